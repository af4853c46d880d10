"""WAIT and Nested WAIT: hand-worked traces, invariants, patience, memory."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.core.ledger import Ledger
from headgate.core.plan import ALL, NONE
from headgate.core.policy import Observer
from headgate.core.view import Limits
from headgate.cost.laws.speculation import Acceptance
from headgate.cost.laws.terms import DraftTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.wait.tracks import Track
from headgate.methods.wait.wait import NestedWait, Wait
from headgate.sim.engine.engine import Engine, Speculation
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Kind, Workload
from headgate_papers.kv_linear import kv_linear
from headgate_papers.wait.runs import kind
from worlds import Batch, Log, admitted, batches, run

FOR_EVER = {"max_pause": 1e9, "max_wait": 1e9}
CLASSES = "SGGSGSGSSGGSSGSGSS"

# start, contents by stage, KV tokens touched, duration, KV tokens resident
FIGURE_6 = """
1.0   0:1,2,3            6   1.6   6
7.0   0:4,5,6            6   1.6   8
14.0  0:7,8,9 1:3,5,6    15  2.5   15
"""
NESTED = """
2.00   0:1,2,3                           6   1.30  6
5.00   0:4,5,6 1:1,2,3                   15  1.75  15
8.00   0:7,8,9 1:4,5,6 2:2,3             23  2.15  23
11.00  0:10,11,12 1:7,8,9                15  1.75  26
14.00  0:13,14,15 1:10,11,12 2:5,7 3:2,3 33  2.65  33
17.00  0:16,17,18 1:13,14,15 2:10,11 3:5,7 33 2.65 33
19.65  1:16,17,18 2:14 3:10,11           23  2.15  23
21.80  2:16 3:14                         9   1.45  9
23.25  3:16                              5   1.25  5
"""
WAIT = """
1.00   0:2                               2   1.10  2
2.10   0:3 1:2                           5   1.25  5
3.35   0:1,4                             4   1.20  9
4.55   0:5 1:3 2:2                       9   1.45  13
6.00   0:7 1:5 2:3 3:2                   14  1.70  18
7.70   0:6,8 1:1,4                       10  1.50  19
9.20   0:10 1:7 2:5 3:3                  14  1.70  18
10.90  0:11 1:10 2:7 3:5                 14  1.70  18
12.60  0:9,12 1:6,8                      10  1.50  19
14.10  0:13,14,15 1:9,11,12 2:10 3:7     24  2.20  24
16.30  0:16 1:14 2:11 3:10               14  1.70  18
18.00  0:17,18 1:13,15                   10  1.50  19
19.50  1:16,17,18 2:14 3:11              18  1.90  18
21.40  2:16 3:14                         9   1.45  9
22.85  3:16                              5   1.25  5
"""


def drain(policy: Wait) -> None:
    """No more requests will come, as in the paper's figures: all move whenever no segment is ready."""
    choose = policy._choose

    def choose_all(tracks, now):
        chosen, deadline = choose(tracks, now)
        everyone = [place for track in tracks for place in track if place.moving or place.queue]
        return chosen or everyone, deadline

    policy._choose = choose_all


class Closing(Observer):
    """Drains the policy when the last request has come, and writes down the KV of every step."""

    def __init__(self, policy: Wait, last: int) -> None:
        self.policy, self.last, self.kv = policy, last, []

    def arrived(self, request, now):
        if request.id == self.last:
            drain(self.policy)

    def stepped(self, steps):
        self.kv.append(steps.kv)


def engine(cost, kv=10**6, batch_tokens=10**5, running=1000, block=1):
    return Engine(cost, kv, 10**6, batch_tokens, running, block)


def stages(batch: Batch, prompt: int = 2) -> str:
    found: dict[int, list[int]] = {}
    for id, position in batch.decodes:
        found.setdefault(position - prompt, []).append(id + 1)
    for id, _, _ in batch.chunks:
        found.setdefault(0, []).append(id + 1)
    return " ".join(f"{stage}:{','.join(map(str, sorted(ids)))}" for stage, ids in sorted(found.items()))


def trace(policy, cost, workload, drained=True):
    watch = Closing(policy, len(workload) - 1 if drained else -1)
    ran = batches(engine(cost), policy, workload, (watch,))
    rows = []
    for batch, kv in zip(ran, watch.kv, strict=True):
        seconds = batch.ends[0] - batch.start
        tokens = sum(position for _, position in batch.decodes) + sum(n for _, _, n in batch.chunks)
        rows.append((round(batch.start, 6), stages(batch), tokens, round(seconds, 6), kv))
    return rows


def table(text):
    rows = []
    for line in text.strip().splitlines():
        start, *contents, tokens, seconds, resident = line.split()
        rows.append((float(start), " ".join(contents), int(tokens), float(seconds), int(resident)))
    return rows


def figure_6():
    short = {1, 2, 4, 9, 10}
    outputs = [1 if number in short else 2 for number in range(1, 11)]
    return Workload.of([2] * 10, outputs, arrival=[0, 0, 1, 5, 5, 7, 7, 11, 14, 14])


def eighteen():
    kinds = [int(letter == "G") for letter in CLASSES]
    outputs = [4 if letter == "G" else 2 for letter in CLASSES]
    return Workload.of([2] * 18, outputs, arrival=range(18), kind=kinds, kinds=[Kind("S"), Kind("G")])


def nested_b(**words):
    return NestedWait(100, kv_linear(1, 0.05), "3/2", "1/3", **(FOR_EVER | words))


def wait_c(**words):
    return Wait(100, kv_linear(1, 0.05), "S=2+G=1", **(FOR_EVER | words))


def test_trace_a_is_figure_6():
    policy = NestedWait(100, kv_linear(1, 0.1), "3/3", "0/1", **FOR_EVER)
    assert trace(policy, kv_linear(1, 0.1), figure_6())[:3] == table(FIGURE_6)


def test_trace_b_of_nested_wait():
    assert trace(nested_b(), kv_linear(1, 0.05), eighteen()) == table(NESTED)


def test_trace_c_of_wait():
    assert trace(wait_c(), kv_linear(1, 0.05), eighteen()) == table(WAIT)


def poisson(rates, prompt, decodes, seconds, seed=0):
    """Types of fixed lengths; kinds are named 0, 1, ..."""
    draws = np.random.default_rng(seed)
    count = draws.poisson(sum(rates) * seconds)
    kinds = draws.choice(len(rates), count, p=np.array(rates) / sum(rates))
    outputs = np.array(decodes)[kinds] + 1
    names = [Kind(str(number)) for number in range(len(rates))]
    arrival = np.sort(draws.random(count)) * seconds
    return Workload.of([prompt] * count, outputs, arrival=arrival, kind=kinds, kinds=names)


class Cohorts(Observer):
    """Looks at every batch that is planned: how many of each type stand at each stage."""

    def __init__(self, policy):
        self.policy, self.seen = policy, set()

    def planned(self, plan, now, gauges):
        for name, track in self.policy.tracks.items():
            counts: dict[int, int] = {}
            for request in track.resident.values():
                counts[request.generated] = counts.get(request.generated, 0) + 1
            self.seen |= {(name, count) for count in counts.values()}


@pytest.mark.parametrize("sizes", [(10, 10), (7, 12)])
def test_whole_cohorts_and_their_memory_bound(sizes):
    """Invariants 1 and 2: each stage holds 0 or n requests, and resident KV never exceeds Σ n w."""
    workload = poisson((1000, 1000), 10, (10, 20), 2.0)
    policy = Wait(10**4, kv_linear(0.008, 3e-7), f"0={sizes[0]}+1={sizes[1]}", max_pause=5.0, max_wait=5.0)
    watch, log = Cohorts(policy), Log()
    Simulator(engine(kv_linear(0.008, 3e-7)), policy, workload, (watch, log)).run()
    before_the_end = {(str(j), n) for j, n in enumerate(sizes)}
    assert before_the_end <= watch.seen
    short = watch.seen - before_the_end  # the last, forced cohorts of each type
    assert all(count < sizes[int(name)] for name, count in short) and len(short) <= 2
    parts = [kind(1000, 10, 10), kind(1000, 10, 20)]
    assert max(log.kv) <= sum(n * part.work for n, part in zip(sizes, parts, strict=True))


@pytest.mark.parametrize("size", [0.3, 0.75, 2.5])
def test_fractional_cohorts_overshoot_by_less_than_one_request(size):
    """Resident KV <= x w + l + l'."""
    workload = poisson((60,), 20, (40,), 20.0)
    policy = Wait(10**4, kv_linear(0.008, 3e-7), f"{size}", max_pause=5.0, max_wait=5.0)
    log = run(engine(kv_linear(0.008, 3e-7)), policy, workload)
    assert max(log.kv) <= size * kind(1, 20, 40).work + 60


def test_time_per_token_is_set_by_arrivals():
    """Invariant 3: a type steps n/λ seconds apart, however fast the engine is."""
    workload = poisson((200,), 10, (30,), 20.0)
    cost = kv_linear(0.002, 1e-8)
    log = run(engine(cost), Wait(10**4, cost, "8", max_pause=1.0, max_wait=1e9), workload)
    done = [event[2] for event in log.events if event[0] == "finished"]
    begun = {event[1]: event[2] for event in log.events if event[0] == "prefilled"}
    early = [event for event in log.events if event[0] == "finished" and event[2] < 18]
    per_token = np.mean([(when - begun[id]) / 30 for _, id, when, *_ in early])
    assert len(done) == len(workload)
    assert per_token == pytest.approx(8 / 200, rel=0.05)


def test_early_ends_shrink_the_cohort():
    policy = Wait(100, kv_linear(1, 0.1), "2", **FOR_EVER)
    workload = Workload.of([2] * 6, [4, 2, 4, 4, 3, 3], arrival=[0, 0, 10, 10, 20, 20])
    rows = [row[1] for row in trace(policy, kv_linear(1, 0.1), workload)]
    assert rows == ["0:1,2", "0:3,4 1:1,2", "0:5,6 1:3,4 2:1", "1:5,6 2:3,4 3:1", "2:5,6 3:3,4"]


def test_a_lowered_threshold_drains():
    """All residents of a type move; with the printed min a surplus would stay for ever."""
    track = Track("", sizes=(3,))
    ledger = admitted(Ledger(Limits(100, 100), 10**6), decoding=5, waiting=[5] * 4)
    for request in ledger.decoding.values():
        track.resident[request.id] = request
    for request in ledger.waiting.values():
        track.waiting[request.id] = request
    track.cut(track.ends, (2,))
    (place,) = track.places()
    assert place.ready and len(place.entrants()) == 2
    assert len(place.moving) == 5


# -- patience ---------------------------------------------------------------------------------------


def lonely(policy, decoding=0, waiting=(5,), now=0.0):
    """A policy that has taken over an engine with these requests."""
    ledger = admitted(Ledger(Limits(100, 100), 1000), decoding=decoding, waiting=waiting)
    ledger.now = now
    policy.adopt(ledger)
    return ledger


def test_waiting_has_a_deadline():
    policy = Wait(100, kv_linear(1, 0.1), "3", max_pause=0.25, max_wait=2.0)
    ledger = lonely(policy, waiting=[5, 5])
    plan = policy.plan(ledger)
    assert (plan.decode, plan.prefill, plan.until.time, plan.until.arrivals) == (NONE, (), 2.0, 1)
    ledger.now = 2.0
    assert policy.plan(ledger).prefill == (0, 1)


def test_standing_has_a_deadline():
    policy = NestedWait(100, kv_linear(1, 0.1), "1/4", "0/9", max_pause=0.25, max_wait=2.0)
    ledger = lonely(policy, decoding=2, waiting=())
    plan = policy.plan(ledger)
    assert (plan.decode, plan.until.time) == (NONE, 0.25)
    ledger.now = 0.25
    assert policy.plan(ledger).decode is ALL


def test_defaults_bound_every_gap():
    """Light traffic, thresholds far too high: no decode stands for more than max_pause and a few steps."""
    cost = kv_linear(0.01, 1e-6)
    workload = poisson((5,), 20, (40,), 30.0)
    for policy in (Wait(100, cost, "4"), NestedWait(100, cost, "4/3/2", "10/20/40")):
        steps: list[tuple[int, float]] = []
        for batch in batches(engine(cost), policy, workload):
            steps += [(id, batch.ends[-1]) for id, _ in (*batch.decodes, *((c[0], 0) for c in batch.chunks))]
        newest: dict[int, float] = {}
        gaps = []
        for id, end in steps:
            gaps.append(end - newest.get(id, end))
            newest[id] = end
        assert max(gaps) < 0.1 + 4 * 0.012


# -- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("name", ["wait", "nested"])
def test_thresholds_far_beyond_memory(name, block):
    """A full batch would need twenty times the memory: all are served, with fewer evictions than mixed."""
    cost = kv_linear(0.01, 1e-5)
    policy = Wait(100, cost, "12") if name == "wait" else NestedWait(100, cost, "9/7/5", "5/10/40")
    workload = poisson((40,), 20, (40,), 10.0)
    logs = [run(engine(cost, 960, 1000, 100, block), each, workload) for each in (policy, Mixed(100, 1000))]
    ours, theirs = (sum(event[0] == "evicted" for event in log.events) for log in logs)
    assert sum(event[0] == "finished" for event in logs[0].events) == len(workload)
    assert max(logs[0].kv) <= 960
    assert ours < theirs


def test_the_youngest_goes_when_nobody_fits():
    cost = kv_linear(0.01, 1e-5)
    policy = Wait(100, cost, "1", max_pause=0.0)
    ledger = admitted(Ledger(Limits(100, 100), 30), decoding=3)
    ledger.kv_free = 0
    policy.adopt(ledger)
    plan = policy.plan(ledger)
    assert plan.evict == (2,)
    assert plan.decode == frozenset({0, 1})


def test_a_batch_may_take_several_steps():
    """Prompts beyond a step's tokens run one after the other; the type's decodes go on beside them."""
    cost = kv_linear(1, 0.1)
    policy = Wait(100, cost, "2", **FOR_EVER)
    workload = Workload.of([6, 6, 6, 6], [3, 3, 3, 3], arrival=[0, 0, 1, 1])
    found = []
    watch = Closing(policy, 3)
    for batch in batches(engine(cost, batch_tokens=8, running=8), policy, workload, (watch,)):
        found.append((tuple(id for id, _ in batch.decodes), tuple((id, n) for id, _, n in batch.chunks)))
    assert found[:4] == [((), ((0, 6), (1, 2))), ((0,), ((1, 4),)), ((0, 1), ((2, 6),)), ((1, 2), ((3, 6),))]


# -- thresholds that are learned --------------------------------------------------------------------


def test_learned_thresholds_are_those_of_the_planner():
    cost = kv_linear(0.008, 3e-7)
    workload = poisson((300, 100), 20, (20, 60), 12.0)
    policy = Wait(10**4, cost)
    run(engine(cost, kv=100_000), policy, workload)
    shortest = 0.008 / (1 - 3e-7 * (300 * kind(1, 20, 20).work + 100 * kind(1, 20, 60).work))
    assert shortest < policy.pace < 1.3 * shortest
    sizes = [policy.tracks[name].quotas[0].each for name in ("0", "1")]
    assert sizes == pytest.approx([300 * policy.pace, 100 * policy.pace], rel=0.25)
    assert policy.gauges()["pace"] == policy.pace


def test_learned_segments():
    cost = kv_linear(0.008, 3e-7)
    workload = poisson((140, 100, 80, 80), 20, (10, 20, 40, 80), 8.0)
    policy = NestedWait(10**4, cost)
    run(engine(cost, kv=100_000), policy, workload)
    (track,) = policy.tracks.values()
    assert track.ends == (10, 20, 40, float("inf"))
    sizes = [quota.each for quota in track.quotas]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] / sizes[0] == pytest.approx(1.05 * 0.65, rel=0.15)
    fixed = NestedWait(10**4, cost, ends="30/60")
    run(engine(cost, kv=100_000), fixed, workload)
    assert fixed.tracks[""].ends == (30, float("inf"))


@pytest.mark.parametrize("make", [Wait, NestedWait])
@pytest.mark.parametrize("accept, burst", [(0.0, 1), (1.0, 4)])
def test_with_drafts_stages_are_steps(make, accept, burst):
    """201 tokens are 200 or 50 decode iterations: as many fewer stages share the slots."""
    cost = WorkCost(WorkTerms(1e-3, 1e-5, 1e-5, 1e-8), drafting=DraftTerms(3))
    world = engine(cost, batch_tokens=10**4)._replace(speculation=Speculation(3, Acceptance(accept), 3))
    slack = {"slack": 0.0} if make is NestedWait else {}
    policy = make(60, cost, max_pause=0.0, warm=50, review=50, **slack)
    rate = 400 if burst > 1 else 100
    arrival = np.cumsum(np.random.default_rng(1).exponential(1 / rate, 600))
    Simulator(world, policy, Workload.of([30] * 600, [201] * 600, arrival=arrival)).run()
    assert policy.pace == pytest.approx(60 / (rate * (1 + 200 / burst)), rel=0.15)


def test_requests_that_jump_over_the_end_of_a_segment_wait_before_the_next():
    track = Track("", (10, 20), (5, 5))
    ledger = admitted(Ledger(Limits(100, 100), 10**6), decoding=4)
    for request, generated in zip(ledger.decoding.values(), (10, 11, 12, 14), strict=True):
        ledger.recount(request, generated)
        track.resident[request.id] = request
    one, wide = track.places()[1], track.places(3)[1]
    assert [r.generated for r in one.entering] == [11]
    assert [r.generated for r in wide.entering] == [11, 12]
    assert [r.generated for r in wide.moving] == [14]
    first, second = list(ledger.decoding.values())[1:3]
    ledger.recount(first, 12)  # it has run: its drafts were rejected, and it is inside
    assert [r.id for r in track.places(3)[1].entering] == [second.id]


def test_before_anything_is_learned_everybody_may_enter():
    policy = Wait(100, kv_linear(1, 0.1))
    ledger = lonely(policy, decoding=2, waiting=[5, 5, 5])
    plan = policy.plan(ledger)
    assert (plan.decode, plan.prefill) == (ALL, (2, 3, 4))


def test_types_nobody_comes_of_any_more_enter_freely():
    cost = kv_linear(0.008, 3e-7)
    early, late = poisson((100, 100), 20, (10, 10), 2.0), poisson((200,), 20, (10,), 12.0, seed=1)
    arrival = np.concatenate((early.arrival, 2 + late.arrival))
    kinds = np.concatenate((early.kind, late.kind))
    both = Workload.of([20] * len(kinds), [11] * len(kinds), arrival=arrival, kind=kinds, kinds=early.kinds)
    policy = Wait(10**4, cost)
    run(engine(cost, kv=100_000), policy, both)
    assert policy.tracks["0"].quotas[0].each < 10
    assert policy.tracks["1"].quotas[0].each == float("inf")


# -- words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words", "said"),
    [
        (Wait, {"slots": 0}, "slots=0"),
        (Wait, {"thresholds": "0"}, "finite numbers above 0"),
        (Wait, {"thresholds": "inf"}, "finite numbers above 0"),
        (Wait, {"thresholds": "3/2"}, "2 thresholds where one is needed"),
        (Wait, {"thresholds": "a=1+b=2+a=3"}, "two of type 'a'"),
        (Wait, {"window": 0}, "wait: window=0"),
        (Wait, {"thresholds": "a=b"}, "'a=b' is not a threshold"),
        (Wait, {"split": "length"}, "choose kind, none"),
        (Wait, {"split": "prompt:9/3"}, "growing numbers"),
        (Wait, {"split": "prompt:x"}, "whole numbers"),
        (Wait, {"max_pause": -1.0}, "max_pause=-1.0"),
        (Wait, {"review": 0}, "review=0"),
        (NestedWait, {"thresholds": "3/2"}, "thresholds without ends"),
        (NestedWait, {"thresholds": "3/2", "ends": "4"}, "2 thresholds for 1 segments"),
        (NestedWait, {"ends": "4/4"}, "growing numbers"),
        (NestedWait, {"segments": 0}, "segments=0"),
    ],
)
def test_bad_words_are_named(make, words, said):
    with pytest.raises(InputError, match=said):
        make(**({"slots": 4, "cost": kv_linear(1, 0.1)} | words))


def test_types_by_prompt_and_by_guess():
    cost = kv_linear(1, 0.1)
    by_prompt = Wait(9, cost, "5=1+more=2", split="prompt:5")
    by_guess = Wait(9, cost, split="output:5/9")
    workload = Workload.of([3, 8, 8], [2, 2, 2], arrival=[0, 0, 0], guess=[4, 7, 30])
    for policy in (by_prompt, by_guess):
        run(engine(cost), policy, workload)
    assert {name: track.quotas[0].each for name, track in by_prompt.tracks.items()} == {"5": 1, "more": 2}
    assert set(by_guess.tracks) == {"5", "9", "more"}
    silent = Wait(9, cost, split="output:5")
    run(engine(cost), silent, Workload.of([3], [2]))
    assert set(silent.tracks) == {"unknown"}
