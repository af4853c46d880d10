"""A policy that fails, and we ourselves: SGLang goes on from the same step, and nothing is lost."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import virtual
from bench import Bench
from sglang.srt.managers.io_struct import AbortReq

import headgate
from headgate.core.errors import InputError
from headgate.live.engine.events import LiveObserver
from headgate.live.engine.settings import WARM_UP
from headgate.live.sglang.scheduler import HeadgateScheduler

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
CAUSES = {"raise": "raised", "nonsense": "nonsense", "hold": "starved"}


class Failing(headgate.Mixed):
    """Behaves for twenty plans."""

    plans, what = 0, "raise"

    def plan(self, view):
        self.plans += 1
        if self.plans <= 20:
            return super().plan(view)
        if self.what == "raise":
            raise RuntimeError("boom")
        return headgate.Plan(prefill=(99999,)) if self.what == "nonsense" else headgate.Plan(headgate.NONE)


class Heard(LiveObserver):
    def __init__(self):
        self.causes, self.ends, self.bends = [], {}, 0

    def fell_back(self, reason, now, cause="raised"):
        self.causes.append(cause)

    def finished(self, request, now, how):
        self.ends[request.id] = how.value

    def bent(self, now):
        self.bends += 1


def served(policy, overlap, hooks=None, count=60, **more):
    heard = Heard()
    bench = virtual.planned(policy, overlap=overlap, observers=(heard,), **more)
    bench.hooks.update({at: lambda act=act: act(bench) for at, act in (hooks or {}).items()})
    bench.serve(virtual.requests(bench, virtual.workload(count)))
    bench.check_whole()
    assert len(bench.finished.keys() | bench.aborted.keys()) == count
    if not bench.scheduler._headgate_guard.broken:
        assert not bench.scheduler._headgate.occupied
        assert not bench.scheduler._headgate_books.entries
    return bench, heard


@LOOPS
@pytest.mark.parametrize("what", CAUSES)
def test_a_policy_that_fails_is_relieved(what, overlap):
    policy = Failing(16, 512)
    policy.what = what
    bench, heard = served(policy, overlap, {1: lambda bench: _patience(bench, 2.0)})
    assert heard.causes == [CAUSES[what]]
    assert len(bench.finished) == 60
    assert len(heard.ends) == 60  # the books are kept on


def _patience(bench, seconds):
    """A held engine launches nothing: its clock goes on by itself."""
    live = bench.scheduler._headgate
    live._watchdog.limit, live._watchdog.next_look = seconds, live.now + seconds
    begin = live.begin

    def later(*args):
        bench.now += 0.01
        return begin(*args)

    live.begin = later


@LOOPS
@pytest.mark.parametrize("part", ["_headgate_prepare", "_headgate_change", "_headgate_ran"])
def test_our_own_fault_ends_our_part_only(part, overlap):
    bench = virtual.planned(headgate.Exclusive(16, 4), overlap=overlap)
    own, calls = getattr(bench.scheduler, part), [0]

    def faulty(*args):
        calls[0] += 1
        if calls[0] == 40:
            raise KeyError("ours")
        return own(*args)

    setattr(bench.scheduler, part, faulty)
    bench.serve(virtual.requests(bench, virtual.workload()))
    bench.check_whole()
    assert len(bench.finished) == 60
    assert bench.scheduler._headgate_guard.broken
    assert "KeyError" in bench.scheduler._headgate.fallen
    assert calls[0] == 40


@LOOPS
def test_aborts_waiting_half_done_and_running(overlap):
    def hang_up(bench):
        for rid in ("r50x", "r2x", "r12x"):
            bench.scheduler.abort_request(AbortReq(rid=rid))

    bench, heard = served(headgate.Exclusive(16, 4), overlap, {6: hang_up})
    assert "r50x" in bench.aborted  # it waited
    assert [*heard.ends.values()].count("aborted") == 3


@LOOPS
def test_rejected_requests_are_answered_503(overlap):
    class Refusing(headgate.Mixed):
        def plan(self, view):
            plan = super().plan(view)
            late = tuple(id for id in view.waiting if id % 7 == 3 and id not in plan.prefill)
            return plan._replace(reject=late)

    bench, heard = served(Refusing(16, 512), overlap)
    assert len(bench.aborted) > 3
    assert {reason["status_code"] for reason in bench.aborted.values()} == {503}
    assert [*heard.ends.values()].count("refused") == len(bench.aborted)


@LOOPS
def test_evictions_of_the_plan(overlap):
    class Evicting(headgate.Mixed):
        plans = 0

        def plan(self, view):
            self.plans += 1
            plan = super().plan(view)
            if self.plans % 9 == 0 and len(view.decoding) > 3:
                return plan._replace(evict=(next(iter(view.decoding)),))
            return plan

    bench, heard = served(Evicting(16, 512), overlap)
    assert len(bench.finished) == 60
    assert heard.causes == []


@LOOPS
def test_short_of_kv_requests_are_retracted_and_come_back(overlap):
    bench, heard = served(headgate.Exclusive(16, refill=1), overlap, kv=2200)
    assert len(bench.finished) == 60
    assert heard.causes == []


def test_a_request_whose_grammar_is_compiled_joins_while_the_plan_only_decodes():
    """SGLang looks for it only where it looks for prompts, which a plan of decodes leaves out."""
    bench = virtual.planned(headgate.Mixed(16, 512))
    scheduler, late = bench.scheduler, []
    add = scheduler._add_request_to_queue

    def queue(request, *args):
        if request.rid == "g1" and not late:
            late.append(request)
        else:
            add(request, *args)

    scheduler._add_request_to_queue = queue
    manager = scheduler.grammar_manager
    ready = lambda: len(bench.steps) >= 10 and bool(late)  # noqa: E731
    manager.has_waiting_grammars = lambda: len(late) == 1 and "g1" not in bench.sent_on
    bench.sent_on = set()

    def get_ready():
        if not ready() or bench.sent_on:
            return []
        bench.sent_on.add("g1")
        return late

    manager.get_ready_grammar_requests = get_ready
    bench.serve([(0.0, bench.request("g1", 100, 5)), (0.0, bench.request("a2", 100, 100))])
    assert len(bench.finished) == 2
    first = next(place for place, step in enumerate(bench.steps) if ("g1", 100) in step.prompts)
    assert 9 <= first <= 12


@LOOPS
@pytest.mark.parametrize("policy", [None, "eb:refill=4", "mixed"], ids=["SGLang alone", "eb", "mixed"])
def test_a_request_whose_adapter_has_no_room_stays_in_the_queue(policy, overlap):
    """SGLang decides on adapters, with a plan as without: here two of three run at a time, and all end."""
    size = virtual.engine()
    bench = (
        Bench(None, virtual.Line(), overlap=overlap, enable_mixed_chunk=True)
        if policy is None
        else virtual.planned(headgate.make_policy(policy, size), overlap=overlap)
    )
    scheduler = bench.scheduler
    scheduler.enable_lora, asked = True, []

    class Manager:  # SGLang's own needs weights; this is its rule
        def validate_lora_batch(self, names):
            asked.append(len(names) <= 2)
            return asked[-1]

    scheduler.tp_worker.model_runner.lora_manager = Manager()
    own, adapters = scheduler.tp_worker.launched, []

    def launched(batch):
        adapters.append(len({request.lora_id for request in batch.reqs}))
        own(batch)

    scheduler.tp_worker.launched = launched
    pairs = virtual.requests(bench, virtual.workload())
    for number, (_, request) in enumerate(pairs):
        request.lora_id = f"adapter {number % 3}"
    bench.serve(pairs)
    bench.check_whole()
    assert len(bench.finished) == 60
    assert max(adapters) == 2 and not all(asked)
    if policy is not None:
        assert scheduler._headgate.fallen is None and not scheduler._headgate.occupied


def test_own_policy_gets_the_nearest_plan():
    class Half(headgate.Mixed):
        def plan(self, view):
            plan = super().plan(view)
            return plan._replace(decode=frozenset([*view.decoding][::2]) or plan.decode)

    _, heard = served(Half(16, 512), False)
    assert heard.bends > 0
    assert heard.causes == []


def test_a_new_settings_file_brings_the_policy_back(tmp_path):
    source = tmp_path / "own.py"
    source.write_text(
        "import headgate\n\n\nclass Own(headgate.Mixed):\n    plans = 0\n\n    def plan(self, view):\n"
        "        self.plans += 1\n        if self.plans > 20:\n            raise RuntimeError('boom')\n"
        "        return super().plan(view)\n"
    )
    file = virtual.configured(policy=f"{source}:Own", set={"slots": 16, "budget": 512})
    bench = Bench(HeadgateScheduler, virtual.Line(), enable_mixed_chunk=True)
    live = bench.scheduler._headgate
    bench.serve(virtual.requests(bench, virtual.workload(30)))
    assert "boom" in live.fallen
    Path(file).write_text(json.dumps({**virtual.QUIET, "policy": "eb:refill=2"}))
    deadline = time.monotonic() + 30
    while not bench.scheduler._headgate_plug_in._renewals.waiting and time.monotonic() < deadline:
        time.sleep(0.1)
    bench.serve([(bench.now, bench.request(f"s{i}", 100, 5)) for i in range(30)])
    assert live.fallen is None
    assert type(live.policy).__name__ == "Exclusive"
    bench.check_whole()


def test_terms_of_a_request():
    virtual.configured(policy="keep", classes={"chat": {"ttft": "1s", "tbt": "50ms"}})
    bench = Bench(HeadgateScheduler, virtual.Line(), enable_mixed_chunk=True)
    seen = []
    live = bench.scheduler._headgate

    class Arrivals(headgate.Observer):
        def arrived(self, request, now):
            seen.append((request.kind, *request.slo[:2]))

    live.news.listen(Arrivals(), True)
    chat = {"headgate_class": "chat", "headgate_tbt": "nonsense"}
    bench.serve([(0.0, bench.request("a1", 50, 3, custom_params=chat)), (0.0, bench.request("a2", 50, 3))])
    assert seen == [("chat", 1.0, 0.04), ("", None, None)]


HOSTILE = (
    7, "text", [1], {}, {None: 1, 2: 3}, {"headgate_class": ["chat"]}, {"headgate_class": "\ud800"},
    {"headgate_ttft": float("nan"), "headgate_tbt": -1}, {"headgate_guess": 10**400, "headgate_tenant": 1},
    {"headgate_tenant": "t" * 10**6, "headgate_class": "c" * 10**6}, {"headgate_" + "x" * 10**6: object},
)  # fmt: skip
BROKEN = (
    b"", b"[]", b'{"policy": ', b"\xff\xfe", b'{"policy": "nothing"}', b'{"policy": "slai"}',
    b'{"policy": "eb", "set": {"refill": -1}}', b'{"policy": "none.py:Mine"}', b'{"polcy": "eb"}',
)  # fmt: skip


@LOOPS
def test_a_policy_takes_over_from_a_warm_up_in_the_middle(overlap):
    """While requests of a warm-up are alone, they are planned for mixed steps; four are users'."""
    bench = virtual.planned(headgate.Exclusive(16, 4), overlap=overlap)
    pairs = virtual.requests(bench, virtual.workload())
    for number, (_, request) in enumerate(pairs):
        if number % 5 or number > 15:
            request.sampling_params.custom_params = {"headgate_class": WARM_UP}
    plans = []
    own = bench.scheduler._headgate.begin
    bench.scheduler._headgate.begin = lambda *asked: plans.append(own(*asked)) or plans[-1]
    bench.serve(pairs)
    bench.check_whole()
    mixed = [plan.decode is headgate.ALL and len(plan.prefill) > 0 for plan in plans]
    assert any(mixed) and not all(mixed)
    assert bench.scheduler._headgate.fallen is None
    assert len(bench.finished) == 60


@LOOPS
def test_hostile_words_and_broken_settings_change_nothing(overlap):
    def spoil(bench):
        renewals = bench.scheduler._headgate_plug_in._renewals
        renewals.close()
        file = Path(os.environ["HEADGATE_CONFIG"])
        for text in (*BROKEN, None):
            file.unlink() if text is None else file.write_bytes(text)
            for _ in range(2):  # a file counts when two looks saw it the same
                renewals._reload._next = 0
                renewals.look()
            assert renewals._reload._used == renewals._reload._before
            assert not renewals.waiting

    plain, _ = served(headgate.Exclusive(16, 4), overlap)
    bench = virtual.planned(headgate.Exclusive(16, 4), overlap=overlap)
    bench.hooks[20] = lambda: spoil(bench)
    pairs = virtual.requests(bench, virtual.workload())
    for number, (_, request) in enumerate(pairs):
        request.sampling_params.custom_params = HOSTILE[number % len(HOSTILE)]
    bench.serve(pairs)
    bench.check_whole()
    assert not bench.hooks
    assert bench.steps == plain.steps
    assert bench.scheduler._headgate.fallen is None
    assert len(bench.finished) == 60


@pytest.mark.parametrize(
    ("settings", "flags", "said"),
    [
        ({"policy": "slai"}, {"enable_mixed_chunk": True}, "names the decodes"),
        ({"policy": "rad-smooth"}, {"enable_mixed_chunk": True}, "half done"),
        ({"policy": "mixed"}, {}, "--enable-mixed-chunk"),
        ({"policy": "eb"}, {"chunked_prefill_size": -1}, "--chunked-prefill-size -1"),
        ({"policy": "eb"}, {"enable_hisparse": True}, "--enable-hisparse"),
    ],
)
def test_refused_before_the_model_is_loaded(settings, flags, said, monkeypatch):
    virtual.configured(**settings)
    monkeypatch.setattr(HeadgateScheduler, "init_model_worker", lambda self: pytest.fail("too late"))
    with pytest.raises(InputError, match=said):
        Bench(HeadgateScheduler, **flags)


def test_without_a_policy_sglang_decides_and_we_watch():
    load = virtual.workload()
    plain = Bench(None, virtual.Line())
    plain.serve(virtual.requests(plain, load))
    virtual.configured(policy="sglang")
    watched = Bench(HeadgateScheduler, virtual.Line())
    watched.serve(virtual.requests(watched, load))
    assert watched.steps == plain.steps
    assert sum(watched.scheduler._headgate.counts.values()) == len(plain.steps)
    assert os.environ["HEADGATE_CONFIG"]
