"""Fluid plans: every solved instance without service levels, duals, and brute force over all vertices."""

from dataclasses import replace
from itertools import combinations
from math import inf
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid_worlds import CODE, DOLLY, EXTRACT, QWEN_4B, SUMMARY, instance
from headgate.core.errors import InputError
from headgate.methods.fluid.flows import EnginePace, Flow, Instance, TokenPrices
from headgate.methods.fluid.gates import solo_shares
from headgate.methods.fluid.levels import Levels
from headgate.methods.fluid.planner import FluidPlan, Form, plan_fluid

ONE_SUMMARY = {"sizes": (SUMMARY,)}


class Known(NamedTuple):
    """A row of the solved instances; vectors by class."""

    instance: Instance
    revenue: float
    x: tuple[float, ...]
    mixed: float
    solo: float
    served: tuple[float, ...]
    waiting: tuple[float, ...]
    decode_waiting: tuple[float, ...] = (0, 0)
    bundled: float | None = None  # of separate plans


SOLVED = {
    "A1": Known(
        instance(), 297.703170, (0.018258, 0.194953), 3.198172, 12.588617, (0.468275, 0.5), (0.317253, 0)
    ),
    "A2": Known(
        instance(charging="separate"),
        298.586557,
        (0.019495, 0.194953),
        3.216727,
        12.568825,
        (0.467933, 0.5),
        (0, 0),
        (0.320672, 0),
        297.624540,
    ),
    "B1": Known(instance(0.4, 0.4), 244.0, (0.01559625, 0.1559625), 0, 12.321232, (0.4, 0.4), (0, 0)),
    "B1 separate": Known(
        instance(0.4, 0.4, charging="separate"),
        244.0,
        (0.01559625, 0.1559625),
        0,
        12.321232,
        (0.4, 0.4),
        (0, 0),
        bundled=244.0,
    ),
    "C1": Known(
        instance(1, 1), 429.933452, (0.008465, 0.389906), 5.975568, 9.626061, (0.217102, 1), (7.828980, 0)
    ),
    "C2": Known(
        instance(1, 1, charging="separate"),
        451.733114,
        (0.038991, 0.389906),
        6.433453,
        9.137650,
        (0.208666, 1),
        (0, 0),
        (7.913344, 0),
        427.993081,
    ),
    "D1": Known(instance(2, 2), 544.227146, (0, 0.558415), 8.376220, 7.065366, (0, 1.432177), (20, 5.678233)),
    "D2": Known(
        instance(5, 5, charging="separate"),
        859.581630,
        (0, 1),
        15,
        0,
        (0, 1.127074),
        (50, 24.352809),
        (0, 14.376453),
        428.288050,
    ),
    "E1": Known(
        instance(slots=8),
        220.575400,
        (0.005183, 0.194953),
        1.400955,
        6.398909,
        (0.132937, 0.5),
        (3.670635, 0),
    ),
    "E2": Known(
        instance(1.2, 1.2, slots=8),
        300.535959,
        (0, 0.308371),
        2.158595,
        5.533035,
        (0, 0.790884),
        (12, 4.091159),
    ),
    "E3": Known(
        instance(1.2, 1.2, slots=8, charging="separate"),
        452.948993,
        (0.046789, 0.467888),
        3.602734,
        3.882590,
        (0, 0.711862),
        (0, 0),
        (12, 4.881376),
        270.507717,
    ),
    "F1": Known(
        instance(2, **ONE_SUMMARY),
        544.227146,
        (0.558415,),
        8.376220,
        7.065366,
        (1.432177,),
        (5.678233,),
        (0,),
    ),
    "F2": Known(
        instance(1, sizes=(CODE,)),
        165.472888,
        (0.028052,),
        0.420776,
        15.551173,
        (0.719447,),
        (2.805527,),
        (0,),
    ),
    "F3": Known(
        instance(5, sizes=(EXTRACT,)), 795.062916, (1,), 4.266667, 0, (2.564719,), (24.352809,), (0,)
    ),
    "N1": Known(
        instance(0.5, 5, sizes=(CODE, EXTRACT)),
        859.581630,
        (0.012641, 0.987359),
        15,
        0,
        (0.324215, 2.532298),
        (1.757854, 24.677024),
    ),
    "G1": Known(
        instance(sizes=DOLLY),
        249.510966,
        (0.004778, 0.076487, 0.064464),
        2.185931,
        13.668340,
        (0.413033, 0.5, 0.5),
        (0.869673, 0, 0),
        (0, 0, 0),
    ),
    "G2": Known(
        instance(sizes=DOLLY, charging="separate"),
        250.229371,
        (0.005784, 0.076487, 0.064464),
        2.201021,
        13.652245,
        (0.412729, 0.5, 0.5),
        (0, 0, 0),
        (0.872712, 0, 0),
        249.452658,
    ),
    "H1": Known(instance(model=QWEN_4B), 305.0, (0.014306, 0.143063), 0, 13.300399, (0.5, 0.5), (0, 0)),
    "H2": Known(
        instance(1, 1, model=QWEN_4B),
        466.130638,
        (0.010715, 0.286125),
        4.452598,
        11.250563,
        (0.374481, 1),
        (6.255190, 0),
    ),
    "L1": Known(
        instance(0.8, 0.8, impatience=(0.05, 0.2)),
        377.041339,
        (0.012382, 0.311925),
        4.864609,
        10.811083,
        (0.317571, 0.8),
        (9.648579, 0),
    ),
    "M1": Known(
        instance(whole_chunks=True),
        297.127225,
        (0.024872, 0.197400),
        3.334082,
        12.443646,
        (0.465771, 0.5),
        (0.342295, 0),
    ),
    "J1": Known(
        instance(slots=8, solo_speed=10.0),
        102.563247,
        (0.019495, 0.194953),
        1.501139,
        6.284413,
        (0, 0.269903),
        (0, 0),
        (5, 2.300967),
    ),
}


def near(values):
    return pytest.approx(values, rel=3e-5, abs=2e-6)


@pytest.mark.parametrize("name", SOLVED)
def test_solved_instances(name):
    known = SOLVED[name]
    plan = plan_fluid(known.instance)
    assert plan.revenue == pytest.approx(known.revenue, rel=1e-7)
    assert plan.revenue == pytest.approx(known.revenue, rel=1e-7)
    assert plan.prefill == near(known.x)
    assert (sum(plan.mixed), sum(plan.solo)) == near((known.mixed, known.solo))
    assert plan.served == near(known.served)
    assert plan.waiting == near(known.waiting)
    assert plan.decode_waiting == near(known.decode_waiting)
    assert plan.bundled == pytest.approx(known.bundled or known.revenue, rel=1e-6)


def test_constants_of_the_base_instance():
    pace = instance().pace
    assert pace.mixed_step == pytest.approx(0.033272)
    assert pace.ratio == pytest.approx(1.5122124)
    flow = instance().flows[0]
    weights = [instance(slots=slots).pace.decode_weight(flow) for slots in (16, 8)]
    omega = [(weight - flow.output) / flow.prompt for weight in weights]
    assert omega == pytest.approx([0.035919525, 0.019912887])
    assert instance().values() == pytest.approx([230, 380])
    assert [1 / seconds for seconds in instance().seconds()] == pytest.approx([25.647191, 2.5647191])
    assert instance(whole_chunks=True).seconds()[0] == pytest.approx(0.0534)


@pytest.mark.parametrize(
    ("name", "mixed", "solo"),
    [
        ("A1", (2.241029, 0.957143), (8.821119, 3.767498)),
        ("C1", (2.102258, 3.873310), (3.386534, 6.239527)),
        ("E1", (0.559380, 0.841575), (2.554988, 3.843921)),
        ("G1", (1.202632, 0.693719, 0.289580), (7.519899, 4.337735, 1.810706)),
    ],
)
def test_decodes_are_split_pro_rata(name, mixed, solo):
    plan = plan_fluid(SOLVED[name].instance)
    assert plan.mixed == near(mixed)
    assert plan.solo == near(solo)


@pytest.mark.parametrize(
    ("name", "mixed", "solo", "arrival"),
    [
        *((name, 6.839023, 10.342055, (0, 264.460564)) for name in ("A1", "C1", "L1")),
        ("D1", 22.493002, 34.014197, (0, 0)),
        ("F1", 22.493002, 34.014197, (0,)),
        ("E1", 6.871669, 10.391423, (0, 274.888032)),
        ("G1", 6.281455, 9.498895, (0, 104.941683, 90.115621)),
        ("B1", 0, 0, (230, 380)),
        ("H1", 0, 0, (230, 380)),
        ("A2", 6.011060, 9.09, (27.844828, 278.448285)),
        ("C2", 6.011060, 9.09, (27.844828, 278.448285)),
    ],
)
def test_shadow_prices(name, mixed, solo, arrival):
    found = plan_fluid(SOLVED[name].instance).shadows
    assert (found.mixed, found.solo) == near((mixed, solo))
    assert found.arrival == near(arrival)


def test_more_shadow_prices():
    found = plan_fluid(instance())
    assert found.shadows.prefilled == near((2.452025, 288.980810))
    price = found.shadows.mixed * found.instance.pace.mixed_step
    assert price == pytest.approx(0.227548, rel=1e-5)
    flow = found.instance.flows[0]
    weight = found.instance.pace.decode_weight(flow)
    assert found.instance.prices.value(flow) / weight == pytest.approx(price)
    assert next_engine(found) == pytest.approx(price * 45.45 * 16 + found.shadows.prefill)
    bound = plan_fluid(SOLVED["F3"].instance).shadows
    assert bound.prefill + 16 * bound.solo == pytest.approx(795.062916)


def next_engine(plan):
    """Revenue per second that one more engine adds when the arrivals stay the same."""
    worth = zip(plan.instance.flows, plan.shadows.arrival, strict=True)
    return plan.revenue - sum(flow.rate * price for flow, price in worth)


@pytest.mark.parametrize("name", ["A1", "C1", "E1", "G1", "L1", "A2", "N1"])
def test_prices_are_derivatives(name):
    """Shadow prices against finite differences of the optimum: arrivals by class, and one more engine."""
    start = SOLVED[name].instance
    plan = plan_fluid(start)
    for place, price in enumerate(plan.shadows.arrival):
        step = 1e-4
        flows = list(start.flows)
        more = flows[place]
        flows[place] = Flow(more.name, more.prompt, more.output, more.rate + step, more.impatience)
        changed = plan_fluid(Instance(tuple(flows), start.pace, start.prices, start.charging))
        assert (changed.revenue - plan.revenue) / step == pytest.approx(price, abs=1e-3, rel=1e-3)
    scale = 1 - 1e-4  # n engines become n / scale: each meets this much less
    flows = [Flow(f.name, f.prompt, f.output, f.rate * scale, f.impatience) for f in start.flows]
    fewer = plan_fluid(Instance(tuple(flows), start.pace, start.prices, start.charging))
    gain = (fewer.revenue / scale - plan.revenue) / (1 / scale - 1)
    assert gain == pytest.approx(next_engine(plan), rel=1e-3, abs=1e-3)


def test_other_splits_of_the_decodes_are_as_good():
    """The optimum fixes totals and rates; this vertex, in which code decodes alone, serves the same."""
    plan = plan_fluid(instance())
    vertex = replace(plan, mixed=(0.0, 3.198172), solo=(10.303073, 2.285544))
    assert vertex.served == near(plan.served)
    assert (sum(vertex.mixed), sum(vertex.solo)) == near((sum(plan.mixed), sum(plan.solo)))
    assert vertex.revenue == pytest.approx(297.703170, rel=1e-6)
    assert solo_shares(vertex) == {"class0": 1.0, "class1": near(0.519390)}


def test_tpot():
    numbers = {"A1": 0.02428530, "B1": 0.02383444, "C1": 0.02631864, "E1": 0.02402640, "E2": 0.02516498}
    for name, tpot in numbers.items():
        assert plan_fluid(SOLVED[name].instance).tpot == pytest.approx(tpot, rel=1e-6)
    assert plan_fluid(instance()).token_tpot == pytest.approx(0.02362320, rel=1e-6)


def test_figure_2():
    """B = 16 as stated cannot give the marked optima 300.2 and 452.9; B = 8 nearly does."""
    assert plan_fluid(instance(0.50944, 0.50944)).revenue == pytest.approx(300.2, rel=1e-4)
    separate = {"charging": "separate"}
    assert plan_fluid(instance(1.00381, 1.00381, **separate)).revenue == pytest.approx(452.9, rel=1e-4)
    assert plan_fluid(instance(1.2, 1.2)).revenue == pytest.approx(482.8256, rel=1e-6)
    assert plan_fluid(instance(1.2, 1.2, **separate)).revenue == pytest.approx(512.9917, rel=1e-6)
    plateau = [plan_fluid(instance(rate, rate, slots=8)).revenue for rate in (0.791, 1.0, 3.0)]
    assert plateau == pytest.approx([300.535959] * 3)


def test_without_patience_the_rest_is_turned_away():
    plan = plan_fluid(instance(1, 1, impatience=0.0))
    assert plan.revenue == pytest.approx(429.933452)
    assert plan.prefill_loss == near((1 - 0.217102, 0))
    assert plan.waiting == (inf, 0)
    assert plan.decode_loss == (0, 0)
    assert plan.throttled == (True, False)


def test_a_class_without_arrivals_gets_nothing():
    plan = plan_fluid(instance(0.5, 0))
    assert plan.prefill[1] == plan.served[1] == 0
    assert plan.revenue == pytest.approx(115)


# -- brute force ----------------------------------------------------------------------------------------


def best_vertex(instance: Instance) -> float:
    """The best basic feasible solution: every choice of basic columns, slacks added, is tried."""
    program = Form(instance, Levels(), True, []).program
    rows, bounds = [], []
    for row, low, high in zip(program.rows, program.low, program.high, strict=True):
        slack = np.zeros(3)
        if low != high:
            slack[len(rows)] = 1.0
        rows.append(np.append(row, slack))
        bounds.append(high)
    matrix, right = np.array(rows), np.array(bounds)
    gain = np.append(program.gain, np.zeros(3))
    usable = [place for place in range(len(gain)) if place >= len(program.most) or program.most[place] > 0]
    best = -inf
    for basis in combinations(usable, len(right)):
        square = matrix[:, basis]
        if abs(np.linalg.det(square)) < 1e-12:
            continue
        values = np.linalg.solve(square, right)
        if (values >= -1e-9).all():
            best = max(best, float(gain[list(basis)] @ values))
    return best


SMALL = st.builds(
    Flow,
    st.just("a"),
    st.sampled_from([50.0, 300.0, 3000.0]),
    st.sampled_from([20.0, 400.0, 1000.0]),
    st.sampled_from([0.0, 0.2, 0.7, 3.0]),
    st.sampled_from([0.0, 0.05, 1.0]),
)
PACES = st.builds(
    EnginePace,
    st.sampled_from([1, 2, 8, 16]),
    st.sampled_from([64, 512]),
    st.sampled_from([0.005, 0.02]),
    st.sampled_from([1e-5, 1e-3]),
    st.sampled_from([5.0, 45.0, 90.0]),
)
PRICES = st.builds(TokenPrices, st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.05, 0.2]))


@given(SMALL, PACES, PRICES, st.sampled_from(["bundled", "separate"]))
def test_one_class_against_brute_force(flow, pace, prices, charging):
    if flow.rate == 0:
        return
    small = Instance((flow,), pace, prices, charging)
    assert plan_fluid(small).revenue == pytest.approx(best_vertex(small), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    "small",
    [
        instance(),
        instance(1, 1, charging="separate", impatience=(0.1, 0.0)),
        instance(0.5, 5, sizes=(CODE, EXTRACT)),
        instance(slots=8, solo_speed=10.0),
    ],
    ids=["base", "separate", "both bind", "mixed faster"],
)
def test_two_classes_against_brute_force(small):
    assert plan_fluid(small).revenue == pytest.approx(best_vertex(small), rel=1e-7)


# -- laws of the optimum --------------------------------------------------------------------------------


@st.composite
def instances(draw: st.DrawFn, charging: str = "bundled") -> Instance:
    flows = draw(st.lists(SMALL, min_size=1, max_size=4))
    named = tuple(
        Flow(str(place), f.prompt, f.output, f.rate or 0.1, f.impatience) for place, f in enumerate(flows)
    )
    return Instance(named, draw(PACES), draw(PRICES), charging)


def revenue(flows, pace, prices, charging="bundled") -> float:
    return plan_fluid(Instance(flows, pace, prices, charging)).revenue


@given(instances(), st.floats(1.0, 3.0))
def test_revenue_grows_with_everything_good(given, factor):
    flows, pace, prices = given.flows, given.pace, given.prices
    base = revenue(flows, pace, prices)
    slack = 1 + 1e-7
    more = tuple(Flow(f.name, f.prompt, f.output, f.rate * factor, f.impatience) for f in flows)
    assert base <= revenue(more, pace, prices) * slack + 1e-7
    faster = EnginePace(
        pace.slots, pace.chunk, pace.mixed_fixed, pace.mixed_per_token, pace.solo_speed * factor
    )
    assert base <= revenue(flows, faster, prices) * slack + 1e-7
    slots = EnginePace(pace.slots + 1, pace.chunk, pace.mixed_fixed, pace.mixed_per_token, pace.solo_speed)
    assert base <= revenue(flows, slots, prices) * slack + 1e-7
    scaled = TokenPrices(prices.prompt * factor, prices.output * factor)
    assert revenue(flows, pace, scaled) == pytest.approx(factor * base, rel=1e-6, abs=1e-7)
    assert base <= revenue(flows, pace, prices, "separate") * slack + 1e-7
    assert base <= sum(f.rate * prices.value(f) for f in flows) * slack


def feasible(plan: FluidPlan) -> None:
    pace, tiny = plan.instance.pace, 1e-6
    assert plan.prefilling <= 1 + tiny
    assert sum(plan.mixed) <= (pace.slots - 1) * plan.prefilling + tiny
    assert sum(plan.solo) <= pace.slots * (1 - plan.prefilling) + tiny
    rows = (plan.prompts, plan.prefill_loss, plan.served, plan.decode_loss)
    for flow, prompts, lost, served, dropped in zip(plan.instance.flows, *rows, strict=True):
        assert prompts + lost == pytest.approx(flow.rate, abs=1e-6)
        assert served + dropped == pytest.approx(prompts, abs=1e-6)


@given(st.sampled_from(["bundled", "separate"]).flatmap(instances))
def test_plans_are_feasible_and_what_they_say_they_bring(given):
    plan = plan_fluid(given)
    feasible(plan)
    assert plan.revenue == pytest.approx(plan.revenue, rel=1e-5, abs=1e-6)
    if given.charging == "bundled" and given.pace.keeps_up:
        assert plan.decode_loss == pytest.approx([0.0] * len(given.flows), abs=1e-8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"flows": ()}, "no class"),
        ({"flows": (Flow("a", 10, 10, 0.0),)}, "no class has arrivals"),
        ({"flows": (Flow("a", 10, 10, -1.0),)}, "class 'a': rate is -1"),
        ({"flows": (Flow("a", 0, 10, 1.0),)}, "prompt is 0 tokens"),
        ({"flows": (Flow("a", 10, float("nan"), 1.0),)}, "output is nan"),
        ({"flows": (Flow("a", 10, 10, 1.0, -0.1),)}, "impatience is -0.1"),
        ({"flows": (Flow("a", 10, 10, 1.0), Flow("a", 20, 10, 1.0))}, "given twice"),
        ({"prices": TokenPrices(-0.1, 0.2)}, "price of a prompt token is -0.1"),
        ({"prices": TokenPrices(0.0, 0.0)}, "both prices are 0"),
        ({"pace": EnginePace(0, 256, 0.1, 0.1, 1.0)}, "0 slots"),
        ({"pace": EnginePace(2, 0, 0.1, 0.1, 1.0)}, "chunk of 0"),
        ({"pace": EnginePace(2, 256, -0.1, 0.1, 1.0)}, "mixed_fixed is -0.1"),
        ({"pace": EnginePace(2, 256, 0.0, 0.0, 1.0)}, "takes no time"),
        ({"pace": EnginePace(2, 256, 0.1, 0.1, 0.0)}, "makes 0 tokens/s"),
    ],
)
def test_bad_input(change, said):
    base = instance()
    words = {"flows": base.flows, "pace": base.pace, "prices": base.prices, "charging": "bundled"} | change
    with pytest.raises(InputError, match=said):
        plan_fluid(Instance(**words))


def test_cached_prompt_tokens_are_paid_for_and_no_work():
    whole = instance()
    first = whole.flows[0]
    cached = replace(first, cached=0.75 * first.prompt)
    shorter = replace(first, prompt=0.25 * first.prompt)
    pace, prices = whole.pace, whole.prices
    assert pace.prefill_seconds(cached) == pace.prefill_seconds(shorter) < pace.prefill_seconds(first)
    assert prices.value(cached) == prices.value(first)
    found = plan_fluid(replace(whole, flows=(cached, *whole.flows[1:])).checked())
    assert found.revenue > plan_fluid(whole).revenue
    with pytest.raises(InputError, match="prompt tokens are cached; give fewer than the prompt has"):
        replace(whole, flows=(replace(first, cached=first.prompt),)).checked()
