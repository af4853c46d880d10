"""Policy `sglang` in the simulator takes the steps of SGLang's scheduler without a plug-in, to the end."""

from __future__ import annotations

import sys

import pytest
import virtual
from bench import Bench
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.managers.scheduler import Scheduler

from headgate.live.files import release_numbers
from headgate.live.sglang import seams
from headgate.methods.sglang import SGLang

UNTIL_0_5_22 = release_numbers(seams.installed() or "")[:3] < (0, 5, 23)
FLAGS = {
    "mixed_chunk": "enable_mixed_chunk",
    "conservativeness": "schedule_conservativeness",
    "interval_min_bs": "prefill_decode_interval_min_bs",
}
AMPLE = {"seed": 1, "rate": 40.0}
SHORT = {"seed": 3, "rate": 60.0, "outputs": 300, "longest": 400}  # of KV
CASES = [
    (AMPLE, {}),
    (AMPLE, {"page": 16}),
    (AMPLE, {"min_free_slots_delay": 4}),
    (AMPLE, {"prefill_decode_interval": 5}),
    (SHORT, {"kv": 2600}),
    (SHORT, {"kv": 2608, "page": 16}),
    (SHORT, {"kv": 3008, "page": 64}),
    ({**SHORT, "rate": None}, {"kv": 3000, "conservativeness": 0.3}),
]


class LaterAdder(PrefillAdder):
    def add_one_req(self, *args, **more):
        spent = self.budget_state() == AddReqResult.OTHER
        return AddReqResult.OTHER if spent else super().add_one_req(*args, **more)


class LaterRules(Scheduler):
    """SGLang 0.5.22 with the three rules of 0.5.23 that its own scheduling lacks; policy `sglang` has them.

    Finished requests leave the batch before prompts enter, not with the next decode step; the row of a
    half-done prompt does not count against another; a step whose tokens are spent tries no prompt.
    """

    _adder = None

    def get_new_batch_prefill(self, running_batch):
        size, self._adder = running_batch.batch_size(), None
        running_batch.filter_batch()
        if running_batch.batch_size() < size:
            running_batch.batch_is_full = False
        return super().get_new_batch_prefill(running_batch)

    def get_prefill_adder_class(self):
        def make(*args, **more):
            self._adder = LaterAdder(*args, **more)
            return self._adder

        return make

    def get_num_allocatable_reqs(self, running_bs, *args, **more):
        count, adder = super().get_num_allocatable_reqs(running_bs, *args, **more), self._adder
        if adder is None:
            return count
        if adder.budget_state() == AddReqResult.OTHER:
            return sys.maxsize  # then add_one_req says no, and the batch is not full
        held = sum(request.kv.holds_kv for request in adder.can_run_list)
        return min(count + held, self.max_running_requests - running_bs)


def compare(load, overlap, slots=16, kv=65536, page=1, budget=512, **flags):
    """The same prompt tokens and decodes in each step, at the same time; also after retractions."""
    size = virtual.engine(slots=slots, kv=kv, page=page, budget=budget)
    ours = virtual.simulated(SGLang(slots=slots, budget=budget, **flags), load, size, overlap)
    words = {FLAGS.get(name, name): value for name, value in flags.items()}
    bench = Bench(
        LaterRules if UNTIL_0_5_22 else None,
        virtual.Line(),
        slots,
        kv,
        page,
        overlap=overlap,
        chunked_prefill_size=budget,
        **words,
    )
    bench.serve(virtual.requests(bench, load))
    bench.check_whole()
    assert virtual.totals(bench.steps) == ours.steps
    assert bench.ends == ours.ends
    return ours


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("mixed", [False, True], ids=["exclusive", "mixed"])
@pytest.mark.parametrize(("load", "words"), CASES, ids=lambda given: "-".join(map(str, given)) or "plain")
def test_same_steps(load, words, mixed, overlap):
    ours = compare(virtual.workload(60, **load), overlap, mixed_chunk=mixed, **words)
    assert bool(ours.evicted_at) == ("kv" in words)


@given(data=st.data())
def test_random_flags(data):
    """WORLDS=1000 for many."""
    page = data.draw(st.sampled_from([1, 1, 16, 64]), "page")
    longest, outputs = data.draw(st.integers(40, 500), "longest"), data.draw(st.integers(5, 200), "outputs")
    least = 2 * (longest + outputs + 64) // page + 3
    pages = data.draw(st.integers(least, least + 4000 // page), "pages")
    slots = data.draw(st.integers(1, 16), "slots")
    budget = max(slots + page, data.draw(st.sampled_from([64, 200, 512, 2048]), "budget"))
    load = virtual.workload(
        data.draw(st.integers(1, 40), "requests"),
        data.draw(st.integers(0, 10**6), "seed"),
        data.draw(st.sampled_from([None, 10.0, 40.0, 200.0]), "rate"),
        longest,
        outputs,
    )
    flags = {
        "mixed_chunk": data.draw(st.booleans(), "mixed"),
        "min_free_slots_delay": data.draw(st.sampled_from([0, 0, 1, slots]), "free"),
        "prefill_decode_interval": data.draw(st.sampled_from([0, 0, 1, 5]), "interval"),
        "conservativeness": data.draw(st.sampled_from([0.1, 0.3, 1.0, 1.4]), "conservativeness"),
    }
    if not UNTIL_0_5_22:  # which has no such flag
        flags["interval_min_bs"] = data.draw(st.sampled_from([0, 0, 3]), "least batch")
    compare(load, data.draw(st.booleans(), "overlap"), slots, pages * page, page, budget, **flags)
