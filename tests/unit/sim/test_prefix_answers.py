"""Prefix caching in the virtual engine: answers known from vLLM 0.32, hit by hit and step by step."""

from __future__ import annotations

import pytest

from headgate.core.plan import ALL, Plan
from headgate.core.policy import Observer
from headgate.methods.keep.policy import Keep
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Contents, Workload
from worlds import Line

APART = 1000.0  # seconds between requests that are to be alone


class Seen(Observer):
    """Steps as (decodes, prompt tokens, tokens behind), and the hits of every admission."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []
        self.hits: dict[int, list[int]] = {}
        self.cached: list[int] = []
        self.evicted_requests = 0

    def finished(self, request, now, how):
        self.cached.append(request.cached)

    def admitted(self, request, now):
        known = request.prompt + request.generated
        self.hits.setdefault(request.id, []).append(known - request.todo)

    def evicted(self, request, now):
        self.evicted_requests += 1

    def stepped(self, steps):
        self.steps += [(steps.decodes, steps.prefill, steps.behind)] * len(steps.ends)


def served(
    pieces, output=1, *, block=16, blocks=1000, budget=256, slots=8, arrival=None, cost=None, **options
):
    contents = Contents.of(pieces)
    prompts = [sum(tokens for _, tokens in row) for row in pieces]
    outputs = output if isinstance(output, list) else [output] * len(prompts)
    times = [APART * place for place in range(len(prompts))] if arrival is None else arrival
    workload = Workload.of(prompts, outputs, arrival=times, contents=contents)
    cache = options.pop("prefix_cache", True)
    engine = Engine(cost or Line(), block * blocks, 10_000, budget, slots, block, cache)
    simulator = Simulator(engine, Mixed(slots=slots, budget=budget), workload, (seen := Seen(),), **options)
    simulator.run()
    blocks_left = simulator.replica.blocks
    assert blocks_left.free == blocks_left.total
    return seen, blocks_left


def flat(seen):
    return [hit for id in sorted(seen.hits) for hit in seen.hits[id]]


def test_the_last_token_is_always_computed():
    seen, _ = served([[(1, 40)]] * 2)
    assert flat(seen) == [0, 32]
    assert seen.steps == [(0, 40, 0), (0, 8, 32)]
    seen, _ = served([[(1, 32)]] * 3)
    assert flat(seen) == [0, 16, 16]


def test_a_block_is_found_as_soon_as_its_step_is_composed():
    seen, _ = served([[(1, 40)]] * 2, 2, arrival=[0.0, 0.0])
    assert flat(seen) == [0, 32]
    assert seen.steps == [(0, 48, 32), (2, 0, 0)]
    seen, _ = served([[(1, 40)]] * 2, 1, arrival=[0.0, 0.0], budget=24)
    assert seen.steps == [(0, 24, 0), (0, 24, 56)]


def test_a_block_belongs_to_the_piece_of_its_last_token():
    seen, _ = served([[(1, 24), (2, 24)], [(1, 24), (3, 24)], [(1, 24), (2, 40)]])
    assert flat(seen) == [0, 16, 48]


def test_tails_are_evicted_before_heads():
    seen, blocks = served([[(1, 64)], [(2, 48)], [(3, 48)], [(1, 64)], [(2, 48)]], blocks=8)
    assert flat(seen) == [0, 0, 0, 32, 16]
    assert blocks.evicted == 6


def test_the_next_turn_finds_the_output():
    seen, _ = served([[(1, 20)], [(1, 60)]], [30, 5])
    assert flat(seen) == [0, 48]
    assert (0, 12, 48) in seen.steps


def test_a_preempted_request_finds_its_own_blocks():
    seen, blocks = served(
        [[(n, 8)] for n in (1, 2, 3)], 12, block=4, blocks=9, slots=4, budget=64, arrival=[0.0] * 3
    )
    assert seen.evicted_requests == 2
    assert seen.hits == {0: [0], 1: [0, 16], 2: [0, 0]}
    assert blocks.evicted == 7
    decodes = [(3, 0, 0)] * 4 + [(2, 0, 0)] * 4 + [(1, 0, 0)] * 3
    assert seen.steps == [(0, 24, 0), *decodes, (0, 14, 16), *[(2, 0, 0)] * 2, *[(1, 0, 0)] * 4]


def test_requests_that_come_during_a_long_prompt_find_its_chunks():
    cost = Line(fixed=1 / 8, prefill=1 / 1024, decode=0.0, context=0.0, behind=0.0)
    seen, _ = served([[(1, 100)]] * 3, budget=48, arrival=[0.0, 0.2, 0.2], cost=cost)
    assert flat(seen) == [0, 96, 96]
    assert seen.steps == [(0, 48, 0), (0, 48, 48), (0, 12, 288)]


CHEAP = Line(fixed=0.01, prefill=1e-5, decode=0.0, context=0.0, behind=0.0)
SHARED, OWN, GROUP = 2048, 64, 64


def group(policy, budget=2048, kv=160_000, **columns):
    """Requests that come together, and of whose common beginning nothing is computed yet."""
    contents = Contents.of([[(1, SHARED), (-1, OWN)]] * GROUP)
    workload = Workload.of([SHARED + OWN] * GROUP, [8] * GROUP, contents=contents, **columns)
    engine = Engine(CHEAP, kv, 4096, budget, GROUP)
    Simulator(engine, policy, workload, (seen := Seen(),)).run()
    return seen


@pytest.mark.parametrize("name", ["mixed", "sarathi", "sarathi-spf", "slai", "keep", "eb+"])
def test_a_group_enters_as_fast_as_its_uncached_tokens(name):
    words = {} if name in ("mixed", "sarathi", "sarathi-spf") else {"cost": CHEAP}
    seen = group(BATCH[name](slots=GROUP, budget=2048, **words))
    prompts = [prefill for _, prefill, _ in seen.steps if prefill]
    assert sum(prompts) == SHARED + GROUP * OWN and len(prompts) <= 4
    seen = group(BATCH[name](slots=GROUP, budget=8192, **words), budget=8192)
    assert [prefill for _, prefill, _ in seen.steps if prefill] == [SHARED + GROUP * OWN]


def test_a_group_has_memory_for_what_it_shares_once():
    seen = group(BATCH["sarathi"](slots=GROUP, budget=8192), budget=8192, kv=8192)
    assert seen.steps[0][1] == SHARED + GROUP * OWN and not seen.evicted_requests


def test_a_group_that_can_be_in_time_is_not_refused():
    policy = Keep(GROUP, 2048, CHEAP, ttft=0.5, refuse="predicted")  # whole prompts would take 2 s
    assert len(group(policy).hits) == GROUP


def test_those_behind_one_that_hung_up_are_served():
    """The first of a group leaves before it ran: the next one computes what they share."""
    seen = group(Mixed(GROUP, 2048), abort=[0.0] + [1e9] * (GROUP - 1))
    assert 0 not in seen.hits and len(seen.hits) == GROUP - 1
    assert sum(prefill for _, prefill, _ in seen.steps) == SHARED + (GROUP - 1) * OWN


class EvictsTheSecond(Mixed):
    """The first request decodes beside the second, which is evicted and forgotten; then as `Mixed`."""

    def __init__(self, slots, budget):
        super().__init__(slots, budget)
        self.first = [Plan(ALL, (0,)), Plan(ALL, (1,)), Plan(ALL, evict=(1,))]

    def plan(self, view):
        return self.first.pop(0) if self.first else super().plan(view)

    def evicted(self, request, now):
        self.cache.forget()


def test_a_group_counts_on_one_that_was_evicted_and_computes_again():
    """What it had computed is lost: the others enter beside its last piece."""
    rows = [[(-1, 64)], *[[(1, 3008), (-1, 64)]] * 16]
    workload = Workload.of([64, *[3072] * 16], [8] * 17, contents=Contents.of(rows))
    engine, policy, seen = Engine(CHEAP, 160_000, 4096, 2048, 32), EvictsTheSecond(32, 2048), Seen()
    simulator = Simulator(engine, policy, workload, (seen,))
    policy.cache = simulator.replica.cache
    simulator.run()
    prompts = [prefill for _, prefill, _ in seen.steps if prefill]
    assert prompts == [64, 2047, 2047, 1025 + 15 * 64]


@pytest.mark.parametrize("options", [{"prefix_cache": False}, {}])
def test_without_cache_or_shared_content_nothing_is_found(options):
    rows = [[(1, 40)]] * 2 if options else [[(-1, 40)]] * 2
    seen, _ = served(rows, **options)
    assert flat(seen) == [0, 0]


def test_an_asynchronous_engine_finds_the_same():
    seen, _ = served([[(1, 20)], [(1, 60)]], [30, 5], asynchronous=True)
    assert seen.cached == [0, 48]
