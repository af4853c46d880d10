"""Small engines, workloads, costs and policies that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from draws import PACED, draw_ordered, draw_paced, draw_rad, draw_sglang
from headgate.core.ledger import Entry, Ledger
from headgate.core.plan import ALL, NONE, Plan, Until
from headgate.core.policy import BatchPolicy, Observer, Steps
from headgate.core.request import Slo
from headgate.core.view import Limits, View
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.cost.laws.tiles import TileCost, TileTerms
from headgate.cost.model import Shape, StepCost
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.replica import VirtualEngine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Contents, Kind, Workload

HOOKS = [name for name in vars(Observer) if not name.startswith("_")]  # a driver tells what a class overrides


class Line(StepCost):
    """A step cost with round numbers: a constant and a price for everything in the step."""

    def __init__(
        self,
        fixed: float = 1.0,
        prefill: float = 0.01,
        decode: float = 0.05,
        context: float = 0.001,
        behind: float = 0.0005,
    ) -> None:
        self.fixed, self.prefill, self.decode, self.context, self.behind = (
            fixed,
            prefill,
            decode,
            context,
            behind,
        )

    def decode_line(self, decodes: int) -> tuple[float, float]:
        return self.fixed + self.decode * decodes, self.context

    def seconds(self, shape: Shape) -> float:
        fixed, slope = self.decode_line(shape.decodes)
        alone = fixed + slope * shape.context
        if not shape.prefill:
            return alone
        return alone + self.prefill * shape.prefill + self.behind * shape.behind

    def span(self, decodes: int, context: int, steps: int) -> np.ndarray[Any, Any]:
        fixed, slope = self.decode_line(decodes)
        return fixed + slope * (context + decodes * np.arange(steps))


PRICES = LinearCost(
    DecodeTerms(constant=1.0, per_decode=0.05, per_context=0.001),
    PrefillTerms(constant=0.4, per_token=0.01),
    MixedTerms(constant=1.2, per_prefill=0.012, per_decode=0.06, per_context=0.001),
)


TILES = TileCost(
    TileTerms(
        layers=2,
        width=8,
        tile=(4, 8, 2),
        vector_tile=(4, 2),
        per_column=0.5,
        per_token=0.01,
        per_pair=0.002,
        per_vector_pair=0.001,
        constant=0.3,
        floor=0.8,
        head_per_column=0.2,
    )
)


class Log(Observer):
    """Writes down everything: steps one by one, and all other events in the order they were told."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int, int, int, int]] = []
        self.events: list[tuple[Any, ...]] = []
        self.plans: list[tuple[float, Plan]] = []
        self.kv: list[int] = []

    def arrived(self, request, now):
        self.events.append(("arrived", request.id, now))

    def admitted(self, request, now):
        self.events.append(("admitted", request.id, now))

    def prefilled(self, request, now):
        self.events.append(("prefilled", request.id, now, request.generated))

    def evicted(self, request, now):
        self.events.append(("evicted", request.id, now, request.generated, request.wasted))

    def finished(self, request, now, how):
        self.events.append(("finished", request.id, now, how, request.generated, request.evictions))

    def planned(self, plan, now, gauges):
        self.plans.append((now, plan))

    def stepped(self, steps):
        for index, end in enumerate(steps.ends):
            context = steps.context + index * steps.decodes
            self.steps.append((float(end), steps.decodes, context, steps.prefill, steps.behind))
        self.kv.append(steps.kv)


class Relay(BatchPolicy):
    """Tells another policy everything it is told; `plan` is for a class derived from it."""

    def __init__(self, inner: BatchPolicy) -> None:
        self.inner = inner
        for hook in HOOKS:
            setattr(self, hook, getattr(inner, hook))

    def arrived(self, request, now): ...
    def admitted(self, request, now): ...
    def prefilled(self, request, now): ...
    def held(self, request, now): ...
    def resumed(self, request, now): ...
    def evicted(self, request, now): ...
    def finished(self, request, now, how): ...
    def stepped(self, steps): ...
    def planned(self, plan, now, gauges): ...


def holding(
    decoding: int,
    waiting: int,
    *,
    running: int = 1000,
    kv_free: int = 10**6,
    kv_total: int = 10**6,
    block: int = 1,
    prompt: int = 10,
) -> Ledger:
    """A ledger in which so many requests decode and so many wait."""
    ledger = Ledger(Limits(batch_tokens=10**6, running=running, block=block), kv_total)
    ledger.kv_free = kv_free
    for id in range(decoding + waiting):
        entry = Entry(ledger, id, arrival=0.0, prompt=prompt, limit=1000)
        ledger.arrive(entry)
        if id < decoding:
            ledger.admit(entry)
            entry.todo = 0
            ledger.join(entry, 0.0, rolling=True)
    return ledger


def run(engine: Engine, policy: BatchPolicy, workload: Workload, **options: Any) -> Log:
    """Serve the workload to the end and say what happened."""
    log = Log()
    Simulator(engine, policy, workload, (log,), **options).run()
    return log


class Batch(NamedTuple):
    """What ran in one step, or in each of several equal ones."""

    start: float
    ends: tuple[float, ...]
    decodes: tuple[tuple[int, int], ...]  # (request, position of the token it read), in the first step
    chunks: tuple[tuple[int, int, int], ...]  # (request, its first position, tokens); positions from 1
    evicted: tuple[int, ...]  # since the batch before


class _Newest(Observer):
    """The steps and evictions since the last look."""

    def __init__(self) -> None:
        self.steps: list[Steps] = []
        self.out: list[int] = []

    def stepped(self, steps):
        self.steps.append(steps)

    def evicted(self, request, now):
        self.out.append(request.id)


def batches(
    engine: Engine,
    policy: BatchPolicy,
    workload: Workload,
    observers: tuple[Observer, ...] = (),
    **options: Any,
) -> list[Batch]:
    """Serve the workload and say exactly who ran in each step: every request is compared before and after."""
    newest, found = _Newest(), []

    class Watched(VirtualEngine):
        def advance(self, wake: float = inf) -> bool:
            ledger = self.ledger
            todo = [(r, r.todo) for r in (*ledger.prefilling.values(), *ledger.waiting.values())]
            tokens = [(r, r.generated) for r in ledger.decoding.values()]
            if not super().advance(wake):
                return False
            steps = newest.steps.pop()
            order = {id: place for place, id in enumerate(self.plan.prefill)}
            ran = sorted(((r, n) for r, n in todo if r.todo < n), key=lambda row: order[row[0].id])
            chunks = tuple((r.id, 1 + r.prompt + r.generated - (r.todo == 0) - n, n - r.todo) for r, n in ran)
            decodes = tuple((r.id, r.prompt + n) for r, n in tokens if r.generated > n)
            assert not newest.steps
            assert steps.prefill == sum(length for _, _, length in chunks)
            assert steps.decodes == len(decodes)
            assert all(r.generated in (n, n + len(steps.ends)) for r, n in tokens)
            found.append(Batch(steps.start, tuple(steps.ends), decodes, chunks, tuple(newest.out)))
            newest.out.clear()
            return True

    Simulator(engine, policy, workload, (newest, *observers), kind=Watched, **options).run()
    return found


def admitted(
    ledger: Ledger, decoding: int = 0, halves: Iterable[int] = (), waiting: Iterable[int] = ()
) -> Ledger:
    """So many decodes of prompt 10, then half-done prompts and waiting ones by the tokens they still need."""
    halves = list(halves)
    prompts = [10] * decoding + [todo + 5 for todo in halves] + list(waiting)
    for id, prompt in enumerate(prompts):
        entry = Entry(ledger, id, arrival=0.0, prompt=prompt, limit=1000)
        ledger.arrive(entry)
        if id < decoding + len(halves):
            ledger.admit(entry)
            entry.todo -= 5
        if id < decoding:
            entry.todo = 0
            ledger.join(entry, 0.0, rolling=True)
    return ledger


class EveryOther(BatchPolicy):
    """Decodes the half that is furthest behind, by name; for testing named decodes."""

    def plan(self, view: View) -> Plan:
        behind = sorted(view.decoding.values(), key=lambda request: (request.generated, request.id))
        chosen = frozenset(request.id for request in behind[: (len(behind) + 1) // 2])
        slots = view.limits.running - len(view.decoding) - len(view.prefilling)
        new = [*view.waiting][: max(0, slots)]
        return Plan(chosen, (*view.prefilling, *new))


class Evicting(BatchPolicy):
    """Mixed batching that throws out every third request once, at its third token; for testing evictions."""

    def plan(self, view: View) -> Plan:
        out = [r.id for r in view.decoding.values() if r.id % 3 == 0 and r.generated == 3 and not r.evictions]
        slots = view.limits.running - len(view.decoding) - len(view.prefilling)
        new = [*view.waiting][: max(0, slots)]
        return Plan(ALL, (*view.prefilling, *new), evict=tuple(out))


class Timed(BatchPolicy):
    """Decodes for one second, prefills for one second, by the clock; for testing leases in time."""

    def plan(self, view: View) -> Plan:
        second = int(view.now)
        until = Until(time=float(second + 1), arrivals=1, prefills=1, finishes=1)
        prompts = (*view.prefilling, *[*view.waiting][: view.limits.running])
        if second % 2 or not view.decoding:
            return Plan(NONE, prompts, until=until) if prompts else Plan(ALL, until=Until(steps=1))
        return Plan(ALL, until=until)


def draw_policy(name: str) -> Callable[[st.DrawFn, Engine], BatchPolicy]:
    """How to make a random policy of that name for an engine."""

    def draw(draw: st.DrawFn, engine: Engine) -> BatchPolicy:
        slots = draw(st.integers(1, engine.running + 2), label="slots")
        if name == "mixed":
            return BATCH[name](slots=slots, budget=draw(st.integers(slots, engine.batch_tokens + slots)))
        gap = draw(st.sampled_from([None, None, 0.5, 3.0]), label="max_gap")
        if name == "eb":
            refill = draw(st.integers(1, slots), label="refill")
            return BATCH[name](slots=slots, refill=refill, max_gap=gap, cost=PRICES)
        if name in ("eb-online", "eb+"):
            return draw_online(draw, name, slots, gap, engine)
        if name in ("rad", "rad-smooth"):
            return draw_rad(draw, name, slots)
        if name in ("sarathi", "sarathi-spf", "slai"):
            return draw_ordered(draw, name, slots, engine, PRICES)
        if name in ("wait", "nested-wait"):
            return draw_wait(draw, name, slots)
        if name == "sglang":
            return draw_sglang(draw, engine)
        if name in PACED:
            return draw_paced(draw, name, slots, engine, PRICES)
        return BATCH[name](slots=slots)

    return draw


def draw_online(draw: st.DrawFn, name: str, slots: int, gap: float | None, engine: Engine) -> BatchPolicy:
    """A policy that learns, with reviews often enough to matter in a small world."""
    words: dict[str, Any] = {
        "gate": draw(st.sampled_from(["forecast", "fit"])),
        "review": draw(st.integers(1, 6), label="review"),
    }
    if name == "eb-online":
        words["slot_rule"] = draw(st.sampled_from(["forecast", "planned", "fixed"]))
        words["window"] = draw(st.sampled_from([3, 8, 50]), label="window")
        words["warm"] = draw(st.integers(1, 3), label="warm")
        return BATCH[name](slots=slots, cost=PRICES, max_gap=gap, **words)
    words["dwell"] = draw(st.sampled_from([0.0, 5.0]), label="dwell")
    words["margin"] = draw(st.sampled_from([0.0, 0.05]), label="margin")
    words["light"] = draw(st.integers(0, 4), label="light")
    budget = draw(st.integers(slots, engine.batch_tokens + slots), label="budget")
    return BATCH[name](slots=slots, budget=budget, cost=PRICES, max_gap=gap, **words)


def draw_wait(draw: st.DrawFn, name: str, slots: int) -> BatchPolicy:
    """Thresholds fixed or learned, whole or fractional; always with patience, or nobody would be served."""
    words: dict[str, Any] = {
        "split": draw(st.sampled_from(["none", "kind", "prompt:20", "prompt:10/30", "output:9"])),
        "max_pause": draw(st.sampled_from([0.0, 0.5, 7.0, 40.0]), label="max_pause"),
        "max_wait": draw(st.sampled_from([0.0, 1.0, 30.0]), label="max_wait"),
        "window": draw(st.sampled_from([3, 8, 50]), label="window"),
        "review": draw(st.integers(1, 6), label="review"),
        "warm": draw(st.integers(1, 3), label="warm"),
    }
    if name == "wait":
        words["thresholds"] = draw(st.sampled_from(["", "1", "3", "0.4", "1.5", "20=2+more=0.3"]))
        return BATCH[name](slots=slots, cost=PRICES, **words)
    ends, thresholds = draw(
        st.sampled_from([("", ""), ("4/20", ""), ("0/2", "3/2"), ("2/9/30", "1.5/0.7/0.2"), ("5", "2")])
    )
    words |= {"ends": ends, "thresholds": thresholds, "segments": draw(st.integers(1, 4), label="segments")}
    words["slack"] = draw(st.sampled_from([0.0, 0.1]), label="slack")
    return BATCH[name](slots=slots, cost=PRICES, **words)


TESTING: dict[str, Callable[[st.DrawFn, Engine], BatchPolicy]] = {
    "every-other": lambda draw, engine: EveryOther(),
    "evicting": lambda draw, engine: Evicting(),
    "timed": lambda draw, engine: Timed(),
}
POLICIES = {name: draw_policy(name) for name in BATCH}


KINDS = (
    Kind("none"),
    Kind("both", Slo(6.0, 4.0)),
    Kind("first", Slo(first_token=0.5), priority=1),
    Kind("gold", Slo(6.0, 4.0, weight=10.0)),
    Kind("background", Slo(background=True)),
)


def columns_of(draw: st.DrawFn, rows: int) -> Callable[[Sequence[Any]], list[Any]]:
    """Columns of so many rows, each value one of a few; a column is one draw, which is most of the time."""
    drawn = st.binary(min_size=rows, max_size=rows)
    return lambda values: [values[byte % len(values)] for byte in draw(drawn)]


@st.composite
def workloads(draw: st.DrawFn, impatient: bool = False, promised: bool = False) -> Workload:
    """A few requests, open or closed loop, with ties in time."""
    column = columns_of(draw, draw(st.integers(1, 25), label="requests"))
    columns: dict[str, Any] = {}
    if draw(st.booleans(), label="closed loop"):
        columns["clients"] = column(range(1, 9))
    else:
        columns["arrival"] = np.cumsum(column([0.0, 0.0, 0.3, 1.7, 12.25, 60.5]))
    if impatient:
        columns["patience"] = column([np.inf, 0.1, 0.5, 2.5, 20.0])
        columns["abort"] = column([np.inf, np.inf, 0.1, 3.5, 30.0])
    columns["limit"] = column([2**31 - 1, 1, 7])
    if promised and draw(st.booleans(), label="own promises"):
        columns["kind"], columns["kinds"] = column(range(len(KINDS))), KINDS
    if promised and draw(st.booleans(), label="several tenants"):
        columns["tenant"], columns["tenants"] = column([0, 1, 2]), ("", "good", "flood")
    if draw(st.booleans(), label="predicted"):
        columns["guess"] = column([-1, 1, 3, 30, 500])
    return Workload.of(column(range(1, 61)), column([1, 2, 3, 9, 30, 140]), **columns)


@st.composite
def sharing(draw: st.DrawFn) -> Workload:
    """Few system prompts and conversations, so that most requests share something."""
    column = columns_of(draw, draw(st.integers(2, 20), label="requests"))
    system, conversation = column([0, 1, 2]), column([3, 4, 5, -1])
    common, own = column([0, 4, 17]), column(range(1, 41))
    rows = [[(a, n), (b, m)] for a, n, b, m in zip(system, common, conversation, own, strict=True)]
    gaps, outputs = column([0.0, 0.0, 1.7, 30.0]), column([1, 2, 9, 40])
    prompts = [n + m for n, m in zip(common, own, strict=True)]
    return Workload.of(prompts, outputs, arrival=np.cumsum(gaps), contents=Contents.of(rows))


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """A small engine, often short of KV."""
    block = draw(st.sampled_from([1, 4, 16]))
    running = draw(st.integers(1, 8))
    return Engine(
        cost=draw(st.sampled_from([Line(context=0.0), Line(context=0.001), TILES])),
        kv_tokens=draw(st.one_of(st.integers(20, 120), st.integers(64, 600))),
        max_model_len=draw(st.sampled_from([50, 100, 10_000])),
        batch_tokens=draw(st.integers(running, 64)),
        running=running,
        block=block,
    )
