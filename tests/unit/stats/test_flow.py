from __future__ import annotations

import math

import numpy as np
import pytest

from headgate.core.policy import Observer
from headgate.methods.eb.exclusive import Exclusive
from headgate.methods.mixed.mixed import Mixed
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.stats.flow import Trend, judge
from headgate.workloads.workload import Workload
from small_runs import little, make_run, open_run, request
from worlds import Line

# -- Little's law, with one side that does not come from the request table ---------------------------------


class Crowd(Observer):
    """Integrates the number in the system: what the ledger holds at every step, split at the arrivals.

    The ledger is read when steps ended and before anybody leaves with them. Who came during the steps is
    not in it yet and is added; who came while the engine stood still before them is in it and did not stay
    for all of that time.
    """

    def __init__(self, arrivals: np.ndarray) -> None:
        self.arrivals, self.area, self.end, self.ledger = arrivals, 0.0, 0.0, None

    def stepped(self, steps):
        ledger, start, end = self.ledger, steps.start, steps.ends[-1]
        number = len(ledger.waiting) + len(ledger.prefilling) + len(ledger.decoding)
        came = self.arrivals
        during, before = (came > start) & (came <= end), (came > self.end) & (came <= start)
        self.area += number * (end - self.end)
        self.area += float(np.sum(end - came[during]) - np.sum(came[before] - self.end))
        self.end = end


@pytest.mark.parametrize(
    "policy", [Mixed(slots=8, budget=256), Exclusive(slots=8, refill=3)], ids=["mixed", "eb"]
)
@pytest.mark.parametrize("kv_tokens", [10**5, 800], ids=["roomy", "tight"])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
def test_the_number_in_the_system_seen_at_the_steps_is_the_sum_of_stays(policy, kv_tokens, closed):
    rng = np.random.default_rng(3)
    prompt, output = rng.integers(1, 300, 300), rng.integers(1, 120, 300)
    arrival = np.cumsum(rng.exponential(30.0, 300))
    load = {"clients": 12} if closed else {"arrival": arrival}
    # In a closed loop requests come when others leave, at the ends of steps: nobody comes within one.
    crowd, recorder = Crowd(np.empty(0) if closed else arrival), Recorder()
    engine = Engine(Line(), kv_tokens, max_model_len=2000, batch_tokens=256, running=8, block=16)
    simulator = Simulator(engine, policy, Workload.of(prompt, output, **load), (crowd, recorder))
    crowd.ledger = simulator.replica.ledger
    simulator.run()
    run = Run({}, **recorder.tables())
    stays = run.requests["finished"] - run.requests["arrival"]
    assert crowd.area == pytest.approx(stays.sum(), rel=1e-9)
    span = run.requests["finished"].max() - run.requests["arrival"].min()
    assert little(run) == pytest.approx((crowd.area / span,) * 2, rel=1e-9)
    run.requests["finished"][100:200] += 1.0  # a broken table is seen
    stays = run.requests["finished"] - run.requests["arrival"]
    assert crowd.area != pytest.approx(stays.sum(), rel=1e-6)


# -- stationarity ------------------------------------------------------------------------------------------


def impatient(patience: float, total: int = 2000, rate: float = 8.0, seed: int = 0) -> Run:
    """One server of 5/s whose users leave the queue when their patience ends."""
    rng = np.random.default_rng(seed)
    requests, free = [], 0.0
    for id, arrival in enumerate(np.cumsum(rng.exponential(1 / rate, total)).tolist()):
        start = max(arrival, free)
        if start - arrival > patience:
            gone = arrival + patience
            requests.append(request(id, arrival, math.nan, math.nan, gone, 1, 0, "abandoned"))
            continue
        free = start + 0.2
        requests.append(request(id, arrival, start, free, free, 1, 1))
    return make_run(requests, load="open")


def test_the_number_in_the_system_counts_even_when_nobody_waits():
    """Everybody is admitted at once and stays longer and longer."""
    rows = [request(n, n, n, n + 1, n + 1 + n * 0.3, 1, 2) for n in range(500)]
    steady, reason = judge(make_run(rows, load="open"))[:2]
    assert not steady and reason.startswith("number in the system still growing: +0.2")


def test_the_queue_counts_even_when_the_number_in_the_system_is_level():
    rows = [request(n, n, n + 0.2 * n, n + 200, n + 200, 1, 2) for n in range(900)]
    steady, reason = judge(make_run(rows, load="open"))[:2]
    assert not steady and "queue still growing" in reason


@pytest.mark.parametrize(("patience", "word"), [(5.0, "neither"), (25.0, "filled up at first")])
def test_a_queue_bounded_by_patience_settles(patience, word):
    steady, reason = judge(impatient(patience))[:2]
    assert steady and reason.startswith(word)


def test_a_queue_still_filling_is_not_stationary():
    assert not judge(impatient(1000.0)).stationary


def test_steady_growth_too_noisy_to_be_seen_in_one_half_has_not_settled():
    """Load 1.15: the whole shows the trend; the second half rises as the first does, within its error."""
    assert not judge(open_run(800, rate=5.75, service=0.2, seed=18)).stationary


def test_a_burst_that_drains_in_the_first_half_is_seen():
    rng = np.random.default_rng(0)
    arrivals = np.concatenate((np.linspace(0, 0.5, 200), 0.5 + np.cumsum(rng.exponential(0.25, 1600))))
    requests, free = [], 0.0
    for id, arrival in enumerate(arrivals.tolist()):
        start = max(arrival, free)
        free = start + 0.2
        requests.append(request(id, arrival, start, free, free, 1, 1))
    steady, reason = judge(make_run(requests))[:2]
    assert not steady and "shrinking" in reason


def test_false_alarms_are_rare_and_overload_is_seen():
    """Load 0.8 over 20 seeds, and 1.3: a test ten times laxer or stricter fails one of the two."""
    calm = [judge(open_run(500, rate=4.0, seed=seed)).stationary for seed in range(20)]
    over = [judge(open_run(1000, rate=6.5, seed=seed)).stationary for seed in range(20)]
    assert sum(calm) >= 19 and sum(over) <= 2


def test_a_trend_by_hand():
    """A line with steps of alternating sign around it: 200 points, 20 stretches of ten."""
    rise = Trend.of(np.arange(200))
    assert rise.change == pytest.approx(200) and rise.error == pytest.approx(0, abs=1e-9) and rise.seen
    level = np.repeat(np.array([0, 40] * 10), 10)
    flat = Trend.of(level)  # residuals of 20 around a slope of 6/133 of that: negative correlation
    assert not flat.seen and abs(flat.change) < 3 * flat.error
    small = Trend.of(np.arange(200) // 21)
    assert not small.seen and small.change < 10  # sure, but too little to matter


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([{"requests": 5, "rate": 2.0}, {"requests": 5, "rate": 3.0}], "2 stages that differ in rate"),
        ([{"requests": 5}, {"requests": 5, "clients": 3}], "2 stages that differ in clients"),
        (
            [
                {"requests": 5, "prompt": {"law": "Uniform", "mean": 5}},
                {"requests": 5, "output": {"law": "X"}},
            ],
            "2 stages that differ in prompt and output",
        ),
    ],
)
def test_stages_that_differ_are_not_stationary_by_design(stages, said):
    run = open_run(400, rate=2.0, workload={"name": "", "drawn": {"seed": 0, "stages": stages}})
    assert judge(run)[:2] == (False, f"not stationary by design: {said}")
    run.meta["clients"] = 4
    assert judge(run)[:2] == (False, f"not stationary by design: {said}")


@pytest.mark.parametrize("workload", [{}, "x", {"drawn": "x"}, {"drawn": {"stages": [{"requests": 3}] * 2}}])
def test_equal_stages_and_other_records_say_nothing(workload):
    assert judge(open_run(400, rate=2.0, workload=workload)).stationary


def test_a_growing_backlog_is_an_overload():
    """Nothing is served."""
    rows = [request(n, 0.1 * n, math.nan, math.nan, math.nan, 1, 2, "") for n in range(500)]
    judged = judge(make_run(rows, load="open"))
    assert judged.reason.startswith("number in the system still growing: +1")
    assert judged.growing and judged.said == "Overloaded: the backlog grows"


def test_a_run_of_a_few_stays_is_short_and_not_overloaded():
    rows = [request(n, n * 0.1, n * 0.1, n * 0.1 + 1, n * 0.1 + 40, 1, 2) for n in range(500)]
    judged = judge(make_run(rows, load="open"))
    assert not (judged.stationary or judged.growing)
    assert judged.said.startswith("Too short to be steady: 39.9 s were measured and a request stays 40 s")
