"""The margin that learns: what it counts, and promises kept on engines that their card describes badly."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from headgate.core.request import Slo
from headgate.cost.card import load_card
from headgate.cost.laws.work import WorkCost
from headgate.cost.model import Shape
from headgate.experiment.build import make_workload
from headgate.experiment.library import card_engine, simulate
from headgate.experiment.settings import experiment
from headgate.methods.keep.policy import EXCUSED, FEWER, LOWEST, MORE, REVIEW, Keep, Trust
from headgate.stats.gaps import Gaps
from headgate.workloads.arrivals import arrival_process
from headgate.workloads.lengths import LogNormal, Uniform
from headgate.workloads.synthetic import Share, generate
from headgate.workloads.workload import Kind

CARD = "cal-h200-qwen3-8b"
PROMISE = 0.1


def steps(trust: Trust, gaps: list[float], decodes: int = 100, start: float = 0.0) -> float:
    """Decode steps with these gaps; when the last one ended."""
    trust.tokens(start, [(PROMISE, decodes)])
    for gap in gaps:
        start += gap
        trust.tokens(start, [(PROMISE, decodes)])
    return start


def test_two_late_steps_of_a_window_lower_it_at_once():
    """One of 200 is half a percent, half of what a p99 allows; two are more."""
    trust = Trust(0.9, 0.01)
    end = steps(trust, [0.09] * 50 + [0.11])
    assert trust.value == 0.9
    trust.tokens(end + 0.11, [(PROMISE, 100)])
    assert trust.value == pytest.approx(0.9 * FEWER)


def test_a_good_window_raises_it_a_little_and_never_beyond_where_it_began():
    trust = Trust(0.9, 0.01)
    steps(trust, [0.05] * REVIEW)
    assert trust.value == 0.9
    end = steps(trust, [0.2] * 2, start=1e3)
    assert trust.value == pytest.approx(0.9 * FEWER)
    end = steps_on(trust, [0.05] * (REVIEW + EXCUSED), end)
    assert trust.value == pytest.approx(0.9 * FEWER + MORE)
    steps_on(trust, [0.05] * 40 * REVIEW, end)
    assert trust.value == 0.9


def test_it_never_falls_below_the_lowest():
    trust = Trust(0.9, 0.01)
    steps(trust, [0.2] * 500)
    assert trust.value == LOWEST


def test_steps_that_could_not_be_in_time_do_not_count():
    trust = Trust(0.9, 0.01)
    end = steps(trust, [0.05] * 5)
    for _ in range(20):
        trust.excuse()
        end = steps_on(trust, [0.3] * EXCUSED, end)
    assert trust.value == 0.9


def steps_on(trust: Trust, gaps: list[float], start: float) -> float:
    for gap in gaps:
        start += gap
        trust.tokens(start, [(PROMISE, 100)])
    return start


def test_an_idle_engine_ends_no_gap():
    trust = Trust(0.9, 0.01)
    for second in range(20):
        trust.tokens(float(second), [(PROMISE, 100)])
        trust.idle()
    assert trust.value == 0.9


def test_each_promise_is_counted_for_those_who_have_it():
    """A gap of 150 ms is late for one decode in a thousand: that alone is no reason."""
    trust = Trust(0.9, 0.01)
    end = 0.0
    for _ in range(REVIEW + 1):
        trust.tokens(end, [(PROMISE, 1), (0.5, 999)])
        end += 0.15
    assert trust.value == 0.9


def test_it_can_be_switched_off():
    trust = Trust(0.9, 0.01, learn=False)
    steps(trust, [0.3] * 100)
    assert trust.value == 0.9


# -- in a run: the card is wrong, the engine jitters --------------------------------------------------------


def scaled(factor: float) -> WorkCost:
    """The card with every time longer by a factor: the GPU's and the host's."""
    cost = load_card(CARD).cost
    assert isinstance(cost, WorkCost) and cost.host is not None

    def times(terms):
        floats = {each.name: getattr(terms, each.name) for each in fields(terms)}
        return replace(terms, **{name: factor * x for name, x in floats.items() if isinstance(x, float)})

    return WorkCost(times(cost.terms), times(cost.host))


class Jitter(WorkCost):
    """A GPU whose steps take at random a little more or less, and now and then much more."""

    def __init__(self, spread: float, stalls: float) -> None:
        plain = load_card(CARD).cost
        super().__init__(plain.terms, plain.host)
        self._rng = np.random.default_rng(7)
        self._spread, self._stalls = spread, stalls

    def unhosted(self) -> WorkCost:
        made = Jitter(self._spread, self._stalls)
        made.terms, made._hosted = super().unhosted().terms, False
        return made

    def _factor(self) -> float:
        return self._rng.lognormal(0.0, self._spread) + 0.3 * (self._rng.random() < self._stalls)

    def seconds(self, shape: Shape) -> float:
        return super().seconds(shape) * self._factor()

    def decode_line(self, decodes):
        """Once for the decode steps that are jumped over together: one, while anybody waits."""
        fixed, slope = super().decode_line(decodes)
        factor = self._factor()
        return fixed * factor, slope * factor


def late_gaps(truth: WorkCost, card: WorkCost | None, rate: float = 21.0, **words) -> tuple[float, Keep]:
    """Share of late gaps over a run at a load near capacity."""
    engine = card_engine(CARD, slots=512, budget=16_384)._replace(cost=truth)
    classes = [Share(1.0, Kind("chat", Slo(0.5, PROMISE)), LogNormal(1000.0, 1.0), Uniform(200.0))]
    workload = generate(
        2500, seed=4, arrivals=arrival_process("poisson", rate, None), classes=classes, name="chat"
    )
    policy = Keep(512, 16_384, card, **words)
    found = simulate(engine, policy, workload, asynchronous=True)
    values, weights, _ = Gaps(found).sample()
    return float(np.average(values > PROMISE, weights=weights)), policy


@pytest.mark.parametrize("factor", [0.8, 0.9, 1.0, 1.1, 1.25])
def test_promises_hold_on_a_card_that_is_wrong(factor):
    """The card says so many times what steps take; below 1 it promises too much."""
    share, policy = late_gaps(scaled(1.0), scaled(factor))
    assert share <= 0.01
    assert policy.trust.value < 0.85 if factor == 0.8 else policy.trust.value > 0.75


def test_without_learning_a_card_that_is_20_percent_too_fast_breaks_them():
    share, _ = late_gaps(scaled(1.0), scaled(0.8), learn=False)
    assert share > 0.02


@pytest.mark.parametrize(("spread", "stalls"), [(0.05, 0.0), (0.1, 0.0), (0.03, 0.01)])
def test_promises_hold_where_steps_jitter(spread, stalls):
    share, _ = late_gaps(Jitter(spread, stalls), load_card(CARD).cost)
    assert share <= 0.01


def test_gaps_are_in_time_behind_a_host_that_is_slower_than_the_card_says():
    """Behind an HTTP server the host launches steps half as slowly again as the card says."""
    plain = load_card(CARD).cost.graphed(512)
    times = ("constant", "per_request", "prompts", "ungraphed")
    host = replace(plain.host, **{name: 1.5 * getattr(plain.host, name) for name in times})
    engine = card_engine(CARD, slots=1024)._replace(cost=WorkCost(plain.terms, host))
    words = {"trace": "sharegpt-8k", "rate": 8.0, "requests": 560, "ttft": 0.5, "tpot": 0.09}
    found = simulate(engine, Keep(1024, 8192, plain), make_workload(experiment(words))[0], asynchronous=True)
    late = [max(gaps, default=0.0) > 0.1 for gaps in Gaps(found).lists()]
    assert np.mean(late) <= 0.01


def test_the_host_is_learned_in_overload():
    """Prompts always wait there; beside them no step waits for a launch, so decodes run alone at times."""
    _, policy = late_gaps(scaled(1.0), scaled(1.0), rate=40.0)
    assert policy.gauges()["host"] == 1.0


def test_promises_hold_without_any_card():
    share, policy = late_gaps(scaled(1.0), None, rate=14.0)
    assert share <= 0.01
    assert policy.learned.seen > 1000
