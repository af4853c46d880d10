"""WAIT's fluid balance and thresholds: known answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.cost.model import Shape, StepCost
from headgate.methods.wait.inventory import (
    Line,
    keeping_up,
    lines_of,
    mean_seconds,
    offered,
    seconds,
    with_slack,
)
from headgate.methods.wait.traffic import best_pace, mean_latency, queue
from headgate_papers.kv_linear import kv_linear
from headgate_papers.wait.balance import (
    along_the_ray,
    equilibrium,
    kv_work,
    most_rate,
    pace_within,
    seen_kind,
)
from headgate_papers.wait.rules import least_thresholds, printed_rule, work_share
from headgate_papers.wait.runs import kind

CARD = kv_linear(0.008, 3e-7)
KV = 100_000
LOW = [kind(1000, 10, 10), kind(1000, 10, 20)]
HIGH = [kind(6000, 20, 100), kind(4000, 20, 200), kind(2000, 20, 300)]
HUNDREDTH = [part._replace(rate=part.rate / 100) for part in HIGH]
FOUR = [kind(0.8 * rate, 10, rate) for rate in (20, 40, 80, 160)]
THREE = [kind(rate, 10, rate) for rate in (20, 40, 80, 160)]
BINS = (23, 11, 8, 7, 6, 4, 3, 2, 1, 1)
LMSYS = [kind(55 * rate / 66, 60, 50 * place) for place, rate in enumerate(BINS, 1)]
TINY, TINY_CARD = [kind(1, 1, 1), kind(1, 1, 2)], kv_linear(0.1, 0.1)
OTHER, OTHER_CARD = [kind(200, 32, 8), kind(100, 64, 16)], kv_linear(0.005, 1e-6)

# parts, card, capacity: W, rho, DT* in ms, sum of N*, M*, decode tokens/s, u
FLUID = {
    "one": ([kind(1000, 10, 10)], CARD, KV, 165_000, 0.0495, 8.416623, 92.5829, 1388.743, 10_000, 0.0627),
    "one long": ([kind(20, 60, 200)], CARD, KV, 643_200, 0.19296, 9.9128, 39.8493, 6375.892, 4000, 0.2444),
    "low": (LOW, CARD, KV, 585_000, 0.1755, 9.70285, 310.4912, 5676.167, 30_000, 0.2223),
    "high/100": (HUNDREDTH, CARD, KV, 2_412_400, 0.72372, 28.9561, 582.5974, 69853.77, 20_000, 0.9167),
    "four, 240/s": (FOUR, CARD, KV, 2_160_000, 0.648, 22.7273, 623.6364, 49090.91, 27_200, 0.8208),
    "four, 300/s": (THREE, CARD, KV, 2_700_000, 0.81, 42.1053, 1444.21, 113684.2, 34_000, 1.026),
    "lmsys": (LMSYS, CARD, KV, 1_567_820.83, 0.470346, 15.1042, 131.1045, 23680.69, 8625, 0.5958),
    "tiny": (TINY, TINY_CARD, 9, 9, 0.9, 1000, 5, 9, 3, 1),
    "other": (OTHER, OTHER_CARD, 50_000, 187_200, 0.1872, 6.151575, 21.5305, 1151.575, 3200, 0.20592),
}

# x*: requests per stage; of many types the first and the last
SIZES = {
    "one": (8.416623,),
    "one long": (0.198255,),
    "low": (9.70285, 9.70285),
    "high/100": (1.7374, 1.1582, 0.5791),
    "four, 240/s": (0.3636, 0.7273, 1.4545, 2.9091),
    "four, 300/s": (0.842, 6.737),
    "lmsys": (0.2895, 0.0126),
    "tiny": (1, 1),
    "other": (1.2303, 0.6152),
}


@pytest.mark.parametrize("name", FLUID)
def test_fluid_equilibrium(name):
    parts, cost, capacity, work, rho, iteration, active, kv, decodes, load = FLUID[name]
    lines = lines_of(cost, parts, capacity)
    found = equilibrium(lines, parts)
    assert offered(parts) == pytest.approx(work, rel=1e-6)
    assert lines[0].pressure(parts) == pytest.approx(rho, rel=1e-5)
    assert found.seconds * 1e3 == pytest.approx(iteration, rel=1e-5)
    assert sum(found.active) == pytest.approx(active, rel=1e-5)
    assert found.kv == pytest.approx(kv, rel=1e-5)
    assert found.decode_rate == pytest.approx(decodes, rel=1e-6)
    sizes = found.sizes if len(SIZES[name]) == len(parts) else (found.sizes[0], found.sizes[-1])
    assert sizes == pytest.approx(SIZES[name], rel=2e-3)
    assert 1 / most_rate(lines, parts, capacity) == pytest.approx(load, rel=3e-4)
    # Balance: in one iteration as many leave as come; (8): stages per second are those that arrive.
    assert found.stage_rate == pytest.approx(sum(part.rate * part.stages for part in parts))
    assert seconds(lines, parts, found.sizes) == pytest.approx(found.seconds)


def test_capacity_lemma():
    """W_max = C/(d0 + d1 C) = 2,631,578.95 and a full iteration of 38 ms."""
    lines = lines_of(CARD, LOW, KV)
    assert most_rate(lines, LOW, KV) * offered(LOW) == pytest.approx(2_631_578.95, abs=0.01)
    assert seconds(lines, [kind(1, 1, 0)], [KV]) == pytest.approx(0.038)
    # With slots instead of memory: 512 requests of the low mix.
    slots = most_rate(lines, LOW, KV, slots=512)
    assert slots == pytest.approx(16 / 1000 / seconds(lines, LOW, (16, 16)))


def test_high_demand_is_unstable_and_says_so():
    lines = lines_of(CARD, HIGH, KV)
    assert offered(HIGH) == 241_240_000 and sum(part.rate * part.decodes for part in HIGH) == 2e6
    with pytest.raises(InputError, match=r"72\.37 seconds of work.*need d1\*W < 1.*with any memory"):
        equilibrium(lines, HIGH)
    with pytest.raises(InputError, match=r"need d1\*W < 1; serve at most 130\.\d of 1\.2e\+04 requests/s"):
        pace_within(lines, HIGH, KV)
    stable, unstable = (lines_of(kv_linear(0.008, d1), HIGH, KV) for d1 in (4.144e-9, 4.146e-9))
    assert equilibrium(stable, HIGH).seconds > 1
    with pytest.raises(InputError, match="unstable"):
        equilibrium(unstable, HIGH)
    with pytest.raises(InputError, match=r"M\* = 113,684 .* need M\* <= C = 100,000; .*292\.3 of 300"):
        pace_within(lines_of(CARD, THREE, KV), THREE, KV)


@pytest.mark.parametrize(
    ("slack", "sizes", "kv"),
    [(0, (10, 10), 5850), (0.05, (11, 11), 6435), (0.1, (11, 11), 6435), (0.2, (13, 13), 7605)],
)
def test_least_thresholds_of_the_low_mix(slack, sizes, kv):
    found = least_thresholds(lines_of(CARD, LOW, KV), LOW, KV, slack)
    assert (found.sizes, found.kv) == (sizes, kv)
    if not slack:
        assert found.seconds == pytest.approx(9.755e-3)


def test_other_least_thresholds():
    lines = lines_of(OTHER_CARD, OTHER, 50_000)
    for slack in (0, 0.1, 0.25):
        found = least_thresholds(lines, OTHER, 50_000, slack)
        assert (found.sizes, found.kv) == ((2, 1), 1872)
    assert found.seconds == pytest.approx(6.872e-3)
    with pytest.raises(InputError, match=r"\(9\)"):
        least_thresholds(lines_of(TINY_CARD, TINY, 9), TINY, 9)


def test_whole_thresholds_need_one_request_at_each_stage():
    """82,360 tokens for the high mix, 155,310 for one type of 60 + 500."""
    lines = lines_of(CARD, HUNDREDTH, KV)
    assert sum(part.work for part in HIGH) == 82_360
    assert kv_work(60, 500) == 155_310
    with pytest.raises(InputError, match=r"C = 50,000 .* below the 82,360 .*sum of w_j <= C"):
        least_thresholds(lines, HUNDREDTH, 50_000)
    with pytest.raises(InputError, match="unstable"):
        least_thresholds(lines, HIGH, KV)


def test_rules_for_a_batch_limit():
    assert printed_rule(LOW, 512) == pytest.approx((23.273, 12.190), abs=1e-3)
    assert work_share(LOW, 512) == pytest.approx((16, 16))
    assert printed_rule(HIGH, 2048) == pytest.approx((10.139, 3.396, 1.134), abs=1e-3)
    assert work_share(HIGH, 2048) == pytest.approx((6.107, 4.072, 2.036), abs=1e-3)


def test_slack_of_the_linear_program():
    """All rows bind at n_j = (1+ε_j) λ_j d0/(1 - d1 W_ε)."""
    slacks = (0.1, 0.3)
    more = with_slack(LOW, slacks)
    lines = lines_of(CARD, LOW, KV)
    found = equilibrium(lines, more)
    heavier = sum((1 + slack) * part.rate * part.work for slack, part in zip(slacks, LOW, strict=True))
    assert found.kv == pytest.approx(0.008 * heavier / (1 - 3e-7 * heavier))
    for size, slack, part in zip(found.sizes, slacks, LOW, strict=True):
        assert size == pytest.approx((1 + slack) * part.rate * seconds(lines, LOW, found.sizes))


@pytest.mark.parametrize(("kv", "slots"), [(4000, 1e9), (KV, 100), (KV, 1e9), (700, 20), (6900, 1e9)])
def test_the_load_that_is_proposed_can_be_carried(kv, slots):
    """Every way of having too much: memory, slots, both; one request of each type is to be left free."""
    heavy = [part._replace(rate=part.rate * 10) for part in LOW]
    lines, spare = lines_of(CARD, LOW, KV), sum(part.peak for part in LOW)
    with pytest.raises(InputError) as caught:
        pace_within(lines, heavy, kv, slots, spare)
    share = float(str(caught.value).split("serve at most ")[1].split(" of ")[0]) / 20_000
    fits = [part._replace(rate=part.rate * share) for part in heavy]
    pace = pace_within(lines, fits, kv, slots, spare)
    assert along_the_ray(lines, fits, pace.shortest).kv + spare <= kv * (1 + 1e-6)
    with pytest.raises(InputError):
        pace_within(lines, [part._replace(rate=part.rate * 1.01) for part in fits], kv, slots, spare)


def test_memory_that_is_proposed_is_enough():
    lines, spare = lines_of(CARD, LOW, KV), sum(part.peak for part in LOW)
    for kv in (40, 3000, 5700):
        with pytest.raises(InputError, match=r"(C|<=) ?.*--kv-tokens \d+") as caught:
            pace_within(lines, LOW, kv, spare=spare)
        enough = int(str(caught.value).split("--kv-tokens ")[1].split()[0])
        assert pace_within(lines, LOW, enough, spare=spare).shortest == pytest.approx(9.70285e-3)
    with pytest.raises(
        InputError, match=r"N\* = 310\.5 requests active, need N\* <= slots = 100; .*--slots 311"
    ):
        pace_within(lines, LOW, KV, 100)
    with pytest.raises(InputError, match=r"sum of l_j \+ l'_j < C: one request of each type needs 50 KV"):
        pace_within(lines, LOW, 50, spare=spare)


@given(st.floats(0.05, 0.95), st.floats(0.0, 60e-6))
def test_pace_along_the_ray(load, per_new):
    """λt keeps up for every t from DT* on, with the compute term too: d0/(1 - d1 W - d2 Σλ(l+l'))."""
    cost = kv_linear(0.008, 3e-7, per_new)
    lines = lines_of(cost, HUNDREDTH, KV)
    parts = [part._replace(rate=part.rate * load * most_rate(lines, HUNDREDTH, KV)) for part in HUNDREDTH]
    pace = pace_within(lines, parts, KV)
    new = sum(part.rate * (part.prompt + part.decodes) for part in parts)
    assert pace.shortest == pytest.approx(0.008 / (1 - 3e-7 * offered(parts) - per_new * new))
    for share in (0.0, 0.3, 1.0):
        t = pace.shortest + share * (pace.longest - pace.shortest)
        found = along_the_ray(lines, parts, t)
        assert found.seconds <= t * (1 + 1e-9)
        assert found.kv <= KV * (1 + 1e-9)


def test_latency_formula_and_best_pace():
    """Simulated .183, .187, .216, .262 s; the best pace is a little above 10 ms."""
    lines = lines_of(CARD, LOW, KV)
    for size, simulated in ((11, 0.187), (13, 0.216), (16, 0.262)):
        assert mean_latency(lines, LOW, (size, size)) == pytest.approx(simulated, rel=0.03)
    pace = best_pace(lines, LOW, pace_within(lines, LOW, KV))
    assert 0.0103 < pace < 0.0112
    best = mean_latency(lines, LOW, [part.rate * pace for part in LOW])
    for other in (0.99 * pace, 1.01 * pace):
        assert mean_latency(lines, LOW, [part.rate * other for part in LOW]) > best
    assert best_pace(lines, LOW, pace_within(lines, LOW, KV), per_token=0.0099) == pytest.approx(
        0.0099, rel=1e-3
    )
    assert queue(LOW[0], 9, 0.0098) == float("inf")


def test_kv_in_whole_blocks():
    for prompt, decodes, block in ((1, 0, 16), (5, 40, 16), (16, 16, 16), (7, 3, 1), (33, 100, 8)):
        stages = range(prompt, prompt + decodes + 1)
        assert kv_work(prompt, decodes, block) == sum(-(-m // block) * block for m in stages)
    import numpy as np

    prompts, decodes = np.array([10, 30]), np.array([5, 9])
    part = seen_kind(3.0, prompts, decodes, 16)
    assert part.work == (kv_work(10, 5, 16) + kv_work(30, 9, 16)) / 2
    assert (part.prompt, part.decodes, part.peak) == (20, 7, 48)


CARDS = ["linear-h200-qwen3-8b", "pub-h200-qwen3-8b", "pub-rtx-pro-6000-qwen3-8b", "derived-h200-qwen3-8b"]


@pytest.mark.parametrize("card", CARDS)
def test_lines_follow_other_cards(card):
    """Knees, floors, prices by share and tiles: the card is at most 5 % above, seldom much below."""
    cost = load_card(card).cost
    parts = [kind(8, 400, 200), kind(4, 900, 100)]
    lines = lines_of(cost, parts, 500_000)
    for pace in (0.01, 0.02, 0.04, 0.1, 0.2, 0.4):
        said = mean_seconds(cost, parts, pace)
        assert said / 1.06 <= seconds(lines, parts, [part.rate * pace for part in parts]) <= 1.12 * said


@pytest.mark.parametrize("card", CARDS)
def test_what_a_card_carries_does_not_depend_on_what_is_asked(card):
    """The same mix, a thousandth or a thousandfold of it: as many requests/s; and when idle, a short step."""
    cost = load_card(card).cost
    found = []
    for times in (1e-3, 1.0, 1e3):
        parts = [kind(8 * times, 400, 200), kind(4 * times, 900, 100)]
        lines = lines_of(cost, parts, 500_000)
        found.append(times * most_rate(lines, parts, 500_000, slots=256))
        if times < 1:
            idle = cost.seconds(Shape(1, parts[0].work // 200))
            assert keeping_up(lines, parts).shortest == pytest.approx(idle, rel=0.1)
    assert found == pytest.approx([found[1]] * 3, rel=0.02)


def test_rare_prompts_run_whole_now_and_then():
    """Half a prompt per iteration is a whole one in every other: the mean of both steps."""
    cost = load_card("pub-rtx-pro-6000-qwen3-8b").cost
    parts = [kind(5, 500, 100)]
    alone, beside = cost.seconds(Shape(50, 5 * 10 * 505)), cost.seconds(Shape(50, 5 * 10 * 505, 500))
    assert mean_seconds(cost, parts, 0.1) == pytest.approx((alone + beside) / 2, rel=1e-3)
    twice = Shape(200, round(0.4 * 5 * (parts[0].work - 500)), 1000)
    assert mean_seconds(cost, parts, 0.4) == cost.seconds(twice)
    silent = [part._replace(prompt=0.0) for part in parts]
    assert mean_seconds(cost, silent, 0.1) == pytest.approx(alone, rel=0.1)


def test_a_steep_line_bounds_the_pace_from_above():
    """With free decodes a mix may keep up only between two paces; beyond the knee work outruns time."""
    flat, steep = Line(0.01, 0.0, 0.0, 0.0), Line(-0.5, 0.0, 0.0, 1.0)
    parts = [kind(2.0, 1, 1)]  # two decodes per second of arrivals
    pace = keeping_up((flat, steep), parts)
    assert pace == (0.01, pytest.approx(0.5))
    assert most_rate((flat, steep), parts, 100) == pytest.approx(0.255 / 0.01)


class Curved(StepCost):
    """A cost that is no straight line: the square root of the KV read."""

    def seconds(self, shape: Shape) -> float:
        return 0.01 + 1e-4 * (shape.context + shape.prefill) ** 0.5

    def decode_line(self, decodes: int) -> tuple[float, float]:
        raise NotImplementedError

    def span(self, decodes, context, steps):
        raise NotImplementedError


def test_a_cost_that_bends_down_is_lifted_to_be_near():
    lines = lines_of(Curved(), LOW, KV)
    assert len(lines) == 1
    for share in (0.02, 0.1, 0.3, 0.6, 1.0):
        found = along_the_ray(lines, LOW, share * KV / offered(LOW)).seconds
        assert found >= Curved().seconds(Shape(0, round(share * KV))) / 1.06


def test_who_is_served_by_the_printed_rule():
    """S5, memory-bound: tokens per KV work +16 %, requests +39 %, 9 : 3 : 1 where 3 : 2 : 1 arrive."""
    found = {}
    for rule in (printed_rule, work_share):
        sizes = rule(HIGH, 512)
        work = sum(size * part.work for size, part in zip(sizes, HIGH, strict=True))
        tokens = sum(size * part.decodes for size, part in zip(sizes, HIGH, strict=True))
        found[rule] = tokens / work, sum(sizes) / work
        if rule is printed_rule:
            assert [size / sizes[-1] for size in sizes] == pytest.approx([9, 3, 1], rel=0.01)
    assert found[printed_rule][0] == pytest.approx(9.608e-3, rel=1e-3)
    assert found[work_share][0] == pytest.approx(8.290e-3, rel=1e-3)
    assert found[printed_rule][1] / found[work_share][1] == pytest.approx(1.39, abs=0.01)
    assert printed_rule(HIGH, 1806)[-1] == pytest.approx(1.0, abs=1e-3)  # B >= 1806 for n_3 >= 1


def test_heavy_traffic_leaves_thresholds_as_they_are():
    """Rates times ζ and step times by ζ change neither x*, N* nor M*."""
    usual = equilibrium(lines_of(CARD, LOW, KV), LOW)
    fast = [part._replace(rate=part.rate * 7) for part in LOW]
    scaled = equilibrium(lines_of(kv_linear(0.008 / 7, 3e-7 / 7), fast, KV), fast)
    assert (*scaled.sizes, *scaled.active, scaled.kv) == pytest.approx(
        (*usual.sizes, *usual.active, usual.kv)
    )
