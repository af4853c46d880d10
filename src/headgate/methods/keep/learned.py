"""Step times learned while serving, for engines without a card."""

from __future__ import annotations

from headgate.core.policy import Steps
from headgate.cost.model import Chunk, Shape, StepCost
from headgate.estimators.least_squares import RelativeLeastSquares
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
