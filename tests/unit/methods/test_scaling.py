"""The number of engines a pool needs, and a simulated fleet that follows it."""

from math import inf, nan

import numpy as np
import pytest

import headgate
from headgate.core.errors import InputError
from headgate.experiment.fleet import FleetSetup
from headgate.experiment.run import Prepared, carry_out
from headgate.experiment.settings import experiment
from headgate.methods.scaling import EnginesNeeded, Scaling, Seen, read_scaling, work_of

EACH = 0.5  # engine-seconds of a request


def needed(engines=2, **settings):
    scaling = Scaling(**{"ceiling": 40, "start": 60.0, "hold": 300.0, "target": 0.5} | settings).checked()
    return EnginesNeeded(scaling, lambda prompt, output: EACH, engines)


def follow(rule, rates, every=15.0, begin=0.0, waiting=0.0):
    """What it says at each look while requests come at these rates, one for each look."""
    came, said = 1000.0 * begin, []
    for look, rate in enumerate(rates):
        came += rate * every
        seen = Seen(came, 100 * came, came, 50 * came)
        said.append(rule.decide((look + 1) * every, seen, waiting).engines)
    return said


def test_engines_follow_the_work_at_the_target_share():
    """8 requests/s of 0.5 engine-seconds are 4 engines' work, 8 engines at half their capacity."""
    said = follow(needed(), [8.0] * 60)
    assert said[-1] == 8
    assert set(said[5:]) == {8}


def test_a_rise_counts_at_once_and_ahead_a_fall_when_it_has_lasted():
    rule = needed()
    steady = follow(rule, [8.0] * 20)[-1]
    came = 8.0 * 300
    rising, time = [], 300.0
    for look in range(1, 9):
        came, time = came + (8 + look) * 15, time + 15
        rising.append(rule.decide(time, Seen(came, 100 * came, came, 50 * came)).engines)
    assert rising == sorted(rising) and rising[0] >= steady
    assert rising[-1] > 16  # 16 requests/s need 16 engines now, and more by the time that one starts
    after = []
    for _ in range(60):
        came, time = came + 4 * 15, time + 15
        after.append(rule.decide(time, Seen(came, 100 * came, came, 50 * came)).engines)
    assert min(after[:15]) == max(rising)  # `hold` is 20 looks
    assert after[-1] == 4


def test_noise_within_the_hold_does_not_flap():
    rng = np.random.default_rng(0)
    said = follow(needed(), rng.poisson(8 * 15, 400) / 15)
    changes = np.count_nonzero(np.diff(said[30:]))
    assert changes < 25 and min(said[30:]) >= 8 and max(said[30:]) <= 13


def test_floor_ceiling_backlog_and_silence():
    assert follow(needed(floor=3), [0.0] * 60)[-1] == 3
    assert follow(needed(ceiling=5), [100.0] * 10)[-1] == 5
    assert follow(needed(), [8.0] * 30, waiting=240.0)[-1] == 10  # 120 engine-seconds within a minute
    rule = needed(engines=7)
    assert rule.decide(10.0, Seen(5, 5, 5, 5)).engines == 7  # one look tells no rate
    assert rule.decide(10.0, Seen(9e9, 5, 5, 5)).engines == 7  # no time has passed


def test_counters_that_begin_anew_or_are_no_numbers_change_nothing_at_once():
    rule = needed()
    assert follow(rule, [8.0] * 40)[-1] == 8
    assert rule.decide(601.0, Seen(nan, 1, 1, 1)).engines == 8
    assert rule.decide(602.0, Seen(inf, 1, 1, 1)).engines == 8
    said = [
        rule.decide(615.0 + 15 * look, Seen(120 * look, 1e4, 120 * look, 5e3)).engines for look in range(9)
    ]
    assert all(8 <= number <= 9 for number in said)


def test_the_rules_of_others_go_by_requests():
    queue = EnginesNeeded(Scaling("queue", ceiling=40, per_engine=5).checked(), lambda p, o: EACH, 2)
    queue.decide(0.0, Seen(0, 0, 0, 0))
    assert queue.decide(15.0, Seen(1, 1, 1, 1), waiting=31, running=500).engines == 7
    load = EnginesNeeded(Scaling("load", ceiling=40, per_engine=20).checked(), lambda p, o: EACH, 2)
    load.decide(0.0, Seen(0, 0, 0, 0))
    assert load.decide(15.0, Seen(1, 1, 1, 1), waiting=31, running=500).engines == 27
    fixed = EnginesNeeded(Scaling("fixed", ceiling=40).checked(), lambda p, o: EACH, 9)
    assert follow(fixed, [100.0] * 9)[-1] == 9


def test_work_is_the_bound_and_pools_share_it():
    engine = headgate.card_engine("cal-h200-qwen3-8b")
    limits = engine.cost, engine.running, engine.batch_tokens, engine.kv_tokens
    whole, prefill, decode = (work_of(*limits, pool)(1000.0, 200.0) for pool in ("any", "prefill", "decode"))
    assert whole == pytest.approx(prefill + decode)
    assert 0.02 < whole < 0.1


@pytest.mark.parametrize(
    "text",
    ["plane", "plan:floor", "plan:ground=2", "plan:floor=0", "plan:floor=9", "plan:target=7", "plan:start=x",
     "plan:every=0s", "plan:start=40h", "queue:per_engine=0", "plan:floor=nan", "plan:floor=2.5",
     "plan:ceiling=inf"],
)  # fmt: skip
def test_a_rule_that_cannot_be_is_refused_in_one_line(text):
    with pytest.raises(InputError) as error:
        read_scaling(text, 8)
    assert "\n" not in str(error.value)


def test_a_rule_is_read_with_units():
    scaling = read_scaling("plan:floor=2,start=90s,hold=5min,target=0.8", 8)
    assert (scaling.floor, scaling.ceiling, scaling.start, scaling.hold) == (2, 8, 90.0, 300.0)


def scaled(text, rates=(2.0, 14.0, 2.0), minutes=6, engines=12):
    """A run on engines that serve 4.9 requests/s at most; each rate lasts some minutes."""
    rng = np.random.default_rng(0)
    gaps = np.concatenate([rng.exponential(1 / rate, int(rate * 60 * minutes)) for rate in rates])
    engine = headgate.card_engine("pub-rtx-ada-6000-mistral-7b", slots=64, budget=2048)
    lengths = rng.integers(500, 1500, len(gaps)), rng.integers(100, 300, len(gaps))
    requests = headgate.Workload.of(*lengths, arrival=np.cumsum(gaps))
    setup = FleetSetup(engine, engines, scaling=read_scaling(text, engines))
    router, _ = setup.router("least-loaded", {}, requests)
    run = setup.run(lambda role: headgate.make_policy("mixed", engine), router, requests)
    assert run.meta["outcome"] == "finished"
    assert int(run.completed().sum()) == len(requests)
    waited = run.requests["first_token"] - run.requests["arrival"]
    return run.meta["autoscale"], float((waited <= 2.0).mean()), run


def test_a_fleet_that_follows_the_plan_costs_less_than_a_fixed_one_and_keeps_more_than_a_queue_rule():
    common = "start=60s,hold=120s,every=10s"
    fixed, fixed_kept, run = scaled(f"fixed:{common}")
    assert fixed["engine_hours"] == pytest.approx(12 * run.requests["finished"].max() / 3600, rel=0.01)
    plan, plan_kept, _ = scaled(f"plan:{common}")
    queue, queue_kept, _ = scaled(f"queue:{common}")
    assert plan["engine_hours"] < 0.6 * fixed["engine_hours"]
    assert (plan["least"], plan["most"]) != (12, 12)
    assert fixed_kept > 0.99
    assert plan_kept > queue_kept
    assert queue["most"] > queue["least"]


def test_engines_that_drain_end_what_they_have_and_new_ones_take_their_time():
    about, _, run = scaled("plan:start=60s,hold=60s,every=10s", minutes=4)
    served = run.requests["replica"]
    early = run.requests["arrival"] < 240
    assert len(set(served[early].tolist())) < about["most"]
    first_use = [run.requests["arrival"][served == engine].min() for engine in set(served.tolist())]
    assert sum(use > 240 for use in first_use) >= 1  # after the rate rose, and an engine's start


def test_what_cannot_be_scaled_is_refused():
    with pytest.raises(InputError, match="give --engines"):
        Prepared(experiment({"autoscale": "plan", "rate": 8.0, "requests": 50}))
    words = {"engines": 4, "autoscale": "plan", "clients": 8, "requests": 50}
    with pytest.raises(InputError, match="needs arrivals"):
        carry_out(Prepared(experiment(words)), "mixed", {})
    planned = Prepared(experiment({"engines": 4, "autoscale": "plan", "rate": 8.0, "requests": 50}))
    with pytest.raises(InputError, match="fixed number of engines"):
        carry_out(planned, "mixed", {}, router=("gate-and-route", {}))
