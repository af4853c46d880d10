"""Mixed batching: every decode in every step, the budget filled to the last token, prompts in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.ledger import Ledger
from headgate.core.plan import ALL, Plan, Until, check
from headgate.core.view import Limits
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Workload
from worlds import Line, admitted, batches, engines, run, workloads


def state(decoding=0, halves=(), waiting=(), running=64, kv_free=10**6, block=1, width=1) -> Ledger:
    """So many decodes, then half-done prompts and waiting ones by the tokens they still need."""
    ledger = Ledger(Limits(batch_tokens=10**6, running=running, block=block, decode_width=width), 10**6)
    ledger.kv_free = kv_free
    return admitted(ledger, decoding, halves, waiting)


def planned(policy: Mixed, view: Ledger) -> Plan:
    plan = policy.plan(view)
    assert check(plan, view) == []
    return plan


def test_prompts_in_order_until_the_budget_is_full():
    plan = planned(Mixed(slots=64, budget=100), state(decoding=10, waiting=[30, 30, 30, 30]))
    assert plan == Plan(ALL, (10, 11, 12), 100)  # 10 + 30 + 30 + 30: the fourth gets nothing
    assert planned(Mixed(64, 101), state(decoding=10, waiting=[30] * 4)).prefill == (10, 11, 12, 13)


def test_half_done_prompts_first_and_without_a_new_slot():
    view = state(decoding=2, halves=[20], waiting=[10, 10], running=4)
    assert planned(Mixed(slots=4, budget=100), view).prefill == (2, 3)
    assert planned(Mixed(slots=3, budget=100), view).prefill == (2,)
    assert planned(Mixed(slots=4, budget=22), view).prefill == (2,)
    assert planned(Mixed(slots=4, budget=23), view).prefill == (2, 3)
    two = state(decoding=2, halves=[20, 10], waiting=[10], running=5)
    assert planned(Mixed(slots=5, budget=22), two).prefill == (2,)
    assert planned(Mixed(slots=5, budget=32), two).prefill == (2, 3)
    assert planned(Mixed(slots=5, budget=33), two).prefill == (2, 3, 4)


def test_slots_of_policy_and_engine():
    for slots, running, prompts in ((64, 64, 5), (12, 64, 2), (64, 11, 1), (10, 64, 0), (64, 10, 0)):
        view = state(decoding=10, waiting=[3] * 5, running=running)
        assert len(planned(Mixed(slots, 100), view).prefill) == prompts


def test_decodes_alone_until_something_can_change():
    assert planned(Mixed(64, 100), state(decoding=3)) == Plan(ALL, until=Until(arrivals=1))
    full = state(decoding=3, waiting=[5], running=3)
    assert planned(Mixed(64, 100), full) == Plan(ALL, until=Until(finishes=1))
    assert planned(Mixed(3, 3), state(decoding=3, waiting=[5])).prefill == ()


def test_the_head_that_does_not_fit_holds_up_the_queue():
    """No overtaking: a short prompt behind one that does not fit waits too."""
    assert planned(Mixed(64, 100), state(3, waiting=[50, 2], kv_free=49)) == Plan(
        ALL, until=Until(finishes=1)
    )
    assert planned(Mixed(64, 100), state(3, waiting=[50, 2], kv_free=50)).prefill == (3, 4)
    assert planned(Mixed(64, 100), state(3, waiting=[17, 2], kv_free=16, block=16)).prefill == ()
    assert planned(Mixed(64, 100), state(3, waiting=[17, 2], kv_free=32, block=16)).prefill == (3, 4)


def test_speculation_takes_more_of_the_budget():
    assert planned(Mixed(8, 20), state(decoding=4, waiting=[5, 5, 5], width=4)).prefill == (4,)
    assert planned(Mixed(8, 16), state(decoding=4, waiting=[5], width=4)).prefill == ()


@pytest.mark.parametrize("waiting", [(5,), ()], ids=["somebody waits", "nobody waits"])
def test_taking_over_an_engine_that_is_too_full_runs_the_oldest(waiting):
    """The budget is the budget, with nobody waiting too."""
    plan = planned(Mixed(slots=4, budget=4), state(decoding=6, waiting=waiting))
    assert plan.decode == frozenset({0, 1, 2, 3})
    wide = planned(Mixed(slots=4, budget=5), state(decoding=6, waiting=waiting, width=2))
    assert wide.decode == frozenset({0, 1})


@pytest.mark.parametrize(("slots", "budget"), [(0, 10), (8, 7), (-1, 5)])
def test_impossible_parameters(slots, budget):
    with pytest.raises(InputError, match="mixed: "):
        Mixed(slots, budget)


@given(engine=engines(), workload=workloads(), data=st.data())
def test_every_step_is_decode_maximal_and_work_conserving(engine, workload, data):
    """Everybody who decodes gets a token; a step below the budget leaves nobody who could have run."""
    slots = data.draw(st.integers(1, engine.running))
    budget = data.draw(st.integers(slots, engine.batch_tokens))
    simulator = Simulator(engine, Mixed(slots, budget), workload)
    replica, ledger, advance = simulator.replica, simulator.replica.ledger, simulator.replica.advance

    def watched(wake):
        ready = dict(ledger.decoding)
        before = {id: r.generated for id, r in ready.items()}
        todo = {r.id: r.todo for r in (*ledger.prefilling.values(), *ledger.waiting.values())}
        order = [*ledger.prefilling, *ledger.waiting]
        evictions = sum(r.evictions for r in ready.values())
        ran = advance(wake)
        if not ran:
            return ran
        kept = [r for id, r in ready.items() if id in ledger.decoding]
        assert all(r.generated > before[r.id] for r in kept), "a decode got nothing"
        if sum(r.evictions for r in ready.values()) > evictions:
            return ran  # memory was short: no prompt may enter
        used = {id: n - ledger.find(id).todo for id, n in todo.items()}
        assert [id for id in order if used[id]] == order[: sum(map(bool, used.values()))], "overtaken"
        tokens = len(ready) + sum(used.values())
        assert tokens <= budget or not sum(used.values())
        cut = [id for id, n in todo.items() if 0 < used[id] < n]
        assert len(cut) <= 1
        if cut:
            assert tokens == budget, "a prompt was cut although there was budget left"
        elif tokens < budget and ledger.waiting:
            head = next(iter(ledger.waiting.values()))
            free = min(slots, engine.running) - len(ledger.decoding) - len(ledger.prefilling)
            assert free <= 0 or replica.blocks.of(head.todo) > replica.blocks.free, "the head could have run"
        return ran

    replica.advance = watched
    simulator.run()


@pytest.mark.parametrize("budget", [16, 40, 64])
def test_budget_is_filled_exactly_while_prompts_are_left(budget):
    """Long prompts, many slots, all there from the start: every step but the last with prompts is full."""
    rng = np.random.default_rng(1)
    workload = Workload.of(rng.integers(30, 200, 40), rng.integers(1, 30, 40))
    engine = Engine(Line(), 10**6, 10**6, batch_tokens=64, running=16, block=16)
    ran = batches(engine, Mixed(slots=16, budget=budget), workload)
    last = max(number for number, batch in enumerate(ran) if batch.chunks)
    tokens = [len(batch.decodes) + sum(n for _, _, n in batch.chunks) for batch in ran]
    slots_full = [len(batch.decodes) + len(batch.chunks) >= 16 for batch in ran]
    assert all(t == budget or full for t, full in zip(tokens[:last], slots_full[:last], strict=True))
    assert tokens.count(budget) > 30
    log = run(engine, Mixed(slots=16, budget=budget), workload)
    assert sum(step[3] for step in log.steps) == int(workload.prompt.sum())
