"""Step times learned while serving, for engines without a card."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headgate.core.policy import Steps
from headgate.cost.model import Chunk, Shape, StepCost
from headgate.methods.keep.step import FIRST

# Seconds: a step, prompts in it, a token, a KV token read, the same beside prompts. A slow guess: until steps
# have been seen, promises are kept by steps that are too small rather than too large.
PRIOR = (0.006, 0.006, 40e-6, 40e-9, 10e-9)
SHORTEST = 1e-9  # seconds: a step cannot take no time at all
# Seconds: shorter steps count by their absolute error. On an H200 the first hundred long steps with prompts
# were priced up to a quarter too short otherwise: an asynchronous engine times small steps at random.
LONG = 0.04


class LearnedCost(StepCost):
    """The law of a measured card with five coefficients, fitted to the steps as they are seen.

    A step takes a constant, another if it holds prompts, a price per token, one per KV token that is read and
    one more for that beside prompts. What is seen includes the host, which is what promises are about. With
    speculation a decode has `width` tokens at most, its drafts among them; prices are for so many.
    """

    def __init__(self) -> None:
        self._fit = RelativeLeastSquares(PRIOR, LONG)
        self.terms: tuple[float, ...] = PRIOR
        self.width = 1

    @property
    def seen(self) -> int:
        return self._fit.seen

    def learn(self, steps: Steps) -> None:
        start, context = steps.start, steps.context
        for end in steps.ends:
            queries = steps.queries or steps.decodes * self.width
            shape = Shape(queries, context, steps.prefill, steps.behind)
            self._fit.update(_features(shape, 1), max(end - start, SHORTEST))
            start, context = end, context + steps.decodes
        self.terms = tuple(max(0.0, float(value)) for value in self._fit.values)

    def seconds(self, shape: Shape) -> float:
        return sum(a * b for a, b in zip(self.terms, _features(shape, self.width), strict=True))

    def decode_line(self, decodes: int) -> tuple[float, float]:
        constant, _, token, read, _ = self.terms
        return constant + token * decodes * self.width, read


def _features(shape: Shape, width: int) -> tuple[float, float, float, float, float]:
    decodes, context, prefill, behind, _ = shape
    beside = context if prefill else 0
    tokens = decodes * width + prefill
    return 1.0, float(prefill > 0), float(tokens), float(context + behind), float(beside)


MOST_SPENT = 0.5  # of the gap: a graph whose step takes longer confines little


def confined(cost: StepCost, gap: float) -> str | None:
    """What `keep` does there, and the remedy.

    None where such launches fit the gap, or steps from the largest graph fill it. Launches are reckoned as
    slow as `keep` reckons them before it has seen any.
    """
    host = cost.host
    if host is None or not host.graph:
        return None
    tokens = host.graph + 1
    step = Shape(0, 0, tokens, 0, (Chunk(0, tokens, True),))
    launch = FIRST * host.seconds(step)
    if launch <= gap or cost.unhosted().seconds(step) > MOST_SPENT * gap:
        return None
    return (
        f"keep runs prompts in steps of at most {host.graph:,} tokens, the largest CUDA graph: beyond it a "
        f"launch may take the host {1000 * launch:.0f} ms, and gaps must stay below {1000 * gap:.0f} ms; a "
        "larger --max-cudagraph-capture-size lets it take more"
    )


# -- least squares, one observation at a time

FORGET = 0.9995  # weight of the past with each observation: half after 1,400
NOISE = 0.1  # of an observation, as a share of it
OUTLIER = 3.0  # an observation of so many times what was expected counts as that much


class RelativeLeastSquares:
    """Recursive least squares of relative errors, with forgetting, from a prior.

    An observation below `least` counts by its absolute error over `least`, so that small ones, which are many
    and noisy, do not outweigh the large ones. Each coefficient starts at its prior, known to within 100
    percent. What has not been seen for long is never less certain than that: plain forgetting would forget it
    altogether.
    """

    def __init__(self, prior: Sequence[float], least: float = 0.0) -> None:
        self._least = least
        self.values: NDArray[np.float64] = np.array(prior, dtype=np.float64)
        self.seen = 0
        self._most = self.values**2  # variances never exceed these
        self._cov = np.diag(self._most)

    def update(self, features: Sequence[float], seen: float) -> None:
        """One observation: `seen`, above zero, was made of so much of each feature."""
        row = np.array(features, dtype=np.float64)
        expected = float(row @ self.values)
        if expected > 0:
            seen = min(seen, OUTLIER * expected)
        whole = max(seen, self._least)
        row /= whole
        spread = self._cov @ row
        gain = spread / (NOISE**2 + float(row @ spread))
        self.values = self.values + gain * (seen / whole - float(row @ self.values))
        self._cov = self._cov - np.outer(gain, spread)
        variance = np.maximum(np.diag(self._cov), 1e-30 * self._most)
        scale = np.minimum(FORGET**-0.5, np.sqrt(self._most / variance))
        self._cov = self._cov * np.outer(scale, scale)
        self.seen += 1
