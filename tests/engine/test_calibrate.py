"""Calibration of a real engine: the probe's walk, the card, and the simulator with that card."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import tiny
from real import SLOTS, Ask, Real, engine

from headgate.cost.card import load_card
from headgate.cost.fit.fit import fit
from headgate.cost.fit.steps import About, StepTable, concat
from headgate.cost.laws.terms import DraftTerms
from headgate.experiment.library import simulate
from headgate.live.calibrate.campaign import Campaign, WantedEngine, about, composition, core_of
from headgate.live.calibrate.probe import FEED, Ground
from headgate.live.engine.requests import MADE_UP
from headgate.methods.make import make_policy
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload

GROUND = Ground(decodes=8, budget=256, kv_tokens=1 << 20, longest=512, passes=2, quick=True)
NOISE = 0.03  # of a step, standard deviation
STALLS = 0.01  # share of steps that take ten times as long
WITHIN = 0.05  # of the real engine's time
TERMS = DraftTerms(3, draft=6e-4, draft_per_decode=5e-5, speculating=9e-4, method="draft_model")


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    model = tiny.model(tmp_path_factory.mktemp("llama"))
    words = {"max_num_seqs": GROUND.slots, "max_num_batched_tokens": GROUND.budget, "max_model_len": 512}
    with engine(model, request.param, **words) as made:
        yield made


class Paced:
    """The clock of an engine whose steps take what a law says, whatever this machine is busy with.

    The steps themselves are real: composed, run and put out by vLLM. With noise, they take a little more or
    less than that, and a few stall.
    """

    def __init__(self, noise: float = 0.0, stalls: float = 0.0) -> None:
        self.now = 0.0
        self._noise, self._stalls = noise, stalls
        self._ends: deque[float] = deque()  # of the steps under way, one after the other
        self._rng = np.random.default_rng(11)

    @contextmanager
    def pacing(self, scheduler: Any) -> Iterator[None]:
        """Whoever reads this clock must have wrapped the scheduler before."""
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def scheduled(*args: Any, **words: Any) -> Any:
            output = schedule(*args, **words)
            begins = max([self.now, *self._ends])
            self._ends.append(begins + self._takes(output) if output.num_scheduled_tokens else begins)
            return output

        def updated(*args: Any, **words: Any) -> Any:
            self.now = max(self.now, self._ends.popleft())
            return update(*args, **words)

        scheduler.schedule, scheduler.update_from_output = scheduled, updated
        yield
        scheduler.schedule, scheduler.update_from_output = schedule, update
        self._ends.clear()

    def _takes(self, output: Any) -> float:
        held = composition(output)
        tokens = held.decodes + held.prefill + held.drafts
        drafting = TERMS.draft * held.drafts / max(1, held.decodes) + TERMS.draft_per_decode * held.drafts
        drafting += TERMS.speculating * (held.drafts > 0)
        seconds = (
            drafting + 2e-3 + 2e-5 * tokens + 2e-7 * (held.context + held.behind) + 1e-3 * (held.prefill > 0)
        )
        stalled = 10 if self._rng.random() < self._stalls else 1
        return float(seconds * stalled * self._rng.lognormal(0.0, self._noise))


def campaign(
    real: Real,
    folder: Path,
    clock: Callable[[], float],
    seconds: float = 60.0,
    passes: int = 2,
    width: int = 1,
) -> Campaign:
    ground = replace(GROUND, kv_tokens=int(real.scheduler._headgate.ledger.kv_total), width=width)
    return Campaign(real.llm, ground, folder / "steps.npz", seconds, passes, clock=clock)


def leave(made: Campaign) -> None:
    """The engine is empty, and as it was before."""
    llm, log = made.llm.llm_engine, made.log
    llm.abort_request([f"probe-{number}" for number in range(made._sent)])
    made.scheduler._headgate.take_over(None)
    while made.scheduler.has_requests() or getattr(core_of(made.llm), "batch_queue", None):
        llm.step()
    made.scheduler.schedule, made.scheduler.update_from_output = log._schedule, log._update


def about_it(real: Real) -> About:
    return about(real.llm, WantedEngine("tiny", GROUND.slots, GROUND.budget, 512), "tiny", GROUND.decodes)


def test_walk_card_and_simulation(real: Real, tmp_path: Path) -> None:
    clock = Paced(NOISE, STALLS)
    made = campaign(real, tmp_path, lambda: clock.now)
    said = about_it(real)
    known = set(MADE_UP)
    with clock.pacing(real.scheduler):
        table = made.run(said)
    leave(made)
    assert MADE_UP - known <= {FEED, *(pool.kind for pool in made.walk.pools)}  # the plug-in bounds classes
    assert made.outcome in ("2 passes", "good enough after 2 passes")
    visited = shapes(table)
    for cell in made.walk.cells:  # whatever is missing was under way when steps were written to disk
        wanted = {(move.decodes, move.tokens, len(move.prompts)) for move in cell.moves}
        assert visited.get(cell.name, set()) <= wanted
    assert len(visited) >= 0.9 * made.each
    asynchronous = bool(real.core.vllm_config.scheduler_config.async_scheduling)
    assert np.mean(table.busy) > 0.9 if asynchronous else not table.busy.any()
    assert table.seconds.min() > 0

    fitted = fit(table, said)
    fitted.card().save(tmp_path / "card.json")
    card = load_card(tmp_path / "card.json")
    assert card == fitted.card()
    real_seconds, simulated = served(real, card.cost)
    assert simulated == pytest.approx(real_seconds, rel=WITHIN)


def test_what_drafts_take(tmp_path: Path) -> None:
    """One engine for each number of drafts; what the card says of them is what their steps took."""
    model, drafter = (tiny.model(tmp_path / name) for name in ("llama", "drafter"))
    words = {"max_num_seqs": GROUND.slots, "max_num_batched_tokens": GROUND.budget, "max_model_len": 512}
    tables = []
    for k in (0, 1, 3):
        drafts = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": k}
        with engine(model, False, **words, **({"speculative_config": drafts} if k else {})) as real:
            clock = Paced(NOISE, STALLS)
            made = campaign(real, tmp_path, lambda clock=clock: clock.now, passes=1, width=1 + k)
            said = about_it(real)
            with clock.pacing(real.scheduler):
                tables.append(made.run(said))
            leave(made)
            assert made.outcome == "1 passes"
    assert [int(np.max(table.drafts / np.maximum(table.decodes, 1))) for table in tables] == [0, 1, 3]
    found = fit(concat(tables), said).card().speculation
    assert found is not None and (found.drafts, found.method) == (3, "draft_model")
    assert found.draft == pytest.approx(TERMS.draft, rel=0.25)
    assert found.draft_per_decode == pytest.approx(TERMS.draft_per_decode, rel=0.25)
    assert found.speculating == pytest.approx(TERMS.speculating, rel=0.35)


def test_on_its_own_clock_no_time_is_counted_twice(real: Real, tmp_path: Path) -> None:
    made = campaign(real, tmp_path, perf_counter, passes=1)
    said = about_it(real)
    began = perf_counter()
    table = made.run(said)
    took = perf_counter() - began
    leave(made)
    assert table.seconds.min() > 0
    assert table.seconds.sum() < took


def shapes(table: StepTable) -> dict[str, set[tuple[int, int, int]]]:
    """Decodes, prompt tokens and prompts of the steps of each cell."""
    return {
        label: set(
            zip(
                *(getattr(part, name).astype(int).tolist() for name in ("decodes", "prefill", "prompts")),
                strict=True,
            )
        )
        for label, part in ((table.labels[i], table.take(table.part == i)) for i in np.unique(table.part))
        if label != "fill"
    }


def served(real: Real, cost: Any) -> tuple[float, float]:
    """Seconds the real and the simulated engine take for the same requests, all there from the beginning.

    The real one is paced without noise: what is left is the error of the card and of the schedule.
    """
    rng = np.random.default_rng(5)
    prompts, outputs = rng.integers(20, 200, 60), rng.integers(4, 40, 60)
    asks = [
        Ask(rng.integers(2, tiny.VOCABULARY, prompt).tolist(), int(output), {"detokenize": False})
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    kv_tokens = int(real.scheduler._headgate.ledger.kv_total)
    world = Engine(cost, kv_tokens, 512, GROUND.budget, GROUND.slots, real.scheduler.block_size)
    clock = Paced()
    with clock.pacing(real.scheduler):
        real.serve(asks, "mixed")
    run = simulate(world, make_policy("mixed", {"slots": SLOTS}, world)[0], Workload.of(prompts, outputs))
    return clock.now, run.span()[1]


def test_an_engine_that_dies_leaves_its_steps(
    real: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Paced(NOISE, STALLS)
    made = campaign(real, tmp_path, lambda: clock.now)
    said = about_it(real)
    step = real.front.step

    def dies() -> Any:
        if len(made.log.rows) > 60:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(real.front, "step", dies)
        with clock.pacing(real.scheduler):
            table = made.run(said)
    leave(made)
    assert made.outcome == "the engine died: RuntimeError: CUDA error: unspecified launch failure"
    kept = StepTable.load(tmp_path / "steps.npz")
    assert len(kept) == len(table) >= 50
    assert fit(kept, said).card().name == "tiny"


def test_time_ends(real: Real, tmp_path: Path) -> None:
    clock = Paced()
    made = campaign(real, tmp_path, lambda: clock.now, seconds=0.2)
    said = about_it(real)
    with clock.pacing(real.scheduler):
        made.run(said)
    leave(made)
    assert made.outcome == "time ended in pass 1"
    assert (tmp_path / "steps.npz").exists()
