"""Requests of a stochastic network: Poisson arrivals by class, exponential phases and patience, in blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headgate.methods.fluid.flows import Instance
from headgate.workloads.streams import stream

BLOCK = 16_384
Floats = NDArray[np.float64]
LOGNORMAL_CV = 1.5


class Block(NamedTuple):
    """Columns of requests in order of arrival."""

    time: list[float]
    kind: list[int]  # position in the instance
    prompt: list[float]  # seconds of prefill
    output: list[float]  # tokens
    patience: list[float]  # seconds before its prompt starts
    decode_patience: list[float]  # seconds before its decode starts


class Source(Protocol):
    """Where requests come from."""

    def next_block(self) -> Block | None:
        """The next of them; None: nobody comes any more."""


def exponential(rng: np.random.Generator, count: int) -> Floats:
    """The paper's phases, of mean 1."""
    return rng.standard_exponential(count)


def fixed(rng: np.random.Generator, count: int) -> Floats:
    """No spread at all."""
    return np.ones(count)


def lognormal(rng: np.random.Generator, count: int) -> Floats:
    """A long tail, of mean 1."""
    sigma = np.sqrt(np.log1p(LOGNORMAL_CV**2))
    return rng.lognormal(-(sigma**2) / 2, sigma, count)


LAWS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "exponential": exponential,
    "fixed": fixed,
    "lognormal": lognormal,
}


class Poisson:
    """Arrivals of every class at its rate; the same requests for every router under the same seed."""

    def __init__(
        self, instance: Instance, engines: int, seed: int, law: str = "exponential", start: float = 0.0
    ) -> None:
        self._rates = np.array([flow.rate for flow in instance.flows]) * engines
        self._prompts = np.array(instance.seconds())
        self._outputs = np.array([flow.output for flow in instance.flows])
        self._patience = _means([flow.impatience for flow in instance.flows])
        self._decode_patience = _means([flow.impatience for flow in instance.flows])
        self._law = LAWS[law]
        names = ("arrivals", "kinds", "prompts", "outputs", "patience", "decode-patience")
        self._streams = [stream(seed, f"network-{name}") for name in names]
        self._now = start

    def next_block(self) -> Block:
        """The next few thousand; it never ends."""
        arrivals, kinds, prompts, outputs, patience, decode = self._streams
        total = self._rates.sum()
        times = self._now + np.cumsum(arrivals.standard_exponential(BLOCK)) / total
        self._now = float(times[-1])
        kind = np.searchsorted(np.cumsum(self._rates) / total, kinds.random(BLOCK), side="right")
        kind = np.minimum(kind, len(self._rates) - 1)
        return Block(
            times.tolist(),
            kind.tolist(),
            (self._prompts[kind] * self._law(prompts, BLOCK)).tolist(),
            (self._outputs[kind] * self._law(outputs, BLOCK)).tolist(),
            (self._patience[kind] * patience.standard_exponential(BLOCK)).tolist(),
            (self._decode_patience[kind] * decode.standard_exponential(BLOCK)).tolist(),
        )


class Shifting:
    """Requests of one instance until a moment, and of another from then on; the classes are the same."""

    def __init__(self, before: Instance, after: Instance, when: float, engines: int, seed: int) -> None:
        self._when = when
        self._before = Poisson(before, engines, seed)
        self._after = Poisson(after, engines, seed + 1_000_003, start=when)
        self._shifted = False

    def next_block(self) -> Block:
        """The next few thousand; it never ends."""
        if not self._shifted:
            block = self._before.next_block()
            early = bisect_left(block.time, self._when)
            self._shifted = early < len(block.time)
            if early:
                time, kind, *rest = block
                return Block(time[:early], kind[:early], *(column[:early] for column in rest))
        return self._after.next_block()


def _means(rates: list[float]) -> Floats:
    return np.array([1 / rate if rate > 0 else inf for rate in rates])
