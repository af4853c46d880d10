"""Which step to run next so that no gap between tokens exceeds its promise."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, NamedTuple

from headgate.core.build import mypyc_attr, quick
from headgate.cost.model import Chunk, Shape, StepCost

LEAST = 64  # prompt tokens of a step whose promise cannot be kept at all
NEAR = 16  # tokens: how exactly the largest chunk is found
MOST_LAUNCH = 0.25  # of the gap: a slow launch beyond that, and prompts do not run apart by choice
SECOND = 0.4  # of the gap: no further piece of prompts alone once that much of it is spent
CHEAPER, DEARER = 0.98, 1.02  # of the price together: below, prompts run apart; above, together


class StepKind(Enum):
    APART = "apart"  # prompts alone; decodes keep their KV
    TOGETHER = "together"
    DECODES = "decodes"


DECODES: Final = StepKind.DECODES
TOGETHER: Final = StepKind.TOGETHER
APART: Final = StepKind.APART  # an enum looks its members up


class Cut(NamedTuple):
    """The first so many tokens of the prompts in a queue."""

    tokens: int
    behind: int  # KV tokens already there for the prompts it touches
    chunks: tuple[Chunk, ...]
    done: int  # prompts completed
    length: int  # context of those, their first token included


NOTHING: Final = Cut(0, 0, (), 0, 0)


class Step(NamedTuple):
    """A step and its GPU time; `kept` is False where no step with prompts could keep the promise."""

    kind: StepKind
    tokens: int
    seconds: float
    kept: bool = True
    launch: float = 0.0  # what the host usually takes for it, where it holds prompts


class DecodeLoad(NamedTuple):
    """The decodes: how many, and the KV tokens they read in one step."""

    decodes: int
    context: int


class Now(NamedTuple):
    load: DecodeLoad
    gap: float  # seconds the tightest promise leaves between two tokens, after the margin
    promised: float  # the same before the margin
    since: float = 0.0  # seconds composed since the last step with decodes
    apart: bool = False  # prompts ran apart when the two ways were last compared
    newest: float = 0.0  # GPU time of the newest of those steps, which were prompts alone
    last: float | None = None  # GPU time of the last step that brought decodes a token, if it had prompts
    starved: bool = False  # prompts have found no room for so long that they may break the gap


@mypyc_attr(serializable=True)
class Chooser:
    """Chooses one step at a time from the prices of a card; `trust` is the margin at the beginning."""

    def __init__(self, prices: StepPrices, trust: float = 1.0) -> None:
        self._prices = prices
        self._trust = trust

    def choose(self, now: Now, prompts: Prompts, budget: int, beside: int) -> Step:
        """The next step: at most `budget` prompt tokens alone, or `beside` together with the decodes.

        Of the two ways the one with the cheaper tokens, with some hysteresis. Decodes run alone when
        neither has room. When nothing has been held back and still neither has room, no step with prompts can
        keep the gap. Then prompts go on in the smallest chunks, unless those would break the gap even at the
        first margin and decodes alone keep the promise: prompts wait, and get one step of their own when they
        have waited long enough.
        """
        prices, load = self._prices, now.load
        most = min(budget, prompts.total)
        if not load.decodes:
            return quick(Step, (APART, most, prices.alone(prompts.first(most)), True, 0.0))
        beside = min(beside, prompts.total)
        least = min(LEAST, prompts.total)
        alone = self._apart(now, prompts, least, most)
        mixed = self._together(now, prompts, least, beside)
        kept = bool(alone or mixed)
        if not kept:
            if now.since > 0:
                return quick(Step, (DECODES, 0, prices.decodes(load), True, 0.0))
            if self._breaks(now, prompts.first(least)):
                return self._wait(now, prompts, most)
            few_alone, few_mixed = min(least, budget), max(0, min(least, beside))
            first = now._replace(gap=self._trust * now.promised)
            alone = self._apart(first, prompts, few_alone, few_alone)
            mixed = self._together(first, prompts, few_mixed, few_mixed)
            kept = bool(alone or mixed)
            if not kept:
                alone, mixed = few_alone, few_mixed
            apart = not mixed or (alone > 0 and self._cheaper_apart(now, prompts, alone, mixed))
        else:
            apart = self._cheaper_apart(now, prompts, alone, mixed)
        if apart and not alone:
            return quick(Step, (DECODES, 0, prices.decodes(load), True, 0.0))
        kind, tokens = (APART, alone) if apart else (TOGETHER, mixed)
        if kept:
            tokens = self._graphed(load, prompts, kind, tokens)
        cut = prompts.first(tokens)
        launch = prices.launch(0 if kind is APART else load.decodes, cut)
        return quick(Step, (kind, tokens, self._price(load, cut, kind), kept, launch))

    def _breaks(self, now: Now, cut: Cut) -> bool:
        """Would so few prompt tokens break the gap, even from a quick host, and decodes alone not?

        For decodes no margin counts, and for prompts the one at the beginning: where late gaps have lowered
        it, decodes would seem lost, and prompts would be shut out of steps that keep the promise.
        """
        prices, load = self._prices, now.load
        before = prices.decodes(load)
        if max(before, prices.launch(load.decodes, NOTHING)) > now.promised:
            return False
        last = before if now.last is None else now.last
        launch = prices.launch(0, cut)
        apart = prices.alone(cut) + before + lag(launch, launch, before, last)
        together = max(prices.together(load, cut), prices.launch(load.decodes, cut))
        return min(apart, together) > self._trust * now.promised

    def _wait(self, now: Now, prompts: Prompts, most: int) -> Step:
        """Decodes alone keep a promise that no step with prompts keeps."""
        prices = self._prices
        if not now.starved:
            return quick(Step, (DECODES, 0, prices.decodes(now.load), False, 0.0))
        cut = prompts.first(most)
        return quick(Step, (APART, cut.tokens, prices.alone(cut), False, prices.launch(0, cut)))

    def _apart(self, now: Now, prompts: Prompts, least: int, most: int) -> int:
        """The most prompt tokens that may run alone before the next decode step."""
        if now.since > SECOND * now.gap:
            return 0
        prices, load = self._prices, now.load
        before = prices.decodes(load)
        last = before if now.last is None else now.last

        def fits(tokens: int) -> bool:
            cut = prompts.first(tokens)
            after = prices.decodes(quick(DecodeLoad, (load.decodes + cut.done, load.context + cut.length)))
            launch = prices.slow_launch(0, cut)
            late = lag(launch, prices.launch(0, cut), before, last) + stalled(now, launch)
            return now.since + prices.alone(cut) + after + late <= now.gap

        return largest(fits, least, most)

    def _together(self, now: Now, prompts: Prompts, least: int, most: int) -> int:
        """The most prompt tokens that may run beside the decodes."""
        prices, load = self._prices, now.load

        def fits(tokens: int) -> bool:
            cut = prompts.first(tokens)
            launch = prices.slow_launch(load.decodes, cut)
            spent = max(prices.together(load, cut), launch)
            return now.since + stalled(now, launch) + spent <= now.gap

        return largest(fits, least, most)

    def _cheaper_apart(self, now: Now, prompts: Prompts, alone: int, mixed: int) -> bool:
        """Is a token cheaper where prompts run apart, each way with as many as it allows?

        Tokens of a decode step between two steps of prompts are seen when the host has launched the second.
        So prompts do not run apart by choice where a launch is a good part of the gap, unless it hides behind
        the decode step, or launches have been seen to take about what the card says.
        """
        if not mixed:
            return True
        prices, load = self._prices, now.load
        cut = prompts.first(alone or mixed)
        long = prices.slow_launch(0, cut) > MOST_LAUNCH * now.gap
        if long and prices.sticks_out(load, prices.launch(0, cut)):
            return False
        apart = (prices.alone(cut) + prices.decodes(load)) / (cut.tokens + load.decodes)
        together = prices.together(load, prompts.first(mixed)) / (mixed + load.decodes)
        if apart < CHEAPER * together:
            return True
        return apart <= DEARER * together and now.apart

    def _graphed(self, load: DecodeLoad, prompts: Prompts, kind: StepKind, tokens: int) -> int:
        """Fewer tokens, so that the step fits the largest CUDA graph, where that serves more a second.

        Beyond the largest graph kernels are launched one by one. That matters only while the host takes
        longer than the GPU.
        """
        beside = load.decodes if kind is TOGETHER else 0
        fewer = self._prices.graph - beside * self._prices.width
        if not LEAST <= fewer < tokens:
            return tokens
        rates = []
        for count in (fewer, tokens):
            cut = prompts.first(count)
            gpu, host = self._price(load, cut, kind), self._prices.launch(beside, cut)
            if count == tokens and gpu >= host:
                return tokens
            rates.append((count + beside) / max(gpu, host))
        return fewer if rates[0] > rates[1] else tokens

    def _price(self, load: DecodeLoad, cut: Cut, kind: StepKind) -> float:
        return self._prices.alone(cut) if kind is APART else self._prices.together(load, cut)


def lag(launch: float, usual: float, decodes: float, last: float) -> float:
    """By how much more than before the tokens of the coming decode step are seen late.

    On an asynchronous engine tokens of a decode step are seen late by what the host takes for the step with
    prompts after it beyond the GPU's time. `launch` is that host time when it is slow, `decodes` the GPU time
    of the coming decode step, `last` that of the newest step with decodes. What that one was late by shortens
    the gap, and counts as after a quick launch.
    """
    return max(0.0, max(0.0, launch - decodes) - max(0.0, usual - last))


def largest(fits: Callable[[int], bool], least: int, most: int, near: int = NEAR) -> int:
    """The most tokens that fit, to `near`; 0 when not even `least` do. More tokens never fit better."""
    if most < least:
        return 0
    if fits(most):  # as it mostly is
        return most
    if most == least or not fits(least):
        return 0
    low, high = least, most
    while high - low > near:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def stalled(now: Now, launch: float) -> float:
    """By how much longer the newest step of prompts lasts if the host takes `launch` for the next one."""
    return max(0.0, launch - now.newest) if now.since > 0 else 0.0


@mypyc_attr(serializable=True)
class Prompts:
    """Prompts in the order in which they run: (tokens already there, tokens to do) of each."""

    def __init__(self, parts: Iterable[tuple[int, int]]) -> None:
        self.parts = list(parts)
        self._chunks: list[Chunk] = []  # each prompt whole
        self._ends: list[int] = []  # tokens to do up to each
        self._behind, self._length = [0], [0]  # the sums of `Cut` before each
        total = behind = length = 0
        for there, todo in self.parts:
            total, behind, length = total + todo, behind + there, length + there + todo + 1
            self._chunks.append(quick(Chunk, (there, todo, True)))
            self._ends.append(total)
            self._behind.append(behind)
            self._length.append(length)
        self.total = total

    def first(self, tokens: int) -> Cut:
        done = bisect_right(self._ends, tokens)
        behind, length = self._behind[done], self._length[done]
        chunks, whole = tuple(self._chunks[:done]), self._ends[done - 1] if done else 0
        if done < len(self.parts) and tokens > whole:
            there = self.parts[done][0]
            chunk = quick(Chunk, (there, tokens - whole, False))
            return quick(Cut, (tokens, behind + there, (*chunks, chunk), done, length))
        return quick(Cut, (whole, behind, chunks, done, length))


@mypyc_attr(serializable=True)
class StepPrices:
    """Seconds of a step: GPU (`alone`, `together`, `decodes`) and host (`launch`).

    Where a card knows its host, GPU and host are priced apart, because an asynchronous engine overlaps them.
    Otherwise the card's price is that of the whole step and `launch` is 0.
    """

    def __init__(self, cost: StepCost) -> None:
        self.host = cost.host
        self.slow = SlowHost()
        self.width: int = cost.width  # tokens of a decode in a step, drafts included
        self._seconds = (cost.unhosted() if cost.host else cost).seconds

    def decodes(self, load: DecodeLoad) -> float:
        return self._seconds(quick(Shape, (*load, 0, 0, ()))) if load.decodes else 0.0

    def alone(self, cut: Cut) -> float:
        return self._seconds(quick(Shape, (0, 0, cut.tokens, cut.behind, cut.chunks)))

    def together(self, load: DecodeLoad, cut: Cut) -> float:
        return self._seconds(quick(Shape, (*load, cut.tokens, cut.behind, cut.chunks)))

    def launch(self, decodes: int, cut: Cut) -> float:
        if self.host is None:
            return 0.0
        shape = quick(Shape, (decodes, 0, cut.tokens, cut.behind, cut.chunks))
        return self.host.seconds(shape, self.width)

    def slow_launch(self, decodes: int, cut: Cut) -> float:
        return self.slow.factor * self.launch(decodes, cut)

    def sticks_out(self, load: DecodeLoad, launch: float) -> bool:
        """May decodes wait for a launch that usually takes so long, beyond a step of their own?"""
        return not self.slow.steady and not self.slow.hides(launch, self.decodes(load))

    @property
    def graph(self) -> int:
        return self.host.graph if self.host else 0


FIRST = 1.5  # behind an HTTP server on an H200, at the 90th percentile of launches
MOST = 2.5
STEADY = 1.3  # up to here the host is as the card says
SHARE = 0.02  # of the launches that may take longer than what is planned with
PACE = 0.1  # how far one launch moves it
NEAR_LAUNCH = 1.02  # a launch is as long as planned
CLEARLY = 1.1  # times the GPU's time of a decode step: up to here a launch hides behind it


@mypyc_attr(serializable=True)
class SlowHost:
    """A high quantile of the host's time over the card's, `factor`.

    On an asynchronous engine tokens of a decode step are seen when the host has launched the step after it.
    If that launch is longer than the decode step, the time of the step is the time of the launch. Each such
    step moves the quantile up a lot or down a little, so that it comes to rest where `SHARE` are above.
    """

    def __init__(self) -> None:
        self.factor = FIRST
        self.overlaps = False  # a step was seen to end after the next one was composed

    @property
    def steady(self) -> bool:
        """Nothing waits for a launch, or launches take about what the card says."""
        return not self.overlaps or self.factor <= STEADY

    def hides(self, launch: float, gpu: float) -> bool:
        """Would a slow launch end before a decode step of `gpu` seconds, or a little after?"""
        return self.factor * launch <= CLEARLY * gpu

    def saw(self, seconds: float, launch: float, gpu: float) -> None:
        """A decode step took `seconds`, on the GPU `gpu`; the step after it usually takes `launch`.

        A slow launch that would hide behind the GPU is not seen, and need not be.
        """
        if self.hides(launch, gpu):
            return
        above = seconds > NEAR_LAUNCH * self.factor * launch
        moved = self.factor + PACE * (1 - SHARE if above else -SHARE)
        self.factor = min(MOST, max(1.0, moved))
