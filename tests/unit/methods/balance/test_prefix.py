"""Routers that know prefixes: seconds saved against seconds waited."""

from __future__ import annotations

import pytest

from headgate.core.errors import InputError
from headgate.core.ledger import Entry, Ledger
from headgate.core.view import Limits
from headgate.experiment.fleet import FleetSetup
from headgate.methods.balance.prefix import Overlap, PrefixAware, PrefixIndex, Sharing
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import Engine
from headgate.workloads.contents import Contents
from headgate.workloads.workload import Workload
from worlds import Line

PRICE = Line(fixed=0.0, prefill=1.0, behind=0.0)  # a second a token
LEDGER = Ledger(Limits(64, 8, 16), 1000)


def request(id, prompt):
    return Entry(LEDGER, id, 0.0, prompt, 10)


def router(contents, make=PrefixAware, kv=10_000, draw=lambda: 0.0, **more):
    sharing = Sharing(lambda request: contents.get(request.id), PRICE, kv, 16)
    return make(2, draw, sharing, **more)


def test_a_prefix_is_worth_the_seconds_it_saves():
    made = router({n: [(1, 64), (10 + n, 36)] for n in range(9)})
    chosen = []
    for id in range(4):
        made.arrived(one := request(id, 100), 0.0)
        chosen.append(made.lift(one))  # and it is gone at once
    assert chosen == [0, 0, 0, 0]  # nobody waits: the one that has the prefix
    made.arrived(request(4, 100), 0.0)  # 36 s wait on engine 0
    made.arrived(request(5, 100), 0.0)
    made.arrived(request(6, 100), 0.0)  # 72 + 36 s there, 100 s on engine 1
    assert [made._weights[id][0] for id in (4, 5, 6)] == [0, 0, 1]


def test_work_that_is_done_waits_no_more():
    made = router({0: [(1, 100)]})
    made.arrived(one := request(0, 100), 0.0)
    assert made._waits[0] == 100.0
    made.prefilled(one, 0, 1.0)
    assert made._waits[0] == 0.0
    made.finished(one, 0, 2.0)
    assert made._waits[0] == 0.0 and made.loads.total == 0


def test_without_contents_it_is_the_fewest_tokens():
    made = router({})
    for id, prompt in enumerate([100, 30, 30, 30, 30]):
        made.arrived(request(id, prompt), 0.0)
    assert [made._weights[id][0] for id in range(5)] == [0, 1, 1, 1, 1]


def test_overlap_counts_blocks_in_use_too():
    made = router({n: [(1, 160)] for n in range(9)}, Overlap)
    made.arrived(first := request(0, 160), 0.0)
    assert made._waits[0] == 20.0  # ten blocks to compute, ten in use
    made.prefilled(first, 0, 1.0)
    assert made._waits[0] == 10.0
    made.arrived(request(1, 160), 1.0)  # 10 + 1 + 10 on engine 0, 10 + 10 on engine 1
    assert made._weights[1][0] == 1
    with pytest.raises(InputError, match="weight=-1 is below 0"):
        router({}, Overlap, weight=-1)


def test_an_index_forgets_what_was_sent_first():
    index = PrefixIndex(kv_tokens=64, block=16)
    for key in (1, 2, 3):
        index.sent([(key, 32)], 32)
    assert [index.cached([(key, 33)], 33) for key in (1, 2, 3)] == [0, 32, 32]
    index.sent([(9, 640)], 640)  # more than an engine holds
    assert index.cached([(9, 640)], 640) == 0


def test_a_fleet_keeps_conversations_where_their_kv_is():
    rows = [[(talk, 64 + 32 * turn)] for turn in range(8) for talk in range(7)]
    prompts = [row[0][1] for row in rows]
    times = [40.0 * place for place in range(len(rows))]
    workload = Workload.of(prompts, [16] * len(rows), arrival=times, contents=Contents.of(rows))
    setup = FleetSetup(Engine(Line(), 1600, 1000, 256, 4, 16), 3)
    hits = {}
    for name in ("round-robin", "prefix-aware"):
        made, _ = setup.router(name, {}, workload)
        run = setup.run(lambda role: Mixed(slots=4, budget=256), made, workload)
        hits[name] = int(run.requests["cached"].sum())
    assert hits["prefix-aware"] > hits["round-robin"] > 0
