"""Shape and StepCost: how long a step takes, as a function of what is in it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Shape(NamedTuple):
    """All a step's duration may depend on."""

    decodes: int = 0  # requests that get one token
    context: int = 0  # KV tokens those decodes read, the one just written included
    prefill: int = 0  # prompt tokens processed
    behind: int = 0  # KV tokens already there for the prompts being processed


class StepCost(Protocol):
    """The duration of a step in seconds."""

    def seconds(self, shape: Shape) -> float:
        """One step of any shape."""

    def decode_line(self, decodes: int) -> tuple[float, float]:
        """(fixed, per_context): a decode-only step of that many takes fixed + per_context * context."""

    def span(self, decodes: int, context: int, steps: int) -> NDArray[np.float64]:
        """Consecutive decode-only steps; the same numbers `seconds` would give, bit for bit.

        `context` is that of the first step and grows by `decodes` with each.
        """
