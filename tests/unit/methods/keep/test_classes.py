"""Background requests make room, leave some free and fill steps; tenants and weights reach the engine."""

from __future__ import annotations

import pytest

from headgate.core.errors import InputError
from headgate.core.request import Slo
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.experiment.library import simulate
from headgate.methods.keep.policy import Keep
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Kind, Workload
from worlds import run

# A step of decodes takes 1 s, a prompt token 10 ms alone and beside decodes.
COST = LinearCost(DecodeTerms(1.0, 0.0, 0.0), PrefillTerms(0.0, 0.01), MixedTerms(1.0, 0.01, 0.0, 0.0))
CHAT, BATCH = Kind("chat", Slo(20.0, None)), Kind("batch", Slo(background=True))


def engine(slots=1, kv=10_000):
    return Engine(COST, kv_tokens=kv, max_model_len=2000, batch_tokens=500, running=slots, block=1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_background_gives_its_slot(asynchronous):
    """One slot. Chat 0 has its token at 1 s, batch at 2, 3 and 4 s. Chat 2 comes at 3.5: batch is evicted at
    4, chat 2 has its tokens at 5 and 6, batch its 4th after 103 tokens at 7.03, and its 20th 16 s later.
    """
    kinds = (CHAT, BATCH)
    rows = Workload.of([100] * 3, [1, 20, 2], arrival=[0.0, 0.0, 3.5], kind=[0, 1, 0], kinds=kinds)
    found = simulate(engine(), Keep(1, 500, COST, patience=0.0), rows, asynchronous=asynchronous).requests
    assert found["evictions"].tolist() == [0, 1, 0]
    if not asynchronous:
        assert found["first_token"].tolist() == pytest.approx([1.0, 2.0, 5.0])
        assert found["finished"].tolist() == pytest.approx([1.0, 23.03, 6.0])
    assert (found["first_token"] - found["arrival"])[2] < 3


@pytest.mark.parametrize("kind", [Kind("plain"), Kind("chat too", Slo(20.0, None))])
def test_no_other_request_does(kind):
    rows = Workload.of([100, 100], [20, 2], arrival=[0.0, 3.5], kind=[1, 0], kinds=(CHAT, kind))
    assert simulate(engine(), Keep(1, 500, COST), rows).requests["evictions"].tolist() == [0, 0]


def test_not_for_a_prompt_that_is_late_anyway():
    """200 tokens take 2 s, and 1 s was promised."""
    kinds = (Kind("chat", Slo(1.0, None)), BATCH)
    rows = Workload.of([100, 200], [20, 2], arrival=[0.0, 3.5], kind=[1, 0], kinds=kinds)
    assert simulate(engine(), Keep(1, 500, COST), rows).requests["evictions"].tolist() == [0, 0]


def test_the_newest_give_their_kv_and_no_more_than_needed():
    """Three of 300 tokens and more hold over 900 of 1,200; a prompt of 700 needs two of them."""
    rows = Workload.of(
        [300, 300, 300, 700], [30] * 4, arrival=[0.0, 0.1, 0.2, 12.0], kind=[1, 1, 1, 0], kinds=(CHAT, BATCH)
    )
    policy = Keep(8, 500, COST, patience=0.0, watermark=0.0, reserve=0.0)
    log = run(engine(8, kv=1200), policy, rows)
    assert [event[1] for event in log.events if event[0] == "evicted"] == [2, 1]


def test_none_is_evicted_again_while_another_never_was():
    """Two slots, two of batch, four chats one by one. 1 leaves and comes back as the newest; then 0 leaves,
    which no chat had evicted, and again, because it is the newest by then; then 1.
    """
    arrival, kind = [0.0, 0.1, 10.0, 30.0, 50.0, 70.0], [1, 1, 0, 0, 0, 0]
    rows = Workload.of([100] * 6, [90, 90, 2, 2, 2, 2], arrival=arrival, kind=kind, kinds=(CHAT, BATCH))
    log = run(engine(2), Keep(2, 500, COST, patience=0.0, reserve=0.0), rows)
    assert [event[1] for event in log.events if event[0] == "evicted"] == [1, 0, 0, 1]


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 1), (9, 8), (10, 9), (20, 18)])
def test_a_small_engine_keeps_a_slot_free_too(slots, most):
    """A tenth of the slots, and of two slots one; a chat is decoding, and takes one of the others."""
    kinds = (Kind("chat", Slo(1000.0, 500.0)), BATCH)
    count = slots + 5
    rows = Workload.of(
        [1] * (count + 1),
        [40] + [30] * count,
        arrival=[0.0] + [0.5] * count,
        kind=[0] + [1] * count,
        kinds=kinds,
    )
    running = []

    class Watched(Keep):
        def plan(self, view):
            if self._promised:
                running.append(len(view.decoding) + len(view.prefilling))
            return super().plan(view)

    run(engine(slots), Watched(slots, 500, COST), rows)
    assert max(running) == most


def test_when_kv_runs_short_background_leaves_before_others():
    """Chat came last, and would be the engine's victim: 400 + 600 of 1,040 tokens, and both grow."""
    rows = Workload.of([400, 600], [90, 30], arrival=[0.0, 0.1], kind=[1, 0], kinds=(CHAT, BATCH))
    policy = Keep(8, 500, COST, watermark=0.0, reserve=0.0)
    assert simulate(engine(8, kv=1040), policy, rows).requests["evictions"].tolist() == [1, 0]


def test_requests_without_a_promise_leave_some_slots_free():
    """Of ten slots five."""
    kinds = (Kind("chat", Slo(1000.0, 500.0)), Kind("plain"))
    arrival, kind = [0.0] + [0.5] * 11, [0] + [1] * 11
    rows = Workload.of([1] * 12, [90] + [30] * 11, arrival=arrival, kind=kind, kinds=kinds)
    most = []

    class Watched(Keep):
        def plan(self, view):
            most.append(len(view.decoding) + len(view.prefilling))
            return super().plan(view)

    for reserve, slots in ((0.5, 5), (0.0, 10)):
        most.clear()
        run(engine(10), Watched(10, 500, COST, reserve=reserve), rows)
        assert max(most) == slots


def test_prompts_without_a_promise_fill_a_step_up_to_a_share():
    """A gap of 5 s leaves 4 s to 400 prompt tokens beside one decode; half of that to those without."""
    kinds = (Kind("chat", Slo(1000.0, 5.0)), Kind("plain"))
    rows = Workload.of([1, 900], [60, 2], arrival=[0.0, 0.5], kind=[0, 1], kinds=kinds)
    for fill, longest in ((1.0, 400), (0.5, 200)):
        log = run(engine(4), Keep(4, 500, COST, trust=1.0, fill=fill, reserve=0.0, learn=False), rows)
        assert longest - 16 <= max(step[3] for step in log.steps) <= longest


def test_background_is_never_refused():
    """1 s is promised to all requests without a promise of their own; two prompts take 3 s each."""
    rows = Workload.of([300, 300], [2, 2], arrival=[0.0, 0.0], kind=[0, 1], kinds=(Kind("plain"), BATCH))
    done = simulate(engine(2), Keep(2, 500, COST, ttft=1.0, refuse="predicted"), rows).completed()
    assert done.tolist() == [False, True]


def test_shares_are_checked():
    with pytest.raises(InputError, match=r"fill=0.*reserve=0.1"):
        Keep(1, 50, COST, fill=0.0)
    with pytest.raises(InputError, match="reserve=1"):
        Keep(1, 50, COST, reserve=1.0)


@pytest.mark.parametrize("tenants", [("",), ("good", "flood")])
def test_a_flood_takes_no_promises_from_another_tenant(tenants):
    """A prompt takes 1 s. Flood sends two a second for 200 s, good one every 5 s; all are promised 6 s."""
    arrival = sorted(
        [(0.5 * place, 1) for place in range(400)] + [(1.1 + 5 * place, 0) for place in range(40)]
    )
    kind = [who for _, who in arrival]
    rows = Workload.of(
        [1000] * 440,
        [2] * 440,
        arrival=[time for time, _ in arrival],
        tenant=[who % len(tenants) for who in kind],
        tenants=tenants,
        kind=kind,
        kinds=(Kind("good", Slo(6.0, None)), Kind("flood", Slo(6.0, None))),
    )
    cost = LinearCost(DecodeTerms(0.1, 0.0, 0.0), PrefillTerms(0.0, 0.001), MixedTerms(0.1, 0.001, 0.0, 0.0))
    big = Engine(cost, kv_tokens=100_000, max_model_len=2000, batch_tokens=500, running=64, block=1)
    found = simulate(big, Keep(64, 500, cost), rows).requests
    kept = (found["first_token"] - found["arrival"] <= 6.0)[found["kind"] == 0].mean()
    assert kept > 0.8 if len(tenants) > 1 else kept < 0.65
