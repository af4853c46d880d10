"""The live driver, with a small engine in the manner of vLLM around it."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.plan import ALL, NONE, Plan, Until
from headgate.core.policy import BatchPolicy
from headgate.live.engine.events import SHOWN_EVERY
from headgate.live.engine.live import RESCUE_STEPS, LiveObserver
from headgate.live.engine.settings import WARM_UP
from headgate.methods.eb.exclusive import Exclusive
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.names import BATCH
from headgate.record.recorder import Recorder
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload
from tests.toy_engine import ToyEngine
from tests.worlds import Line, Log, draw_policy, engines, run, workloads


class Alarm(LiveObserver):
    """Remembers what must not be missed."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.rescues = 0

    def fell_back(self, reason, now, cause):
        self.reasons.append(reason)

    def rescued(self, now):
        self.rescues += 1


def small(requests: int = 12, prompt: int = 20, output: int = 8) -> Workload:
    return Workload.of(
        arrival=[0.5 * row for row in range(requests)],
        prompt=[prompt + row % 3 for row in range(requests)],
        output=[output + row % 5 for row in range(requests)],
    )


ENGINE = Engine(Line(), kv_tokens=400, max_model_len=200, batch_tokens=64, running=4, block=4)


def fitting(workload: Workload, engine: Engine) -> dict[int, int]:
    """Who can be served, and with how many tokens."""
    rows = zip(workload.prompt.tolist(), workload.output.tolist(), workload.limit.tolist(), strict=True)
    return {
        id: min(output, limit, engine.longest - prompt)
        for id, (prompt, output, limit) in enumerate(rows)
        if prompt < engine.longest
    }


@pytest.mark.parametrize("name", BATCH)
@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
@given(data=st.data(), engine=engines(), workload=workloads())
def test_everybody_is_served_in_a_live_engine(name, ahead, data, engine, workload):
    """Also when the view is one step old, prompts are refused at random, and KV is short."""
    policy = draw_policy(name)(data.draw, engine)
    fickle = data.draw(st.sampled_from([None, Random(1)]), label="fickle")
    warms = data.draw(st.sampled_from([0.0, 0.8]), label="share of a warm-up")
    heard = recorder, log = Recorder(("", WARM_UP)), Log()
    kind = lambda row: WARM_UP if Random(row).random() < warms else ""  # noqa: E731
    toy = ToyEngine(engine, policy, workload, heard, ahead, fickle, kind=kind)
    toy.run()
    assert toy.live.fallen is None
    assert toy.served == fitting(workload, engine)
    assert not toy.live.occupied
    tables = recorder.tables()
    assert dict(zip(tables["requests"]["id"], tables["requests"]["output"], strict=True)) == toy.served
    assert sum(toy.live.counts.values()) - toy.live.counts["empty"] == len(log.steps)
    if name in ("eb", "v0", "request-level", "eb-online") and not warms:
        assert toy.live.counts["mixed"] == 0


@pytest.mark.parametrize("name", BATCH)
@given(data=st.data(), engine=engines(), workload=workloads(), seed=st.integers(0, 99))
def test_clients_that_hang_up_at_any_moment(name, data, engine, workload, seed):
    """Also while a step with them is in the air; nobody hears of a request after it has left."""
    policy = draw_policy(name)(data.draw, engine)
    log = Log()
    toy = ToyEngine(engine, policy, workload, (log,), ahead=True, hangs_up=Random(seed))
    toy.run()
    assert toy.live.fallen is None
    assert toy.served.keys() | toy.gone == fitting(workload, engine).keys()
    assert not toy.live.occupied
    last = {event[1]: event[0] for event in log.events}
    assert set(last.values()) <= {"finished"}


class Clumsy(Log):
    """An observer that breaks at the tenth event, and again whenever it is asked."""

    def prefilled(self, request, now):
        if len(self.events) >= 10:
            raise OSError("disk full")
        super().prefilled(request, now)


def test_an_observer_that_breaks_hears_no_more_and_nothing_else_happens():
    """Neither the policy nor the others pay for it."""
    clumsy, log = Clumsy(), Log()
    toy = ToyEngine(ENGINE, Mixed(slots=4, budget=64), small(), (clumsy, log))
    toy.run()
    assert toy.live.fallen is None
    assert toy.served == fitting(small(), ENGINE)
    assert len(clumsy.steps) < len(log.steps)


@pytest.mark.parametrize("name", BATCH)
@given(data=st.data(), engine=engines(), workload=workloads())
def test_a_live_engine_in_turn_runs_the_simulator_s_schedule(name, data, engine, workload):
    """Same steps at the same times, as long as nobody has to be evicted."""
    roomy = engine._replace(kv_tokens=1 << 20)
    if workload.closed:
        workload = workload.all_at_once()
    workload = workload.cap(roomy.longest - 1, None)  # a live front end refuses longer ones unheard
    policy = draw_policy(name)(data.draw, roomy)
    simulated = run(roomy, deepcopy(policy), workload)
    ToyEngine(roomy, policy, workload, (live := Log(),)).run()
    assert live.steps == simulated.steps


@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
def test_without_a_policy_the_engine_decides_and_books_are_kept(ahead):
    """Passive: nothing is planned, everything is seen."""
    toy = ToyEngine(ENGINE, None, small(), (log := Log(),), ahead)
    toy.run()
    assert toy.served == fitting(small(), ENGINE)
    assert toy.live.counts["mixed"] > 0
    assert not log.plans


@pytest.mark.parametrize("user", [0, 6, 12])
def test_requests_of_a_warm_up_alone_are_mixed_whatever_the_policy(user):
    """The policy decides while a request of a user is inside."""
    together = small(output=30).all_at_once()
    kind = lambda row: "" if row == user else WARM_UP  # noqa: E731
    toy = ToyEngine(ENGINE, Exclusive(slots=4, refill=2), together, (log := Log(),), kind=kind)
    toy.run()
    assert toy.live.fallen is None
    assert toy.served == fitting(together, ENGINE)
    gone = max((event[2] for event in log.events if event[:2] == ("finished", user)), default=0.0)
    mixed = [end for end, decodes, _, prompt, _ in log.steps if decodes and prompt]
    assert mixed and min(mixed) > gone


class Broken(Mixed):
    """Mixed batching until it is asked for the nth time."""

    def __init__(self, how: str, after: int = 5) -> None:
        super().__init__(slots=4, budget=64)
        self.how, self.left = how, after

    def _due(self) -> bool:
        self.left -= 1
        return self.left == 0

    def plan(self, view):
        if self.how != "hook" and self._due():
            if self.how == "raises":
                raise RuntimeError("no idea")
            return {"nonsense": Plan(ALL, (999,)), "not a plan": "decode"}[self.how]
        return super().plan(view)

    def prefilled(self, request, now):
        if self.how == "hook" and self._due():
            raise KeyError(request.id)


@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "RuntimeError: no idea (in plan,"),
        ("nonsense", "prefills requests that have no prompt to run: [999]"),
        ("not a plan", "'decode' is not a Plan"),
        ("hook", "KeyError: 4 (in prefilled,"),
    ],
)
def test_a_bad_policy_is_relieved_once_and_nobody_is_lost(how, said, ahead):
    """The reason is told; the engine goes on by itself."""
    toy = ToyEngine(ENGINE, Broken(how), small(), (alarm := Alarm(),), ahead)
    toy.run()
    assert len(alarm.reasons) == 1
    assert said in alarm.reasons[0]
    assert toy.live.fallen == alarm.reasons[0]
    assert toy.served == fitting(small(), ENGINE)


class Idle(BatchPolicy):
    """Serves the first few, then nobody, and says it will think about it."""

    def plan(self, view):
        if view.now < 5:
            return Plan(ALL, (*view.prefilling, *list(view.waiting)[:2]))
        return Plan(NONE, until=Until(time=view.now + 1.0))


def test_a_policy_that_starves_somebody_is_relieved():
    """After one to two of the watchdog's limits."""
    toy = ToyEngine(ENGINE, Idle(), small(), (alarm := Alarm(),), watchdog=30.0)
    toy.run()
    assert len(alarm.reasons) == 1
    assert "made no progress for 30 s" in alarm.reasons[0]
    assert toy.served == fitting(small(), ENGINE)


class Stubborn(BatchPolicy):
    """Holds decodes for a prompt that the engine will not take."""

    def plan(self, view):
        if view.waiting and view.decoding:
            return Plan(NONE, tuple(view.waiting))
        return Plan(ALL, (*view.prefilling, *list(view.waiting)[:1]))


def test_decodes_do_not_wait_for_prompts_the_engine_refuses():
    """They run for a while instead, and nobody starves; one empty step each time."""
    toy = ToyEngine(ENGINE._replace(running=1), Stubborn(), small(output=40), (alarm := Alarm(),))
    toy.run()
    assert alarm.rescues == toy.live.counts["empty"]
    assert toy.live.counts["decode"] <= RESCUE_STEPS * alarm.rescues + len(toy.served)
    assert toy.served == fitting(small(output=40), ENGINE)


def test_another_policy_takes_over_in_the_middle():
    """It hears of everybody who is there."""
    toy = ToyEngine(ENGINE, Mixed(slots=4, budget=64), small(), (log := Log(),))
    live, begin = toy.live, toy.live.begin

    def watched(*args):
        if len(log.steps) == 7:
            live.take_over(Exclusive(slots=4, refill=2))
        return begin(*args)

    live.begin = watched
    toy.run()
    assert live.fallen is None
    assert isinstance(live.policy, Exclusive)
    assert toy.served == fitting(small(), ENGINE)


def test_times_are_those_of_the_step_whose_tokens_are_told():
    """Ahead, the first token is known one step after it was booked: the recorder must get the later time."""
    workload = Workload.of([10, 10], [3, 3])
    toy = ToyEngine(ENGINE, Mixed(slots=4, budget=64), workload, (recorder := Recorder(), log := Log()), True)
    toy.run()
    first_step_ends = log.steps[0][0]
    assert recorder.tables()["requests"]["first_token"].tolist() == [first_step_ends, first_step_ends]
    assert [step[0] for step in log.steps] == sorted(step[0] for step in log.steps)


class Attentive(Mixed):
    """Has it heard of every step that has ended, whenever it is asked or told of something else?"""

    heard = together = 0

    def stepped(self, steps):
        assert len(steps.ends) == 1 or not steps.prefill
        self.heard += len(steps.ends)
        self.together = max(self.together, len(steps.ends))

    def up_to_date(self):
        counts, air = self.live.counts, len(self.live.flights)
        assert self.heard == sum(counts.values()) - counts["empty"] - air

    def plan(self, view):
        self.up_to_date()
        return super().plan(view)

    def finished(self, request, now, how):
        self.up_to_date()


@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
def test_steps_are_told_together_but_before_anything_else(ahead):
    log, policy = Log(), Attentive(slots=4, budget=64)
    toy = ToyEngine(ENGINE, policy, small(output=20), (log,), ahead)
    policy.live = toy.live
    toy.run()
    assert toy.live.fallen is None
    assert policy.together > 1 and policy.heard == len(log.steps)


class Counted(Mixed):
    """How many plans it has made is its gauge."""

    plans = 0

    def plan(self, view):
        self.plans += 1
        return super().plan(view)

    def gauges(self):
        return {"plans": self.plans}


class Gauges(LiveObserver):
    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def gauged(self, gauges, now):
        self.seen.append((now, gauges["plans"]))


def test_gauges_are_shown_a_few_times_a_second_and_the_last_are_not_forgotten():
    engine = Engine(Line(0.01, 0.0, 0.0, 0.0, 0.0), 4000, 200, 64, 4, 4)
    shown, policy = Gauges(), Counted(slots=4, budget=64)
    work = Workload.of(
        [20] * 12, [50 + 7 * row for row in range(12)], arrival=[0.02 * row for row in range(12)]
    )
    toy = ToyEngine(engine, policy, work, (shown,), ahead=True)
    toy.run()
    times, plans = zip(*shown.seen, strict=True)
    assert min(b - a for a, b in pairwise(times)) >= SHOWN_EVERY
    assert len(plans) < policy.plans == plans[-1]
