"""The trial itself: rounds of blocks on a live server, looks on the way, a guard. Read `Trial.run` first."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil, inf

from headgate.core.errors import InputError, RunError
from headgate.live.trial.arms import BACK, Arm, SettingsFile
from headgate.live.trial.book import Block, Book, Findings, judge
from headgate.live.trial.load import FollowedTrace, PlugInMetrics, TraceLoad
from headgate.stats.switchback import (
    CANNOT_TELL,
    KEPT,
    TTFT,
    Looks,
    Metric,
    Verdict,
    block_length,
    in_rounds,
    rounds_for,
    too_short,
)

SIZING = 60.0  # seconds before the first round, from which the length of blocks is found
LOOK = 0.25  # seconds between two looks at the guard
READ_WITHIN = 30.0  # seconds in which a server must have read its settings
ASK_EVERY = 5.0  # seconds between two looks at the server's metrics
NOT_TAKEN = (
    "the server did not take the settings over: its log says why, if it reads this file and no flag of its "
    "own overrides it"
)
MOST_IDLE = 3  # rounds in a row without a request at a switch: no traffic comes any more
LONGEST_MARK = 200  # characters, as the settings allow
LEAST_DRAIN = 30.0  # seconds that requests get to end after their block


class NotReadError(RunError):
    """The engine did not read the settings in time; it reads them between two steps only."""


Source = TraceLoad | FollowedTrace  # where the figures come from


@dataclass(frozen=True)
class TrialPlan:
    arms: tuple[Arm, ...]
    minutes: float | None = 30.0  # None: until the answer is clear, or interrupted
    seed: int = 0
    block: float | None = None  # seconds; None: from the traffic
    primary: Metric | None = None  # None: promises where there are any
    floor: float | None = None  # least share of kept promises in an arm
    whole: bool = False  # run to the planned end, even when the answer is clear before
    sizing: float = SIZING
    speed: float = 1.0  # of an emulator

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.arms)


@dataclass(frozen=True)
class Outcome:
    findings: Findings
    book: Book
    stopped: str = ""
    guarded: bool = False  # the guard ended it
    interrupted: bool = False
    model: str = ""
    notes: tuple[str, ...] = ()  # what makes the figures mean less than they seem to
    too_slow: bool = False  # this machine, to measure anything


class Trial:
    def __init__(self, plan: TrialPlan, source: Source, switch: Switch, say: Callable[[str], None]) -> None:
        self.plan, self._source, self._switch, self._say = plan, source, switch, say
        self._book = source.book
        self._interrupted = asyncio.Event()
        self._why = ""  # the guard ended it
        self._block, self._burn, self._rounds = 0.0, 0.0, 0
        self._idle = 0  # rounds in a row that were left out
        self._slow = ""  # as said last
        self._primary: Metric = plan.primary or TTFT

    async def run(self) -> Outcome:
        plan, complete = self.plan, False
        told: Findings | None = None
        with signals(self._interrupted.set):
            try:
                await self._source.start()
                await self._size()
                for number, order in enumerate(in_rounds(len(plan.arms), plan.seed)):
                    complete = plan.minutes is not None and number == self._rounds
                    if complete or self._over:
                        break
                    await self._round(number, order)
                    if self._over:
                        self._book.forget_round(number)  # it was cut short
                        break
                    findings = self._judge(ended=False)
                    self._say(line(findings, number + 1, self._rounds))
                    if (slow := self._source.too_slow()) and not self._slow:
                        self._say(slow)
                    self._slow = slow
                    if findings.told and not plan.whole and not slow:
                        told = findings
                        break
                self._book.end(self._source.now())
                if not self._over:
                    await self._last_requests(self._patience)
            finally:
                self._switch.restore()
                await self._source.stop(0.0)
        if not self._over:  # else it was we who cut requests off
            self._book.conclude()
        findings = self._judge(ended=complete)
        if told is not None and not findings.told:  # the look that stopped it counts
            findings = told
        stopped = "the answer was clear before the planned end" if told is not None else ""
        if self._over:
            stopped = f"{self._why or 'interrupted'}; {self._switch.restore()}"
        return Outcome(
            findings=findings,
            book=self._book,
            stopped=stopped,
            guarded=bool(self._why),
            interrupted=self._interrupted.is_set(),
            model=self._source.model,
            notes=(*self._source.notes(), *self._switch.notes()),
            too_slow=bool(self._source.too_slow()),
        )

    async def _size(self) -> None:
        plan = self.plan
        await self._put(plan.arms[0], "start", lambda at: Block(0, -1, at, inf))
        await self._pause(plan.sizing)
        if not self._over and not self._book.came:
            raise RunError("no request came in the first minute; send some, or let the trial send, --rate 10")
        block, burn = block_length(self._book.time_in_system())
        if plan.block is not None:
            block = plan.block
            burn = min(burn, float(ceil(block / 3)))
        self._block, self._burn = block, burn
        self._primary = plan.primary or (KEPT if self._book.promises else TTFT)
        if plan.minutes is not None:
            self._rounds = rounds_for(plan.minutes, len(plan.arms), block)
            if (fault := too_short(plan.minutes, len(plan.arms), block)) and not self._over:
                raise RunError(fault)
        planned = f"{self._rounds} rounds" if self._rounds else "rounds until the answer is clear"
        self._say(
            f"requests stay {self._book.time_in_system():.1f} s: {planned} of {len(plan.arms)} blocks of "
            f"{block:g} s, the first {burn:g} s of each left out"
        )

    async def _round(self, number: int, order: Sequence[int]) -> None:
        for arm in order:
            if self._over:
                return
            begin = lambda at, arm=arm: self._book.begin(arm, number, at, self._burn)  # noqa: E731
            block_number = number * len(self.plan.arms) + order.index(arm) + 1
            place = f"round {number + 1} block {block_number}"
            try:
                block = await self._put(self.plan.arms[arm], place, begin)
            except NotReadError as error:  # traffic may rest: it ends only what it keeps from being compared
                self._book.end(self._source.now())
                self._book.forget_round(number)
                self._idle += 1
                if self._idle >= MOST_IDLE:
                    self._why = str(error)
                else:
                    self._say(f"round {number + 1} is left out: no request came at a switch")
                return
            except (InputError, RunError) as error:
                self._why = str(error)
                return
            if block is not None:
                followed = isinstance(self._source, FollowedTrace)  # it begins when it is in force
                waited = 0.0 if followed else self._source.now() - block.start
                await self._pause(self._block - min(waited, self._burn))
                self._guard(block)
        self._idle = 0

    async def _put(self, arm: Arm, place: str, begin: Callable[[float], Block]) -> Block | None:
        put = asyncio.create_task(self._switch.put(arm, place, begin))
        stop = asyncio.create_task(self._interrupted.wait())
        await asyncio.wait({put, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if put.done():
            return put.result()
        put.cancel()
        with suppress(asyncio.CancelledError):
            await put
        return None

    async def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds / self.plan.speed
        asked = loop.time()
        while (left := end - loop.time()) > 0 and not self._over:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._interrupted.wait(), min(left, LOOK / self.plan.speed))
            try:
                trouble = self._source.trouble()
            except (InputError, RunError) as error:  # what was found so far is worth telling
                trouble = str(error)
            if not trouble and loop.time() - asked >= ASK_EVERY / self.plan.speed:
                asked = loop.time()
                trouble = await self._switch.trouble()
            self._why = self._why or trouble or ""

    async def _last_requests(self, seconds: float) -> None:
        """They end under the settings that were there before; a trace written for the trial must go on."""
        source = self._source
        if isinstance(source, FollowedTrace):
            if source.own:
                with suppress(InputError, RunError):  # the rounds are over
                    await self._put(self.plan.arms[0], "end", lambda at: Block(0, -1, at, inf))
            else:
                self._switch.restore()
            end = asyncio.get_running_loop().time() + seconds / self.plan.speed
            while any(block.unfinished for block in self._book.blocks):
                left = end - asyncio.get_running_loop().time()
                if left <= 0 or self._over:
                    break
                await self._pause(min(1.0, left * self.plan.speed))
        else:
            self._switch.restore()
            await source.stop(seconds)

    @property
    def _patience(self) -> float:
        return max(LEAST_DRAIN, 2 * self._block)

    @property
    def _over(self) -> bool:
        return self._interrupted.is_set() or bool(self._why)

    def _guard(self, block: Block) -> None:
        """Live users are not kept waiting for the sake of a figure."""
        plan, arm = self.plan, block.arm
        self._book.give_up(self._source.now(), self._patience)
        if arm == 0 or self._why:
            return
        name = plan.names[arm]
        followed = isinstance(self._source, FollowedTrace)
        book = self._book
        if followed and book.finished and book.backlog_seconds(book.waiting) > self._block:
            self._why = f"under {name} the backlog grew beyond {self._block:g} s of work"
        ended = [one for one in self._book.blocks if one.arm == arm and one.end < inf and not one.unfinished]
        shares = [sums.kept / sums.promised for sums in (one.sums() for one in ended[-2:]) if sums.promised]
        if plan.floor is not None and len(shares) == 2 and max(shares) < plan.floor:
            self._why = (
                f"{name} kept at most {max(shares):.0%} of the promises in two blocks running, less than "
                f"{plan.floor:.0%}"
            )

    def _judge(self, ended: bool) -> Findings:
        plan = self.plan
        looks = Looks(plan.minutes is not None, len(plan.arms) - 1, self._rounds)
        return judge(self._book, plan.names, self._primary, self._block, self._burn, looks, ended=ended)


# -- the two ways to put an arm into force


class BySettings:
    def __init__(
        self, file: SettingsFile, source: Source, metrics: PlugInMetrics | None, speed: float = 1.0
    ) -> None:
        self._file, self._source, self._metrics, self._speed = file, source, metrics, speed
        self._name = secrets.token_hex(4)
        self._arm: Arm | None = None

    async def put(self, arm: Arm, place: str, begin: Callable[[float], Block]) -> Block:
        source, switches = self._source, self._arm is not None and dict(self._arm.words) != dict(arm.words)
        self._arm = arm  # the same arm again is no switch, and the plug-in keeps its policy
        mark = f"trial {self._name} {place} arm {arm.name}"[:LONGEST_MARK]
        if isinstance(source, FollowedTrace):
            source.expect(mark, begin)
            before = source.renewals
            self._file.put(arm.words, mark)
            block = await self._begun(source, mark)
            if switches and source.renewals == before:
                raise RunError(self._not_taken)
        else:
            shown = await self._shown() if switches else None
            self._file.put(arm.words, mark)
            block = begin(source.now())
            if shown is not None:
                await self._taken(shown)
                block.measured_from = max(block.measured_from, source.now())
        return block

    async def _shown(self) -> float | None:
        return self._metrics.renewals if self._metrics is not None and await self._metrics.read() else None

    async def _taken(self, before: float) -> None:
        end, came, shown = asyncio.get_running_loop().time() + READ_WITHIN, self._source.book.came, None
        while asyncio.get_running_loop().time() < end:
            shown = await self._shown()
            if shown is not None and shown > before:
                return
            await asyncio.sleep(2 * LOOK / self._speed)
        if shown is not None:
            self._arm = None  # whichever the engine has
            idle = self._source.book.came == came
            raise NotReadError(self._not_taken) if idle else RunError(self._not_taken)

    @property
    def _not_taken(self) -> str:
        slow = f"or the machine is too slow: start server and trial with less than --speed {self._speed:g}"
        return NOT_TAKEN if self._speed <= 1 else f"{NOT_TAKEN}; {slow}"

    async def _begun(self, source: FollowedTrace, mark: str) -> Block:
        end = asyncio.get_running_loop().time() + READ_WITHIN
        while asyncio.get_running_loop().time() < end:
            source.poll()
            if mark in source.begun:
                return source.begun[mark]
            await asyncio.sleep(LOOK / self._speed)
        self._arm = None  # whichever the engine has
        raise NotReadError(
            f"the trace {source.path} shows no new settings after {READ_WITHIN:g} s: is it the trace "
            "of the server that reads this file, and does that server have requests? Give --rate 20 --url "
            "http://HOST:PORT to make a load"
        )

    async def trouble(self) -> str | None:
        if self._metrics is None:
            return None
        await self._metrics.read()
        if self._metrics.fallen:
            return f"the policy of {self._arm.name if self._arm else '?'} failed and the engine fell back"
        return None

    def notes(self) -> list[str]:
        return [] if self._metrics is None else self._metrics.notes()

    def restore(self) -> str:
        return self._file.restore()


class ByUrl:
    def __init__(self, source: TraceLoad) -> None:
        self._source = source

    async def put(self, arm: Arm, place: str, begin: Callable[[float], Block]) -> Block:
        self._source.url = arm.url
        return begin(self._source.now())

    async def trouble(self) -> str | None:
        return None

    def notes(self) -> list[str]:
        return []

    def restore(self) -> str:
        return BACK


Switch = BySettings | ByUrl


def line(findings: Findings, round: int, rounds: int) -> str:
    """The last planned round has no word: the answer follows, from more requests and at another level."""
    parts = [f"round {round} of {rounds}" if rounds else f"round {round}"]
    if rounds > round:
        parts[0] += f", {ceil(findings.minutes(rounds - round))} min left"
    if findings.state is None:
        return f"{parts[0]}; its requests are still under way"
    parts.append(findings.state.name)
    for found in findings.found:
        if (verdict := found.verdict(findings.primary)) is None:
            why = "with so many failures" if found.failed else "in this state"
            parts.append(f"{findings.primary.title} cannot be compared {why}")
        else:
            metric, change = verdict.metric, verdict.change
            figures = f"{findings.arms[found.arm]}: {metric.title}"
            if change is not None:
                figures += f" {metric.shown(change.baseline)} -> {metric.shown(change.arm)}"
            parts.append(figures if round == rounds else f"{figures}, {_word(findings, verdict)}")
    return "; ".join(parts)


def _word(findings: Findings, verdict: Verdict) -> str:
    if verdict.word != CANNOT_TELL:
        return verdict.word
    if verdict.rounds_missing is None:
        return f"{CANNOT_TELL} yet"
    return f"{CANNOT_TELL} yet: roughly {ceil(findings.minutes(verdict.rounds_missing))} min more"


@contextmanager
def signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and kill end the trial, not the process; a second one ends the process."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def leave() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def signalled() -> None:
        stop()
        leave()

    try:
        with suppress(RuntimeError, ValueError):  # another thread's, which hears none
            for number in numbers:
                loop.add_signal_handler(number, signalled)
        yield
    finally:
        leave()
