"""How many engines a pool needs now. The router, `headgate watch` and the simulator decide by this object.

It sees cumulative counters only, as /metrics has them, so that all three can tell it the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil, isfinite
from typing import NamedTuple

from headgate.core.durations import duration
from headgate.core.errors import InputError, unknown
from headgate.cost.model import StepCost
from headgate.methods.bounds import Requests, engine_bound

PLAN, QUEUE, LOAD, FIXED = "plan", "queue", "load", "fixed"
RULES = (PLAN, QUEUE, LOAD, FIXED)
PREFILL, DECODE = "prefill", "decode"  # pools with one kind of work; any other has both
TIMES = ("start", "hold", "every", "window")
MOST_ENGINES = 100_000


@dataclass(frozen=True)
class Scaling:
    """A rule and its bounds; durations in seconds.

    `plan` computes the engines' work from the rates seen. `queue` and `load` are what KEDA does with a
    Prometheus trigger of type AverageValue: so many waiting, or waiting and running requests, for each
    engine. For all of them an engine goes only if it was not needed for `hold`, which is the stabilisation
    window of Kubernetes' autoscaler.
    """

    rule: str = PLAN
    floor: int = 1
    ceiling: int = 100
    target: float = 0.7  # plan: share of what engines can do at most that they are given
    per_engine: float = 5.0  # queue, load: requests for each engine
    start: float = 120.0  # until a new engine serves
    hold: float = 300.0
    every: float = 15.0  # between two decisions
    window: float = 0.0  # over which rates are taken; 0: `start`, at least a minute

    @property
    def span(self) -> float:
        return self.window or max(self.start, 60.0)

    def checked(self) -> Scaling:
        if self.rule not in RULES:
            raise unknown("rule of autoscaling", self.rule, RULES)
        if not 1 <= self.floor <= self.ceiling <= MOST_ENGINES:
            raise InputError(
                f"autoscaling: floor={self.floor}, ceiling={self.ceiling}; give 1 <= floor <= ceiling"
            )
        if not 0.05 <= self.target <= 1:
            raise InputError(f"autoscaling: target={self.target:g}; give a share from 0.05 to 1, such as 0.7")
        for name in ("per_engine", "every"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"autoscaling: {name}={getattr(self, name):g}; give more than 0")
        for name in TIMES:
            if not 0 <= getattr(self, name) <= 86_400:
                raise InputError(f"autoscaling: {name}={getattr(self, name):g} s; give at most a day")
        return self


def read_scaling(text: str, ceiling: int = 100) -> Scaling:
    """RULE[:NAME=VALUE,...], such as plan:floor=2,start=90s."""
    rule, _, rest = text.partition(":")
    values: dict[str, float | int] = {}
    known = {field.name for field in fields(Scaling)} - {"rule"}
    for part in rest.split(",") if rest else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in known or not equals:
            raise unknown("setting of autoscaling", name, known)
        try:
            number = duration(value) if name in TIMES else float(value)
        except ValueError:
            raise InputError(f"autoscaling: {name}={value!r} is no number; write {name}=2 or 90s") from None
        if name in ("floor", "ceiling"):
            if not float(number).is_integer():
                raise InputError(f"autoscaling: {name}={value}; give a whole number of engines")
            number = int(number)
        values[name] = number
    return replace(Scaling(rule.strip(), ceiling=ceiling), **values).checked()  # type: ignore[arg-type]


class Seen(NamedTuple):
    """Counters since any one beginning. One that is lower than before began anew."""

    requests: float  # that came, or where only ends are counted, that ended
    prompt_tokens: float  # of those
    ended: float
    output_tokens: float  # of the ended


class Decision(NamedTuple):
    engines: int
    rate: float = 0.0  # requests per second
    work: float = 0.0  # engines that would be busy without a break
    forecast: float = 0.0  # the same when an engine that starts now serves


class EnginesNeeded:
    """The number for one pool, from what was seen so far.

    Work is the rate times the least time that a mean request takes from an engine (`methods.bounds`).
    Engines are given the share `target` of it. Where work rises, it is taken as it will be when an engine
    that starts now serves. Requests that wait are to be served within that time, too. A rise counts at once,
    a fall when `hold` has passed. Before two observations nothing is known and the number stays.
    """

    def __init__(self, scaling: Scaling, seconds: Callable[[float, float], float], engines: int) -> None:
        """`seconds`: of a request of so many prompt and output tokens; `engines` to begin with."""
        self.scaling = scaling
        self._seconds = seconds
        self._seen: deque[tuple[float, Seen]] = deque()
        self._wanted: deque[tuple[float, int]] = deque()
        self._means = (0.0, 0.0)  # prompt and output, where a window has no request
        self.last = Decision(self._bounded(engines))

    def decide(self, now: float, seen: Seen, waiting: float = 0.0, running: float = 0.0) -> Decision:
        """At any times, in order. `waiting` and `running` are requests in the whole pool now."""
        if self._seen and now <= self._seen[-1][0]:
            return self.last
        if not all(map(isfinite, (*seen, waiting, running))):
            return self.last  # a scrape that failed in part
        if self._seen and any(new < old for new, old in zip(seen, self._seen[-1][1], strict=True)):
            self._seen.clear()
        if not self._wanted:
            self._wanted.append((now, self.last.engines))
        self._seen.append((now, seen))
        scaling, span = self.scaling, self.scaling.span
        while len(self._seen) > 2 and self._seen[1][0] <= now - 2 * span:
            self._seen.popleft()
        if scaling.rule == FIXED or len(self._seen) < 2:
            return self.last
        if scaling.rule == PLAN:
            made = self._plan(now, waiting)
        else:
            load = waiting + (running if scaling.rule == LOAD else 0.0)
            made = Decision(ceil(min(load / scaling.per_engine, MOST_ENGINES)))
        self._wanted.append((now, made.engines))
        while self._wanted[0][0] < now - scaling.hold:
            self._wanted.popleft()
        engines = self._bounded(max(wanted for _, wanted in self._wanted))
        self.last = made._replace(engines=engines)
        return self.last

    def _plan(self, now: float, waiting: float) -> Decision:
        span, newest = self.scaling.span, self._seen[-1][1]
        middle_time, middle = self._at(now - span)
        rate = (newest.requests - middle.requests) / (now - middle_time)
        prompts, outputs = self._means
        if newest.requests > middle.requests:
            prompts = (newest.prompt_tokens - middle.prompt_tokens) / (newest.requests - middle.requests)
        if newest.ended > middle.ended:
            outputs = (newest.output_tokens - middle.output_tokens) / (newest.ended - middle.ended)
        self._means = prompts, outputs
        each = self._seconds(max(prompts, 1.0), max(outputs, 1.0))
        work = forecast = rate * each
        first_time, first = self._at(middle_time - span)
        if middle_time - first_time > span / 2:
            before = (middle.requests - first.requests) / (middle_time - first_time) * each
            between = (now - first_time) / 2
            forecast += max(work - before, 0.0) / between * (self.scaling.start + self.scaling.every)
            forecast = min(forecast, 2 * work)
        behind = waiting * each / max(self.scaling.start, self.scaling.every)
        needed = ceil(min(forecast / self.scaling.target + behind, MOST_ENGINES))
        return Decision(needed, rate, work, forecast)

    def _at(self, time: float) -> tuple[float, Seen]:
        older = [each for each in self._seen if each[0] <= time]
        return older[-1] if older else self._seen[0]

    def _bounded(self, engines: int) -> int:
        return min(max(engines, self.scaling.floor), self.scaling.ceiling)


def work_of(
    cost: StepCost, slots: int, budget: int, kv_tokens: float, pool: str = ""
) -> Callable[[float, float], float]:
    """The least seconds that a request of so many tokens takes from an engine of a pool."""

    @lru_cache(256)
    def seconds(prompt: float, output: float) -> float:
        lengths = Requests.of([max(prompt, 1.0)], [max(output - 1, 0.0)])
        bound = engine_bound(cost, lengths, slots, budget, kv_tokens)
        return {PREFILL: bound.prefill, DECODE: bound.decode}.get(pool, bound.seconds)

    return lambda prompt, output: seconds(round(prompt), round(output))
