"""EB(k): the switch, its two ends (vLLM v0 and request-level batching), and the exact chain."""

from __future__ import annotations

from itertools import islice
from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError, RunError
from headgate.core.ledger import Ledger
from headgate.core.plan import ALL, NONE, Plan, Until, check
from headgate.core.policy import BatchPolicy, Observer
from headgate.methods.eb.exclusive import Exclusive, PrefillFirst, RequestLevel
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Workload
from worlds import PRICES, Line, batches, engines, holding, run, workloads


def refills(policy: BatchPolicy, view: Ledger) -> int:
    """How many prompts it lets in now; 0 while it decodes."""
    plan = policy.plan(view)
    assert check(plan, view) == []
    assert plan.decode is (NONE if plan.prefill else ALL)
    assert plan.prefill == tuple(islice(view.waiting, len(plan.prefill)))
    if plan.prefill:
        assert plan.until == Until(prefills=len(plan.prefill))
    return len(plan.prefill)


# -- when to refill -------------------------------------------------------------------------------------

MANY = 500


@pytest.mark.parametrize(
    ("decoding", "waiting", "expected"),
    [(104, MANY, 24), (105, MANY, 0), (50, 11, 0), (50, 12, 12)],
)
def test_switch_known_answers(decoding, waiting, expected):
    assert refills(Exclusive(slots=128, refill=24), holding(decoding, waiting)) == expected


def test_switch_with_a_long_queue_is_idle_slots_against_k():
    for idle in range(0, 129, 4):
        assert (refills(Exclusive(128, 24), holding(128 - idle, MANY)) > 0) == (idle >= 24)


def test_half_done_prompts_come_first_where_the_engine_passed_one_over():
    """A real engine may have no room for the first prompt of a refill and run a part of the second."""
    policy, view = Exclusive(slots=4, refill=2), holding(decoding=1, waiting=3)
    assert policy.plan(view).prefill == (1, 2, 3)
    view.admit(view.waiting[2])
    plan = policy.plan(view)
    assert plan.prefill == (2, 1, 3) and check(plan, view) == []


@pytest.mark.parametrize(("slots", "refill"), [(1, 1), (5, 1), (5, 2), (5, 5), (8, 3)])
def test_switch_is_the_rule_in_integers(slots, refill):
    for decoding in range(slots + 1):
        for waiting in range(slots + 3):
            fillable = min(waiting, slots - decoding)
            rule = fillable >= 1 and fillable * (slots - refill) >= decoding * refill
            found = refills(Exclusive(slots, refill), holding(decoding, waiting))
            assert found == (fillable if rule else 0), (decoding, waiting)


def test_ends_of_the_switch():
    assert refills(PrefillFirst(64), holding(63, 1)) == 1  # k = 1: one slot, one prompt
    assert refills(PrefillFirst(64), holding(64, 9)) == 0
    assert refills(RequestLevel(64), holding(1, MANY)) == 0  # k = N: not while anybody decodes
    assert refills(RequestLevel(64), holding(0, MANY)) == 64
    assert refills(RequestLevel(64), holding(0, 3)) == 3


def test_an_empty_engine_takes_anybody():
    assert refills(Exclusive(128, 100), holding(0, 1)) == 1


def test_a_smaller_engine_than_the_policy_was_made_for():
    """Slots are the engine's if it has fewer; so is the largest k."""
    assert refills(Exclusive(128, 24), holding(8, MANY, running=32)) == 24
    assert refills(Exclusive(128, 24), holding(9, MANY, running=32)) == 0
    assert refills(Exclusive(128, 64), holding(0, MANY, running=32)) == 32
    assert refills(Exclusive(128, 64), holding(1, MANY, running=32)) == 0


@pytest.mark.parametrize(
    ("kv_free", "block", "expected"),
    [
        (10**6, 1, 28),
        (100 + 28 * 11, 1, 28),  # a token for each decode, ten and the first new one for each prompt
        (100 + 28 * 11 - 1, 1, 27),
        (100 + 3 * 11, 1, 3),
        (100 + 10, 1, 0),
        (100 + 3 * 16, 16, 3),  # whole blocks
        (100 + 3 * 16 - 1, 16, 2),
        (100 + 15, 16, 0),
    ],
)
def test_memory_shortens_a_refill(kv_free, block, expected):
    view = holding(100, MANY, kv_free=kv_free, block=block)
    assert refills(Exclusive(slots=128, refill=24), view) == expected


def test_the_first_prompt_always_enters_an_empty_engine():
    assert refills(Exclusive(slots=4, refill=2), holding(0, 3, kv_free=10)) == 1


def test_leases_of_the_decode_phase():
    def lease(view: Ledger) -> Until:
        return Exclusive(slots=128, refill=24).plan(view).until

    assert lease(holding(128, MANY)) == Until(finishes=24)
    assert lease(holding(110, MANY)) == Until(finishes=6)
    assert lease(holding(110, MANY, kv_free=0)) == Until(finishes=6)
    assert lease(holding(100, MANY, kv_free=0)) == Until(finishes=1)
    assert lease(holding(110, 0)) == Until(arrivals=1)
    # 50 decode, 11 wait: a refill of 11 is due when 47 decode (11 * 104 = 1144; 47 * 24 = 1128, 48: 1152).
    assert lease(holding(50, 11)) == Until(finishes=3, arrivals=1)
    assert lease(holding(48, 11)) == Until(finishes=1, arrivals=1)
    assert lease(holding(47, 11)) == Until(prefills=11)


def test_gauges_tell_threshold_and_phase():
    policy = Exclusive(slots=8, refill=3)
    assert policy.gauges() == {"refill": 3, "slots": 8, "refilling": 0}
    policy.plan(holding(2, 9))
    assert policy.gauges() == {"refill": 3, "slots": 8, "refilling": 6}


@pytest.mark.parametrize(("slots", "refill"), [(0, 1), (4, 0), (4, 5), (-1, -1)])
def test_impossible_parameters(slots, refill):
    with pytest.raises(InputError, match="eb: "):
        Exclusive(slots, refill)


# -- refills ------------------------------------------------------------------------------------------


def saturated(slots: int, batch_tokens: int = 10**5, **columns) -> tuple[Engine, Workload]:
    rng = np.random.default_rng(8)
    count = 12 * slots
    workload = Workload.of(rng.integers(5, 60, count), rng.integers(1, 40, count), **columns)
    return Engine(Line(), 10**6, 10**6, batch_tokens, slots, block=16), workload


@pytest.mark.parametrize("refill", [1, 2, 7, 15, 16])
@pytest.mark.parametrize("batch_tokens", [10**5, 48])
def test_under_saturation_a_refill_admits_at_least_k(refill, batch_tokens):
    engine, workload = saturated(16, batch_tokens)
    sizes, phase, last = [], set(), False
    for batch in batches(engine, Exclusive(slots=16, refill=refill), workload):
        assert not (batch.decodes and batch.chunks), "prompts and decodes in one step"
        if batch.chunks:
            phase |= {id for id, _, _ in batch.chunks}
        elif phase:
            last = max(phase) == len(workload) - 1
            sizes.append(len(phase))
            phase = set()
    assert last
    assert sum(sizes) == len(workload)
    assert sizes[0] >= 16  # the first fill takes all slots, and more when somebody leaves with one token
    assert min(sizes[:-1]) >= refill
    if refill < 16 and batch_tokens > 48:
        assert min(sizes[:-1]) < 16


class Watched(Exclusive):
    """EB that looks, whenever a refill begins, who is still there."""

    def __init__(self, slots: int, refill: int) -> None:
        super().__init__(slots, refill)
        self.phase: set[int] = set()
        self.begun = 0

    def plan(self, view):
        plan = super().plan(view)
        if not set(plan.prefill) <= self.phase:
            assert not view.decoding, "somebody of the batch before still decodes"
            assert not view.prefilling
            assert len(plan.prefill) <= min(self.slots, view.limits.running)
            self.begun += 1
        self.phase = set(plan.prefill)
        return plan


@given(engine=engines(), workload=workloads(impatient=True), slots=st.integers(1, 8))
def test_k_n_lets_the_batch_run_empty(engine, workload, slots):
    watched = Watched(slots, refill=slots)
    expected = run(engine, watched, workload)
    found = run(engine, RequestLevel(slots), workload)
    assert found.steps == expected.steps
    assert watched.begun > 0 or not found.steps


def test_k_below_n_does_not():
    with pytest.raises(RunError, match="still decodes"):
        run(*(lambda engine, workload: (engine, Watched(16, 15), workload))(*saturated(16)))


class PlainPrefillFirst(BatchPolicy):
    """vLLM v0 in ten lines: whoever can enter is prefilled at once, else everybody decodes."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def plan(self, view):
        slots = min(self.slots, view.limits.running) - len(view.decoding)
        room, block, prompts = view.kv_free - len(view.decoding), view.limits.block, []
        for request in islice(view.waiting.values(), max(0, slots)):
            room -= -(-(request.todo + 1) // block) * block
            if room < 0 and (prompts or view.decoding):
                break
            prompts.append(request.id)
        return Plan(NONE, tuple(prompts)) if prompts else Plan(ALL)


@given(engine=engines(), workload=workloads(impatient=True), slots=st.integers(1, 10))
def test_k_1_is_prefill_first_at_every_load(engine, workload, slots):
    """With a budget that holds every refill in one step (else the batch under way is finished first)."""
    engine = engine._replace(batch_tokens=10**5)
    expected = run(engine, PlainPrefillFirst(slots), workload)
    for policy in (Exclusive(slots=slots, refill=1), PrefillFirst(slots)):
        found = run(engine, policy, workload)
        assert found.steps == expected.steps
        assert found.events == expected.events


# -- the exact chain ------------------------------------------------------------------------------------


def chain(slots: int, p: float, refill: int) -> tuple[float, float]:
    """E[tau], E[K]: decode iterations from a full batch until k slots are idle; how many are idle then."""
    reach = np.zeros(slots + 1)
    reach[slots] = 1.0  # probability that the number of decodes is ever n
    tau = idle = 0.0
    for n in range(slots, slots - refill, -1):
        leaving = [comb(n, left) * p**left * (1 - p) ** (n - left) for left in range(n + 1)]
        visits = reach[n] / (1 - leaving[0])
        tau += visits
        idle += p * n * visits
        for left in range(1, n + 1):
            reach[n - left] += visits * leaving[left]
    return tau, idle


KNOWN = {24: (13.627753, 24.814633), 64: (44.266863, 64.501312)}


@pytest.mark.parametrize("refill", KNOWN)
def test_exact_chain_gives_the_known_answers(refill):
    assert chain(128, 1 / 64, refill) == pytest.approx(KNOWN[refill], abs=5e-7)


class Cycles(Observer):
    """Decode steps between two refills, and prompts per refill."""

    def __init__(self) -> None:
        self.decodes: list[int] = []
        self.prompts: list[int] = []
        self._refilling = False

    def stepped(self, steps):
        if steps.prefill and not self._refilling:
            self.decodes.append(0)
            self.prompts.append(0)
        self._refilling = steps.prefill > 0
        if steps.decodes:
            self.decodes[-1] += len(steps.ends)

    def prefilled(self, request, now):
        self.prompts[-1] += 1


@pytest.mark.parametrize(("refill", "count"), [(24, 24_000), (64, 24_000)])
def test_saturated_simulation_follows_the_exact_chain(refill, count):
    """N = 128, p = 1/64. The prompt brings the first token, so decode iterations are D = O - 1.

    The chain wants D geometric from 1 on: every decode leaves with probability p at each iteration, its first
    one included, and nobody leaves with the prompt. So O = 1 + D. Ages carry over refills, which geometric
    lengths do not notice; each cycle begins with a full batch, so cycles are independent.
    """
    slots, p = 128, 1 / 64
    rng = np.random.default_rng(2)
    workload = Workload.of(np.full(count, 8), 1 + rng.geometric(p, count))
    engine = Engine(Line(), 10**7, 10**7, batch_tokens=8 * slots, running=slots, block=16)
    cycles = Cycles()
    Simulator(engine, Exclusive(slots, refill), workload, (cycles,)).run()
    assert cycles.prompts[0] == slots
    full = np.cumsum(cycles.prompts) <= count - slots  # after these the queue still had a batch to give
    tau = np.array(cycles.decodes)[:-1][full[:-1]]
    idle = np.array(cycles.prompts)[1:][full[:-1]]
    assert idle.min() >= refill
    for found, expected in zip((tau, idle), KNOWN[refill], strict=True):
        error = found.std(ddof=1) / sqrt(len(found))
        assert error < 0.02 * expected, "too few cycles for the test to mean anything"
        assert abs(found.mean() - expected) < 3 * error
    # The same for tokens: in a cycle K leave, each after 64 iterations on average.
    assert idle.mean() / tau.mean() == pytest.approx(KNOWN[refill][1] / KNOWN[refill][0], rel=0.02)


def test_decodes_between_pieces_may_take_the_kv_of_the_rest_of_a_refill():
    """The rest then waits for the next refill, instead of holding decodes for a prompt that cannot enter."""
    engine = Engine(Line(), kv_tokens=100, max_model_len=50, batch_tokens=7, running=3, block=4)
    workload = Workload.of([16, 40, 36, 45, 9] + [1] * 13, [1, 1, 9, 3] + [1] * 14)
    log = run(engine, Exclusive(slots=3, refill=1, max_gap=0.5, cost=PRICES), workload)
    assert sum(event[0] == "finished" for event in log.events) == 18


@pytest.mark.parametrize(("kv_free", "running"), [(9, 1000), (10**6, 2)])
def test_a_refill_whose_next_prompt_cannot_enter_any_more_is_given_up(kv_free, running):
    """In a fleet others may come with KV of their own after a refill was chosen."""
    policy, view = Exclusive(slots=8, refill=2), holding(decoding=2, waiting=3)
    assert policy.plan(view).prefill == (2, 3, 4)
    view.kv_free, view.limits = kv_free, view.limits._replace(running=running)
    plan = policy.plan(view)
    assert plan.decode is ALL and not plan.prefill
    assert policy.plan(view) == plan
