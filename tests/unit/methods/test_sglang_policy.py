"""SGLang's own scheduling: as policies we know where those are the same, else by hand."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.core.ledger import Ledger
from headgate.core.plan import ALL, NONE
from headgate.core.policy import Steps
from headgate.core.view import Limits
from headgate.methods.make import make_policy, split_name
from headgate.methods.sglang import SGLang
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload
from worlds import Line, admitted, batches, run

AMPLE = Engine(Line(), kv_tokens=65_536, max_model_len=16_384, batch_tokens=512, running=16, block=1)


def at_once(seed: int, count: int = 60) -> Workload:
    draw = np.random.default_rng(seed)
    prompt, output = draw.integers(20, 900, count), draw.integers(2, 60, count)
    return Workload.of(prompt, output, limit=output)


@pytest.mark.parametrize(
    ("flags", "same"),
    [("", "v0"), (":min_free_slots_delay=4", "eb:refill=4"), (":mixed_chunk=true", "mixed")],
)
@pytest.mark.parametrize("seed", range(4))
def test_with_all_requests_there_it_is_a_policy_we_know(flags, same, seed):
    """Other draws differ where a prompt ends with a full step within a refill: SGLang then leaves it."""
    requests = at_once(seed)
    logs = [
        run(AMPLE, make_policy(*split_name(text), AMPLE)[0], requests) for text in (f"sglang{flags}", same)
    ]
    until = inf
    if same.startswith("eb"):  # which does not wait for idle slots once few requests wait
        entered = [event[2] for event in logs[0].events if event[0] == "admitted"]
        until = entered[-8]
    ours, theirs = ([step for step in log.steps if step[0] <= until] for log in logs)
    assert ours == theirs and len(ours) > 60


def world(kv: int, waiting=(), decoding=0, halves=(), block=1, running=64) -> Ledger:
    """So many decodes of prompt 10 with one token each, limit 1000, and prompts that wait."""
    ledger = Ledger(Limits(batch_tokens=1000, running=running, block=block), kv)
    ledger.kv_free = kv - 10 * decoding - 5 * len(halves)
    return admitted(ledger, decoding, halves, waiting)


def known(policy: SGLang, ledger: Ledger) -> SGLang:
    policy.adopt(ledger)
    return policy


def test_a_prompt_enters_by_the_ratio_of_what_others_may_still_produce():
    """1,000 prompt tokens, 1,000 output tokens and a page beside 0.7 of the 999 that a decode has left."""
    fits = 1000 + 1000 + 1 + 0.7 * 999
    for more, entered in ((0, ()), (1, (1,))):
        ledger = world(10 + int(fits) + more, waiting=[1000], decoding=1)
        assert known(SGLang(slots=8, budget=2000), ledger).plan(ledger).prefill == entered
    ledger = world(2900, waiting=[1000], decoding=1)
    policy = known(SGLang(slots=8, budget=2000, conservativeness=2.0), ledger)
    assert policy.ratio == 1.0
    assert policy.plan(ledger).prefill == ()


def test_the_ratio_falls_to_its_floor_over_600_decode_steps_and_starts_again_when_idle():
    policy = SGLang(slots=4, budget=512)
    seen = []

    class Watched(SGLang):
        def plan(self, view):
            seen.append(self.ratio)
            return super().plan(view)

    run(AMPLE, Watched(slots=4, budget=512), Workload.of([10, 10], [800, 2], arrival=[0.0, 5000.0]))
    assert policy.ratio == 0.7
    assert seen[-1] == 0.7  # idle before the second request came
    run(AMPLE, Watched(slots=4, budget=512), Workload.of([10, 10], [2000, 2], arrival=[0.0, 2500.0]))
    assert seen[-1] == pytest.approx(0.098)


def test_first_pieces_end_at_a_page_and_every_prompt_is_charged_in_pages():
    ledger = world(10_000, waiting=[500, 500], block=16)
    plan = known(SGLang(slots=8, budget=810), ledger).plan(ledger)
    assert plan.prefill == (0, 1) and plan.chunk == 500 + 288  # 512 are charged; 298 are left, 18 pages
    ledger = world(10_000, halves=[900], block=16)
    assert known(SGLang(slots=8, budget=810), ledger).plan(ledger).chunk == 810  # one that goes on is not cut


def test_prompts_wait_for_free_slots_and_for_decode_steps():
    ledger = world(10_000, waiting=[10, 10], decoding=5)
    assert known(SGLang(slots=8, budget=100, min_free_slots_delay=4), ledger).plan(ledger).prefill == ()
    assert known(SGLang(slots=9, budget=100, min_free_slots_delay=4), ledger).plan(ledger).prefill == (5, 6)
    requests = Workload.of([30] * 4, [20] * 4, arrival=[0.0, 1.4, 1.5, 30.0])
    steps = run(AMPLE, SGLang(slots=4, budget=512, prefill_decode_interval=3), requests).steps
    assert [step[3] for step in steps[:6]] == [30, 0, 0, 0, 60, 0]
    steps = run(
        AMPLE, SGLang(slots=4, budget=512, prefill_decode_interval=3, interval_min_bs=2), requests
    ).steps
    assert [step[3] for step in steps[:3]] == [30, 0, 60]


def test_mixed_chunks_share_the_budget_with_decodes():
    ledger = world(10_000, waiting=[200], decoding=5)
    plan = known(SGLang(slots=8, budget=100, mixed_chunk=True), ledger).plan(ledger)
    assert (plan.decode, plan.prefill, plan.chunk) == (ALL, (5,), 95)
    assert known(SGLang(slots=8, budget=100), ledger).plan(ledger).decode is NONE


def test_at_most_so_many_prefill_tokens_enter():
    ledger = world(10_000, waiting=[40, 40, 40])
    assert known(SGLang(slots=8, budget=512, max_prefill_tokens=60), ledger).plan(ledger).prefill == (0, 1)


def test_the_shortest_output_is_retracted_and_waits_behind_all_others():
    """Of equals the longest prompt goes. The ratio is set to what the others are likely to need."""
    ledger = world(3000, waiting=[5], decoding=3)
    for id, tokens in ((0, 5), (1, 2), (2, 2)):
        ledger.recount(ledger.decoding[id], tokens)
    ledger.decoding[1].prompt = 11
    ledger.kv_free = 2
    policy = known(SGLang(slots=3, budget=100), ledger)
    plan = policy.plan(ledger)
    assert plan.evict == (1,)
    policy.evicted(ledger.decoding[1], 0.0)
    policy.planned(plan, 0.0, {})
    assert list(policy._queue) == [3, 1]
    policy.stepped(Steps(0.0, [1.0], decodes=2, context=20))
    assert policy.ratio == pytest.approx((5 + 2 + 2 * 20) / (1000 + 1000 + 1))


@pytest.mark.parametrize("policy", ["eb:refill=1", "mixed", "v0"])
@pytest.mark.parametrize(("retraction", "out", "back"), [("newest", 1, [1, 2]), ("shortest", 0, [2, 0])])
def test_an_engine_retracts_as_sglang_does_under_any_policy(policy, retraction, out, back):
    """Two decodes of one age run out of KV: the newest goes, or the longer prompt; and where it waits."""
    engine = AMPLE._replace(kv_tokens=60, running=2, retraction=retraction)
    requests = Workload.of([24, 16, 8], [30, 30, 3])
    ran = batches(engine, make_policy(*split_name(policy), engine)[0], requests)
    place = next(number for number, batch in enumerate(ran) if batch.evicted)
    assert ran[place].evicted == (out,)
    later = [id for batch in ran[place:] for id, _, _ in batch.chunks]
    assert list(dict.fromkeys(later)) == back


@pytest.mark.parametrize(("retraction", "cut", "out"), [("newest", 15, 1), ("shortest", 4, 0)])
def test_a_half_done_prompt_runs_the_piece_that_has_room(retraction, cut, out):
    """It fits when it enters; then the decode grows to 50 tokens, and beside 143 of it 4 are free."""
    engine = AMPLE._replace(kv_tokens=197, batch_tokens=16, running=2, retraction=retraction)
    ran = batches(engine, make_policy("mixed", {}, engine)[0], Workload.of([40, 150], [60, 5]))
    place = next(number for number, batch in enumerate(ran) if batch.evicted)
    assert ran[place].evicted == (out,)
    assert [tokens for batch in ran[:place] for _, _, tokens in batch.chunks][-1] == cut


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"slots": 0}, "slots=0"),
        ({"budget": 0}, "budget=0"),
        ({"order": "random"}, "order of sglang"),
        ({"conservativeness": 0.0}, "must be above 0"),
        ({"min_free_slots_delay": -1}, "give 0"),
    ],
)
def test_bad_flags_are_refused(words, said):
    with pytest.raises(InputError, match=said):
        SGLang(**{"slots": 4, "budget": 64, **words})


def test_an_unknown_retraction_is_refused():
    with pytest.raises(InputError, match="retraction"):
        AMPLE._replace(retraction="oldest").checked()
