"""Step times learned while serving, for engines without a card."""

from __future__ import annotations

from headgate.core.policy import Steps
from headgate.cost.model import Shape, StepCost
from headgate.estimators.least_squares import RelativeLeastSquares

# Seconds: a step, prompts in it, a token, a KV token read, the same beside prompts. A slow guess: until steps
# have been seen, promises are kept by steps that are too small rather than too large.
PRIOR = (0.006, 0.006, 40e-6, 40e-9, 10e-9)
SHORTEST = 1e-9  # seconds: a step cannot take no time at all


class LearnedCost(StepCost):
    """The law of a measured card with five coefficients, fitted to the steps as they are seen.

    A step takes a constant, another if it holds prompts, a price per token, one per KV token that is read and
    one more for that beside prompts. What is seen includes the host, which is what promises are about.
    """

    def __init__(self) -> None:
        self._fit = RelativeLeastSquares(PRIOR)
        self._terms: tuple[float, ...] = PRIOR

    @property
    def seen(self) -> int:
        """Steps it was learned from."""
        return self._fit.seen

    @property
    def terms(self) -> tuple[float, ...]:
        """The coefficients in force, none below zero."""
        return self._terms

    def learn(self, steps: Steps) -> None:
        start, context = steps.start, steps.context
        for end in steps.ends:
            shape = Shape(steps.decodes, context, steps.prefill, steps.behind)
            self._fit.update(_features(shape), max(end - start, SHORTEST))
            start, context = end, context + steps.decodes
        self._terms = tuple(max(0.0, float(value)) for value in self._fit.values)

    def seconds(self, shape: Shape) -> float:
        """One step of any shape."""
        return sum(a * b for a, b in zip(self._terms, _features(shape), strict=True))

    def decode_line(self, decodes: int) -> tuple[float, float]:
        """(fixed, per_context) of a decode-only step of that many."""
        constant, _, token, read, _ = self._terms
        return constant + token * decodes, read


def _features(shape: Shape) -> tuple[float, float, float, float, float]:
    decodes, context, prefill, behind, _ = shape
    beside = context if prefill else 0
    return 1.0, float(prefill > 0), float(decodes + prefill), float(context + behind), float(beside)
