"""The recorder against a naive one that lists every token of every request, on random worlds."""

from __future__ import annotations

import copy
import sys
from math import inf, isnan, nan
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plain import PlainEngine
from headgate.core.build import compiled
from headgate.core.plan import ALL, Plan
from headgate.core.policy import BatchPolicy, Observer
from headgate.experiment.fleet import outcome_of
from headgate.methods.eb.exclusive import Exclusive
from headgate.record.recorder import HOW, Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.stats.gaps import Gaps
from headgate.workloads.workload import Kind, Workload
from worlds import POLICIES, TESTING, Line, engines, workloads

MAKE = POLICIES | TESTING


class Naive(Observer):
    """Looks at every request after every step and writes down each token; needs one step at a time."""

    def __init__(self) -> None:
        self.requests = {}
        self.arrival: dict[int, float] = {}
        self.admit: dict[int, float] = {}
        self.tokens: dict[int, list[float]] = {}
        self.left: dict[int, tuple[float, int, int, int, int]] = {}
        self.steps: list[tuple[float, float, int, int, int, int, int]] = []

    def arrived(self, request, now):
        self.requests[request.id] = request
        self.arrival[request.id] = now
        self.tokens[request.id] = []

    def admitted(self, request, now):
        self.admit.setdefault(request.id, now)

    def stepped(self, steps):
        (end,) = steps.ends
        self.steps.append((steps.start, end, *steps[2:]))
        self._look(end)

    def prefilled(self, request, now):
        self._look(now)

    def finished(self, request, now, how):
        del self.requests[request.id]
        row = (now, HOW[how], request.generated, request.evictions, request.wasted)
        self.left[request.id] = row

    def _look(self, now):
        for id, request in self.requests.items():
            new = request.generated - len(self.tokens[id])
            assert new in (0, 1)
            self.tokens[id] += [now] * new


def recorded(engine: Engine, policy: BatchPolicy, workload: Workload, **options) -> Run:
    recorder = Recorder([kind.name for kind in workload.kinds])
    Simulator(engine, policy, workload, (recorder,), **options).run()
    return Run({}, **recorder.tables())


def same(run: Run, naive: Naive, workload: Workload) -> None:
    """Every number in the tables, worked out again from the list of tokens."""
    requests = run.requests
    ids = requests["id"].tolist()
    assert ids == sorted(naive.tokens)
    assert requests["arrival"].tolist() == [naive.arrival[id] for id in ids]
    columns = zip(*(naive.left[id] for id in ids), strict=True)
    for name, expected in zip(("finished", "how", "output", "evictions", "wasted"), columns, strict=True):
        assert requests[name].tolist() == list(expected), name
    assert requests["output"].tolist() == [len(naive.tokens[id]) for id in ids]
    assert requests["prompt"].tolist() == workload.prompt[ids].tolist()
    for name, known in (
        ("first_token", {id: times[0] for id, times in naive.tokens.items() if times}),
        ("admitted", naive.admit),
    ):
        np.testing.assert_array_equal(requests[name], [known.get(id, nan) for id in ids])
    gaps = Gaps(run)
    wanted = [np.diff(naive.tokens[id]).tolist() for id in ids]
    found = gaps.lists()
    assert [len(row) for row in found] == [len(row) for row in wanted]
    for row, expected in zip(found, wanted, strict=True):
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-9)
    longest = [max(row, default=nan) for row in wanted]
    np.testing.assert_allclose(gaps.longest(), longest, rtol=1e-9, atol=1e-9)
    sample = gaps.sample()
    flat = np.repeat(sample.values, sample.weights)
    np.testing.assert_allclose(np.sort(flat), np.sort([gap for row in wanted for gap in row]), atol=1e-9)


def same_steps(run: Run, naive: Naive) -> None:
    """Rows of several steps, laid out one by one."""
    steps = run.steps
    assert int(steps["count"].sum()) == len(naive.steps)
    one = iter(naive.steps)
    for row in range(len(steps["count"])):
        count = int(steps["count"][row])
        part = [next(one) for _ in range(count)]
        assert part[0][0] == steps["start"][row]
        assert part[0][1] - part[0][0] == steps["first"][row]
        assert part[-1][1] - part[0][0] == steps["seconds"][row]
        assert [step[2] for step in part] == [steps["decodes"][row]] * count
        assert [step[3] for step in part] == [
            steps["context"][row] + number * steps["decodes"][row] for number in range(count)
        ]
        assert [step[4] for step in part] == [steps["prefill"][row]] * count
        assert [step[5] for step in part] == [steps["behind"][row]] * count
        assert part[-1][6] == steps["kv"][row]


@pytest.mark.parametrize("name", MAKE)
@given(data=st.data(), engine=engines(), workload=workloads(impatient=True))
def test_tables_are_those_of_a_naive_recorder(name, data, engine, workload):
    policy = MAKE[name](data.draw, engine)
    naive = Naive()
    Simulator(engine, copy.deepcopy(policy), workload, (naive,), leases=False).run()
    for leases in (True, False):
        run = recorded(engine, copy.deepcopy(policy), workload, leases=leases)
        same(run, naive, workload)
        same_steps(run, naive)


@pytest.mark.parametrize("name", MAKE)
@given(data=st.data(), engine=engines(), workload=workloads())
def test_tables_are_those_of_the_plain_engine(name, data, engine, workload):
    """The same, but the tokens are listed by an engine that shares nothing with ours."""
    policy = MAKE[name](data.draw, engine)
    naive = Naive()
    PlainEngine(engine, copy.deepcopy(policy), workload, (naive,)).run()
    run = recorded(engine, copy.deepcopy(policy), workload)
    same(run, naive, workload)
    same_steps(run, naive)


class Fickle(BatchPolicy):
    """Names its decodes by a draw of numbers, and evicts now and then: every state a recorder can see."""

    def __init__(self, seed: int) -> None:
        self.numbers = Random(seed).choices(range(1000), k=97)
        self.turn = 0

    def plan(self, view):
        self.turn += 1
        number = self.numbers[self.turn % len(self.numbers)]
        out = ()
        if number % 4 == 0 and self.turn < 60:
            out = tuple(id for id in (*view.decoding, *view.prefilling) if (id + number) % 3 == 0)
        chosen = frozenset(id for id in view.decoding if id not in out and (id * 7 + number) % 5 > 1)
        if not chosen:
            chosen = frozenset(view.decoding) - frozenset(out)
        half = tuple(id for id in view.prefilling if id not in out)
        return Plan(ALL if number % 11 == 0 else chosen, (*half, *view.waiting), evict=out)


@given(engine=engines(), workload=workloads(impatient=True), seed=st.integers(0, 10**6))
def test_any_mixture_of_holding_evicting_and_leaving(engine, workload, seed):
    """A policy without sense, asked at every step, so that turns are the same for both recorders."""
    naive = Naive()
    recorder = Recorder()
    Simulator(engine, Fickle(seed), workload, (naive, recorder), leases=False).run()
    run = Run({}, **recorder.tables())
    same(run, naive, workload)
    same_steps(run, naive)


# -- by hand -------------------------------------------------------------------------------------------


def small() -> Engine:
    cost = Line(fixed=1.0, prefill=0.0, decode=0.0, context=0.0, behind=0.0)
    return Engine(cost, 1000, 1000, batch_tokens=32, running=4, block=1)


class Script(BatchPolicy):
    def __init__(self, *plans: Plan) -> None:
        self.plans = list(plans)

    def plan(self, view):
        return self.plans.pop(0) if self.plans else Plan(ALL, (*view.prefilling, *view.waiting))


# A prompt that is done under a plan which names its decodes joins them held. It must hear `held` at once:
# without, the recorder gave it the ticks of the others when it was aborted or evicted before it ever resumed.


def test_a_prompt_done_under_a_named_plan_and_aborted_before_it_ever_decodes():
    """It has one token and no gap, although others tick on while it is held."""
    only = Plan(frozenset({0}))
    policy = Script(Plan(ALL, (0,)), Plan(frozenset({0}), (1,)), *[only] * 10)
    workload = Workload.of([4, 4], [9, 9], abort=[inf, 5.5])
    run = recorded(small(), policy, workload)
    assert run.requests["output"].tolist() == [9, 1]
    assert run.requests["finished"].tolist() == [9.0, 6.0]
    assert Gaps(run).lists() == [[1.0] * 8, []]
    assert isnan(Gaps(run).longest()[1])


def test_a_prompt_done_under_a_named_plan_and_evicted_before_it_ever_decodes():
    only = Plan(frozenset({0}))
    policy = Script(
        Plan(ALL, (0,)), Plan(frozenset({0}), (1,)), *[only] * 3, Plan(frozenset({0}), evict=(1,))
    )
    run = recorded(small(), policy, Workload.of([4, 4], [9, 3]))
    # Its first token at 2; evicted at 5, prefilled again by 7, one more at 8.
    assert Gaps(run).lists() == [[1.0] * 8, [5.0, 1.0]]
    assert run.requests["wasted"].tolist() == [0, 4]


def test_held_resumed_and_evicted_by_hand():
    """1 decodes at 2, is held for 3 and 4, decodes at 5, is evicted and comes back with the step to 7."""
    both, zero = Plan(ALL), Plan(frozenset({0}))
    policy = Script(Plan(ALL, (0, 1)), both, zero, zero, both, Plan(ALL, evict=(1,)))
    run = recorded(small(), policy, Workload.of([4, 4], [9, 5]))
    assert Gaps(run).lists() == [[1.0] * 8, [1.0, 3.0, 2.0, 1.0]]
    assert Gaps(run).longest().tolist() == [1.0, 3.0]
    assert run.requests["first_token"].tolist() == [1.0, 1.0]
    assert run.requests["evictions"].tolist() == [0, 1]
    assert run.requests["wasted"].tolist() == [0, 6]


def test_a_run_that_is_looked_at_half_way():
    """Requests still there have a row, those still to come have none; what comes later is not lost."""
    recorder = Recorder()
    workload = Workload.of([4, 4, 4], [9, 2, 3], arrival=[0.0, 0.0, 50.0])
    simulator = Simulator(small(), Exclusive(slots=4, refill=1), workload, (recorder,))
    replica = simulator.replica
    for _ in range(2):
        replica.receive(simulator.arrivals.take(replica.ledger))
    replica.ask()
    replica.advance()
    replica.settle()
    replica.ask()
    replica.advance(wake=3.5)
    replica.settle()
    half = recorder.tables()
    assert half["requests"]["id"].tolist() == [0, 1]
    assert half["requests"]["how"].tolist() == [-1, 0]
    assert half["requests"]["output"].tolist() == [2, 2]
    assert np.isnan(half["requests"]["finished"][0])


def test_kinds_and_gauges():
    kinds = [Kind("chat"), Kind("code")]
    workload = Workload.of([4, 4], [2, 3], kinds=kinds, kind=[1, 0])
    run = recorded(small(), Exclusive(slots=4, refill=2), workload)
    assert run.requests["kind"].tolist() == [1, 0]
    assert run.plans["gauge.refill"].tolist() == [2.0] * len(run.plans["time"])
    assert run.plans["gauge.refilling"].tolist()[0] == 2.0
    assert run.plans["time"].tolist()[:2] == [0.0, 1.0]
    assert run.plans["step"].tolist()[:2] == [0, 1]
    assert run.plans["decode"].tolist()[:2] == [0, -1]
    assert run.plans["prompts"].tolist()[:2] == [2, 0]


class Interrupts:
    """Ctrl-C before the given line of the recorder's code is run."""

    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(("record/recorder.py", "record/rows.py")):
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.skipif(compiled(), reason="compiled rows are written in one go")
def test_tables_are_whole_wherever_ctrl_c_comes():
    engine = Engine(Line(fixed=1.0, prefill=0.1, decode=0.1, context=0.0, behind=0.0), 64, 64, 16, 3, 1)
    workload = Workload.of([5, 9, 20, 7], [6, 12, 4, 1], arrival=[0.0, 1.0, 1.5, 30.0])
    number = 0
    outcome = "interrupted"
    while outcome == "interrupted":
        number += 1
        recorder, policy = Recorder(), Exclusive(3, 2)
        simulator = Simulator(engine, policy, workload, (recorder,))
        sys.settrace(Interrupts(number))
        try:
            outcome = outcome_of(simulator.run)
        finally:
            sys.settrace(None)
        run = Run({}, **recorder.tables())
        ids = run.requests["id"].tolist()
        assert ids == sorted({*ids})
        assert run.rows_of(run.stays["request"]).tolist() == [ids.index(id) for id in run.stays["request"]]
        assert len({len(column) for column in run.plans.values()}) == 1
    assert number > 300 and ids == [0, 1, 2, 3]
