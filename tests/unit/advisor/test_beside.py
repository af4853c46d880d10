"""How much batch fits beside chat: the bound, what policies leave, levels and background work, overload."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headgate.advisor.capacity.beside import (
    REQUESTS,
    plan_beside,
    tokens_bound,
    unpromised,
    with_promises,
)
from headgate.advisor.capacity.plan import choose, plan_capacity
from headgate.advisor.capacity.traffic import make_traffic, parse_levels, promise
from headgate.advisor.set_up import BY_TENANT, Asked, set_up
from headgate.advisor.settings import SearchSettings
from headgate.core.errors import InputError
from headgate.core.request import Slo
from headgate.cost.card import load_card
from headgate.experiment.build import make_engine
from headgate.experiment.settings import experiment
from headgate.report.plans.advise import background_said
from headgate.report.plans.capacity import beside_page, left_said

CHAT = {"name": "chat", "share": 1, "prompt": 500, "output": 60, "ttft": 0.5, "tbt": 0.1}
BATCH = {"name": "batch", "clients": 24, "prompt": 1000, "output": 80, "background": True}
ONE = SearchSettings(seeds=1)


def words(*classes, **more):
    return experiment({"rate": 6.0, "requests": 120, "slots": 64, "classes": classes or (CHAT, BATCH)} | more)


def planned(policies=("keep", "mixed"), options=ONE, levels="", **more):
    asked = words(**more)
    chosen, _ = choose(policies, asked, make_engine(asked, load_card(asked.card)))
    return plan_beside(asked, chosen, Asked(parse_levels([levels]) if levels else (), options))


def test_a_plan_says_the_bound_and_what_each_policy_leaves():
    plan = planned()
    assert [str(level) for level in plan.traffic.levels] == [
        "p95 TTFT of chat <= 500 ms",
        "p99 TBT of chat <= 100 ms",
    ]
    assert (plan.name, plan.clients, plan.rate, plan.engines) == ("batch", 24, 6.0, 1)
    for each in plan.found:
        assert 0 < each.tokens.value <= plan.bound and each.share == each.tokens.value / plan.bound
        assert each.unanswered == 0
    assert plan.best.policy == "keep" and plan.best.kept > 0.95
    document = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert document["best"] == "keep" and document["bound"]["tokens_per_second"] == plan.bound
    page = beside_page(plan, [])
    assert (
        "tokens/s of batch (24 clients) fit beside 6.000 requests/s on one engine with keep"
        in page.chapters[0].verdict
    )


def test_the_bound_is_a_straight_line_between_batch_alone_and_chat_alone():
    start = set_up(words(rate=None), Asked(with_promises(words(), ()), ONE), REQUESTS)
    batch_alone, chat_alone = tokens_bound(start, 0.0)
    half, _ = tokens_bound(start, 0.5 * chat_alone)
    assert half == pytest.approx(0.5 * batch_alone, rel=0.02)  # prices of a linear card add up
    assert tokens_bound(start, chat_alone)[0] == 0.0 == tokens_bound(start, 2 * chat_alone)[0]


def test_the_bound_counts_tenants_by_their_clients():
    def bound(*batch):
        asked = words(CHAT, *batch, rate=None)
        return tokens_bound(set_up(asked, Asked(with_promises(asked, ()), ONE), REQUESTS), 0.0)[0]

    short, long = BATCH | {"tenant": "x"}, BATCH | {"tenant": "y", "prompt": 3000}
    many_short = bound(short | {"clients": 63}, long | {"clients": 1})
    assert many_short == pytest.approx(bound(short), rel=0.02) != pytest.approx(bound(long), rel=0.05)


def test_engines_share_the_load():
    one, two = planned(("keep",)), planned(("keep",), engines=2, rate=12.0)
    assert two.bound == pytest.approx(2 * one.bound) and two.engines == 2
    assert "12.00 requests/s on 2 engines" in beside_page(two, []).chapters[0].verdict


def test_a_share_of_the_mix_becomes_clients_for_every_slot():
    batch = {key: value for key, value in BATCH.items() if key != "clients"} | {"share": 1}
    plan = planned(("keep",), classes=(CHAT, batch))
    assert plan.clients == 64 and plan.found[0].tokens.value > 0
    assert plan.rate == 3.0 and plan.bound == pytest.approx(planned(("keep",), rate=3.0).bound, rel=0.01)
    assert plan.notes[0].startswith("batch has 50 % of the rate and comes from clients instead; the others")


def test_a_plan_says_how_many_requests_ran():
    assert planned(("mixed",)).requests == 120
    plan = planned(("mixed",), rate=0.25)
    assert plan.requests == plan.as_dict()["requests_per_run"] == 75
    assert any(note.startswith("runs have 75 requests with a promise, not 120") for note in plan.notes)
    assert "75 requests with a promise" in str(beside_page(plan, []).chapters[0].sections[0])


def test_only_policies_that_ran_are_said_to_miss_the_levels():
    plan = planned(("mixed", "sarathi"), levels="ttft=1ms@p50")
    assert left_said(plan).startswith(
        "None of mixed and sarathi keeps these levels beside 24 clients of batch"
    )
    assert left_said(planned(("mixed",), levels="ttft=1ms@p50")).startswith(
        "mixed does not keep these levels"
    )


def test_advise_speaks_of_its_own_answer_first():
    plan = planned()  # mixed and keep
    said = background_said("mixed", plan)
    assert plan.best.policy == "keep" and "mixed" in said.partition(" With keep: ")[0]
    assert said.endswith("of the promises are kept.") and " With " not in background_said("keep", plan)


def test_one_class_for_two_tenants_is_one_class():
    batch = BATCH | {"clients": 8}
    plan = planned(("keep",), classes=(CHAT, batch | {"tenant": "x"}, batch | {"tenant": "y"}))
    assert (plan.name, plan.clients) == ("batch", 16) and plan.found[0].tokens.value > 0
    shared = {key: value for key, value in BATCH.items() if key != "clients"}
    tenants = (shared | {"tenant": "x", "share": 3}, shared | {"tenant": "y", "share": 1})
    start = planned(("keep",), classes=(CHAT, *tenants)).start
    assert [each.clients for each in start.settings.classes] == [None, 48, 16]


def test_too_much_chat_leaves_nothing():
    plan = planned(("mixed",), rate=500.0)
    assert plan.bound == 0.0 and "Nothing is left to batch" in beside_page(plan, []).chapters[0].verdict


@pytest.mark.parametrize(
    ("classes", "levels", "message"),
    [
        ((CHAT,), "", "no class is without a promise"),
        ((CHAT, BATCH, BATCH | {"name": "eval"}), "", "one class without a promise, there are batch, eval"),
        ((BATCH | {"share": 1, "clients": None},), "ttft=1s@p50", "nothing comes beside batch"),
    ],
)
def test_mixes_that_do_not_ask_it(classes, levels, message):
    with pytest.raises(InputError, match=message):
        unpromised(words(*classes), parse_levels([levels]) if levels else ())


def test_nothing_promised_is_no_question():
    with pytest.raises(InputError, match="nothing is promised; give --slo"):
        with_promises(words({"name": "chat", "share": 1}, BATCH), ())


def test_clients_whose_prompts_do_not_fit_are_refused_before_any_search():
    engine = make_engine(words(), load_card("cal-h200-qwen3-8b"))
    levels = parse_levels(["ttft=1s@p95:chat"])
    asked = words(CHAT, BATCH | {"prompt": 900_000}, rate=None)
    with pytest.raises(InputError, match=r"classes.batch: no request of its clients fits"):
        make_traffic(asked, levels, None, 100, False, engine)
    cut = asked.model_copy(update={"cap_prompt": 2000, "trace": "azure-conv", "classes": asked.classes[1:]})
    drawn = make_traffic(cut, levels[:0], None, 100, False, engine).at(5.0, 0)
    assert drawn.prompt[drawn.clients > 0].max() == 2000


def test_levels_of_all_are_not_about_background_work():
    levels = parse_levels(["ttft=1s@p95,tbt=200ms@p99"])
    assert promise(levels, "chat", Slo()) == Slo(1.0, 0.2)
    assert promise(levels, "batch", Slo(background=True)) == Slo(background=True)
    engine = make_engine(words(), load_card("cal-h200-qwen3-8b"))
    traffic = make_traffic(words(rate=None), levels, None, 100, False, engine)
    kinds = {kind.name: kind.slo for kind in traffic.at(5.0, 0).kinds}
    assert kinds == {"chat": Slo(1.0, 0.2), "batch": Slo(background=True)}
    assert traffic.background_said.startswith("levels without a class are not about background work (batch)")
    with pytest.raises(InputError, match="class 'batch', which is background work"):
        make_traffic(words(rate=None), parse_levels(["ttft=1s@p95:batch"]), None, 100, False, engine)


def test_the_rate_of_chat_is_searched_beside_the_clients():
    settings = {"requests": 150, "slots": 64, "rate": None}
    levels = parse_levels(["ttft=500ms@p95:chat"])
    asks = Asked(levels, SearchSettings(seeds=1, precision=0.2))
    alone = plan_capacity(words(CHAT, **settings), ["keep"], asks)
    beside = plan_capacity(words(CHAT, BATCH, **settings), ["keep"], asks)
    assert beside.ideal.rate == pytest.approx(alone.ideal.rate)  # the bound is of what comes at the rate
    assert 0 < beside.best.rate.value <= 1.05 * alone.best.rate.value


def test_a_trace_keeps_its_tenants_when_rows_are_drawn(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(
        "arrival,prompt,output,tenant\n" + "".join(f"{n},{100 + n},9,{'ab'[n % 2]}\n" for n in range(20))
    )
    engine = make_engine(words(), load_card("cal-h200-qwen3-8b"))
    settings = experiment({"trace": str(path)})
    drawn = make_traffic(settings, parse_levels(["ttft=1s@p95"]), None, 200, False, engine).at(5.0, 3)
    asks = Asked(parse_levels(["ttft=1s@p95"]), SearchSettings(seeds=1))
    assert BY_TENANT in set_up(settings, asks, 200).notes(fleet=False)
    assert drawn.tenants == ("a", "b") and np.array_equal(drawn.tenant, (drawn.prompt - 100) % 2)
