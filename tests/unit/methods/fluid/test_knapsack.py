"""The knapsack form against the linear program, and static plans from both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid_worlds import CODE, EXTRACT, instance
from headgate.core.errors import InputError
from headgate.methods.fluid.flows import EnginePace, Flow, Instance, TokenPrices
from headgate.methods.fluid.plan import fixed_staff, staff
from headgate.methods.fluid.planner import plan_fluid
from oracles.knapsack import knapsack

FLOWS = st.lists(
    st.tuples(st.floats(10, 4000), st.floats(10, 4000), st.floats(0.01, 5)), min_size=1, max_size=6
)


@given(FLOWS, st.integers(2, 40), st.floats(0.9, 6.0), st.floats(0, 1), st.floats(0.01, 1))
def test_agrees_with_the_linear_program(sizes, slots, ratio, prompt, output):
    flows = tuple(Flow(str(place), *size, impatience=0.1) for place, size in enumerate(sizes))
    pace = EnginePace(slots, 256, 0.0174, 6.2e-5, ratio / 0.033272)
    given = Instance(flows, pace, TokenPrices(prompt, output))
    if not pace.keeps_up:
        return
    found = knapsack(given)
    assert found.value == pytest.approx(plan_fluid(given).revenue, rel=1e-6)
    for flow, served in zip(flows, found.served, strict=True):
        assert -1e-12 <= served <= flow.rate * (1 + 1e-12)
    decode = sum(r * pace.decode_weight(flow) for r, flow in zip(found.served, flows, strict=True))
    prefill = sum(r * pace.prefill_seconds(flow) for r, flow in zip(found.served, flows, strict=True))
    assert decode <= slots * pace.solo_speed * (1 + 1e-9)
    assert prefill <= 1 + 1e-9
    # Strong duality: the prices pay for the capacities, and the arrivals for the rest.
    worth = found.decode_price * slots * pace.solo_speed + found.prefill_price
    for flow in flows:
        taken = found.decode_price * pace.decode_weight(flow) + found.prefill_price * pace.prefill_seconds(
            flow
        )
        worth += flow.rate * max(0.0, given.prices.value(flow) - taken)
    assert worth == pytest.approx(found.value, rel=1e-6)


def test_known_prices():
    base = knapsack(instance())
    assert base.decode_price == pytest.approx(0.227548, rel=1e-5)
    assert base.prefill_price == 0
    both = knapsack(instance(0.5, 5, sizes=(CODE, EXTRACT)))
    assert both.served == pytest.approx((0.324215, 2.532298), rel=1e-5)
    assert both.prefill_price > 0
    only = knapsack(instance(5, sizes=(EXTRACT,)))
    assert (only.decode_price, only.prefill_price) == pytest.approx((0, 795.062916))


def test_refuses_where_the_form_does_not_hold():
    with pytest.raises(InputError, match="the knapsack form does not hold"):
        knapsack(instance(slots=8, solo_speed=10.0))


def test_mixed_engines():
    plan = plan_fluid(instance())
    assert [staff(plan, n).mixed for n in (5, 20, 50, 200, 500)] == [2, 5, 11, 43, 107]
    assert [staff(plan, n, slack=True).mixed for n in (5, 20, 200)] == [4, 8, 50]
    assert staff(plan, 1).roles == ("mixed",)
    assert staff(plan, 5).roles == ("mixed",) * 2 + ("solo",) * 3
    full = plan_fluid(instance(5, sizes=(EXTRACT,)))
    assert staff(full, 7, slack=True).solo == 0


def test_exact_products_are_not_rounded_up():
    plan = plan_fluid(instance(5, sizes=(EXTRACT,)))
    assert staff(plan, 3).mixed == 3
    few = plan_fluid(instance(0.001, sizes=(CODE,)))
    assert few.prefilling * 100 < 0.01
    assert staff(few, 100).mixed == 1


def test_roles_a_user_asks_for():
    assert fixed_staff(10, 3, 7).roles.count("solo") == 7
    with pytest.raises(InputError, match="leave 3 of 10 without a role"):
        fixed_staff(10, 3, 4)
    with pytest.raises(InputError, match="more roles than the 4 engines"):
        fixed_staff(4, 3, 2)
    with pytest.raises(InputError, match="at least 0"):
        fixed_staff(4, -1, 2)
