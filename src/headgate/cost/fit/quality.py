"""How far a fit is from steps it has not seen, by region and by part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headgate.cost.fit.cuts import cut
from headgate.cost.fit.steps import KINDS, Floats, Rows, StepTable

GOOD = 0.03


@dataclass(frozen=True)
class Quality:
    """Relative errors of pieces that the fit had not seen.

    `regions`: decode, prefill, mixed (those there are) and all, each with `median` and `p95` of absolute
    errors, `total` (the signed error of the sum of times), and `pieces`, how many there were. A piece is a
    decode step, or a burst of prompts with the decode step before it. `parts`: the signed error of the sum
    of times of each part's pieces, by its number.
    """

    regions: dict[str, dict[str, float]]
    parts: dict[str, float]

    def good_enough(self, threshold: float = GOOD) -> bool:
        """Are the median error and the error of the total of every region below the threshold?"""
        return all(
            max(figures["median"], abs(figures["total"])) < threshold for figures in self.regions.values()
        )


def measure(table: StepTable, told: Floats) -> Quality:
    """Of what an unseeing fit told of each row."""
    pieces = cut(table, together=1)
    real, said = pieces.seconds, pieces.sums(told)
    regions = {}
    for kind in np.unique(pieces.kind):
        here: Rows = pieces.kind == kind
        regions[KINDS[kind]] = _figures(real[here], said[here])
    regions["all"] = _figures(real, said)
    parts = {
        f"{index}": float(said[pieces.part == index].sum() / real[pieces.part == index].sum() - 1)
        for index in np.unique(pieces.part)
    }
    return Quality(regions, parts)


def _figures(real: Floats, said: Floats) -> dict[str, float]:
    errors = np.abs(said / real - 1)
    return {
        "median": _four(np.median(errors)),
        "p95": _four(np.quantile(errors, 0.95)),
        "total": _four(said.sum() / real.sum() - 1),
        "pieces": float(len(real)),
    }


def _four(value: np.floating) -> float:
    return float(f"{float(value):.4g}")
