"""Estimators of a switchback: one server, several arms by turns, and what may be said of their difference.

A *round* holds each arm once, in random order, each for one *block* of time. Rounds cancel slow changes of
the load. If the arms are the same, the sign of a round's difference is that of a fair coin, however traffic
is correlated. So the unit of every error is the round, never the request.

Means and shares are ratios of sums over rounds with linearised errors. The ratio of two means gets Fieller's
interval, the ratio of two percentiles Woodruff's by inversion. The logarithm of the ratio with a linearised
error finds differences that are not there (7 to 26 % of the time for the mean TTFT), so does a jackknife of
percentiles (8 to 14 %); neither is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf, isfinite, log, sqrt
from random import Random

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHORTEST_BLOCK = 30.0  # seconds, unless another length is asked for
FEWEST_ROUNDS = 6  # 2 / 2^6 < 5 %: with fewer, all signs alike prove nothing
MOST_ROUNDS = 5000  # that a forecast looks ahead
LOOK, END = 0.01, 0.04  # of the 5 %: for stopping at any round, for the planned end
ANY_TIME = 0.05  # where no end is planned
MIXTURE = 1.0  # precision of the normal mixture behind `anytime`

LIGHT, SATURATED, OVERLOAD = "light", "saturated", "overload"
LIGHT_BACKLOG = 5.0  # seconds
STEADY = 1.5  # the largest backlog of a saturated server over its smallest
MORE, LESS, SAME, CANNOT_TELL = "more", "less", "same", "cannot tell"


# -- what was counted


GRAIN = 0.01  # of histograms: 1 %
LOWEST, BINS = 1e-4, 1800  # seconds: from 0.1 ms to about 6,500 s


def bin_of(seconds: float) -> int:
    if seconds <= LOWEST:
        return 0
    return min(BINS - 1, int(log(seconds / LOWEST) / GRAIN) + 1)


def middle_of(bins: Floats | float) -> Floats:
    return np.asarray(LOWEST * np.exp((np.asarray(bins, np.float64) - 0.5) * GRAIN))


@dataclass
class Sums:
    """What happened in one block after its burn-in, of one class of requests or of all."""

    requests: float = 0.0  # that arrived
    promised: float = 0.0  # of those: were promised something
    kept: float = 0.0  # of those: all promises kept
    failed: float = 0.0  # of all that arrived: did not end as they should
    ttft: float = 0.0  # seconds, of those that got a first token
    firsts: float = 0.0
    gap_seconds: float = 0.0
    gaps: float = 0.0  # that ended in the block, of whatever request
    tokens: float = 0.0
    seconds: float = 0.0  # that were measured
    ttft_bins: Floats = field(default_factory=lambda: np.zeros(BINS))
    gap_bins: Floats = field(default_factory=lambda: np.zeros(BINS))


def in_rounds(arms: int, seed: int) -> Iterator[list[int]]:
    draw = Random(seed)
    while True:
        order = list(range(arms))
        draw.shuffle(order)
        yield order


# -- what is compared


@dataclass(frozen=True)
class Metric:
    """A figure of an arm, and how that of two arms is compared: by difference (a share) or by ratio."""

    name: str  # in JSON and flags
    title: str
    top: str  # a sum, or the bins of a percentile
    under: str = ""  # what the sum is over
    share: bool = False
    quantile: float = 0.0
    margin: float = 0.05  # a difference within it counts as none
    higher_is_better: bool = False

    def shown(self, value: float) -> str:
        if self.share:
            return f"{100 * value:.1f} %"
        if self.under == "seconds":
            return f"{value:,.0f}/s"
        return f"{value:#.4g} s" if value >= 1 else f"{1000 * value:#.4g} ms"


KEPT = Metric("kept", "promises kept", "kept", "promised", share=True, margin=0.01, higher_is_better=True)
TTFT = Metric("ttft", "TTFT, mean", "ttft", "firsts")
TTFT_P95 = Metric("ttft-p95", "TTFT, p95", "ttft_bins", quantile=0.95)
TPOT = Metric("tpot", "time per output token", "gap_seconds", "gaps")
GAP_P99 = Metric("gap-p99", "gap, p99", "gap_bins", quantile=0.99)
THROUGHPUT = Metric(
    "throughput", "output tokens per second", "tokens", "seconds", margin=0.01, higher_is_better=True
)
FAILURES = 0.01  # a larger difference of failed shares leaves waits out: a request that fails waits for none
METRICS = (KEPT, TTFT, TTFT_P95, TPOT, GAP_P99, THROUGHPUT)
ALLOWED = {
    LIGHT: (KEPT, TTFT, TTFT_P95, TPOT, GAP_P99),  # throughput is what arrives
    SATURATED: (THROUGHPUT, TPOT, GAP_P99),  # waits are those of the queue
    OVERLOAD: (KEPT,),  # each arm meets what the other left
}


# -- critical values


def student(rounds: int, alpha: float) -> float:
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # slow to import

    return float(stdtrit(rounds - 1, 1 - alpha / 2))


def anytime(rounds: int, alpha: float) -> float:
    """Multiplier at which one may look after every round: the anytime-valid t (Lai; Wang and Ramdas).

    It is the inversion of a likelihood ratio with a normal mixture of precision `MIXTURE`. Infinite where so
    few rounds can tell nothing.
    """
    n, g = rounds, MIXTURE
    ratio, shrunk = ((n + g) / (g * alpha**2)) ** (1 / n), g / (n + g)
    return inf if ratio * shrunk >= 1 else sqrt((n - 1) * (ratio - 1) / (1 - ratio * shrunk))


@dataclass(frozen=True)
class Looks:
    """Which error is spent when. `comparisons`: so many arms are compared with the baseline, and share it.
    `rounds`: so many are planned, where that is known; a forecast may end with the plan.
    """

    planned: bool = True
    comparisons: int = 1
    rounds: int = 0

    def on_the_way(self, rounds: int) -> float:
        return anytime(rounds, (LOOK if self.planned else ANY_TIME) / self.comparisons)

    def at_the_end(self, rounds: int) -> float:
        if not self.planned:
            return self.on_the_way(rounds)
        return student(rounds, END / self.comparisons)

    def later(self, rounds: int) -> float:
        """What holds when there are so many rounds, seen from a look on the way."""
        return self.at_the_end(rounds) if 0 < self.rounds <= rounds else self.on_the_way(rounds)


# -- intervals


@dataclass(frozen=True)
class Change:
    """What an arm changes: in points of a share, or relative to the baseline (0.05: 5 % more)."""

    baseline: float
    arm: float
    value: float
    low: float
    high: float


def compare(metric: Metric, rounds: Sequence[tuple[Sums, Sums]], critical: float) -> Change | None:
    tops = np.array([[getattr(sums, metric.top) for sums in each] for each in rounds])
    if metric.quantile:
        return woodruff(tops, metric.quantile, critical)
    unders = np.array([[getattr(sums, metric.under) for sums in each] for each in rounds])
    return difference(tops, unders, critical) if metric.share else fieller(tops, unders, critical)


def _ratios(tops: Floats, unders: Floats) -> tuple[Floats, Floats]:
    """The arms' ratios and the covariance of their errors; it keeps the pairing within rounds."""
    n = len(tops)
    ratios = tops.sum(0) / unders.sum(0)
    errors = (tops - ratios * unders) / unders.mean(0)
    return ratios, errors.T @ errors / (n * (n - 1))


def difference(tops: Floats, unders: Floats, critical: float) -> Change | None:
    """Of two shares. `tops` and `unders` have a row for each round: baseline, arm."""
    if not np.all(unders.sum(0) > 0):
        return None
    (base, arm), errors = _ratios(tops, unders)
    variance = errors[1, 1] + errors[0, 0] - 2 * errors[0, 1]
    # No spread leaves no interval, but for rounds that are too few to tell
    half = critical * sqrt(variance) if variance > 0 else 0.0 if isfinite(critical) else inf
    change = float(arm - base)
    return Change(float(base), float(arm), change, change - half, change + half)


def fieller(tops: Floats, unders: Floats, critical: float) -> Change | None:
    """Of two means: all ratios that the data do not contradict; without an upper end where that is so."""
    if not np.all(unders.sum(0) > 0) or not np.all(tops.sum(0) > 0):
        return None
    (base, arm), errors = _ratios(tops, unders)
    change = float(arm / base) - 1
    square = critical**2
    first = base**2 - square * errors[0, 0] if isfinite(critical) else 0.0
    if first <= 0:
        return Change(float(base), float(arm), change, -1.0, inf)
    middle = base * arm - square * errors[0, 1]
    last = arm**2 - square * errors[1, 1]
    root = sqrt(max(middle**2 - first * last, 0.0))
    low, high = (middle - root) / first - 1, (middle + root) / first - 1
    return Change(float(base), float(arm), change, max(float(low), -1.0), float(high))


def quantile(bins: Floats, share: float) -> float:
    counts = np.cumsum(bins)
    wanted = share * counts[-1]
    place = int(np.searchsorted(counts, wanted))
    before = counts[place - 1] if place else 0.0
    part = (wanted - before) / max(counts[place] - before, 1e-300)
    return float(middle_of(place - 0.5 + part))


def woodruff(bins: Floats, share: float, critical: float) -> Change | None:
    """Of two percentiles: the factors by which the arm's times may be divided so that both arms have the same
    share above their common percentile. `bins`: a row for each round, of baseline and arm.

    Shares are compared, which sums of counts allow; a percentile has no error of its own by round.
    """
    if not np.all(bins.sum((0, 2)) > 0):
        return None
    base, arm = (quantile(bins[:, place].sum(0), share) for place in (0, 1))
    apart = partial(_apart, bins, share)  # falls as the shift grows
    below, above = -BINS, BINS
    while above - below > 1:
        middle = (below + above) // 2
        if apart(middle) > 0:
            below = middle
        else:
            above = middle
    low, high = _edge(apart, below, -1, critical), _edge(apart, above, 1, critical)
    at = min(max(log(arm / base), below * GRAIN), above * GRAIN)
    return Change(base, arm, float(np.expm1(at)), float(np.expm1(low)), float(np.expm1(high)))


def _edge(apart: Callable[[int], float], near: int, side: int, critical: float) -> float:
    """The first shift on this side at which the shares differ: never narrower than the bins."""
    far = near + side * BINS
    if abs(apart(far)) <= critical:
        return side * inf
    while abs(far - near) > 1:
        middle = (near + far) // 2
        if abs(apart(middle)) <= critical:
            near = middle
        else:
            far = middle
    return far * GRAIN


def _apart(bins: Floats, share: float, shift: int) -> float:
    """How many standard errors lie between the arms' shares above their common percentile, once the arm's
    times are so many bins shorter.
    """
    base, arm = bins[:, 0], _shifted(bins[:, 1], shift)
    common = np.cumsum(base.sum(0)) / (2 * base.sum()) + np.cumsum(arm.sum(0)) / (2 * arm.sum())
    place = int(np.argmax(common >= share))
    under = common[place - 1] if place else 0.0
    part = (common[place] - share) / max(common[place] - under, 1e-300)  # of that bin, what lies above
    both = np.stack([base, arm], 1)
    ratios, errors = _ratios(both[:, :, place + 1 :].sum(2) + part * both[:, :, place], both.sum(2))
    spread = errors[1, 1] + errors[0, 0] - 2 * errors[0, 1]
    change = float(ratios[1] - ratios[0])
    if spread <= 0:
        return 0.0 if change == 0 else float(np.sign(change)) * inf
    return change / sqrt(spread)


def _shifted(bins: Floats, shift: int) -> Floats:
    """All times so many bins shorter; what leaves the histogram stays in its last bin."""
    shift = min(max(shift, 1 - BINS), BINS - 1)
    moved = np.zeros_like(bins)
    if shift >= 0:
        moved[:, : BINS - shift] = bins[:, shift:]
        moved[:, 0] += bins[:, :shift].sum(1)
    else:
        moved[:, -shift:] = bins[:, :shift]
        moved[:, -1] += bins[:, shift:].sum(1)
    return moved


# -- words


@dataclass(frozen=True)
class Verdict:
    metric: Metric
    change: Change | None  # None: there is nothing to compare
    word: str  # more, less, same, cannot tell
    rounds_missing: int | None = None  # roughly, where it cannot tell

    @property
    def better(self) -> bool | None:
        if self.word in (SAME, CANNOT_TELL):
            return None
        return (self.word == MORE) == self.metric.higher_is_better


def word_for(change: Change | None, margin: float) -> str:
    if change is not None and (change.low > 0 or change.high < 0):
        return MORE if change.low > 0 else LESS
    same = change is not None and -margin < change.low and change.high < margin
    return SAME if same else CANNOT_TELL


def judge_metric(
    metric: Metric,
    rounds: Sequence[tuple[Sums, Sums]],
    critical_after: Callable[[int], float],
    later: Callable[[int], float] | None = None,
) -> Verdict:
    """`critical_after` so many rounds, `later` in forecasts where it differs. Only rounds in which both arms
    have something count as rounds: else a class that seldom sends gets an interval without width.
    """
    counted = metric.under or metric.top
    telling = sum(all(np.sum(getattr(sums, counted)) > 0 for sums in pair) for pair in rounds)
    if telling < FEWEST_ROUNDS:
        missing = ceil((FEWEST_ROUNDS - telling) * len(rounds) / telling) if telling else None
        change = compare(metric, rounds, inf) if len(rounds) > 1 else None
        return Verdict(metric, change, CANNOT_TELL, missing)
    critical = critical_after(telling)
    change, more = compare(metric, rounds, critical), None
    word = word_for(change, metric.margin)
    if word == CANNOT_TELL and change is not None:
        more = rounds_missing(change, telling, metric.margin, critical, later or critical_after)
    return Verdict(metric, change, word, more and ceil(more * len(rounds) / telling))


def rounds_missing(
    change: Change, rounds: int, margin: float, critical: float, later: Callable[[int], float]
) -> int | None:
    """So many more, roughly, until the interval leaves zero or lies inside the margin; None: not in sight.

    Forecasts were between half and six times what it then took.
    """
    edge = change.low if change.value > 0 and change.low > -1 else change.high  # -1: no end on that side
    half, found = abs(change.value - edge), abs(change.value)
    if not isfinite(half) or not isfinite(critical):
        return None
    for total in range(rounds + 1, MOST_ROUNDS):
        then = later(total) * sqrt(rounds / total) * half / critical
        if then < found or found + then < margin:
            return total - rounds
    return None


# -- the state of the server


@dataclass(frozen=True)
class State:
    """What the backlog at the ends of blocks says of the server, in seconds of work."""

    name: str
    low: float  # p10 of the arm that has less of it
    high: float  # p90 of the arm that has more

    def said(self) -> str:
        if self.name == LIGHT:
            return "Light load: throughput is what arrives, and is not compared."
        if self.name == SATURATED:
            return "Saturated: waits are those of the queue, so TTFT and promises are not compared."
        return (
            f"A backlog of {self.high:.0f} s outlives the blocks: each arm meets what the other left. "
            "Only promises are compared; lower the load."
        )


def state_of(backlogs: Sequence[Sequence[float]]) -> State:
    """From the backlog at the end of each block, for each arm: requests without a first token, over the
    requests that finish in a second.

    Both limits were chosen on the 51 simulated trials they were tried on.
    """
    high = max(float(np.quantile(arm, 0.9)) for arm in backlogs)
    low = min(float(np.quantile(arm, 0.1)) for arm in backlogs)
    name = LIGHT if high <= LIGHT_BACKLOG else SATURATED if high <= STEADY * low else OVERLOAD
    return State(name, low, high)


def rounds_for(minutes: float, arms: int, block: float) -> int:
    return int(minutes * 60 / (arms * block) + 1e-9)


def too_short(minutes: float, arms: int, block: float) -> str:
    """The remedy where so many minutes hold too few rounds, else nothing."""
    rounds, least = rounds_for(minutes, arms, block), ceil(FEWEST_ROUNDS * arms * block / 60)
    hold = f"{minutes:g} minutes hold {rounds} rounds of {arms} blocks of {block:g} s"
    needed = f"at least {FEWEST_ROUNDS} are needed; give --minutes {least} or more"
    return f"{hold}, {needed}" if rounds < FEWEST_ROUNDS else ""


def block_length(time_in_system: float) -> tuple[float, float]:
    """Seconds of a block, and of its burn-in: batches turn over in the time a request is in the system.

    Longer blocks do not help an overloaded server, and too few of them fit into an hour.
    """
    block = min(120.0, max(SHORTEST_BLOCK, 4 * time_in_system))
    return float(ceil(block)), float(ceil(min(block / 3, max(5.0, time_in_system))))
