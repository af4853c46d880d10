"""Fleets at token level: known answers, and one engine or many against the simulator of one engine."""

from __future__ import annotations

import copy
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fleet_worlds import Listed, draws, make_router
from headgate.core.errors import InputError, RunError
from headgate.core.fleet import ANY, DECODE, PREFILL, STAY, Move, RoutePolicy, Routing
from headgate.core.plan import ALL, Plan, Until
from headgate.core.policy import BatchPolicy
from headgate.core.request import Slo
from headgate.cost.model import StepCost
from headgate.methods.balance.balance import LeastLoaded, RoundRobin
from headgate.methods.eb.exclusive import PrefillFirst
from headgate.methods.fluid.flows import EnginePace, Flow, Instance, TokenPrices
from headgate.methods.fluid.planner import plan_fluid
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.split.split import Split
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.sim.engine.steps import StepClock, step_ends
from headgate.sim.fleet.fleet import FleetSimulator
from headgate.sim.fleet.kv_handover import Transfer
from headgate.stats.gaps import Gaps
from headgate.workloads.workload import Kind, Workload
from headgate_papers.network.network import Network
from worlds import POLICIES, PRICES, TESTING, Line, engines, workloads

MAKE = POLICIES | TESTING
BY_ORDER = [name for name in MAKE if name != "evicting"]  # that one goes by the number of a request
SECOND = Line(fixed=1.0, prefill=0.0, decode=0.0, context=0.0, behind=0.0)  # every step takes a second
few = settings(max_examples=settings.default.max_examples // 6)


def alone(engine, policy, workload):
    recorder = Recorder([kind.name for kind in workload.kinds])
    Simulator(engine, copy.deepcopy(policy), workload, (recorder,)).run()
    return recorder.tables()


def fleet_of(engine, count, policy, router, workload, **more):
    fleet = FleetSimulator(engine, count, lambda role: copy.deepcopy(policy), router, workload, **more)
    fleet.run()
    return fleet.recorder.tables()


def same(ours, theirs):
    for name, column in theirs.items():
        assert np.array_equal(ours[name], column, equal_nan=column.dtype.kind == "f"), name


@pytest.mark.parametrize("name", MAKE)
@few
@given(data=st.data(), engine=engines(), impatient=st.booleans())
def test_one_engine_is_the_simulator_to_the_last_bit(name, data, engine, impatient):
    workload = data.draw(workloads(impatient=impatient))
    workload = workload.cap(engine.longest - 1, None)  # a fleet refuses at its door, before the policy hears
    if impatient and workload.closed:  # there the next client is noticed a step later
        workload = workload.all_at_once()
    policy = MAKE[name](data.draw, engine)
    one, many = alone(engine, policy, workload), fleet_of(engine, 1, policy, RoundRobin(1), workload)
    same(many["requests"], one["requests"])
    if not impatient:  # or steps are the same, but cut into rows elsewhere
        for table in ("steps", "stays", "plans"):
            same(many[table], one[table])


def test_engines_of_an_interrupted_run_have_come_about_as_far():
    """Also where they run one by one."""

    def interrupt(came):
        if came >= 768:
            raise KeyboardInterrupt

    engine = Engine(PRICES, 10_000, 10_000, 64, 8, 1)
    workload = Workload.of([20] * 1000, [3] * 1000, arrival=np.arange(1000.0))
    fleet = FleetSimulator(engine, 4, lambda role: Mixed(8, 64), RoundRobin(4), workload, progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        fleet.run()
    steps = fleet.recorder.tables()["steps"]
    reached = [steps["start"][steps["replica"] == engine].max() for engine in range(4)]
    assert fleet.alone is not None
    assert min(reached) > 500 and max(reached) < 800


@few
@given(data=st.data(), engine=engines(), count=st.integers(2, 4), name=st.sampled_from(BY_ORDER))
def test_round_robin_is_as_many_simulators(data, engine, count, name):
    workload = data.draw(workloads())
    workload = (workload.all_at_once() if workload.closed else workload).cap(engine.longest - 1, None)
    assume(len(workload) >= count)
    policy = MAKE[name](data.draw, engine)
    many = fleet_of(engine, count, policy, RoundRobin(count), workload)
    for number in range(count):
        mine = np.arange(len(workload)) % count == number
        one = alone(engine, policy, workload.subset(mine))
        for column in ("admitted", "first_token", "finished", "output", "how", "evictions"):
            assert np.array_equal(many["requests"][column][mine], one["requests"][column], equal_nan=True)
        rows = many["steps"]["replica"] == number
        for column in ("start", "first", "seconds", "count", "decodes", "context", "prefill", "kv"):
            assert np.array_equal(many["steps"][column][rows], one["steps"][column])


def served(tables):
    return tables["requests"]["first_token"].tolist(), tables["requests"]["finished"].tolist()


def test_a_hand_over_by_hand():
    """Prompts take a step on engine 0, are copied in 0.5 s and 0.05 s per token, and go on on engine 1.

    A: prompt 0 to 1, copied 1 to 2, tokens at 3, 4, 5. B comes at 0.2: prompt 1 to 2; A decodes from 2 on, so
    B's KV is reserved at 2, copied to 3, tokens at 4 and 5. C's prompt is done at 3, while engine 1 is in the
    step that ends at 3; it is reserved there at 3, copied to 4.5, and waits for the step that ends at 5.
    """
    engine = Engine(SECOND, 1000, 1000, 64, 8, block=10)
    workload = Workload.of([10, 10, 20], [4, 3, 2], arrival=[0.0, 0.2, 1.5])
    tables = fleet_of(engine, 2, Mixed(8, 64), Split(2, 1), workload, transfer=Transfer(0.5, 0.05))
    assert served(tables) == ([1.0, 2.0, 3.0], [5.0, 5.0, 6.0])
    assert tables["requests"]["replica"].tolist() == [1, 1, 1]
    steps = tables["steps"]
    here = steps["replica"] == 0
    assert steps["start"][here].tolist() == [0.0, 1.0, 2.0]
    # after each step: A; A, which is copied until 2, and B; B, until 3, and C
    assert steps["kv"][here].tolist() == [10, 20, 30]
    run = Run({}, **tables)
    assert Gaps(run).lists() == [[2.0, 1.0, 1.0], [2.0, 1.0], [3.0]]


def test_kv_that_comes_to_decodes_alone_asks_their_policy_once():
    """Once when memory is reserved and once when it joins; its own first plan needs no other."""
    engine = Engine(SECOND, 1000, 1000, 100, 10, 1)
    workload = Workload.of([10, 10], [30, 30], arrival=[0.0, 5.0])
    tables = fleet_of(engine, 2, Mixed(10, 100), Split(2, 1), workload, transfer=Transfer(2.5, 0.0))
    plans = tables["plans"]
    assert served(tables) == ([1.0, 6.0], [32.5, 38.5])
    assert plans["time"][plans["replica"] == 1].tolist() == [3.5, 6.5, 9.5]


def test_memory_is_reserved_at_the_receiver_before_the_copy_begins():
    """Engine 1 holds one request of 30 tokens at a time, so the second is copied when the first has gone."""
    engine = Engine(SECOND, 40, 40, 64, 8, block=10)
    workload = Workload.of([29, 29], [4, 4], arrival=[0.0, 0.0])
    tables = fleet_of(engine, 2, Mixed(8, 64), Split(2, 1), workload, transfer=Transfer(0.5, 0.0))
    assert served(tables) == ([1.0, 2.5], [4.5, 8.0])


def test_background_prompts_pass_an_engine_that_does_prompts_only():
    """It has no room for decodes, by which others' places are told from background's."""
    kinds = (Kind("batch", Slo(background=True)), Kind("chat", Slo(5.0)))
    engine = Engine(SECOND, 1000, 1000, 10, 8, block=10)
    workload = Workload.of([10, 10, 10], [2, 2, 2], kind=[0, 1, 0], kinds=kinds)
    tables = fleet_of(engine, 2, Mixed(8, 10), Split(2, 1), workload, transfer=Transfer(0.5, 0.0))
    assert sorted(tables["requests"]["first_token"]) == [1.0, 2.0, 3.0]
    assert np.isfinite(tables["requests"]["finished"]).all()


def test_a_slot_that_an_eviction_left_goes_to_whoever_has_kv_there():
    """A outgrows the memory that is left beside B's KV. It is evicted, and fits again when B has gone."""
    engine = Engine(SECOND, 40, 40, 64, 1, block=10)
    workload = Workload.of([10, 10], [25, 3], arrival=[0.0, 0.0])
    tables = fleet_of(engine, 2, Mixed(1, 64), Split(2, 1), workload, transfer=Transfer(0.5, 0.0))
    assert served(tables) == ([1.0, 2.0], [27.5, 23.5])
    assert tables["requests"]["evictions"].tolist() == [1, 0]


class Punctual(BatchPolicy):
    """Begins short prompts at once and long ones at five o'clock."""

    def plan(self, view):
        now = tuple(id for id, request in view.waiting.items() if request.prompt < 9 or view.now >= 5)
        return Plan(ALL, now, until=Until(arrivals=1, prefills=1, time=5.0 if view.now < 5 else inf))


def test_who_waits_for_a_moment_begins_then_whoever_else_is_busy():
    """Engine 0 waits until 5.0; a step of engine 1, whose plan ends at 5.0 as well, ends at 5.25."""
    engine = Engine(SECOND, 1000, 1000, 64, 8, block=10)
    workload = Workload.of([9, 5], [3, 20], arrival=[0.0, 0.25])
    tables = fleet_of(engine, 2, Punctual(), RoundRobin(2), workload)
    assert served(tables) == ([6.0, 1.25], [8.0, 20.25])


class Curious(Mixed):
    """Notes what it can read of a request before its prompt runs."""

    def __init__(self):
        super().__init__(8, 64)
        self.seen = []

    def arrived(self, request, now):
        self.seen.append((request.limit, request.guess))


def test_a_prefill_engine_cannot_tell_whose_first_token_is_the_last():
    """Requests of 1, 2 and 30 tokens look alike to the policy that does their prompts."""
    engine = Engine(SECOND, 1000, 1000, 64, 8, block=10)
    workload = Workload.of([10, 10, 10], [1, 2, 30], limit=[30, 30, 30], guess=[1, 2, 30])
    policies = {PREFILL: Curious(), DECODE: Mixed(8, 64)}
    fleet = FleetSimulator(engine, 2, policies.__getitem__, Split(2, 1), workload)
    fleet.run()
    assert policies[PREFILL].seen == [(1, 1)] * 3
    assert fleet.recorder.tables()["requests"]["output"].tolist() == [1, 2, 30]


TOY_ARRIVAL = [0, 0, 5, 20, 21, 60, 300]
TOY_PROMPT, TOY_OUTPUT = [9, 4, 12, 3, 6, 10, 5], [4, 3, 3, 5, 3, 2, 1]
TOY_DECODES = [8, 8, 9.5, 7.5, 8.5, 8.5, 7, 7.5, 7.5, 9, 7.5, 8]


class Toy(StepCost):
    """Whole prompts as the TOY set prices them; decode steps take the published times one by one."""

    def __init__(self):
        self.left = iter(TOY_DECODES)

    def seconds(self, shape):
        tiles = ceil(shape.prefill / 4)
        return 6 * tiles + shape.prefill / 2 + 2 * tiles * tiles

    def decode_line(self, decodes):
        return next(self.left), 0.0

    def span(self, decodes, context, steps):
        raise AssertionError("one step at a time, please")


def test_distserve_as_published():
    """The hand-worked schedule of one prefill and one decode engine without transfer time."""
    workload = Workload.of(TOY_PROMPT, TOY_OUTPUT, arrival=TOY_ARRIVAL)
    engine = Engine(Toy(), 10**6, 10**6, 24, 8, block=1)
    policies = {PREFILL: PrefillFirst(1), DECODE: Mixed(8, 24)}
    fleet = FleetSimulator(engine, 2, policies.__getitem__, Split(2, 1), workload, leases=False)
    fleet.run()
    tables = fleet.recorder.tables()
    assert served(tables) == (
        [40.5, 50.5, 92.5, 102, 125, 166, 322.5],
        [66, 73.5, 109.5, 140.5, 148, 174, 322.5],
    )
    decodes = tables["steps"]["decodes"][tables["steps"]["replica"] == 1]
    assert decodes.tolist() == [1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1]


class TwoSpeeds(StepCost):
    """The engine of the stochastic network: a step takes τ with a prompt in it and 1/γ without."""

    def __init__(self, mixed, solo):
        self.mixed, self.solo = mixed, solo

    def seconds(self, shape):
        return self.mixed if shape.prefill else self.solo

    def decode_line(self, decodes):
        return self.solo, 0.0

    def span(self, decodes, context, steps):
        return np.full(steps, self.solo)


class Chunked(BatchPolicy):
    """Every decode and one chunk of the oldest prompt."""

    def __init__(self, chunk):
        self.chunk = chunk

    def plan(self, view):
        prompts = (*view.prefilling, *view.waiting)[:1]
        return Plan(ALL, prompts, chunk=self.chunk)


@pytest.mark.parametrize("name", ["fi-wsp", "gate-and-route", "gf-wsp"])
def test_token_level_agrees_with_the_stochastic_network(name):
    """The same arrivals, prompts and outputs on the same fleet, in steps and in the network's fluid tokens.

    They differ by the steps: who comes waits for the one under way, and tokens come at their ends. With
    steps of 1 % of a service the mean time in the system agrees within 1.5 %.
    """
    chunk, mixed, solo, slots, count, engines, rate = 20, 0.03, 0.02, 6, 2000, 5, 1.5
    rng = np.random.default_rng(1)
    arrival = np.cumsum(rng.exponential(1 / (rate * engines), count))
    prompt, output = rng.geometric(1 / 200, count), 1 + rng.geometric(1 / 100, count)
    pace = EnginePace(slots, chunk, 0.0, mixed / chunk, 1 / solo)
    plan = plan_fluid(Instance((Flow("", 200.0, 100.0, rate),), pace, TokenPrices(1.0, 2.0)))
    draw = draws(0)

    def router():
        return make_router(name, plan, engines, draw)

    rows = zip(
        arrival.tolist(), [0] * count, (np.ceil(prompt / chunk) * mixed).tolist(), (output - 1.0).tolist(),
        [np.inf] * count, [np.inf] * count, strict=True,
    )  # fmt: skip
    network = Network(plan.instance, engines, router(), Listed(*rows))
    page = network.run()[-1]
    there = page.spent.sum() / count
    engine = Engine(TwoSpeeds(mixed, solo), 10**7, 10**6, 64, slots, block=1)
    workload = Workload.of(prompt, output, arrival=arrival)
    requests = fleet_of(engine, engines, Chunked(chunk), router(), workload)["requests"]
    here = float((requests["finished"] - requests["arrival"]).mean())
    assert here == pytest.approx(there, rel=0.015)


class Stubborn(RoutePolicy):
    """Moves nobody."""

    def route(self, fleet):
        return STAY


class Wrong(RoutePolicy):
    """Sends everybody to an engine that does not exist."""

    def route(self, fleet):
        return Routing((Move(next(iter(fleet.queues[""])), 9),))


def test_what_cannot_be_is_said():
    engine, workload = Engine(SECOND, 1000, 1000, 64, 8), Workload.of([10], [4])
    with pytest.raises(InputError, match="0 engines"):
        FleetSimulator(engine, 0, lambda role: Mixed(8, 64), Stubborn(), workload)
    with pytest.raises(InputError, match="fixed is -1"):
        fleet_of(engine, 1, Mixed(8, 64), RoundRobin(1), workload, transfer=Transfer(-1.0))
    with pytest.raises(RunError, match=r"1 requests are left unserved .* 1 wait for router Stubborn"):
        fleet_of(engine, 1, Mixed(8, 64), Stubborn(), workload)
    with pytest.raises(RunError, match="there are 2 engines"):
        fleet_of(engine, 2, Mixed(8, 64), Wrong(), workload)
    with pytest.raises(InputError, match="at least 2 slots"):
        fleet_of(Engine(SECOND, 1000, 1000, 64, 1), 1, Mixed(1, 64), Stubborn(), workload)
    with pytest.raises(InputError, match="1 engine cannot be split"):
        Split(1, 1)
    with pytest.raises(InputError, match="give 1 to 3"):
        Split(4, 4)


def test_a_span_that_is_cut_short_reaches_the_moment_that_cuts_it():
    """Three steps end a rounding error before it, so a fourth has begun; a quotient alone says three."""
    start, stop = 1.331329999999964, 1.3343299999999638
    clock = StepClock(Line(fixed=0.001, decode=0.0, context=0.0))
    count, _, before, end = clock.decode_span(1, 36, 90, start, stop)
    assert (count, before, end) == (4, 1.3343299999999636, 1.3353299999999635)
    assert step_ends(Line(), (0.001, 0.0), 1, 36, 90, start, stop)[-1] == end


def test_a_prompt_that_never_fits_is_refused_at_the_door():
    engine = Engine(SECOND, 1000, 20, 64, 8)
    tables = fleet_of(engine, 2, Mixed(8, 64), LeastLoaded(2), Workload.of([25, 5], [4, 2]))
    assert tables["requests"]["how"].tolist() == [4, 0]
    assert tables["requests"]["replica"].tolist() == [-1, 0]
    assert ANY in {slot for slot in RoundRobin(2).roles(2)}


def test_kv_that_waits_for_a_place_gives_way_when_nothing_else_can_run():
    """13 was evicted and needs all memory but one token; 14 keeps two of them while it waits for a slot."""
    engine = Engine(Line(context=0.0), 20, 50, 2, 2, block=1)
    prompt, output = [1] * 14 + [2, 1], [1] * 13 + [30, 2, 1]
    pace = EnginePace(2, 16, 0.8, 0.02, 1.0)
    plan = plan_fluid(Instance((Flow("", 30.0, 5.0, 0.02),), pace, TokenPrices(0.1, 0.2)))
    router = make_router("fg-sp", plan, 1, draws(0))
    requests = fleet_of(engine, 1, Mixed(2, 2), router, Workload.of(prompt, output))["requests"]
    whole = np.minimum(output, engine.longest - np.array(prompt))
    assert requests["output"].tolist() == whole.tolist()
    assert requests["evictions"][14] == 1 and requests["wasted"][14] == 2
