"""Drives an engine through a probe's walk and keeps every step; stops when the fit is good enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.fit.fit import Fitted, fit
from headgate.cost.fit.steps import About, StepTable
from headgate.live.calibrate.engine import WantedEngine, about, core_of, start
from headgate.live.calibrate.probe import FEED, Ground, Probe, ProbeWalk, grid
from headgate.live.calibrate.step_log import StepLog

SAVE_EVERY = 20.0  # seconds
STANDSTILL = 20_000  # steps with nothing in them, in a row: about twenty seconds
WARM_UP = ((512, 8), (64, 64))  # prompt tokens, requests; thrown away
DECODED = 8  # output tokens of those
ENDLESS = 100_000  # output tokens a request of a pool may have; cut to the model's length
GOOD = 0.03  # relative error below which no further pass is made
FEWEST_PASSES = 2  # unless time ends before

ANY_KV = 1 << 30  # until the engine says how much it has

Report = Callable[[int, int, str], None]


@dataclass
class Campaign:
    """One engine, one walk of several passes, one file of steps."""

    llm: Any  # an engine that `calibrate.engine.start` made
    ground: Ground  # what the engine allows; its KV is read from the engine
    steps_file: Path  # where the steps are written, again and again
    seconds: float  # for all of it, filling the pools included
    passes: int = 3  # most visits of each cell; less where KV or time end, or the fit is good
    seed: int = 0  # of the order of the cells; each pass has its own
    # Of sampling. With made-up weights greedy decodes all say the same word, and a mixture of experts sends
    # all of them to the same few; at 1.0 they say random words and meet all experts.
    temperature: float = 0.0
    report: Report = lambda done, total, doing: None  # cells done, cells in all, and what is being done
    clock: Callable[[], float] = perf_counter  # seconds of steps, and when time ends
    log: StepLog = field(init=False)
    walk: ProbeWalk = field(init=False)  # all passes
    each: int = field(init=False)  # cells of one pass
    probe: Probe = field(init=False)
    outcome: str = "not begun"
    cut_short: bool = False  # by the engine's death or the user

    def __post_init__(self) -> None:
        self.scheduler = core_of(self.llm).scheduler
        self.log = StepLog(self.scheduler, self.clock)
        one = grid(self.ground)
        self.each = len(one.cells)
        rng = np.random.default_rng(self.seed)
        order = [place for _ in range(self.passes) for place in rng.permutation(self.each).tolist()]
        self.walk = one.ordered(order)
        self.probe = Probe(self.walk, self.ground.slots, self.ground.budget)
        vocabulary = int(self.llm.llm_engine.vllm_config.model_config.get_vocab_size())
        self._words = rng.integers(2, vocabulary, 2 * self.ground.longest).tolist()
        self._sent, self._saved = 0, 0.0

    def run(self, said: About) -> StepTable:
        """Measure until time, KV or cells end, or the fit is good; whatever happens, steps are kept.

        An engine that dies, or a user who interrupts, ends it early: `outcome` says why.
        """
        try:
            self._run(said)
        except KeyboardInterrupt:
            self.outcome, self.cut_short = "interrupted", True
        except InputError:
            raise
        except Exception as error:  # the engine died: what was measured is kept
            words = " ".join(str(error).split())[:200]
            self.outcome, self.cut_short = f"the engine died: {type(error).__name__}: {words}", True
        return self.save()

    def leave(self) -> None:
        """Give the engine back as it was, empty and with vLLM deciding."""
        engine, core = self.llm.llm_engine, core_of(self.llm)
        engine.abort_request([f"probe-{number}" for number in range(self._sent)])
        self.scheduler._headgate.take_over(None)
        while self.scheduler.has_requests() or getattr(core, "batch_queue", None):
            engine.step()
        self.log.close()

    def save(self) -> StepTable:
        table = self.log.table()
        self.steps_file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.steps_file.with_name(f".{self.steps_file.name}")
        with partial.open("wb") as file:
            table.save(file)  # type: ignore[arg-type]  # numpy takes an open file, too
        partial.replace(self.steps_file)
        self._saved = self.clock()
        return table

    def _run(self, said: About) -> None:
        began = self.clock()
        deadline = began + self.seconds
        self.report(0, len(self.walk.cells), "warming up")
        self._warm_up()
        self.log.rows.clear()
        self.log.label = lambda: self.probe.label
        self._saved = self.clock()
        self.scheduler._headgate.take_over(self.probe)
        for pool in self.walk.pools:
            for _ in range(pool.size):
                self._send(pool.kind, pool.prompt, min(ENDLESS, self.ground.longest - pool.prompt))
        for number in range(self.passes):
            if number and not self._fits():
                self.outcome = f"KV is full after {number} passes"
                return
            self._feed(number)
            if not self._walk_to((number + 1) * self.each, deadline):
                self.outcome = f"time ended in pass {number + 1}"
                return
            self.outcome = f"{number + 1} passes"
            if number + 1 >= FEWEST_PASSES and number + 1 < self.passes and self._good(said):
                self.outcome = f"good enough after {number + 1} passes"
                return

    def _walk_to(self, cell: int, deadline: float) -> bool:
        step, probe, live = self.llm.llm_engine.step, self.probe, self.scheduler._headgate
        last = -1
        while probe.position < cell:
            step()
            if live.fallen is not None:
                raise RuntimeError(f"the probe was relieved: {live.fallen}")
            if self.log.empty > STANDSTILL:
                raise RuntimeError(f"the engine stands still at cell {probe.label!r}")
            now = self.clock()
            if now > deadline:
                return False
            if probe.position != last or not last:  # while the pools are filled, at every step
                last = probe.position
                self.report(last, len(self.walk.cells), probe.label)
                if now > self._saved + SAVE_EVERY:
                    self.log.disturbed()
                    self.save()
        return True

    def _feed(self, number: int) -> None:
        """Send the prompts of all cells of a pass; they wait for their turn."""
        self.log.disturbed()
        for place in range(number * self.each, (number + 1) * self.each):
            for prompt in self.walk.cells[place].feed:
                self._send(FEED, prompt, 1)

    def _fits(self) -> bool:
        cells = self.walk.cells[: self.each]
        grown = sum(move.decodes * move.steps for cell in cells for move in cell.moves)
        pool = self.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks() * self.scheduler.block_size
        spread = self.ground.slots * self.scheduler.block_size  # each request may begin one more block
        return bool(free > grown + spread + max(sum(cell.feed) for cell in cells))

    def _good(self, said: About) -> bool:
        self.log.disturbed()
        self.report(self.probe.position, len(self.walk.cells), "fitting")
        try:
            fitted: Fitted = fit(self.save(), said)
        except Exception:  # a fit that fails must not cost the passes still to come
            return False
        return fitted.quality.good_enough(GOOD)

    def _warm_up(self) -> None:
        """Kernels are compiled at their first use."""
        engine = self.llm.llm_engine
        for prompt, requests in WARM_UP:
            for _ in range(min(requests, self.ground.decodes)):
                self._send("", min(prompt, self.ground.longest // 2), DECODED)
        while engine.has_unfinished_requests():
            engine.step()

    def _send(self, kind: str, prompt: int, output: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=self.temperature,
            max_tokens=output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"headgate_class": kind} if kind else None,
        )
        offset = self._sent * 17 % self.ground.longest
        tokens = self._words[offset : offset + prompt]
        self.llm.llm_engine.add_request(f"probe-{self._sent}", {"prompt_token_ids": tokens}, params)
        self._sent += 1


def measured(
    model: str,
    *,
    ground: tuple[int, int, int, bool],
    seconds: float,
    passes: int,
    seed: int,
    dummy: bool,
    more: dict[str, Any],
    steps_file: Path,
    report: Report,
) -> tuple[StepTable, About, str, bool]:
    """Start an engine for a model and measure it; steps, engine, how it ended, and whether it was cut short.

    `ground` is the largest batch of decodes, the tokens of a step, those of a request, and whether the
    small grid is enough.
    """
    slots, budget, longest, quick = ground
    wide = Ground(slots, budget, ANY_KV, longest, min(passes, FEWEST_PASSES), quick)
    grid(wide)  # refuse before the engine is started
    wanted = WantedEngine(model, wide.slots, budget, longest, dummy, more=more)
    llm = start(wanted)
    said = about(llm, wanted, steps_file.name, slots)
    heat = 1.0 if "experts" in said.model_shape and said.settings["weights"] == "made up" else 0.0
    campaign = Campaign(llm, wide.with_kv(said.kv_tokens), steps_file, seconds, passes, seed, heat, report)
    table = campaign.run(said)
    return table, said, campaign.outcome, campaign.cut_short
