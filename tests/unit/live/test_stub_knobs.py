"""Knobs and gated queues on the stub of vLLM's scheduler: what a plan sets, and that it goes back."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.plan import ALL, NONE, Plan, Until
from headgate.core.policy import BatchPolicy
from stub_engine import StubEngine
from stub_requests import ListQueue, PauseState, Request, RequestStatus
from stub_scheduler import plug_in


class Told(BatchPolicy):
    """Plans what it is told, one step at a time; otherwise everything."""

    def __init__(self) -> None:
        self.next: Plan | None = None

    def plan(self, view):
        plan, self.next = self.next, None
        slots = view.limits.running - len(view.decoding) - len(view.prefilling)
        usual = Plan(ALL, (*view.prefilling, *[*view.waiting][: max(0, slots)]), until=Until(steps=1))
        return plan or usual


def running(count: int = 4, **words) -> tuple[StubEngine, Told]:
    """An engine with so many decodes, and three requests in its queue."""
    policy = Told()
    engine = StubEngine(policy, **words)
    for number in range(count):
        engine.add(f"d{number}", 10, 50)
    engine.step()
    for number in range(3):
        engine.add(f"w{number}", 40, 5)
    return engine, policy


def step(engine: StubEngine, policy: Told, plan: Plan) -> dict[str, int]:
    policy.next = plan._replace(until=Until(steps=1))
    scheduled = engine.step().num_scheduled_tokens
    assert engine.live.fallen is None and not engine.scheduler._headgate_hooks.broken
    assert engine.scheduler.max_num_scheduled_tokens == 256
    assert engine.scheduler.scheduler_config.long_prefill_token_threshold == 0
    return scheduled


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_who_is_held_and_who_enters(asynchronous):
    engine, policy = running(asynchronous=asynchronous)
    assert step(engine, policy, Plan(NONE, (5,))) == {"w1": 40}
    assert engine.scheduler.waiting.peek_request().request_id == "w0"
    assert set(step(engine, policy, Plan(frozenset({0, 2})))) == {"d0", "d2"}
    assert set(step(engine, policy, Plan(ALL))) == {"d0", "d1", "d2", "d3", "w1"}
    assert [*step(engine, policy, Plan(NONE, (6, 4)))] == ["w2", "w0"]  # in the order of the plan
    engine.drain()
    assert not any(engine.sizes().values())


def test_budget_and_chunk_of_one_step():
    engine, policy = running()
    assert step(engine, policy, Plan(ALL, (4,), budget=14)) == {"d0": 1, "d1": 1, "d2": 1, "d3": 1, "w0": 10}
    assert step(engine, policy, Plan(ALL, (4, 5), chunk=8)) == {"d0": 1, "d1": 1, "d2": 1, "d3": 1, "w0": 8}
    assert step(engine, policy, Plan(NONE, (4,))) == {"w0": 22}
    assert step(engine, policy, Plan(NONE, (5,), budget=10_000)) == {"w1": 40}  # never above the engine's own


def test_half_done_prompts_come_behind_decodes_and_the_order_goes_back():
    engine, policy = running(2)
    step(engine, policy, Plan(NONE, (2,), chunk=8))
    engine.add("late", 3, 9)
    step(engine, policy, Plan(NONE, (5,)))
    before = [request.request_id for request in engine.scheduler.running]
    assert before == ["d0", "d1", "w0", "late"]
    assert [*step(engine, policy, Plan(ALL, (2,), chunk=8))] == ["d0", "d1", "late", "w0"]
    assert [
        request.request_id for request in engine.scheduler.running
    ] == before  # whom vLLM preempts is its own


def test_a_prompt_that_cannot_be_cut_runs_whole():
    engine, policy = running(chunked=False)
    assert step(engine, policy, Plan(ALL, (4,), budget=14))["w0"] == 40


def test_adapters_that_do_not_fit_are_set_aside_until_there_is_room():
    engine = StubEngine(Told(), max_loras=2)
    for number, adapter in enumerate([1, 2, 3, 1, 3]):
        engine.add(f"r{number}", 5, 4 + number, adapter=adapter)
    engine.step()
    assert {r.request_id for r in engine.scheduler.running} == {"r0", "r1", "r3"}
    assert engine.books._aside.keys() == {"r2", "r4"} and not engine.live.ledger.waiting
    engine.drain()
    assert len(engine.scheduler.gone) == 5 and not any(engine.sizes().values())


def test_a_plan_that_evicts():
    engine, policy = running()
    scheduled = step(engine, policy, Plan(ALL, evict=(1,)))
    assert set(scheduled) == {"d0", "d2", "d3"} and engine.books.entries["d1"].evictions == 1
    engine.drain()
    assert engine.scheduler.gone["d1"] == (RequestStatus.FINISHED_LENGTH_CAPPED, 50)


def test_a_pause_and_a_throttle_of_vllms_own():
    engine, _ = running()
    engine.scheduler._pause_state = PauseState.PAUSED_ALL
    assert engine.step().num_scheduled_tokens == {}
    engine.scheduler._pause_state = PauseState.PAUSED_NEW
    assert set(engine.step().num_scheduled_tokens) == {"d0", "d1", "d2", "d3"}
    engine.scheduler._pause_state = PauseState.UNPAUSED
    output = engine.scheduler.schedule(True)
    assert set(output.num_scheduled_tokens) == {"d0", "d1", "d2", "d3"}
    engine.scheduler.update_from_output(output, None)
    engine.drain()
    assert not any(engine.sizes().values())


def test_an_interval_between_prompts_holds_only_where_vllm_decides():
    engine, policy = running(interval=4)
    assert step(engine, policy, Plan(ALL, (4,)))["w0"] == 40  # at once: the policy decides
    engine.live.take_over(None)
    entered = ["w1" in engine.step().num_scheduled_tokens for _ in range(4)]
    assert entered == [False, False, False, True]
    engine.drain()
    assert engine.scheduler.local_prefill_interval == 4


@pytest.mark.parametrize("part", ["arrive", "tidy", "ran", "done", "left"])
def test_our_own_bug_costs_nobody_an_answer(part, caplog):
    """When the plug-in itself fails, vLLM goes on without it, with every knob where vLLM had it."""
    engine, _ = running()

    def broken(*args):
        raise KeyError("a bug of ours")

    setattr(engine.books, part, broken)
    engine.add("more", 5, 3)
    engine.drain()
    assert engine.scheduler._headgate_hooks.broken and "internal error" in engine.live.fallen
    assert len(engine.scheduler.gone) == 8 and engine.scheduler.gone["d0"][1] == 50
    assert engine.scheduler.max_num_scheduled_tokens == 256
    assert caplog.text.count("vLLM goes on without it") == 1


def test_a_step_that_is_undone_leaves_every_request_in_one_queue():
    """Some releases move one that they skip to another queue, before they may fail."""
    engine, _ = running()
    scheduler, waits = engine.scheduler, engine.scheduler.requests
    scheduler.kv_cache_manager.free = scheduler.reset_prefix_cache = lambda *args, **words: None
    knobs = scheduler._headgate_hooks._knobs
    seen = knobs.turn(Plan(NONE, (4, 5)))
    assert [scheduler.waiting.pop_request() for _ in seen] == [waits["w0"], waits["w1"]]
    scheduler.kv_holding_waiting.prepend_request(waits["w0"])
    scheduler.running.append(waits["w1"])
    knobs.undo(seen)
    assert [*scheduler.kv_holding_waiting] == [waits["w0"]]
    assert [*scheduler.waiting] == [waits["w1"], waits["w2"]] and len(scheduler.waiting) == 2
    assert scheduler.waiting.peek_request() is waits["w1"] and len(scheduler.running) == 4


@pytest.mark.parametrize("known", [False, True])
def test_a_step_is_undone_only_where_one_can_tell_how_far_it_came(known):
    """A release may count the tokens of a step elsewhere than those we know."""
    engine, _ = running()
    scheduler = engine.scheduler
    scheduler.kv_cache_manager.free = scheduler.reset_prefix_cache = lambda *args, **words: None
    for request in scheduler.requests.values():
        request.mm_features = ()
    if known:
        scheduler._update_after_schedule = lambda output: None
    inner, calls = scheduler._headgate_hooks._schedule, []

    def fails_once():
        calls.append(True)
        if len(calls) == 1:
            raise KeyError("an error of vLLM's own")
        return inner()

    scheduler._headgate_hooks._schedule = fails_once
    if known:
        assert engine.step().num_scheduled_tokens and "an error of vLLM's own" in engine.live.fallen
    else:
        with pytest.raises(KeyError):
            engine.step()
        assert engine.live.fallen is None and scheduler.waiting.peek_request().request_id == "w0"


# -- the queue ------------------------------------------------------------------------------------------


def test_no_request_is_seen_in_any_queue_behind_a_shut_gate():
    queues = plug_in().queues
    gate = queues.QueueGate()
    queue = queues.GatedQueue(ListQueue(), gate)
    first, second = (Request(name, 1, 1) for name in ("first", "second"))
    queue.add_request(first)
    gate.shut = True
    queue.add_request(second)
    assert not queue and len(queue) == 2 and [*queue] == [first, second]
    for look in (queue.peek_request, queue.pop_request):
        with pytest.raises(IndexError):
            look()
    queue.remove_request(first)
    gate.shut = False
    assert queue.pop_request() is second and not queue


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "prepend", "pop", "shut", "open", "remove"]), st.integers(0, 11)),
    max_size=40,
)


@given(ACTIONS, st.sampled_from([0, 2, 64]))
def test_a_gated_queue_is_the_inner_queue_with_a_view(actions, few):
    """Against a plain list: order kept, length true, and only those visible are taken while it is shut.

    Those taken stay in the inner queue until they are more than `few` and a quarter of those that wait.
    """
    with mock.patch.object(plug_in().queues, "FEW", few):
        check_gated_queue(actions)


def test_taking_from_the_middle_walks_through_a_long_queue_now_and_then():
    """10,000 wait, and in each of 4,000 steps the last but some enters: that was a walk in each."""
    inner = ListQueue()
    queue = plug_in().queues.GatedQueue(inner, plug_in().queues.QueueGate())
    requests = [Request(str(number), 1, 1) for number in range(10_000)]
    for request in requests:
        queue.add_request(request)
    walks = []
    remove = inner.remove_requests
    inner.remove_requests = lambda gone: walks.append(len(gone)) or remove(gone)
    for request in requests[:5000:-1][:4000]:
        queue.shut([request])
        assert queue.pop_request() is request
        queue.open()
    assert len(walks) <= 4
    assert len(queue) == 6000 and queue.peek_request() is requests[0]
    assert len(inner.list) <= 1.25 * 6000 + 1
    queue.prepend_request(requests[9000])  # preempted: it is there once
    assert [*queue].count(requests[9000]) == 1 and queue.peek_request() is requests[9000]


def check_gated_queue(actions):
    gate = plug_in().queues.GatedQueue(ListQueue(), plug_in().queues.QueueGate())
    requests = [Request(f"r{number}", 1, 1) for number in range(12)]
    truth: list[Request] = []
    visible: list[Request] | None = None
    for what, number in actions:
        request = requests[number]
        if what in ("add", "prepend") and request not in truth:
            getattr(gate, f"{what}_request")(request)
            truth.insert(0 if what == "prepend" else len(truth), request)
        elif what == "remove" and request in truth:
            gate.remove_request(request)
            truth.remove(request)
            visible = visible and [each for each in visible if each is not request]
        elif what == "pop" and gate:
            head = (truth if visible is None else visible)[0]
            assert gate.peek_request() is head and gate.pop_request() is head
            truth.remove(head)
            if visible is not None:
                visible.remove(head)
        elif what == "shut" and visible is None:
            chosen = [*requests[number:], *requests[:number]][:5]
            gate.shut(chosen)
            visible = [each for each in chosen if each in truth]
        elif what == "open":
            gate.open()
            visible = None
        assert len(gate) == len(truth)
        assert bool(gate) == bool(truth if visible is None else visible)
        assert [*gate] == truth
    gate.open()
    assert [*gate] == truth


class Patient(BatchPolicy):
    """Decodes until a request leaves; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def plan(self, view):
        self.asked += 1
        slots = view.limits.running - len(view.decoding) - len(view.prefilling)
        prompts = (*view.prefilling, *[*view.waiting][: max(0, slots)])
        return Plan(ALL, prompts, until=Until(steps=1) if prompts else Until(finishes=1))


def full(slots: int = 4) -> tuple[StubEngine, Patient]:
    """An engine without a free slot under a lease, and one request in its queue."""
    policy = Patient()
    engine = StubEngine(policy, slots=slots)
    for number in range(slots):
        engine.add(f"d{number}", 10, 50)
    engine.step()
    engine.add("w", 40, 5)
    engine.step()
    assert not engine.live.lease.ended
    return engine, policy


def test_a_lease_ends_when_the_slots_change():
    engine, policy = full()
    engine.scheduler.max_num_running_reqs = 5
    engine.scheduler.num_waiting_for_streaming_input = 1  # a session has the fifth
    before = policy.asked
    engine.step()
    assert policy.asked == before  # the lease holds
    engine.scheduler.num_waiting_for_streaming_input = 0
    assert "w" in engine.step().num_scheduled_tokens
    assert policy.asked == before + 1 and engine.live.ledger.limits.running == 5


def test_the_head_of_the_queue_is_not_looked_up_without_a_free_slot(monkeypatch):
    engine, _ = full()
    looked: list[int] = []
    monkeypatch.setattr(engine.books._lookup, "look_at_head", lambda entry, _: looked.append(entry.id))
    engine.step()
    assert looked == []  # no slot, and the lease holds
    engine.live.lease.ended = True
    engine.step()
    assert looked == [4]  # the policy is asked, and sees what is in the cache
    engine.scheduler.finish_request("d0")
    assert "w" in engine.step().num_scheduled_tokens and looked == [4, 4]


@pytest.mark.parametrize(
    ("drafts", "ahead", "blocks"), [(0, 0, 1), (3, 3, 1), (7, 8, 1), (8, 8, 2), (15, 16, 2)]
)
def test_blocks_that_a_decode_may_need_for_its_drafts(drafts, ahead, blocks):
    """1 + k tokens, and room for those that are drafted after them: with blocks of 16, one up to k = 7."""
    engine, _ = running()
    scheduler = engine.scheduler
    scheduler.num_spec_tokens, scheduler.num_lookahead_tokens = drafts, ahead
    scheduler.scheduler_config.async_scheduling = True
    engine.live.ledger.limits = engine.live.ledger.limits._replace(decode_width=1 + drafts)
    knobs = plug_in().knobs.Knobs(scheduler, engine.live, engine.books, lambda: None)
    assert knobs._blocks_each == blocks
    assert knobs.forgets is bool(drafts)
