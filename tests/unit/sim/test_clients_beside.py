"""Clients of a class in a closed loop beside requests that come at times of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.core.request import Slo
from headgate.cost.card import load_card
from headgate.experiment.build import make_engine, make_workload, ran_out, too_long
from headgate.experiment.library import simulate, simulate_fleet
from headgate.experiment.run import Prepared, arrivals_said, carry_out, warning
from headgate.experiment.settings import experiment
from headgate.sim.engine.engine import Engine
from headgate.stats.flow import choose
from headgate.workloads.workload import Kind, Workload
from headgate_leaderboard.laws import fleet_world, try_laws, world
from worlds import PRICES, Line

CHAT, BATCH, EVAL = Kind("chat", Slo(1.0)), Kind("batch", Slo(background=True)), Kind("eval")
SECOND = Engine(Line(1.0, 0.0, 0.0, 0.0, 0.0), 10**6, 10**6, 4096, 8, 16)  # every step takes a second
SHORT = SECOND._replace(max_model_len=4096)


def beside(times, clients, rows=50, prompt=1, output=2, tenants=("",), kind=BATCH):
    """Chat of one token at these times, beside clients whose requests take two steps."""
    many = len(times)
    chat = Workload.of([5] * many, [1] * many, arrival=times, kinds=[CHAT], tenants=tenants[:1])
    closed = Workload.of(
        [prompt] * rows, [output] * rows, clients=clients, kinds=[kind], tenants=tenants[-1:]
    )
    return chat.merge(closed)


def test_a_client_sends_when_its_last_request_returns_and_stops_with_the_others():
    run = simulate(SECOND, "mixed", beside([0.5, 5.0], clients=1), asynchronous=False)
    sent = list(zip(run.requests["kind"].tolist(), run.requests["arrival"].tolist(), strict=True))
    assert sent == [(1, 0.0), (0, 0.5), (1, 2.0), (1, 4.0), (0, 5.0)]  # at 6.0 none with a time is to come
    assert run.requests["output"].tolist() == [2, 1, 2, 2, 1] and run.requests["prompt"].tolist() == [
        1,
        5,
        1,
        1,
        5,
    ]
    assert run.completed().all() and run.meta["load"] == "open" and run.meta["clients_beside"] == {"batch": 1}
    assert run.meta["workload"]["requests"] == 2 and run.meta["clients"] is None


def test_a_request_with_a_time_goes_before_one_that_a_client_sends_at_that_moment():
    run = simulate(SECOND, "mixed", beside([2.0, 9.0], clients=1), asynchronous=False)
    assert run.requests["kind"].tolist()[:3] == [1, 0, 1] and run.requests["arrival"].tolist()[1:3] == [
        2.0,
        2.0,
    ]


@pytest.mark.parametrize("policy", ["mixed", "keep", "slai", "eb+"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_leases_change_nothing(asynchronous, policy):
    draw = np.random.default_rng(1)
    requests = beside(np.sort(draw.uniform(0, 20, 40)), clients=6, output=9)
    engine = SECOND._replace(cost=PRICES, running=16)
    runs = [
        simulate(engine, policy, requests, leases=leases, asynchronous=asynchronous)
        for leases in (True, False)
    ]
    for name, column in runs[0].requests.items():
        assert np.array_equal(column, runs[1].requests[name], equal_nan=True), name


def outstanding(run, kind):
    mine = run.requests["kind"] == kind
    came, left = run.requests["arrival"][mine], run.requests["finished"][mine]
    return max(int(np.sum((came <= time) & (left > time))) for time in came)


def test_each_class_has_clients_of_its_own_and_keeps_its_columns_in_a_fleet_too():
    draw = np.random.default_rng(2)
    requests = beside(np.sort(draw.uniform(0, 15, 60)), clients=5, output=9, tenants=("ours", "theirs"))
    other = Workload.of(
        [77] * 300, [4] * 300, clients=3, kinds=[EVAL], tenants=["theirs"], patience=1e6, abort=1e6
    )
    requests = requests.merge(other)
    engine = SECOND._replace(cost=PRICES, running=8)
    fleet = simulate_fleet(engine, "mixed", "least-loaded", requests, engines=2)
    for run in (simulate(engine, "mixed", requests), fleet):
        assert [kind["name"] for kind in run.kinds] == ["chat", "batch", "eval"]
        assert (outstanding(run, 1), outstanding(run, 2)) == (5, 3)
        lengths = {0: (5, 1), 1: (1, 9), 2: (77, 4)}
        for kind, pair in lengths.items():
            mine = run.requests["kind"] == kind
            assert {
                *zip(
                    run.requests["prompt"][mine].tolist(), run.requests["output"][mine].tolist(), strict=True
                )
            } == {pair}
        assert run.tenants == ["ours", "theirs"]
        assert np.array_equal(run.requests["tenant"], (run.requests["kind"] > 0).astype(int))
        assert (np.diff(run.requests["arrival"]) >= 0).all() and int((run.requests["kind"] == 0).sum()) == 60


def mixed(**words):
    chat = {"name": "chat", "share": 1, "prompt": 100, "output": 20, "ttft": 0.5, "weight": 3.0}
    batch = {
        "name": "batch",
        "clients": 4,
        "prompt": 300,
        "output": 50,
        "background": True,
        "tenant": "night",
    }
    return experiment({"rate": 5.0, "requests": 40, "classes": [chat, batch]} | words)


def test_a_mix_has_both_and_a_trace_too():
    drawn, _ = make_workload(mixed())
    assert drawn.beside and not drawn.closed and int((drawn.clients == 0).sum()) == 40
    assert drawn.kinds[0].slo == Slo(0.5, weight=3.0) and drawn.kinds[1].slo == Slo(background=True)
    assert {*drawn.clients[drawn.kind == 1].tolist()} == {4} and drawn.tenants == ("", "night")
    batch = mixed().classes[1].model_dump()
    traced, _ = make_workload(
        experiment({"trace": "azure-conv", "requests": 40, "ttft": 0.7, "classes": [batch]})
    )
    assert [kind.slo for kind in traced.kinds] == [
        Slo(0.7),
        Slo(background=True),
    ]  # promised to the trace alone


def test_clients_leave_the_draws_of_the_others_as_they_were():
    both, _ = make_workload(mixed())
    alone, _ = make_workload(mixed(classes=[mixed().classes[0].model_dump()]))
    assert replace(both.subset(both.kind == 0), kinds=alone.kinds, tenants=alone.tenants) == alone


def test_a_class_may_be_there_for_several_tenants():
    chat = {"name": "chat", "prompt": 100, "output": 20, "ttft": 0.5}
    classes = [chat | {"tenant": "a", "share": 3}, chat | {"tenant": "b", "share": 1}]
    drawn, _ = make_workload(experiment({"rate": 5.0, "requests": 4000, "classes": classes}))
    assert [kind.name for kind in drawn.kinds] == ["chat"] and drawn.tenants == ("a", "b")
    assert np.mean(drawn.tenant == 0) == pytest.approx(0.75, abs=0.03)
    assert not np.array_equal(drawn.prompt[drawn.tenant == 0][:50], drawn.prompt[drawn.tenant == 1][:50])


def test_a_class_with_clients_may_be_there_for_several_tenants():
    chat, batch = (share.model_dump() for share in mixed().classes)
    words = mixed(classes=[chat, batch | {"tenant": "x"}, batch | {"tenant": "y", "clients": 3}])
    requests, _ = make_workload(words)
    run = simulate(SECOND._replace(cost=PRICES, running=16), "mixed", requests)
    mine = run.requests["kind"] == 1
    at_start = run.requests["tenant"][mine & (run.requests["arrival"] == 0)]
    assert sorted(run.tenants[number] for number in at_start.tolist()) == ["x"] * 4 + ["y"] * 3
    assert outstanding(run, 1) == 7 and run.meta["clients_beside"] == {"batch": 7}
    assert arrivals_said(words).endswith("requests/s, beside 7 clients of batch")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"clients": 3}, "classes.batch: clients in two tables of one tenant"),
        ({"clients": None, "share": 1, "tenant": "x"}, "classes.batch: share and clients in two tables"),
    ],
)
def test_tables_of_one_name_that_contradict_each_other(second, message):
    chat, batch = (share.model_dump() for share in mixed().classes)
    with pytest.raises(InputError, match=message):
        make_workload(mixed(classes=[chat, batch, batch | second]))


def test_clients_none_of_whose_prompts_fits_are_refused():
    requests = beside([0.5, 5.0], clients=1, prompt=5000)
    for serve in (
        lambda: simulate(SHORT, "mixed", requests),
        lambda: simulate_fleet(SHORT, "mixed", "least-loaded", requests, engines=2),
        lambda: too_long(requests, SHORT),
    ):
        with pytest.raises(InputError, match=r"classes.batch: no request of its clients fits.*--cap-prompt"):
            serve()


def test_requests_of_clients_that_are_refused_are_no_part_of_what_is_measured():
    chat = beside(np.arange(0.5, 60.5), clients=2, rows=1000)
    long = Workload.of([5000] * 900 + [7] * 100, [2] * 1000, clients=2, kinds=[EVAL])
    run = simulate(SHORT, "mixed", chat.merge(long), asynchronous=False)
    assert (run.requests["prompt"] == 5000).sum() == 900 and (run.requests["arrival"] == 0).sum() > 900
    kept = choose(run).keep
    assert kept[run.requests["kind"] == 0].sum() >= 45 and not kept[run.requests["prompt"] == 5000].any()


def test_clients_get_no_more_requests_than_engines_can_serve_in_the_time():
    classes = [
        mixed().classes[0].model_dump(),
        {"name": "batch", "clients": 192, "prompt": 2000, "output": 64},
    ]
    long = mixed(rate=1.0, requests=3600, classes=classes)
    drawn, _ = make_workload(long)
    assert 70_000 < (drawn.clients > 0).sum() < 200_000  # 19 a second are the most, twice that is drawn
    short, _ = make_workload(mixed(rate=5.0, requests=50, classes=classes))
    run = simulate(make_engine(long, load_card(long.card)), "mixed", short)
    assert not ran_out(run, short)


def test_a_run_says_that_its_clients_fell_silent(monkeypatch):
    assert warning(carry_out(Prepared(mixed()), "mixed", {})) is None
    monkeypatch.setattr("headgate.experiment.build.MOST_SENT", 5)
    run = carry_out(Prepared(mixed()), "mixed", {})
    assert run.meta["clients_ran_out"] == {"batch": 5}
    assert "mixed: clients of batch sent all 5 requests drawn for them" in warning(run)


@pytest.mark.parametrize("weight", [0.0, 2e9])
def test_a_mix_refuses_weights_that_mean_nothing(weight):
    chat, batch = (share.model_dump() for share in mixed().classes)
    with pytest.raises(
        InputError, match=r"classes.chat: weight=.*; give (a number above 0|at most 1,000,000,000)"
    ):
        make_workload(mixed(classes=[chat | {"weight": weight}, batch]))


def test_laws_are_tried_in_worlds_with_clients_beside_an_open_loop():
    worlds = [world(number) for number in range(40)]
    assert 5 <= sum(at.workload.beside for at in worlds) <= 20
    at = next(at for at in worlds if at.workload.beside)
    assert not fleet_world(at.number).workload.beside
    assert try_laws("keep", {}, 1, at.number).kept
