"""A mix as estimators see it: rates, mean prompts and survival curves become parts and segments."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.cost.model import StepCost
from headgate.estimators.averages import WindowMean
from headgate.estimators.hazard import OutputHazard, Survival
from headgate.methods.wait.inventory import Lines, MixPart, PaceRange, keeping_up, lines_of, offered, seconds

LAST = 0.005  # of the requests may live beyond the end of the last segment


class SeenType(NamedTuple):
    """One type of requests: how many come per second, their mean prompt, how long they decode.

    Of the prompt `cached` tokens are found in a prefix cache: they take memory and no time. Memory that
    requests share is counted for each of them.
    """

    rate: float
    prompt: float
    survival: Survival  # of those that decode at all
    decoding: float = 1.0  # the share that does
    cached: float = 0.0

    def part(self) -> MixPart:
        """The type as one part: l' and w by their means, (l+k) summed over the stages that are reached."""
        curve, ending = self.survival
        stages = np.arange(1, len(curve) + 1)
        stay, last = 1 - ending, float(curve[-1])
        beyond = last * stay / ending  # mean stages after the curve's end: a geometric tail
        decodes = float(curve.sum()) + beyond
        read = float((curve * (self.prompt + stages)).sum())
        read += beyond * (self.prompt + len(curve)) + beyond / ending
        work = self.prompt + self.decoding * read
        longest = self.prompt + self.end(1 - LAST)
        computed = self.prompt - self.cached
        return MixPart(self.rate, computed, self.decoding * decodes, work, longest, self.cached)

    def end(self, share: float) -> int:
        """By which decode iteration that share of the requests has ended, nearly."""
        curve, ending = self.survival
        short = np.flatnonzero(self.decoding * curve <= 1 - share)
        if len(short):
            return int(short[0])
        left = (1 - share) / (self.decoding * float(curve[-1]))
        return len(curve) - 1 + int(np.ceil(np.log(max(left, 1e-12)) / np.log(max(1 - ending, 1e-12))))

    def segments(self, ends: Sequence[int]) -> list[MixPart]:
        """Cut at these iterations: what one request that enters a segment does there on average.

        Cohorts shrink inside a segment as requests end. `Segments` counts them whole, which is safe but, with
        few segments, wastes half the memory; learned thresholds have a guard, so means are enough.
        """
        beyond = max(ends[-1], self.end(1 - LAST / 10))
        alive = self.decoding * self._curve(beyond)  # P(l' >= k) for k = 1, 2, ...
        kv = self.prompt + np.arange(1, beyond + 1)
        found = []
        for number, (begin, end) in enumerate(zip((0, *ends[:-1]), (*ends[:-1], beyond), strict=True)):
            enter = float(alive[begin]) if number and begin < beyond else float(not number)
            stages, first = slice(begin, end), not number
            decodes = float(alive[stages].sum()) / enter if enter else 0.0
            read = float((alive[stages] * kv[stages]).sum()) / enter if enter else 0.0
            prompt, cached = (self.prompt, self.cached) if first else (0.0, 0.0)
            found.append(
                MixPart(
                    rate=self.rate * enter,
                    prompt=prompt - cached,
                    decodes=decodes,
                    work=prompt + read,
                    peak=self.prompt + end,
                    cached=cached,
                )
            )
        return found

    def _curve(self, ages: int) -> NDArray[np.float64]:
        """P(l' > t) of those that decode, for t = 0 .. ages - 1."""
        curve, ending = self.survival
        known = curve[:ages]
        tail = float(curve[-1]) * (1 - ending) ** np.arange(1, max(0, ages - len(curve)) + 1)
        return np.concatenate((known, tail))


def cuts(seen: SeenType, count: int) -> tuple[int, ...]:
    """Ends of so many segments in each of which as many requests end; fewer where lengths repeat."""
    ends = {seen.end(number / count) for number in range(1, count)} | {seen.end(1 - LAST)}
    return tuple(sorted(ends))


def running_pace(
    cost: StepCost,
    parts: Sequence[MixPart],
    capacity: float,
    slots: int,
    slack: Sequence[MixPart] | None = None,
    pausing: bool = True,
) -> float | None:
    """The t to set thresholds x = λt by: the best for latency of those that keep up, fit and find slots.

    In overload, or where the shortest does not fit, the longest that does; None where memory is too small for
    any. Where no request is ever paused (`pausing` is False) a longer t costs no time per token, it only lets
    more enter at once: then always the longest. Fractional cohorts may overshoot their share of memory by one
    request of each type, for which room is left. `slack`: the same parts with slack added, as
    sizes are to be.
    """
    full = slack or parts
    spare = capacity - sum(part.peak for part in parts if part.prompt)
    if spare <= 0:
        return None
    longest = min(spare / offered(full), slots / sum(part.rate * part.stages for part in full))
    if not pausing:
        return longest
    lines = lines_of(cost, parts, capacity)
    try:
        pace = keeping_up(lines, full)
    except InputError:  # more work than can ever be done: as much as fits
        return longest
    return best_pace(lines, parts, PaceRange(pace.shortest, min(pace.longest, longest)), slack=slack)


# -- a census of the traffic

ENOUGH = 20  # completions of a type before its own lengths count; until then those of all types do


class _Lengths:
    def __init__(self, window: int) -> None:
        self.hazard = OutputHazard(window)
        self.decoding = WindowMean(window)


class Census:
    def __init__(self, window: int) -> None:
        self.ended = 0  # completions so far
        self._window = window
        self._arrivals: deque[tuple[str, int, int, float]] = deque(maxlen=window)
        self._all = _Lengths(window)
        self._lengths: dict[str, _Lengths] = {}

    def came(self, name: str, prompt: int, when: float, cached: int = 0) -> None:
        self._arrivals.append((name, prompt, cached, when))

    def went(self, name: str, decodes: int, how: End) -> None:
        """One has left after so many decode iterations; a request that never began (-1) is ignored."""
        whole = how in (End.STOPPED, End.LIMIT)
        if decodes < 0 or (not decodes and not whole):
            return
        self.ended += whole
        own = self._lengths.setdefault(name, _Lengths(self._window))
        for each in (own, self._all):
            each.decoding.update(float(decodes > 0))
            if decodes:
                each.hazard.update(decodes, whole)

    def seen(
        self, running: Mapping[str, Sequence[int]], now: float, longer: float = 0.0
    ) -> dict[str, SeenType]:
        """The types of the last arrivals; `running`: ages of those that decode; prompts are `longer`."""
        span = now - self._arrivals[0][-1] if self._arrivals else 0.0
        if span <= 0:
            return {}
        prompts: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        for name, prompt, there, _ in self._arrivals:
            prompts.setdefault(name, []).append(prompt)
            cached[name] = cached.get(name, 0) + there
        all_ages = [age for ages in running.values() for age in ages if age]
        found: dict[str, SeenType] = {}
        for name, theirs in prompts.items():
            own = self._lengths.get(name, self._all)
            known = own if len(own.hazard) >= ENOUGH else self._all
            decoding = own if len(own.decoding) >= ENOUGH else self._all  # known of types that never decode
            ages = all_ages if known is self._all else [age for age in running.get(name, ()) if age]
            survival, share = known.hazard.survival(ages), decoding.decoding.value
            if survival is not None and share is not None:
                count = len(theirs)
                mean, found_there = sum(theirs) / count + longer, cached[name] / count
                found[name] = SeenType(count / span, mean, survival, share, found_there)
        return found


# -- latency, and the best pace

NEAR = 1e-6  # how close to the edge of what keeps up the search may go, as a share


def queue(part: MixPart, size: float, iteration: float) -> float:
    """Requests that wait to enter a part, on average: E|Q_j|.

    Half a threshold, the arrivals during an iteration, and a random walk whose drift is the slack n - λΔT.
    Within 2 % of simulations, high by a tenth where the slack is nearly nil.
    """
    come = part.rate * iteration
    return size / 2 + come + come / (2 * (size - come)) if size > come else inf


def mean_latency(lines: Lines, parts: Sequence[MixPart], sizes: Sequence[float]) -> float:
    """Seconds from arrival to the last token, over all requests: number in the system over arrival rate."""
    iteration = seconds(lines, parts, sizes)
    inside = sum(
        queue(part, size, iteration) + size * part.decodes
        for part, size in zip(parts, sizes, strict=True)
        if part.rate
    )
    return inside / sum(part.rate for part in parts if part.prompt)


def best_pace(
    lines: Lines,
    parts: Sequence[MixPart],
    within: PaceRange,
    per_token: float = inf,
    slack: Sequence[MixPart] | None = None,
) -> float:
    """The t with the least mean latency, no longer than the promised time per output token.

    Sizes are t times the rates of `slack`, the same parts with slack added (none: the parts as they are).
    Latency falls with the slack and rises with t itself, once each, so a bounded search finds it.
    """
    from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]

    rates = [part.rate for part in slack or parts]
    low = within.shortest * (1 + NEAR)
    high = min(within.longest, per_token)
    if high <= low:
        return max(min(within.shortest, high), 0.0)
    found = minimize_scalar(
        lambda pace: mean_latency(lines, parts, [rate * pace for rate in rates]),
        bounds=(low, high),
        options={"xatol": NEAR * low},
    )
    return float(found.x)
