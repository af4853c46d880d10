"""The fewest engines for a load: the search, bounds, shares of levels, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.advisor.capacity.search import Fewest
from headgate.advisor.capacity.traffic import measure, parse_levels
from headgate.advisor.fewest_engines import Way, out_of_reach, plan_engines, utilisation
from headgate.advisor.set_up import Asked
from headgate.advisor.settings import SearchSettings
from headgate.core.errors import InputError, RunError
from headgate.cost.card import load_card
from headgate.experiment.build import make_engine
from headgate.experiment.library import simulate
from headgate.experiment.settings import experiment
from headgate.methods.make import make_policy
from headgate.record.tables import Run

WORDS = {"slots": 32, "budget": 1024, "prompt": 200, "output": 40, "requests": 300}
ENGINE = make_engine(experiment(WORDS), load_card("linear-h200-qwen3-8b"))
STANDS = "the engine stands still; mend the policy"
TWO_SEEDS = SearchSettings(seeds=2)
WAYS = {"round robin + mixed": Way("round-robin", "mixed", {}, {})}


def round_robin(way, engines, seed, requests):
    """Engines that never meet, each with every n-th request: a fleet whose answer is known."""
    parts = []
    for place in range(engines):
        mine = np.arange(len(requests)) % engines == place
        policy, _ = make_policy(way.policy, way.settings, ENGINE)
        run = simulate(ENGINE, policy, requests.subset(mine))
        run.requests["id"] = np.flatnonzero(mine)
        run.stays["request"] = np.flatnonzero(mine)[run.stays["request"].astype(int)]
        for table in (run.requests, run.steps):
            table["replica"] = np.full_like(table["replica"], place)
        parts.append(run)
    tables = {}
    for name in ("requests", "steps", "stays", "plans"):
        columns = [getattr(part, name) for part in parts]
        tables[name] = {key: np.concatenate([each[key] for each in columns]) for key in columns[0]}
    order = np.argsort(tables["requests"]["id"])
    tables["requests"] = {key: column[order] for key, column in tables["requests"].items()}
    return Run(parts[0].meta, **tables)


def planned(levels="ttft=30ms@p90", options=TWO_SEEDS, serve=round_robin, ways=None, **words):
    base = experiment(WORDS | {"rate": 400.0} | words)
    return plan_engines(base, ways or WAYS, Asked(parse_levels([levels]), options), serve)


@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 30))
def test_the_fewest_is_found_from_any_bound(least, more, room):
    """Against counting up one by one."""
    truth, most = least + more, least + more + room
    search = Fewest(least, most)
    while (count := search.next()) is not None:
        assert least <= count <= most and count not in search.tried
        search.tell(count, 0.5 if count >= truth else 2.0)
    assert search.enough == truth
    assert search.too_few == truth - 1
    assert len(search.tried) <= 16


def test_too_few_even_at_the_most():
    search = Fewest(3, 10)
    while (count := search.next()) is not None:
        search.tell(count, 2.0)
    assert search.enough is None and max(search.tried) == 10


def test_what_a_plan_says():
    plan = planned()
    (found,) = plan.found
    assert found.engines is not None and found.engines > plan.least
    enough, fewer = found.size(found.engines), found.size(found.engines - 1)
    assert enough.kept == 2 and fewer.kept < 2
    level = "p90 TTFT <= 30 ms"
    assert found.gives_way == level
    assert enough.shares[level].value >= 0.9 and enough.values[level] <= 0.03
    assert fewer.shares[level].value < enough.shares[level].value
    assert 0 < enough.slots.value < fewer.slots.value <= 1
    assert enough.load == pytest.approx(400 / (found.engines * plan.bound.rate))
    assert plan.least == -(-400 // plan.bound.rate)
    document = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert document["fleets"][0]["engines"] == found.engines
    assert document["least_engines"] == plan.least


def test_looser_levels_need_no_more_and_the_bound_is_a_bound():
    tight, loose = (planned(f"ttft={limit}@p90").found[0].engines for limit in ("20ms", "2s"))
    plan = planned("e2e=10h@p99")
    assert tight >= loose >= plan.found[0].engines >= plan.least
    assert plan.found[0].gives_way == ""


def test_an_answer_near_the_bound_is_doubted():
    bound = planned("e2e=10h@p99").bound.rate
    full, roomy = (planned("e2e=10h@p99", rate=share * 3 * bound) for share in (0.99, 0.9))
    assert full.found[0].engines == roomy.found[0].engines == 3
    said = "3 engines run at 99 % of λ*"
    assert f"round robin + mixed: {said}" in full.notes[0] and "; 4 are on the safe side" in full.notes[0]
    assert not any(said in note for note in roomy.notes)


def test_levels_that_an_idle_engine_misses_by_far_are_refused_without_a_search():
    asked = []
    with pytest.raises(InputError, match=r"almost idle cannot keep p90 TTFT <= 1 ms; the nearest promise"):
        planned("ttft=1ms@p90", serve=lambda *way: asked.append(way))
    assert not asked


def test_in_parallel_and_here_are_the_same():
    here, apart = (planned(options=SearchSettings(seeds=2, jobs=jobs)) for jobs in (1, 2))
    assert here.found == apart.found


def test_seeds_after_a_miss_are_run_only_for_the_row_that_is_shown():
    runs = []

    def counted(way, engines, seed, requests):
        runs.append((engines, seed))
        return round_robin(way, engines, seed, requests)

    options = SearchSettings(seeds=3)
    (found,) = planned("ttft=20ms@p90", options, counted, rate=1500.0).found
    (again,) = planned("ttft=20ms@p90", options.model_copy(update={"jobs": 2}), rate=1500.0).found
    assert found == again
    others = [size for size in found.sizes if size.engines < found.engines - 1]
    assert others and all(size.kept == size.seeds - 1 < 2 for size in others)  # up to the first that missed
    assert found.size(found.engines).kept == 3
    fewer = found.size(found.engines - 1)
    assert fewer.seeds == 3 and fewer.kept < 3
    assert len(set(runs)) == len(runs) == sum(size.seeds for size in found.sizes)


def test_runs_that_stop_miss_every_level():
    def broken(way, engines, seed, requests):
        raise RunError(STANDS)

    plan = planned(serve=broken, options=SearchSettings(seeds=2, most_engines=4), rate=10.0)
    assert plan.found[0].engines is None
    assert plan.found[0].sizes[-1].engines == 4 and plan.found[0].sizes[-1].kept == 0
    assert plan.notes == ("round robin + mixed with 4 engines: the run stopped: " + STANDS,)
    json.dumps(plan.as_dict(), allow_nan=False)


def test_levels_out_of_reach_are_named_with_the_nearest_that_can_be_kept():
    few = SearchSettings(seeds=2, most_engines=12)
    advice = out_of_reach(planned("ttft=12ms@p90,e2e=10h@p99", few))
    assert advice.startswith("12 engines with round robin + mixed cannot keep p90 TTFT <= 12 ms; ")
    nearest = advice.partition("--slo ")[2].partition(":")[0]
    (level,) = parse_levels([nearest])
    followed = planned(f"{nearest},e2e=10h@p99", few)
    assert followed.found[0].engines is not None and not out_of_reach(followed)
    barely = f"{level.metric}={level.limit * 0.99}s@{level.statistic}"
    assert planned(barely, few).found[0].engines is None


def test_out_of_reach_without_any_numbers():
    def broken(way, engines, seed, requests):
        raise RunError(STANDS)

    plan = planned(serve=broken, options=SearchSettings(seeds=1, most_engines=2), rate=10.0)
    assert out_of_reach(plan) == f"2 engines with round robin + mixed: the run stopped: {STANDS}"


def test_a_seed_that_stops_leaves_nothing_to_propose():
    def sometimes(way, engines, seed, requests):
        if seed:
            raise RunError(STANDS)
        return round_robin(way, engines, seed, requests)

    plan = planned("e2e=10h@p99", serve=sometimes, options=SearchSettings(seeds=2, most_engines=2), rate=10.0)
    assert (plan.found[0].sizes[-1].kept, plan.found[0].sizes[-1].stopped) == (1, 1)
    assert out_of_reach(plan) == f"2 engines with round robin + mixed: the run stopped: {STANDS}"


def test_an_interrupt_leaves_what_was_found():
    runs = []

    def impatient(way, engines, seed, requests):
        runs.append(engines)
        if len(runs) > 2:
            raise KeyboardInterrupt
        return round_robin(way, engines, seed, requests)

    plan = planned(serve=impatient)
    assert plan.interrupted and "unfinished" in plan.notes[0]
    judged = [(size.engines, size.seeds) for size in plan.found[0].sizes]
    assert judged == [(plan.least, 1), (plan.least + 1, 1)]  # each missed with the first seed
    runs += [1, 1]
    with pytest.raises(KeyboardInterrupt):
        planned(serve=impatient)


def test_the_load_of_a_trace():
    words = {"trace": "azure-conv", "rate": None, "prompt": None, "output": None, "requests": 200}
    options = SearchSettings(seeds=1)
    one = planned("e2e=10h@p99", options, **words)
    four = planned("e2e=10h@p99", options, scale_rate=4.0, **words)
    assert one.rate == pytest.approx(5.2, abs=0.1) and four.rate == pytest.approx(4 * one.rate)
    recorded = planned("e2e=10h@p99", SearchSettings(seeds=3, as_recorded=True), **words)
    assert len(recorded.start.seeds) == 1 and "no interval" in recorded.notes[0]
    assert recorded.found[0].sizes[0].shares["p99 E2E <= 36000 s"].low is None


def test_shares_and_busy_of_a_run():
    words = experiment(WORDS | {"rate": 20.0})
    from headgate.experiment.build import make_workload

    run = round_robin(WAYS["round robin + mixed"], 2, 0, make_workload(words)[0])
    kept = measure(run, parse_levels(["ttft=20ms@p50,tbt=10h@p99,e2e=1ms@p50"]))
    ttft = run.requests["first_token"] - run.requests["arrival"]
    assert kept.shares[0] == pytest.approx(np.mean(ttft[30:-30] <= 0.02))
    assert kept.shares[1:] == (1.0, 0.0)
    whole = run.steps["seconds"].sum() / (2 * (run.span()[1] - run.span()[0]))
    busy, slots = utilisation(run, 2, ENGINE.running)
    assert busy == pytest.approx(whole, rel=0.2)
    assert 0 < slots < busy


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"rate": None}, "needs a load: give --rate, or a trace"),
        ({"rate": 3.0, "scale_rate": 2.0}, "both set the load"),
        ({"rate": None, "trace": "sharegpt-8k", "prompt": None, "output": None}, "no arrival times"),
        ({"rate": 1e6}, "need at least"),
        ({"patience": 3.0}, "--patience lets requests leave"),
        ({"clients": 3}, "--clients is another kind of load"),
    ],
)
def test_what_is_refused(words, says):
    with pytest.raises(InputError, match=says):
        planned(**words)
