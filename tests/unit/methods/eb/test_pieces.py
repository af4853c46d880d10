"""A refill in pieces: how large they are, that the promised gap is kept, that prompts get through."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.core.ledger import Entry, Ledger
from headgate.core.plan import ALL, NONE, Plan
from headgate.core.view import Limits
from headgate.cost.model import Shape
from headgate.experiment.library import card_engine, simulate
from headgate.methods.eb.exclusive import Exclusive
from headgate.methods.eb.refill import SMALLEST, Pieces
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.stats.gaps import Gaps
from headgate.workloads.workload import Workload
from worlds import Line, batches, run

FLAT = Line(fixed=1.0, prefill=0.01, decode=0.0, context=0.0, behind=0.0)  # every decode step takes 1 s
RISING = Line(fixed=1.0, prefill=0.01, decode=0.05, context=0.0, behind=0.0)


def view(decoding: int, batch_tokens: int) -> Ledger:
    ledger = Ledger(Limits(batch_tokens, running=100), kv_total=10**6)
    for id in range(decoding):
        entry = Entry(ledger, id, arrival=0.0, prompt=10, limit=1000)
        ledger.arrive(entry)
        ledger.admit(entry)
        entry.todo = 0
        ledger.join(entry, 0.0, rolling=True)
    return ledger


@pytest.mark.parametrize(
    ("max_gap", "batch_tokens", "expected"),
    [
        (5.0, 100, (100, 2)),  # 4 s are left beside the decode step, a full step takes 2
        (3.99, 100, (100, 1)),
        (2.5, 100, (50, 1)),  # 1.5 s: one step of 50 tokens
        (2.17, 100, (17, 1)),
        (2.1, 100, (SMALLEST, 1)),  # the promise cannot be kept with anything useful
        (0.5, 100, (SMALLEST, 1)),  # nor here, where the decode step alone is longer
        (0.5, 7, (7, 1)),  # never above the engine's budget
    ],
)
def test_the_largest_piece_that_keeps_the_promise(max_gap, batch_tokens, expected):
    assert Pieces(max_gap, FLAT).next_piece(view(3, batch_tokens)) == expected


def test_a_piece_leaves_time_for_the_decodes_there_are():
    """40 decodes take 3 s of RISING, so 5.5 s leave 2.5 s for prompts: 150 tokens; 20 take 2: 250."""
    assert Pieces(5.5, RISING).next_piece(view(40, 1000)) == (150, 1)
    assert Pieces(5.5, RISING).next_piece(view(20, 1000)) == (250, 1)


def test_decodes_are_due_after_the_last_step_of_a_piece_and_not_before():
    pieces = Pieces(5.0, FLAT)
    assert pieces.next_piece(view(3, 100)) == (100, 2)
    pieces.composed(Plan(NONE, (7,), 100))
    assert not pieces.decodes_are_due
    assert pieces.next_piece(view(3, 100)) == (100, 1)  # what is left of it
    pieces.composed(Plan(NONE, (7,), 100))
    assert pieces.decodes_are_due
    pieces.composed(Plan(ALL))
    assert not pieces.decodes_are_due
    assert pieces.next_piece(view(3, 100)) == (100, 2)


def test_the_end_of_a_refill_makes_decodes_due():
    pieces = Pieces(5.0, FLAT)
    pieces.next_piece(view(3, 100))
    pieces.end()
    assert pieces.decodes_are_due
    assert pieces.next_piece(view(3, 100)) == (100, 2)  # a new piece, not the rest of the old one


@pytest.mark.parametrize("max_gap", [0.0, -1.0, float("nan")])
def test_a_bound_above_zero(max_gap):
    with pytest.raises(InputError, match="max_gap"):
        Pieces(max_gap, FLAT)


def test_a_bound_needs_a_cost():
    with pytest.raises(InputError, match="needs a cost"):
        Exclusive(8, 2, max_gap=1.0)


# -- in a run -----------------------------------------------------------------------------------------


def saturated(count: int = 120, slots: int = 12) -> Workload:
    rng = np.random.default_rng(3)
    clients = np.full(count, 3 * slots)
    return Workload.of(rng.integers(20, 300, count), rng.integers(1, 40, count), clients=clients)


def longest_gap(cost: Line, max_gap: float | None, batch_tokens: int = 200) -> float:
    workload = saturated()
    recorder = Recorder()
    policy = Exclusive(12, 5, max_gap=max_gap, cost=cost)
    Simulator(Engine(cost, 10**6, 10**6, batch_tokens, 12, 16), policy, workload, (recorder,)).run()
    gaps = Gaps(Run({}, **recorder.tables())).longest()
    return float(np.nanmax(gaps))


@pytest.mark.parametrize("max_gap", [2.3, 3.0, 4.5, 8.0])
@pytest.mark.parametrize("batch_tokens", [64, 200])
def test_the_promise_is_kept_and_used(max_gap, batch_tokens):
    assert longest_gap(FLAT, None, batch_tokens) > 10
    found = longest_gap(FLAT, max_gap, batch_tokens)
    assert found <= max_gap * (1 + 1e-12)
    assert found > max_gap - FLAT.seconds(Shape(prefill=batch_tokens))  # no smaller pieces than needed


@pytest.mark.parametrize("max_gap", [0.08, 0.1, 0.2, 0.5])
def test_the_promise_is_kept_on_an_asynchronous_engine_too(max_gap):
    """There a step is composed before the one before it has run: pieces count when they are composed."""
    engine = card_engine("cal-h200-qwen3-8b", slots=256, budget=16_384)
    rng = np.random.default_rng(3)
    workload = Workload.of(rng.integers(100, 3000, 500), rng.integers(1, 300, 500), clients=400)
    policy = Exclusive(256, 16, max_gap=max_gap, cost=engine.cost)
    found = simulate(engine, policy, workload, asynchronous=True)
    gaps = Gaps(found).longest()
    assert np.nanmax(gaps) <= max_gap * 1.02  # the KV behind half-done prompts is not priced
    assert np.nanmax(gaps) > 0.8 * max_gap


@pytest.mark.parametrize("max_gap", [3.0, 4.0, 8.0])
def test_the_promise_counts_those_who_join(max_gap):
    """Prompts that are completed in a piece decode in the step after it, which is longer for them.

    Twelve decodes take 1.6 s and the smallest piece 1.16 s: a promise below 2.76 s cannot be kept.
    """
    assert longest_gap(RISING, max_gap) <= max_gap * (1 + 1e-12)


class Watched(Exclusive):
    """EB that notes what it asks for: tokens of a piece beside waiting decodes, or None for decodes."""

    def __init__(self, max_gap: float) -> None:
        super().__init__(12, 5, max_gap=max_gap, cost=FLAT)
        self.asked: list[float | None] = []

    def plan(self, view):
        plan = super().plan(view)
        if view.decoding:
            self.asked.append(plan.budget * plan.until.steps if plan.prefill else None)
        return plan


@pytest.mark.parametrize(("max_gap", "most"), [(0.01, SMALLEST), (2.305, 30), (5.0, 200)])
def test_pieces_take_turns_with_decodes_and_everybody_is_served(max_gap, most):
    policy, workload = Watched(max_gap), saturated()
    log = run(Engine(FLAT, 10**6, 10**6, 200, 12, 16), policy, workload)
    assert sum(event[0] == "finished" for event in log.events) == len(workload)
    assert sum(step[3] for step in log.steps) == int(workload.prompt.sum())  # no prompt token twice
    pieces = [asked for asked in policy.asked if asked is not None]
    assert max(pieces) == most
    assert len(pieces) > 50
    for before, after in pairwise(policy.asked):
        assert before is None or after is None, "two pieces without a decode step between"


def test_without_decodes_nobody_waits_for_pieces():
    """The first prompt of an empty engine runs in full steps."""
    workload = Workload.of([1000], [3])
    steps = batches(Engine(FLAT, 10**6, 10**6, 500, 4, 16), Exclusive(4, 2, max_gap=2.2, cost=FLAT), workload)
    assert [sum(tokens for _, _, tokens in step.chunks) for step in steps][:2] == [500, 500]
