"""What an engine loses against operators timed alone: five numbers from a calibrated card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Corrections:
    """`compute` stretches matrix products, `kv` the reading of KV, `mixed` that reading beside prompts again.

    `per_layer` and `constant` are seconds for what has no law: norms, rotations, gaps between kernels.
    """

    compute: float = 1.0
    kv: float = 1.0
    mixed: float = 1.0
    per_layer: float = 14e-6
    constant: float = 0.04e-3

    def values(self) -> list[float]:
        """In the order of the fields."""
        return [self.compute, self.kv, self.mixed, self.per_layer, self.constant]


NONE = Corrections()
OF_H200 = Corrections(1.18, 0.955, 1.32)  # from cal-h200-qwen3-8b
SCALES = (1.0, 1.0, 1.0, 14e-6, 0.4e-3)  # of the fields, for a search
MOST = (3.0, 3.0, 3.0, 200e-6, 20e-3)


def corrections(values: Sequence[float]) -> Corrections:
    """From a list, to four digits."""
    return Corrections(*(float(f"{value:.4g}") for value in values))
