"""Capacity by search: against a policy whose capacity is known, classes, traces, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headgate.advisor.capacity.plan import plan_capacity
from headgate.advisor.capacity.traffic import make_traffic, parse_classes, parse_levels
from headgate.advisor.set_up import Asked
from headgate.advisor.settings import SearchSettings
from headgate.core.errors import InputError
from headgate.experiment.settings import experiment
from headgate.sim.engine.engine import Engine
from worlds import PRICES

LEVELS = parse_levels(["ttft=2s@p50"])
ENGINE = Engine(PRICES, 100_000, 8192, 512, 16)


def planned(policies=("mixed",), levels="ttft=2s@p50", options=None, **words):
    base = {"slots": 32, "budget": 1024, "prompt": 200, "output": 40, "requests": 150} | words
    chosen = options or SearchSettings(seeds=2)
    return plan_capacity(experiment(base), policies, Asked(parse_levels([levels]), chosen))


def test_what_a_plan_says():
    plan = planned(("mixed", "eb:refill=8"), "ttft=150ms@p90")
    assert [each.policy for each in plan.found] == ["mixed", "eb:refill=8"]
    for each in plan.found:
        assert 0 < each.rate.value <= plan.ideal.rate
        assert each.rate.low < each.rate.value < each.rate.high
        assert each.share == pytest.approx(each.rate.value / plan.ideal.rate)
        assert each.limited_by == "p90 TTFT <= 150 ms"
        assert each.values["p90 TTFT <= 150 ms"] <= 0.15
        assert len(each.by_seed) == 2
    assert plan.limited.rate <= plan.ideal.rate * (1 + 1e-9)
    document = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert document["policies"][0]["rate"]["value"] == plan.found[0].rate.value
    assert document["bound"]["rate"] == plan.ideal.rate


def test_graphs_that_confine_keep_are_named():
    words = {"card": "cal-h200-qwen3-30b-a3b", "graph": 512, "requests": 40}
    for policy, levels, said in (
        ("keep", "ttft=2s@p90,tbt=100ms", True),
        ("keep", "ttft=2s@p90,tpot=100ms", True),
        ("keep", "ttft=2s@p90", False),
        ("slai", "ttft=2s@p90,tbt=100ms", False),
    ):
        plan = planned((policy,), levels, SearchSettings(seeds=1, precision=0.3), **words)
        assert any("steps of at most 512 tokens" in note for note in plan.notes) == said


def test_a_sustained_rate_is_sustained_and_a_little_more_is_not():
    plan = planned(levels="ttft=100ms@p90", options=SearchSettings(seeds=1, precision=0.01))
    found = plan.found[0]
    traffic = make_traffic(
        experiment({"prompt": 200, "output": 40, "requests": 150}),
        plan.traffic.levels,
        None,
        150,
        False,
        plan.start.engine,
    )
    from headgate.advisor.capacity.trials import Case, RateTrial

    case = Case(plan.start.engine, traffic, 3600.0, asynchronous=True)
    below, above = (
        case.run(RateTrial("mixed", {}, None, 0, found.rate.value * by)).ratio for by in (0.97, 1.03)
    )
    assert below <= 1 < above


def test_a_level_that_never_binds_and_one_that_cannot_be_kept():
    loose, hard = planned(levels="e2e=10h@p99"), planned(levels="ttft=12ms@p50")
    assert loose.found[0].share == pytest.approx(1.0)
    assert loose.found[0].limited_by == ""
    assert hard.found[0].rate.value == 0
    assert 0.001 < hard.found[0].values["p50 TTFT <= 12 ms"] < 0.1  # at the lowest rate tried


def test_in_parallel_and_here_are_the_same():
    here, apart = (planned(("mixed", "v0"), options=SearchSettings(seeds=2, jobs=jobs)) for jobs in (1, 2))
    assert here.found == apart.found


def test_all_means_those_that_need_nothing():
    plan = planned(("all",), options=SearchSettings(seeds=1, precision=0.4), requests=40)
    names = [each.policy for each in plan.found]
    assert {"mixed", "v0", "eb+"} <= set(names)
    assert "eb" not in names
    assert "left out, for want of parameters: eb" in plan.notes[0]


def test_classes_promises_and_priorities():
    levels = parse_levels(["ttft=1s@p50,tbt=100ms@p99:paying,tbt=500ms:free"])
    words = experiment({"trace": "sharegpt-8k"})
    traffic = make_traffic(words, levels, "paying=5%,free=95%", 4000, False, ENGINE)
    drawn = traffic.at(2.0, 3)
    assert len(drawn) == 4000
    assert np.mean(drawn.kind == 0) == pytest.approx(0.05, abs=0.015)
    assert [kind.name for kind in drawn.kinds] == ["paying", "free"]
    assert [tuple(kind.slo[:3]) for kind in drawn.kinds] == [(1.0, 0.1, "gap"), (1.0, 0.5, "gap")]
    assert np.array_equal(drawn.priority, drawn.kind)
    assert 4000 / drawn.arrival[-1] == pytest.approx(2.0, rel=0.06)
    again, faster = traffic.at(2.0, 3), traffic.at(4.0, 3)
    assert again == drawn
    assert np.array_equal(faster.prompt, drawn.prompt)
    assert faster.arrival == pytest.approx(drawn.arrival / 2)
    assert not np.array_equal(traffic.at(2.0, 4).prompt, drawn.prompt)
    assert traffic.lengths(ENGINE).prompts.mean() == pytest.approx(2340, abs=1)


def test_a_trace_as_recorded_keeps_its_bursts():
    traffic = make_traffic(experiment({"trace": "azure-code"}), LEVELS, None, 1500, True, ENGINE)
    own, faster = traffic.at(3.0, 0), traffic.at(6.0, 5)
    assert len(own) == 2146
    assert (len(own) - 1) / own.arrival[-1] == pytest.approx(3.0)
    assert faster.arrival == pytest.approx(own.arrival / 2)
    assert not traffic.drawn
    plan = planned(
        options=SearchSettings(as_recorded=True, seeds=3),
        trace="azure-code",
        requests=200,
        prompt=None,
        output=None,
    )
    assert len(plan.found[0].by_seed) == 1
    assert plan.found[0].rate.low is None
    assert "no interval" in plan.notes[0]


def test_a_mix_brings_its_own_classes():
    mix = [
        {"name": "chat", "share": 1, "prompt": 50, "output": 20, "tpot": 0.2},
        {"name": "code", "share": 3, "prompt": 500, "output": 500},
    ]
    levels = parse_levels(["ttft=1s@p50:code"])
    traffic = make_traffic(experiment({"classes": mix}), levels, None, 100, False, ENGINE)
    kinds = traffic.at(1.0, 0).kinds
    assert [tuple(kind.slo[:3]) for kind in kinds] == [(None, 0.2, "mean"), (1.0, None, "gap")]


@pytest.mark.parametrize(
    ("words", "options", "says"),
    [
        ({"rate": 3.0}, {}, "in a capacity search --rate is what is searched for; drop it"),
        ({"clients": 3}, {}, "--clients is another kind of load"),
        ({"patience": 3.0}, {}, "--patience lets requests leave"),
        ({"ttft": 3.0}, {}, "--ttft belongs into --slo"),
        ({"trace": "azure-conv", "scale_rate": 2.0}, {}, "--scale-rate is what is searched for"),
        ({"arrivals": "all-at-once"}, {}, "has no rate to search for"),
        ({}, {"recorded": True}, "--as-recorded is about traces"),
        ({"trace": "sharegpt-8k"}, {"recorded": True}, "the trace has no arrival times"),
        ({"trace": "azure-conv", "burstiness": 0.5}, {"recorded": True}, "drop one of the two"),
        ({}, {"classes": "paying"}, "--classes 'paying' is not NAME=SHARE; write paying=5%,free=95%"),
        ({}, {"classes": "paying=0"}, "is not NAME=SHARE"),
        ({}, {"classes": "a=1,a=2"}, "names 'a' twice"),
        ({"classes": [{"name": "a", "share": 1}]}, {"classes": "b=1"}, "--classes and the classes of a mix"),
    ],
)
def test_what_a_search_refuses(words, options, says):
    classes, recorded = options.get("classes"), options.get("recorded", False)
    with pytest.raises(InputError) as caught:
        make_traffic(experiment(words), LEVELS, classes, 100, recorded, ENGINE)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        (None, "class 'gold', which no request belongs to; name a class column"),
        ("silver=1,free=2", "class 'gold', which no request belongs to; choose from: silver, free"),
    ],
)
def test_a_level_of_an_unknown_class(classes, says):
    with pytest.raises(InputError, match=says):
        make_traffic(experiment({}), parse_levels(["ttft=1s@p50:gold"]), classes, 100, False, ENGINE)


def test_shares_with_and_without_percent():
    assert parse_classes("paying=5%,free=95") == (("paying", 5.0), ("free", 95.0))
    assert parse_classes(None) == ()


def test_a_policy_twice_or_misspelled():
    with pytest.raises(InputError, match="is there twice"):
        planned(("mixed", "mixed"))
    with pytest.raises(InputError, match="did you mean 'mixed'"):
        planned(("mixd",))


def test_classes_of_a_trace_are_drawn_with_their_lengths(tmp_path):
    rows = (f"{place},{'900,10,b' if place % 4 == 0 else '100,20,a'}\n" for place in range(80))
    (tmp_path / "own.csv").write_text("at,in,out,who\n" + "".join(rows))
    columns = "arrival=at,prompt=in,output=out,class=who"
    words = experiment({"trace": str(tmp_path / "own.csv"), "columns": columns})
    traffic = make_traffic(words, parse_levels(["ttft=1s@p95:b"]), None, 500, False, ENGINE)
    drawn = traffic.at(5.0, 0)
    names = np.array([drawn.kinds[place].name for place in drawn.kind])
    assert set(drawn.prompt[names == "b"]) == {900} and set(drawn.prompt[names == "a"]) == {100}
    assert {kind.name: kind.slo[0] for kind in drawn.kinds} == {"a": None, "b": 1.0}
