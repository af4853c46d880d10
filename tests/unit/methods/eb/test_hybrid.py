"""EB+: where it starts, at which loads it changes, how often, and what becomes of half-done prompts."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.core.ledger import Ledger
from headgate.core.plan import ALL, NONE, check
from headgate.core.policy import Observer
from headgate.core.view import Limits
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.experiment.library import card_engine, simulate
from headgate.methods.eb.costs import Lengths
from headgate.methods.eb.hybrid import ExclusivePlus
from headgate.methods.eb.prediction import exclusive_rate, mixed_rate
from headgate.methods.eb.thresholds import base_share
from headgate.methods.make import make_policy
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.lengths import Uniform
from headgate.workloads.synthetic import generate
from headgate.workloads.workload import Workload
from studies.eb.loops import compare
from studies.eb.worlds import CARDS, requests
from worlds import admitted

SLOTS, BUDGET, PROMPT, OUTPUT = 256, 2048, 100, 50
# A token costs 1.5 times as much in a mixed step, but saves a step's constant: mixing wins at light load.
PRICES = LinearCost(DecodeTerms(0.010, 5e-5), PrefillTerms(0.008, 3e-5), MixedTerms(0.010, 4.5e-5, 7.5e-5))
# Prompts beside decodes at four times their price: EB wins from a few requests on.
DEAR = LinearCost(DecodeTerms(0.010, 5e-5), PrefillTerms(0.001, 3e-5), MixedTerms(0.020, 12e-5, 20e-5))


class Modes(Observer):
    """The mode in force at every plan."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def planned(self, plan, now, gauges):
        self.seen.append((now, gauges["exclusive"]))

    @property
    def changes(self) -> list[float]:
        """When it changed."""
        pairs = zip(self.seen, self.seen[1:], strict=False)
        return [after[0] for before, after in pairs if before[1] != after[1]]

    @property
    def last(self) -> bool:
        return bool(self.seen[-1][1])


def closed(clients, count=None, seed=0) -> Workload:
    """Lengths around 100/50 in a closed loop; `clients` may change from request to request."""
    rng = np.random.default_rng(seed)
    clients = np.full(count, clients) if count else np.asarray(clients)
    prompts = rng.integers(PROMPT // 2, 3 * PROMPT // 2 + 1, len(clients))
    return Workload.of(prompts, rng.integers(25, 77, len(clients)), clients=clients)


def serve(workload: Workload, cost=PRICES, kv_tokens=10**6, **words) -> tuple[ExclusivePlus, Modes]:
    policy, modes = ExclusivePlus(SLOTS, BUDGET, cost, **words), Modes()
    Simulator(Engine(cost, kv_tokens, 10**6, BUDGET, SLOTS, 16), policy, workload, (modes,)).run()
    return policy, modes


def gain(cost: LinearCost, running: int) -> float:
    """What the planner says of these lengths; the policy has to find out."""
    lengths = Lengths(PROMPT, OUTPUT)
    share = base_share(cost.prefill.constant / cost.decode.constant / OUTPUT)
    both = exclusive_rate(cost, lengths, running, share, BUDGET), mixed_rate(cost, lengths, running, BUDGET)
    return both[0] / both[1] - 1


# -- where ----------------------------------------------------------------------------------------------


def state(decoding=0, halves=(), waiting=()) -> Ledger:
    """So many decodes, then half-done prompts and waiting ones by the tokens they still need."""
    ledger = Ledger(Limits(batch_tokens=BUDGET, running=SLOTS), 10**6)
    return admitted(ledger, decoding, halves, waiting)


def test_it_starts_mixed():
    plan = ExclusivePlus(SLOTS, BUDGET, DEAR).plan(state(decoding=20, waiting=[30, 30]))
    assert plan.decode is ALL
    assert plan.prefill == (20, 21)


@pytest.mark.parametrize(("clients", "exclusive"), [(20, False), (200, True), (400, True)])
def test_it_ends_in_the_mode_that_serves_more(clients, exclusive):
    assert (gain(PRICES, min(clients, SLOTS)) > 0.01) is exclusive, "a toy with the wrong prices"
    _, modes = serve(closed(clients, 3000))
    assert modes.last is exclusive
    if not exclusive:
        assert not modes.changes


def test_it_follows_the_load_down_again():
    _, modes = serve(closed([20] * 600 + [240] * 2500 + [20] * 2500))
    assert len(modes.changes) == 2
    assert not modes.last


def test_light_load_stays_mixed_whatever_the_gain():
    assert gain(DEAR, 30) > 0.05
    assert not serve(closed(30, 1500), DEAR, light=40)[1].changes
    assert serve(closed(30, 1500), DEAR, light=0)[1].last


def test_it_learns_in_both_modes():
    """Lengths are estimated while it mixes, else the choice would rest on the prior for ever."""
    policy, modes = serve(closed(20, 1500))
    assert not modes.changes
    assert policy.exclusive.lengths.output == pytest.approx(OUTPUT - 0.5, rel=0.1)
    assert policy.exclusive.lengths.prompt == pytest.approx(PROMPT, rel=0.1)
    assert policy.exclusive.share != pytest.approx(base_share(0.8 / 256), rel=0.3)  # the prior's


def test_a_negative_margin_favours_exclusive_batches():
    engine = card_engine("linear-h200-qwen3-8b", slots=512, budget=16384)
    requests = generate(600, seed=0, prompt=Uniform(256), output=Uniform(128), clients=48)
    shares = {}
    for margin in (0.2, -0.2):
        policy, _ = make_policy("eb+", {"margin": margin, "slot_rule": "fixed"}, engine)
        shares[margin] = simulate(engine, policy, requests).plans["gauge.exclusive"].mean()
    assert shares[0.2] == 0
    assert shares[-0.2] > 0.5


# -- how often ------------------------------------------------------------------------------------------

SWINGS = [20] * 400 + ([300] * 1500 + [20] * 1500) * 3


def test_dwell_limits_changes():
    free = serve(closed(SWINGS), dwell=0.0)[1].changes
    assert len(free) > 3
    held = serve(closed(SWINGS), dwell=45.0)[1].changes
    assert len(held) < len(free)
    assert min(np.diff(held), default=99.0) >= 45.0
    assert min(np.diff(free)) < 45.0


def test_margin_is_a_band_around_the_present_mode():
    assert 0.02 < gain(PRICES, 200) < 0.6
    assert serve(closed(200, 2000), margin=0.01)[1].last
    assert not serve(closed(200, 2000), margin=0.6)[1].changes
    down = [20] * 600 + [240] * 2500 + [20] * 2500
    policy, modes = serve(closed(down), margin=0.0)
    assert not modes.last
    policy.margin = 0.9  # once exclusive, no loss below 90 % drives it out
    policy._in_exclusive = policy._wants_exclusive = True
    policy._smoothed.update(20, 1e9)
    policy._decide(1e6)
    assert policy._gain < 0
    assert policy._wants_exclusive


def test_a_surge_is_looked_at_at_once():
    """No review is due for a million completions, yet many requests at once change the mode."""
    outputs = np.full(400, OUTPUT)
    arrival = np.concatenate((np.arange(20) * 0.05, np.full(380, 2.0)))
    workload = Workload.of(np.full(400, PROMPT), outputs, arrival=arrival)
    _, modes = serve(workload, review=10**6, dwell=0.0)
    assert len(modes.changes) == 1
    assert modes.changes[0] == pytest.approx(2.0, abs=0.2)
    few = Workload.of(np.full(30, PROMPT), np.full(30, OUTPUT), arrival=np.arange(30) * 0.05)
    assert not serve(few, review=10**6, dwell=0.0)[1].changes


# -- the change itself ------------------------------------------------------------------------------------


def test_half_done_prompts_are_finished_first_and_nobody_is_admitted():
    policy = ExclusivePlus(SLOTS, BUDGET, PRICES)
    view = state(decoding=10, halves=[300, 40], waiting=[30] * 50)
    policy._wants_exclusive = True
    plan = policy.plan(view)
    assert check(plan, view) == []
    assert (plan.decode, plan.prefill) == (NONE, (10, 11))
    assert policy.plan(view) == plan
    for id in (10, 11):
        entry = view.prefilling[id]
        entry.todo = 0
        view.join(entry, 1.0, rolling=True)
        policy.prefilled(entry, 1.0)
    assert len(policy.plan(view).prefill) == 50  # now EB's own switch decides


def test_a_refill_is_finished_before_it_mixes_again():
    policy = ExclusivePlus(SLOTS, BUDGET, PRICES)
    policy._wants_exclusive = True
    view = state(decoding=5, waiting=[30] * 50)
    refill = policy.plan(view)
    assert refill.decode is NONE
    policy._wants_exclusive = False
    assert policy.plan(view) == refill
    for id in refill.prefill:
        entry = view.waiting[id]
        view.admit(entry)
        entry.todo = 0
        view.join(entry, 1.0, rolling=True)
        policy.prefilled(entry, 1.0)
    assert policy.plan(view).decode is ALL
    assert policy.gauges()["exclusive"] == 0


def test_a_plan_lasts_no_longer_than_the_next_review():
    policy = ExclusivePlus(SLOTS, BUDGET, PRICES, review=7)
    assert policy.plan(state(decoding=20)).until.finishes == 7


# -- memory -----------------------------------------------------------------------------------------------


def test_what_mixing_computes_twice_counts_where_memory_is_short():
    policy = ExclusivePlus(SLOTS, BUDGET, PRICES)
    without = policy._predicted_gain(100.0, 50.0)
    policy._wasted.update(300.0)
    assert policy._predicted_gain(100.0, 50.0) > without + 0.05
    assert policy._predicted_gain(50.0, 50.0) == pytest.approx(without)


@pytest.mark.parametrize(
    "words",
    [{"gate": "both"}, {"margin": -1.0}, {"margin": 1.0}, {"dwell": -1.0}, {"light": -1}, {"slots": 0}],
)
def test_impossible_parameters(words):
    with pytest.raises(InputError):
        ExclusivePlus(**{"slots": SLOTS, "budget": BUDGET, "cost": PRICES} | words)


EACH_PROMPT_ALONE = (28, 55, 23, 27, 123, 3)  # the first two lost 1.8 % with prompts one by one
LAGGING = (5077, 6128, 6476, 6898)  # 1.5 to 3.5 %: a review undid a surge's decision by a demand that lagged
LATE_REFILLS = (6448, 6923)  # 1.2 and 1.9 %: phases of short outputs were predicted half a step too long
NEAR = (6001, 6230, 5071, 5106, 7684, 7911)  # lose up to 0.95 %, the most of 2,230


@pytest.mark.parametrize("seed", EACH_PROMPT_ALONE + LAGGING + LATE_REFILLS + NEAR)
def test_it_is_within_one_percent_of_its_better_half(seed):
    """Random closed loops; `python -m studies.eb loops` takes hundreds."""
    assert compare(seed)["loss %"] < 1.0


def test_prompts_bunch_as_the_prediction_says():
    """112 requests of 147 decode steps: 0.76 prompts enter a step, and 53 % of the steps hold one."""
    engine, workload = card_engine(CARDS[3], 256, 8192), requests("uniform 512/148", 3000, 112)
    steps = simulate(engine, make_policy("mixed", {}, engine)[0], workload).steps
    steady = (steps["start"] > 0.2 * steps["start"].max()) & (steps["start"] < 0.8 * steps["start"].max())
    count = steps["count"] * steady
    assert count[steps["prefill"] > 0].sum() / count.sum() == pytest.approx(-np.expm1(-112 / 148), abs=0.03)
