"""RAD: prompts alone and in tiles, decodes in tiles, cycles; and its two-phase form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.ledger import Entry, Ledger
from headgate.core.plan import ALL, NONE, Plan, Until, check
from headgate.core.policy import End
from headgate.core.view import Limits
from headgate.methods.rad import Rad, TwoPhaseRad
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload
from worlds import Batch, Line, admitted, batches, engines, run, workloads

ALONE = Until(prefills=1)


def planned(policy: Rad, decoding=0, halves=(), waiting=(), running=64, kv_free=10**6, total=10**6) -> Plan:
    ledger = Ledger(Limits(batch_tokens=10**6, running=running), total)
    ledger.kv_free = kv_free
    admitted(ledger, decoding, halves, waiting)
    policy.adopt(ledger)
    plan = policy.plan(ledger)
    assert check(plan, ledger) == []
    return plan


def test_one_prompt_alone_until_the_tile_is_full():
    assert planned(Rad(4, 4, 8), decoding=3, waiting=[20, 5]) == Plan(NONE, (3,), chunk=8, until=ALONE)
    assert planned(Rad(4, 4, 8), decoding=4, waiting=[20, 5]) == Plan(ALL, until=Until(finishes=1))
    assert planned(Rad(4, 4, 8), decoding=6, waiting=[20]) == Plan(ALL, until=Until(finishes=3))
    assert planned(Rad(4, 4, 8), decoding=2) == Plan(ALL, until=Until(arrivals=1))


def test_a_prompt_that_has_begun_is_finished_first():
    assert planned(Rad(4, 4, 4), decoding=4, halves=[7], waiting=[20]) == Plan(
        NONE, (4,), chunk=4, until=ALONE
    )


@pytest.mark.parametrize(("slots", "whole"), [(4, 4), (11, 8), (3, 3), (8, 8), (128, 128)])
def test_slots_are_whole_tiles(slots, whole):
    assert Rad(slots, tile=4, chunk=4).slots == whole


def test_an_engine_with_fewer_slots_than_tiles():
    assert planned(Rad(8, 4, 4), decoding=5, waiting=[9], running=5) == Plan(ALL, until=Until(finishes=1))


def test_a_cycle_lets_everybody_leave():
    policy = Rad(4, 4, 4, cycle=6)
    for _ in range(3):
        policy.prefilled(None, 0.0)
    assert planned(policy, decoding=3, waiting=[9]).decode is ALL  # adopted: three more
    assert planned(policy, decoding=3, waiting=[9]).until == Until(finishes=3)
    assert planned(policy, waiting=[9]).prefill == (0,)  # nobody decodes: a new one begins
    assert planned(Rad(4, 4, 4, cycle=6), decoding=3, waiting=[9]).prefill == (3,)


def test_kv_is_kept_for_everybodys_output():
    """Three decodes of prompt 10 and a head of 20, with 30 expected each: 4 * 30 + 50 tokens."""
    for total, starts in ((170, True), (169, False)):
        plan = planned(Rad(8, 4, 4, output=30), decoding=3, waiting=[20], kv_free=100, total=total)
        assert bool(plan.prefill) == starts
        assert starts or plan.until == Until(finishes=1)
    assert planned(Rad(8, 4, 4, output=30), decoding=3, waiting=[20], kv_free=19).prefill == ()
    assert planned(Rad(8, 4, 4, output=1e9), waiting=[20], kv_free=100, total=100).prefill == (0,)


def test_the_expected_output_is_learned_from_those_that_ended():
    policy = Rad(4, 4, 4, output=1000.0)
    ledger = Ledger(Limits(100, 4), 100)
    entry = Entry(ledger, 0, 0.0, prompt=5, limit=50)
    entry._tokens = 10
    policy.finished(entry, 1.0, End.ABORTED)
    assert policy.gauges()["output"] == 1000
    policy.finished(entry, 1.0, End.STOPPED)
    assert policy.gauges()["output"] == 10
    entry._tokens = 20
    policy.finished(entry, 1.0, End.LIMIT)
    assert policy.gauges()["output"] == 15


@given(engine=engines(), workload=workloads(), data=st.data())
def test_prompts_run_alone_and_whole_and_decodes_fit_their_tiles(engine, workload, data):
    tile = data.draw(st.integers(1, 4))
    chunk = tile * data.draw(st.integers(1, 5))
    slots = data.draw(st.integers(1, engine.running))
    policy = Rad(slots, tile, chunk)
    under_way = None
    for batch in batches(engine, policy, workload):
        assert not (batch.decodes and batch.chunks)
        assert len(batch.decodes) <= policy.slots
        assert len(batch.chunks) <= 1
        if under_way in batch.evicted:
            under_way = None
        for id, _, length in batch.chunks:
            assert under_way in (None, id), "another prompt in the middle of one"
            assert length <= chunk
            under_way = id
        if batch.decodes:
            assert under_way is None, "decodes in the middle of a prompt"
        if under_way is not None and ended(batch, workload):
            under_way = None


def ended(batch: Batch, workload: Workload) -> bool:
    """Was the prompt of this batch completed? After an eviction its output so far belongs to it."""
    ((id, first, length),) = batch.chunks
    return first + length - 1 >= workload.prompt[id]


@pytest.mark.parametrize("made", [Rad, TwoPhaseRad])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"slots": 0}, "rad: slots=0, tile=4; both must be at least 1"),
        ({"tile": 0}, "tile=0"),
        ({"chunk": 6}, "rad: chunk=6 is not a multiple of tile=4; choose whole tiles"),
        ({"chunk": 0}, "chunk=0"),
        ({"cycle": 7}, "rad: cycle=7 is below the 8 slots; raise it or drop it"),
        ({"output": 0.0}, "rad: output=0.0 tokens; it must be above 0"),
    ],
)
def test_impossible_parameters(made, words, message):
    with pytest.raises(InputError, match=message):
        made(**{"slots": 8, "tile": 4, "chunk": 8} | words)


# -- two phases ---------------------------------------------------------------------------------------


def wave(hold: bool, **columns) -> list[Batch]:
    """Six prompts at once on four slots, 40 tokens a step."""
    engine = Engine(Line(), 10**6, 10**6, 40, 6, 16)
    workload = Workload.of([30, 8, 1, 45, 20, 12], [4, 6, 3, 2, 5, 3], **columns)
    return batches(engine, TwoPhaseRad(4, 4, 40, hold_first_token=hold), workload)


@pytest.mark.parametrize("hold", [False, True])
def test_all_prompts_come_before_any_decode_and_no_prompt_interrupts(hold):
    found = wave(hold, arrival=[0.0, 0.0, 0.0, 0.0, 0.0, 3.0])
    phases = ["decode" if batch.decodes else "prefill" for batch in found]
    first = phases.index("decode")
    assert all(length == 1 for batch in found[first:] for _, _, length in batch.chunks)
    assert all(len(batch.decodes) <= 4 for batch in found)


def test_without_holding_the_first_token_comes_with_the_prompt():
    found = wave(False)
    assert [batch.chunks for batch in found[:7]] == [
        ((0, 1, 30),),
        ((1, 1, 8),),
        ((2, 1, 1),),
        ((3, 1, 40),),
        ((3, 41, 5),),
        ((4, 1, 20),),
        ((5, 1, 12),),
    ]
    assert [id for id, _ in found[7].decodes] == [0, 1, 2, 3]


def test_held_tokens_are_made_when_their_requests_begin_to_decode():
    """All prompts but their last tokens; then four of those, then decodes and whoever takes a free slot."""
    found = wave(True)
    prefill = [batch.chunks for batch in found[:7]]
    assert prefill == [
        ((0, 1, 29),),
        ((1, 1, 7),),
        ((2, 1, 1),),  # a single token cannot be kept back
        ((3, 1, 40),),
        ((3, 41, 4),),
        ((4, 1, 19),),
        ((5, 1, 11),),
    ]
    assert [id for id, _ in found[7].decodes] == [2]
    assert found[7].chunks == ((0, 30, 1), (1, 8, 1), (3, 45, 1))
    assert {id for id, _ in found[8].decodes} == {0, 1, 2, 3}
    assert found[9].chunks == ((4, 20, 1), (5, 12, 1))  # two have left


def test_a_phase_ends_with_its_cycle():
    engine = Engine(Line(), 10**6, 10**6, 40, 8, 16)
    workload = Workload.of([10] * 9, [3] * 9)
    for hold in (False, True):
        policy = TwoPhaseRad(2, 2, 40, cycle=4, hold_first_token=hold)
        order = [event[1] for event in run(engine, policy, workload).events if event[0] == "admitted"]
        assert order == list(range(9))
        found = batches(engine, policy, workload)
        starts = [number for number, batch in enumerate(found) if batch.chunks and batch.chunks[0][2] > 1]
        assert starts[:4] == [0, 1, 2, 3]
        assert starts[4] > 4


def test_a_phase_ends_when_memory_does():
    plan = planned(TwoPhaseRad(2, 2, 4, output=30), decoding=3, waiting=[20], kv_free=100, total=169)
    assert plan == Plan(frozenset({0, 1}), until=Until(finishes=1))
