"""What to try next for the highest rate or fewest engines; `search_all` makes the runs of all planners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from math import ceil, isfinite, log
from time import process_time
from typing import Any, Generic, Protocol, TypeVar

from headgate.advisor.capacity.memory import AnswerFile
from headgate.experiment.workers import WorkerPool, Workers

START = 0.7  # of the highest rate there can be
LEAST = 1 / 128  # below this share of it the answer is zero
ROUGH, ROUGH_LEAST = 0.1, 1 / 4  # width of a bracket, and lowest share, that a rough search is content with
MOST = 20  # rates tried
STEP = 0.95  # of the precision: the first step from a rate that was found before (the next ones double), and
# the last bracket's width; a guess within NEAR of that width from an end is near enough to make the last one
STEP_UP = 0.125  # of the least count: the first step up; the next ones double the way gone
NEAR = 0.75
INSIDE = 0.15  # a guess stays this far, as a share of the bracket, from its ends
EXPECTED = 7  # values tried by a search, for the progress bar
Progress = Callable[[str, int], Any]  # a context manager that yields a function to report to
Bar = Callable[[int], Any]  # one that has its label


class Search:
    """Looks for where a ratio that rises with the rate crosses one, between zero and `top`.

    `next` says which rate to try, `tell` takes the answer; so many searches can run at the same time. A
    bracket is narrowed by interpolating the logarithm of the ratio, and the answer is interpolated likewise.
    A rough search stops early; set `rough` to False and it goes on from there.
    """

    shown: float | None = None  # a rate is tried with one run, so nothing is left to run at the end

    def __init__(self, top: float, precision: float, first: float = START, rough: bool = False) -> None:
        self.top = top
        self.precision = precision
        self.first = min(max(first, LEAST), 1.0)  # the share of `top` to try first
        self.rough = rough
        self.tried: dict[float, float] = {}
        self.spent = 0.0  # CPU seconds of its runs, wherever they ran

    @property
    def sustained(self) -> float:
        missed = self.missed
        return max((rate for rate, ratio in self.tried.items() if ratio <= 1 and rate < missed), default=0.0)

    @property
    def missed(self) -> float:
        return min((rate for rate, ratio in self.tried.items() if not ratio <= 1), default=2 * self.top)

    def tell(self, rate: float, ratio: float) -> None:
        self.tried[rate] = ratio

    def next(self) -> float | None:
        """The next rate to try; None when the answer is known well enough."""
        if not self.tried:
            return self.first * self.top
        low, high = self.sustained, self.missed
        known = self.first != START  # a first rate that was found before is near the answer
        step = STEP * self.precision * 2 ** (len(self.tried) - 1)
        if high > self.top:
            above = min(low * (1 + step), self.top) if known else self.top
            return None if low >= self.top else above
        if not low:
            below = high * max(1 - step, 0.5) if known else high / 2
            return below if below >= (ROUGH_LEAST if self.rough else LEAST) * self.top else None
        enough = max(self.precision, ROUGH) if self.rough else self.precision
        if high - low <= enough * high or len(self.tried) >= MOST:
            return None
        return self._between(low, high, STEP * enough * high)

    def _between(self, low: float, high: float, last: float) -> float:
        """A rate in the bracket. Two answers in a row on one side say that interpolation creeps: the middle.
        A guess near an end is not tried itself, but a rate that most likely makes a bracket of width `last`.
        """
        *_, before, newest = (ratio <= 1 for ratio in self.tried.values())
        if before == newest:
            return (low + high) / 2
        guess, near = self._crossing(low, high), NEAR * last
        if guess - low <= near:
            return low + last
        if high - guess <= near:
            return high - last
        room = INSIDE * (high - low)
        return min(max(guess, low + room), high - room)

    @property
    def answer(self) -> float:
        low, high = self.sustained, self.missed
        return low if high > self.top or not low else self._crossing(low, high)

    def _crossing(self, low: float, high: float) -> float:
        below, above = self.tried[low], self.tried[high]
        if not (below > 0 and isfinite(above)):
            return (low + high) / 2
        return low + (high - low) * log(1 / below) / log(above / below)


class Fewest:
    """Looks for the smallest count that is enough, from `least` on, where no smaller one can be.

    It goes up in growing steps until a count is enough and halves what lies between, so the count found
    is enough and one fewer is not; with chance in the runs a smaller one might be again: it is not tried.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most
        self.tried: dict[int, float] = {}
        self.spent = 0.0  # CPU seconds of its runs

    @property
    def enough(self) -> int | None:
        return min((count for count, ratio in self.tried.items() if ratio <= 1), default=None)

    @property
    def too_few(self) -> int:
        below = self.enough or self.most + 1
        missed = (count for count, ratio in self.tried.items() if not ratio <= 1 and count < below)
        return max(missed, default=self.least - 1)

    @property
    def shown(self) -> int | None:
        """The count that stands beside the answer and is run with every seed; None where none was tried."""
        return self.too_few if self.too_few in self.tried else None

    def tell(self, count: int, ratio: float) -> None:
        self.tried[count] = ratio

    def next(self) -> int | None:
        """The next count to try; None when it is found, or `most` is too few."""
        enough, low = self.enough, self.too_few
        if enough is None:
            above = max(2 * (low - self.least), ceil(self.least * STEP_UP), 1) if self.tried else 0
            return None if low >= self.most else min(self.least + above, self.most)
        return None if enough - low <= 1 else (low + enough) // 2


# -- many searches at the same time


class RunRatio(Protocol):
    @property
    def ratio(self) -> float:
        """Of the worst level to its limit; not at most 1: it is missed."""


Key = TypeVar("Key", bound=tuple[Any, ...])  # of a search; its first part is whose runs they are
Task = TypeVar("Task")
Answer = TypeVar("Answer", bound=RunRatio)


def _timed(run: Callable[[Task], Answer], task: Task) -> tuple[Answer, float]:
    began = process_time()
    return run(task), process_time() - began


@dataclass(eq=False)
class TriedValue(Generic[Key, Task, Answer]):
    """A value that is tried, with one run after the other up to the first that misses; `whole`: with all."""

    key: Key
    value: Any
    tasks: Sequence[Task]
    answers: dict[int, Answer] = field(default_factory=dict)  # by place among the tasks
    left: int = 0  # runs that were asked for and have neither ended nor been given up
    whole: bool = False

    @property
    def ratio(self) -> float:
        ratios = [answer.ratio for answer in self.answers.values()]
        return next((ratio for ratio in ratios if not ratio <= 1), max(ratios, default=0.0))

    @property
    def judged(self) -> list[Answer]:
        """The answers in order, without what ran ahead of the first that missed."""
        judged: list[Answer] = []
        for place in range(len(self.tasks)):
            if place not in self.answers or not (self.whole or all(each.ratio <= 1 for each in judged)):
                break
            judged.append(self.answers[place])
        return judged


Values = dict[tuple[Any, ...], TriedValue[Key, Task, Answer]]  # by the parts of a key, and the value


def search_all(
    run: Callable[[Task], Answer],
    searches: Mapping[Key, Search] | Mapping[Key, Fewest],
    tasks: Callable[[Key, Any], Sequence[Task]],
    workers: Workers,
    progress: Bar,
    memory: AnswerFile[Task, Any] | None = None,
    seeds: int = 1,
) -> Values[Key, Task, Answer]:
    """Every search to its end: what was tried. `tasks` are the runs, one for each of `seeds`, of a value.

    What a value gives does not depend on how many processes there are. Interrupted, it returns what was found
    by then; with no value tried, it passes the interrupt on.
    """
    values: Values[Key, Task, Answer] = {}
    most = seeds * len(searches)
    try:
        timed = partial(_timed, run)
        with progress(EXPECTED * most) as report, workers.start(timed, most) as pool:
            for done, _ in enumerate(_Searching(pool, searches, tasks, memory, values).run(), 1):
                report(min(done, EXPECTED * most - 1))
    except KeyboardInterrupt:
        if not any(trial.value in searches[trial.key].tried for trial in values.values()):
            raise
    return {key: trial for key, trial in values.items() if trial.value in searches[trial.key].tried}


@dataclass(eq=False)
class _Searching(Generic[Key, Task, Answer]):
    """Of the runs that wait, the first ones of a value go first; among these, those of the policy that took
    most time, so that none is left alone at the end.
    """

    pool: WorkerPool[Task, tuple[Answer, float]]
    searches: Mapping[Key, Search] | Mapping[Key, Fewest]
    tasks: Callable[[Key, Any], Sequence[Task]]
    memory: AnswerFile[Task, Any] | None
    values: Values[Key, Task, Answer]
    ready: list[tuple[int, TriedValue[Key, Task, Answer]]] = field(default_factory=list)  # places, trials
    spent: dict[Any, float] = field(default_factory=lambda: defaultdict(float))

    def run(self) -> Iterator[None]:
        pending: dict[Future[tuple[Answer, float]], tuple[int, TriedValue[Key, Task, Answer]]] = {}
        for key, search in self.searches.items():
            self.spent[key[0]] += search.spent
            self._ask(key)
        while self.ready or pending:
            self.ready.sort(key=lambda run: (run[0], -self.spent[run[1].key[0]]))
            while self.ready and len(pending) < self.pool.ahead:
                place, trial = self.ready.pop(0)
                task = trial.tasks[place]
                if not (trial.whole or trial.ratio <= 1):
                    self._ended(trial)
                elif self.memory and (known := self.memory.get(task)) is not None:
                    trial.answers[place] = known
                    self._ended(trial)
                    yield
                else:
                    pending[self.pool.submit(task)] = place, trial
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                place, trial = pending.pop(future)
                answer, seconds = future.result()
                if self.memory:
                    self.memory.put(trial.tasks[place], answer)
                self.searches[trial.key].spent += seconds
                self.spent[trial.key[0]] += seconds
                trial.answers[place] = answer
                self._ended(trial)
                yield

    def _ask(self, key: Key) -> None:
        search = self.searches[key]
        value = search.next()
        if whole := value is None:
            value = search.shown
        if value is None:
            return
        trial = self.values.get((*key, value)) or TriedValue(key, value, self.tasks(key, value))
        trial.whole = whole
        self.values[*key, value] = trial
        missing = [place for place in range(len(trial.tasks)) if place not in trial.answers]
        trial.left = len(missing)
        self.ready += [(place, trial) for place in missing]

    def _ended(self, trial: TriedValue[Key, Task, Answer]) -> None:
        trial.left -= 1
        if not trial.left and not trial.whole:
            self.searches[trial.key].tell(trial.value, trial.ratio)
            self._ask(trial.key)
