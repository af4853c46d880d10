"""What the real engine is asked, and whether two runs gave the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import tiny
from real import Ask, Real, Served

NEAR = 0.005  # log probability: two tokens this close may change places by rounding (logits have spread 3)


def conversations(count: int = 40, longest: int = 40, seed: int = 5) -> list[Ask]:
    """Prompts of 4 to 200 tokens, a third with a common beginning; some come later than others."""
    rng = np.random.default_rng(seed)
    common = rng.integers(2, tiny.VOCABULARY, 96).tolist()
    asks = []
    for number in range(count):
        own = rng.integers(2, tiny.VOCABULARY, rng.integers(4, 200)).tolist()
        prompt = common + own[:60] if number % 3 == 0 else own
        asks.append(Ask(prompt, int(rng.integers(1, longest)), step=int(rng.integers(0, 30)) * (number % 2)))
    return asks


def near_tie(real: Real, ask: Ask, one: list[int], other: list[int]) -> bool:
    """Where they part, had the model hardly a preference? Then rounding decides, not scheduling."""
    at = next(place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    again = Ask([*ask.prompt, *one[:at]], 1, {**ask.words, "logprobs": 2}, adapter=ask.adapter)
    choices = real.serve([again]).outputs[0].outputs[0].logprobs[0]
    likely = {token: choice.logprob for token, choice in choices.items()}
    both = {one[at], other[at]}
    return both <= likely.keys() and abs(np.subtract(*(likely[token] for token in both))) < NEAR


def assert_same(real: Real, asks: list[Ask], expected: Served, found: Served) -> None:
    """The same tokens for everybody; a near tie is forgiven in one request of twenty, once it is proven."""
    differ = [
        number
        for number, (a, b) in enumerate(zip(expected.tokens, found.tokens, strict=True))
        if a is not None and b is not None and a != b
    ]
    assert len(differ) <= len(asks) / 20, differ
    for number in differ:
        for one, other in zip(expected.tokens[number], found.tokens[number], strict=True):
            assert one == other or near_tie(real, asks[number], one, other), number


def assert_nearly_same(expected: Sequence[object], found: Sequence[object]) -> None:
    """Where chance or penalties choose, a near tie cannot be proven: one answer of twenty may differ."""
    differ = [number for number, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
    assert len(differ) <= len(expected) / 20, differ


def varied(served: Served) -> bool:
    """A model that says the same whatever it reads would prove nothing."""
    said = [token for samples in served.tokens if samples for sample in samples for token in sample]
    repeated = sum(a == b for a, b in pairwise(said))
    return len(set(said)) > 100 and repeated < len(said) / 4
