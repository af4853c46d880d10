"""Service levels of fluid plans: solved instances, frontiers, and what cannot be kept."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid_worlds import instance
from headgate.core.errors import InputError
from headgate.methods.fluid.levels import Levels
from headgate.methods.fluid.planner import plan_fluid
from headgate_papers.fluid.fig9 import sensitivity
from headgate_papers.fluid.frontier import frontier


def near(values):
    return pytest.approx(values, rel=3e-5, abs=2e-6)


@pytest.mark.parametrize(
    ("slots", "levels", "revenue", "x", "waiting"),
    [
        (16, Levels(tpot=0.023), 187.500494, (0.019495, 0.074391), (0, 3.092092)),  # I1
        (16, Levels(prefill_fairness=0.10), 231.459325, (0.019495, 0.119495), (0, 1.935281)),  # I2
        (16, Levels(decode_fairness=1.0), 268.040143, (0.013230, 0.194953), (1.606950, 0)),  # I3
        (8, Levels(decode_fairness=0.0), 211.765528, (0.005754, 0.182457), (3.524168, 0.320489)),  # I4
    ],
    ids=["I1", "I2", "I3", "I4"],
)
def test_solved_instances(slots, levels, revenue, x, waiting):
    plan = plan_fluid(instance(slots=slots), levels)
    assert plan.revenue == pytest.approx(revenue, rel=1e-7)
    assert plan.prefill == near(x)
    assert plan.waiting == near(waiting)
    assert plan.decode_waiting == (0, 0)


def test_decode_fairness_fixes_the_split_by_class():
    plan = plan_fluid(instance(), Levels(decode_fairness=1.0))
    assert plan.mixed == near((3.122743, 0))
    assert plan.solo == near((5.400440, 4.400440))
    eight = plan_fluid(instance(slots=8), Levels(decode_fairness=0.0))
    assert eight.mixed == near((0, 1.317480))
    assert eight.solo == near((3.247154, 3.247154))


def test_shadow_prices_of_levels():
    prices = [
        plan_fluid(instance(slots=slots), levels).shadows.levels
        for slots, levels in (
            (16, Levels(tpot=0.023)),
            (16, Levels(prefill_fairness=0.1)),
            (16, Levels(decode_fairness=1.0)),
            (8, Levels(decode_fairness=0.0)),
        )
    ]
    assert prices[0]["tpot"] == pytest.approx(91_164, rel=1e-4)
    assert prices[1]["prefill_fairness"] == pytest.approx(974.593252, rel=1e-6)
    assert prices[2]["decode_fairness"] == pytest.approx(10.640541, rel=1e-6)
    assert prices[3]["decode_fairness"] == pytest.approx(16.043715, rel=1e-6)


@pytest.mark.parametrize(
    ("level", "value"),
    [("tpot", 0.023), ("tpot", 0.0235), ("prefill_fairness", 0.16), ("decode_fairness", 2.0)],
)
@pytest.mark.parametrize("over", ["slots", "tokens"])
def test_prices_are_slopes_of_the_frontier(level, value, over):
    at = [
        plan_fluid(instance(), Levels(**{level: value * factor}, tpot_over=over)).revenue
        for factor in (1 - 1e-5, 1 + 1e-5)
    ]
    plan = plan_fluid(instance(), Levels(**{level: value}, tpot_over=over))
    slope = (at[1] - at[0]) / (2e-5 * value)
    assert plan.shadows.levels[level] == pytest.approx(slope, rel=1e-3, abs=1e-3)


def test_without_a_queue_before_decode():
    """J2: mixed steps are the faster ones, and forbidding the queue costs 15 % of the revenue."""
    slow = instance(slots=8, solo_speed=10.0)
    plan = plan_fluid(slow, Levels(tpot=1e3))  # any level does
    assert plan.revenue == pytest.approx(87.065790, rel=1e-7)
    assert plan.prefill == near((0, 0.089336))
    assert (sum(plan.mixed), sum(plan.solo)) == near((0.625349, 7.285316))
    assert plan.waiting == near((5, 2.708795))


@pytest.mark.parametrize(
    ("slots", "level", "points", "slopes"),
    [
        (16, "prefill_fairness", (0.0, 0.1), (974.593, 974.593)),
        (16, "prefill_fairness", (0.16, 0.18), (645.824, 0)),
        (16, "decode_fairness", (0.0, 3.0, 4.0), (10.6405, 10.6405, 0)),
        (16, "tpot", (0.0221, 0.023, 0.0241, 0.0243), (5.6e5, 9.1e4, 6.6e4, 0)),
        (8, "prefill_fairness", (0.0, 0.15, 0.2), (674.199, 674.199, 0)),
        (8, "decode_fairness", (0.0, 0.5, 0.6), (16.0437, 16.0437, 0)),
        (8, "tpot", (0.0221, 0.023, 0.0241), (6.0e5, 7.3e4, 0)),
    ],
)
def test_frontiers(slots, level, points, slopes):
    found = frontier(instance(slots=slots), level, points)
    rough = 0.02 if level == "tpot" else 1e-4
    assert [point.slope for point in found] == pytest.approx(slopes, rel=rough, abs=1e-6)


def test_ends_of_frontiers():
    assert [point.revenue for point in frontier(instance(), "prefill_fairness", (0.0, 0.2))] == near(
        [134.0, 297.703170]
    )
    assert frontier(instance(), "decode_fairness", (0.0,))[0].revenue == pytest.approx(257.3996, rel=1e-6)
    assert frontier(instance(slots=8), "prefill_fairness", (0.0,))[0].revenue == pytest.approx(
        92.6327, rel=1e-5
    )
    assert frontier(instance(slots=8), "decode_fairness", (0.0,))[0].revenue == pytest.approx(
        211.7655, rel=1e-6
    )
    below, just = frontier(instance(), "tpot", (0.022, 0.0220023))
    assert below.plan is None and below.revenue == 0
    assert just.plan is not None


@given(
    st.sampled_from(["prefill_fairness", "decode_fairness", "tpot"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([(0.5, 0.5), (1.0, 1.0), (0.3, 2.0)]),
)
def test_frontiers_are_concave_and_rise(level, one, other, rates):
    spans = {"prefill_fairness": (0.0, 0.3), "decode_fairness": (0.0, 5.0), "tpot": (0.0221, 0.03)}
    low, high = spans[level]
    first, last = sorted(low + share * (high - low) for share in (one, other))
    points = [point.revenue for point in frontier(instance(*rates), level, (first, (first + last) / 2, last))]
    assert points[0] <= points[1] + 1e-6 and points[1] <= points[2] + 1e-6
    assert points[1] >= (points[0] + points[2]) / 2 - 1e-6


def test_levels_are_kept():
    plan = plan_fluid(instance(1, 1), Levels(prefill_fairness=0.05, decode_fairness=0.3, tpot=0.0235))
    assert max(plan.prefill) - min(plan.prefill) <= 0.05 + 1e-7
    assert max(plan.solo) - min(plan.solo) <= 0.3 + 1e-7
    assert plan.tpot <= 0.0235 + 1e-9
    users = plan_fluid(instance(1, 1), Levels(tpot=0.0235, tpot_over="tokens"))
    assert users.token_tpot == pytest.approx(0.0235)
    half = plan_fluid(instance(), Levels(prefilling=0.1))
    assert half.prefilling == pytest.approx(0.1)
    fair = plan_fluid(instance(), Levels(served={"class0": 1.0}))
    assert fair.served[0] == pytest.approx(0.5)
    assert fair.revenue < plan_fluid(instance()).revenue


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        (Levels(tpot=0.022), "time per token of 0.022 s cannot be kept: the fastest step takes 0.0220022 s"),
        (Levels(tpot=0.0225, served={"class1": 1.0}), "the least possible is 0.0262246 s"),
        (
            Levels(prefill_fairness=0.1, served={"class1": 0.8}),
            "prefill fairness of 0.1 cannot be kept beside the rest; the nearest possible is 0.136467",
        ),
        (
            Levels(served={"class0": 1.0, "class1": 1.0}),
            "share served cannot be kept; lower all of them to 9",
        ),
        (Levels(prefill_fairness=-1.0), "prefill fairness is -1"),
        (Levels(served={"nobody": 0.5}), "unknown class 'nobody'"),
        (Levels(served={"class0": 1.5}), "share served is 1.5"),
        (Levels(tpot_over="requests"), "unknown average for TPOT 'requests'"),
        (Levels(prefilling=1.5), "share of engines that prefill is 1.5"),
    ],
)
def test_what_cannot_be_kept_is_named(levels, said):
    with pytest.raises(InputError) as error:
        plan_fluid(instance(1, 1) if "0.0225" in repr(levels) else instance(), levels)
    assert said in str(error.value)


def test_the_nearest_value_can_be_kept():
    asked = Levels(prefill_fairness=0.1, served={"class1": 0.8})
    plan_fluid(instance(), replace(asked, prefill_fairness=0.136468))
    with pytest.raises(InputError):
        plan_fluid(instance(), replace(asked, prefill_fairness=0.13646))


@pytest.mark.parametrize(
    ("parameter", "known", "slots"),
    [
        (
            "slots",
            {1: 41.346, 2: 81.520, 4: 158.548, 8: 220.575, 12: 259.231, 16: 297.703, 17: 305.0, 32: 305.0},
            16,
        ),
        ("mixed_fixed", {0.001: 228.911, 0.02: 219.277, 0.06: 199.651, 0.1: 170.222}, 8),
        ("mixed_per_token", {1e-5: 227.270, 2e-4: 203.170, 6e-4: 132.017, 1e-3: 93.174}, 8),
        ("solo_speed", {0.1: 43.458, 10: 102.563, 30: 197.863, 45.45: 220.575, 50: 227.223}, 8),
    ],
)
def test_sensitivity(parameter, known, slots):
    found = sensitivity(instance(slots=slots), parameter, known)
    assert [point.revenue for point in found] == pytest.approx(list(known.values()), rel=2e-5)


def test_tpot_along_the_sweeps():
    known = {1e-5: 0.02178, 2e-4: 0.03947, 6e-4: 0.12142, 1e-3: 0.21362}
    found = sensitivity(instance(slots=8), "mixed_per_token", known)
    assert [point.plan.tpot for point in found if point.plan] == pytest.approx(list(known.values()), rel=5e-4)
    slow = sensitivity(instance(slots=8), "solo_speed", (0.1,))[0].plan
    assert slow is not None and slow.tpot == pytest.approx(8.078, rel=1e-4)


def test_prices():
    known = {(0.3, 0.3): 561.845, (0.3, 0.05): 478.611, (0.05, 0.3): 176.875, (0.05, 0.05): 93.641}
    for prices, revenue in known.items():
        assert plan_fluid(instance(slots=8, prices=prices)).revenue == pytest.approx(revenue, rel=1e-5)
    swept = sensitivity(instance(slots=8, prices=(0.3, 0.3)), "output_price", (0.05, 0.3))
    assert [point.revenue for point in swept] == pytest.approx([478.611, 561.845], rel=1e-5)


def test_unknown_names_are_refused():
    base = instance()
    with pytest.raises(InputError, match="unknown parameter"):
        sensitivity(base, "colour", (1.0,))
    with pytest.raises(InputError, match="unknown service level"):
        frontier(base, "served", (1.0,))
