from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.plan import Plan, check
from headgate.core.policy import BatchPolicy, Observer, Steps
from headgate.core.view import View
from headgate.cost.card import load_card
from headgate.experiment.library import simulate
from headgate.live.calibrate.probe import (
    FEED,
    DecodePool,
    Ground,
    Probe,
    ProbeCell,
    ProbeMove,
    ProbeWalk,
    grid,
)
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Kind, Workload

SMALL = Ground(decodes=8, budget=256, kv_tokens=6400, longest=512, passes=1, quick=True)
LARGE = Ground(decodes=1024, budget=16384, kv_tokens=812_000, longest=17_408)


def engine(ground: Ground, block: int = 16) -> Engine:
    cost = load_card("linear-h200-qwen3-8b").cost
    return Engine(cost, ground.kv_tokens, ground.longest, ground.budget, ground.slots, block)


def requests(walk: ProbeWalk, output: int) -> Workload:
    """All that a walk needs, there from the beginning."""
    kinds = [*(pool.kind for pool in walk.pools), FEED]
    rows = [(pool.prompt, output, place) for place, pool in enumerate(walk.pools) for _ in range(pool.size)]
    rows += [(prompt, 1, len(walk.pools)) for cell in walk.cells for prompt in cell.feed]
    prompt, put_out, kind = zip(*rows, strict=True)
    return Workload.of(prompt, put_out, kind=kind, kinds=[Kind(name) for name in kinds])


class Shapes(Observer):
    """The shape of every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def stepped(self, steps: Steps) -> None:
        self.steps += [(steps.decodes, steps.prefill)] * len(steps.ends)


def walked(walk: ProbeWalk, ground: Ground, leases: bool = True, output: int = 500) -> list[tuple[int, int]]:
    seen = Shapes()
    probe = Probe(walk, ground.slots, ground.budget)
    simulate(engine(ground), probe, requests(walk, output), leases=leases, observers=(seen,))
    assert probe.position == len(walk.cells)
    return seen.steps


def expected(walk: ProbeWalk) -> list[tuple[int, int]]:
    return [
        (move.decodes, move.tokens) for cell in walk.cells for move in cell.moves for _ in range(move.steps)
    ]


def filling(steps: list[tuple[int, int]], walk: ProbeWalk) -> int:
    """Steps before the first cell: no decodes until every pool is full."""
    tokens, count = sum(pool.prompt * pool.size for pool in walk.pools), 0
    while tokens > 0:
        assert steps[count][0] == 0
        tokens -= steps[count][1]
        count += 1
    return count


@given(st.permutations(range(len(grid(SMALL).cells))))
def test_every_cell_is_visited_in_the_order_given(order: list[int]) -> None:
    walk = grid(SMALL).ordered(order)
    steps, wanted = walked(walk, SMALL), expected(walk)
    begin = filling(steps, walk)
    assert steps[begin : begin + len(wanted)] == wanted


def test_the_large_grid_in_a_simulated_h200() -> None:
    walk = grid(LARGE).ordered(np.random.default_rng(0).permutation(len(grid(LARGE).cells)))
    steps, wanted = walked(walk, LARGE), expected(walk)
    begin = filling(steps, walk)
    assert steps[begin : begin + len(wanted)] == wanted
    decodes = {decodes for decodes, prefill in wanted if not prefill}
    prompts = {prefill for decodes, prefill in wanted if not decodes}
    assert {1, 100, 450, 900, 1024} <= decodes and max(decodes) > 1024
    assert {16, 1000, 16384} <= prompts
    assert sum(1 for decodes, prefill in wanted if decodes and prefill) > 100


def test_leases_do_not_change_the_walk() -> None:
    walk = grid(SMALL)
    assert walked(walk, SMALL) == walked(walk, SMALL, leases=False)


def test_asked_twice_it_answers_the_same() -> None:
    class Twice(BatchPolicy):
        def __init__(self, inner: Probe) -> None:
            self.inner = inner

        def arrived(self, request: object, now: float) -> None:
            self.inner.arrived(request, now)  # type: ignore[arg-type]

        def plan(self, view: View) -> Plan:
            first, again = self.inner.plan(view), self.inner.plan(view)
            assert first == again
            assert not check(first, view)
            return first

    walk = grid(SMALL)
    policy = Twice(Probe(walk, SMALL.slots, SMALL.budget))
    simulate(engine(SMALL), policy, requests(walk, 300), leases=False)
    assert policy.inner.position == len(walk.cells)


def test_every_request_is_served_when_the_walk_is_over() -> None:
    walk = grid(SMALL)
    run = simulate(engine(SMALL), Probe(walk, SMALL.slots, SMALL.budget), requests(walk, 400))
    assert run.completed().all()


def test_contexts_grow_evenly() -> None:
    """The decodes with the fewest tokens go first, so that half of a pool alternates with the other half."""
    pool = DecodePool("p", 32, 4, 256)
    walk = ProbeWalk(
        (pool,),
        (ProbeCell("a", (ProbeMove(2, ("p",), steps=3),)), ProbeCell("b", (ProbeMove(2, ("p",), steps=3),))),
    )
    seen: list[frozenset[int]] = []

    class Plans(Probe):
        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            if isinstance(plan.decode, frozenset):
                seen.append(plan.decode)
            return plan

    simulate(engine(SMALL), Plans(walk, 8, 256), requests(walk, 20))
    assert seen == [frozenset({0, 1}), frozenset({2, 3})]


def test_it_waits_for_the_prompts_of_a_cell() -> None:
    pool = DecodePool("p", 32, 2, 256)
    walk = ProbeWalk((pool,), (ProbeCell("late", (ProbeMove(prompts=(0,), tokens=64),), (64,)),))
    kinds = [Kind("p"), Kind(FEED)]
    load = Workload.of([32, 32, 64], [5, 5, 1], kind=[0, 0, 1], kinds=kinds, arrival=[0.0, 0.0, 3.0])
    run = simulate(engine(SMALL), Probe(walk, 8, 256), load)
    assert run.requests["first_token"][2] > 3.0
    assert run.completed().all()


def test_a_cell_whose_decodes_are_gone_is_left_out() -> None:
    pool = DecodePool("p", 32, 2, 256)
    cells = (
        ProbeCell("long", (ProbeMove(2, ("p",), steps=10),)),
        ProbeCell("nobody", (ProbeMove(2, ("p",), steps=4),)),
    )
    probe = Probe(ProbeWalk((pool,), cells), 8, 256)
    stranger = Workload.of([32, 32, 50], [4, 4, 2], kind=[0, 0, 1], kinds=[Kind("p"), Kind("other")])
    run = simulate(engine(SMALL), probe, stranger)
    assert probe.position == 2
    assert run.completed().all()


def test_pools_shrink_to_the_memory_there_is() -> None:
    for kv in (812_000, 400_000, 120_000):
        walk = grid(replace(LARGE, kv_tokens=kv))
        grown = sum(move.decodes * move.steps for cell in walk.cells for move in cell.moves)
        assert sum(pool.prompt * pool.size for pool in walk.pools) + LARGE.passes * grown < kv


def test_cells_have_names_of_their_own() -> None:
    names = Counter(cell.name for cell in grid(LARGE).cells)
    assert names.most_common(1)[0][1] == 1


@pytest.mark.parametrize(
    "change, told",
    [
        ({"decodes": 2}, "too few to measure"),
        ({"budget": 32}, "too small to measure"),
        ({"kv_tokens": 500}, "KV tokens are too few"),
    ],
)
def test_engines_too_small_to_measure(change: dict[str, int], told: str) -> None:
    with pytest.raises(InputError, match=told):
        grid(replace(SMALL, **change))


def test_it_is_not_for_serving() -> None:
    assert Probe not in BATCH.values()
