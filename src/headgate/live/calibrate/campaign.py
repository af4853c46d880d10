"""Drives an engine through a probe's walk and keeps every step; stops when the fit is good enough."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.fit.fit import METHOD, Fitted, fit
from headgate.cost.fit.steps import About, StepTable, shape_class
from headgate.cost.likeness import shape_of
from headgate.live.calibrate.probe import FEED, Ground, Probe, ProbeWalk, grid, kv_of

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
    llm: Any  # an engine that `start` made
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
        """Steps are kept whatever ends it, a dead engine or the user included; see `outcome`."""
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
            self.log.disturbed()
            for cell in self.walk.cells[number * self.each : (number + 1) * self.each]:
                for prompt in cell.feed:
                    self._send(FEED, prompt, 1)
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

    def _fits(self) -> bool:
        cells = self.walk.cells[: self.each]
        pool = self.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks() * self.scheduler.block_size
        spread = self.ground.slots * self.scheduler.block_size  # each request may begin one more block
        return bool(free > kv_of(cells, 1) + spread)

    def _good(self, said: About) -> bool:
        self.log.disturbed()
        self.report(self.probe.position, len(self.walk.cells), "fitting")
        try:
            fitted: Fitted = fit(self.save(), said)
        except Exception:  # a fit that fails must not cost the passes still to come
            return False
        return fitted.quality.good_enough(GOOD)

    def _warm_up(self) -> None:
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


def drafting(config: Any) -> dict[str, Any]:
    """All drafts are rejected where the config does not say how: a decode gets one token a step."""
    if not isinstance(config, dict) or not isinstance(config.get("num_speculative_tokens"), int):
        raise InputError(
            'speculative_config must be an object with num_speculative_tokens, such as {"method": "mtp", '
            '"num_speculative_tokens": 3}'
        )
    if "rejection_sample_method" in config:
        return config
    rates = [0.0] * config["num_speculative_tokens"]
    return {**config, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}


def measured(
    model: str,
    *,
    ground: tuple[int, int, int, bool],
    seconds: float,
    seed: int,
    dummy: bool,
    more: dict[str, Any],
    steps_file: Path,
    report: Report,
) -> tuple[StepTable, About, str, bool]:
    """`ground`: the most decodes, the tokens of a step and of a request, and whether a small grid will do."""
    slots, budget, longest, quick = ground
    if "speculative_config" in more:
        more = {**more, "speculative_config": drafting(more["speculative_config"])}
    width = 1 + more.get("speculative_config", {}).get("num_speculative_tokens", 0)
    wide = Ground(slots, budget, ANY_KV, longest, FEWEST_PASSES, quick, width)
    grid(wide)  # refuse before the engine is started
    wanted = WantedEngine(model, wide.slots, budget, longest, dummy, more=more)
    llm = start(wanted)
    said = about(llm, wanted, steps_file.name, slots)
    heat = 1.0 if "experts" in said.model_shape and said.settings["weights"] == "made up" else 0.0
    known = replace(wide, kv_tokens=said.kv_tokens)
    campaign = Campaign(llm, known, steps_file, seconds, seed=seed, temperature=heat, report=report)
    table = campaign.run(said)
    return table, said, campaign.outcome, campaign.cut_short


# -- a vLLM engine in this process, to be measured

SCHEDULER = "headgate.vllm.scheduler"
SETTINGS = {"policy": "vllm", "watchdog": "1h", "metrics": False}  # the probe takes over when all is ready


@dataclass(frozen=True)
class WantedEngine:
    model: str  # a name or folder vLLM knows, or a config.json whose weights are then made up
    slots: int  # requests that may run at once (`max_num_seqs`)
    budget: int  # tokens in one step (`max_num_batched_tokens`)
    longest: int  # tokens of one request (`max_model_len`)
    dummy: bool = False  # make weights up; the times of dense models do not depend on them
    graphs: int | None = None  # largest batch with a CUDA graph; None: as vLLM decides
    more: Mapping[str, Any] = field(default_factory=dict)  # further arguments of vLLM's `LLM`


def start(wanted: WantedEngine) -> Any:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler must be within reach
    model, dummy = wanted.model, wanted.dummy
    if Path(model).name == "config.json" and Path(model).is_file():
        model, dummy = str(Path(model).parent), True
    words: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "load_format": "dummy" if dummy else "auto",
        "max_model_len": wanted.longest,
        "max_num_seqs": wanted.slots,
        "max_num_batched_tokens": wanted.budget,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
        "scheduler_cls": SCHEDULER,
        "additional_config": {"headgate": dict(SETTINGS)},
    }
    if wanted.graphs is not None:
        words["compilation_config"] = {"max_cudagraph_capture_size": wanted.graphs}
    try:
        from vllm import LLM
    except ImportError as error:
        raise InputError(f"vLLM cannot be imported ({error}); install it, 0.26 to 0.33") from None
    return LLM(**{**words, **wanted.more})


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def about(llm: Any, wanted: WantedEngine, name: str, decodes: int) -> About:
    import torch
    import vllm

    config, scheduler = llm.llm_engine.vllm_config, core_of(llm).scheduler
    graphs = config.compilation_config.max_cudagraph_capture_size
    settings = {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "weights": "made up" if config.load_config.load_format == "dummy" else "loaded",
        "asynchronous scheduling": str(bool(config.scheduler_config.async_scheduling)),
        "V2 model runner": str(bool(getattr(config, "use_v2_model_runner", False))),
        "largest CUDA graph": "none" if config.model_config.enforce_eager else str(graphs),
        "prefix caching": str(bool(config.cache_config.enable_prefix_caching)),
        "tensor parallel": str(config.parallel_config.tensor_parallel_size),
        "quantization": str(config.model_config.quantization),
    }
    if config.speculative_config is not None:
        settings[METHOD] = str(config.speculative_config.method)
    return About(
        name=name,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none (CPU)",
        model=str(wanted.more.get("served_model_name", Path(wanted.model).name)),
        kv_tokens=int(scheduler._headgate.ledger.kv_total),
        max_model_len=wanted.longest,
        max_running=decodes,
        max_batch_tokens=wanted.budget,
        block=int(scheduler.block_size),
        versions={"vllm": vllm.__version__, "torch": torch.__version__},
        settings=settings,
        model_shape=shape_of(config.model_config.hf_text_config),
        date=datetime.now(UTC).date().isoformat(),
        source="headgate calibrate",
    )


# -- one row per step, written by a listener outside the scheduler

SETTLE = 2  # steps after a disturbance that do not count: one may be under way, one was composed late


class Composition(NamedTuple):
    decodes: int = 0
    context: int = 0  # KV tokens the decodes read, those they write included
    prefill: int = 0
    behind: int = 0
    prompts: int = 0
    attention: float = 0.0  # sum over pieces of prompts of tokens * (start + tokens / 2)
    drafts: int = 0  # that the decodes verify


class StepRow(NamedTuple):
    composed: float  # when schedule() was entered
    follows: bool  # a step before it was still to end, or had just ended with others waiting
    kept: bool
    label: str
    held: Composition
    start: float = 0.0  # when it began to count: the end of the step before it, or `composed` where none was
    end: float = 0.0  # when its tokens were there
    ahead: bool = False  # it was composed before the step before it had ended
    before: int = 0  # shape class of that step; 0: the engine stood idle


class StepLog:
    """A step takes from the end of the step before it, after a stand-still from its own schedule() on, until
    update_from_output() is entered: what the engine does with the tokens then overlaps with the next step, or
    is part of it.
    """

    def __init__(self, scheduler: Any, clock: Callable[[], float] = perf_counter) -> None:
        self.rows: list[StepRow] = []
        self.empty = 0  # steps with nothing in them, in a row
        self.label: Callable[[], str] = lambda: "all"
        self._clock = clock
        self._open: deque[StepRow | None] = deque()  # composed, tokens not there yet; first in, first out
        self._last_end: float | None = None  # None: the engine stood idle, or was held up
        self._last_class = 0
        self._ignore = 0
        self._scheduler = scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self._scheduled, self._updated

    def disturbed(self) -> None:
        """The host does something that is no part of serving: the steps around it do not count."""
        self._ignore = SETTLE
        self._last_end = None
        self._open = deque(each and each._replace(kept=False, follows=False) for each in self._open)

    def table(self) -> StepTable:
        rows = [row for row in self.rows if row.kept]
        labels = tuple(dict.fromkeys(row.label for row in rows)) or ("all",)
        place = {label: number for number, label in enumerate(labels)}
        columns: dict[str, Any] = {
            name: [getattr(row.held, name) for row in rows] for name in Composition._fields
        }
        columns |= {"seconds": [row.end - row.start for row in rows], "before": [row.before for row in rows]}
        columns |= {"busy": [row.ahead for row in rows], "part": [place[row.label] for row in rows]}
        return StepTable.from_columns(columns, labels)

    def _scheduled(self, *args: Any, **words: Any) -> Any:
        composed = self._clock()
        output = self._schedule(*args, **words)
        if not output.num_scheduled_tokens:
            self.empty += 1
            if not any(self._open):
                self._last_end = None
            self._open.append(None)
            return output
        self.empty = 0
        follows = any(self._open) or self._last_end is not None
        self._open.append(StepRow(composed, follows, not self._ignore, self.label(), composition(output)))
        self._ignore = max(0, self._ignore - 1)
        return output

    def _updated(self, *args: Any, **words: Any) -> Any:
        end = self._clock()
        if (row := self._open.popleft()) is not None:
            last = self._last_end if row.follows else None
            if last is None:
                self.rows.append(row._replace(start=row.composed, end=end))
            else:
                ahead = row.composed < last
                self.rows.append(row._replace(start=last, end=end, ahead=ahead, before=self._last_class))
            self._last_end = end
            self._last_class = int(shape_class(row.held.decodes, row.held.prefill))
        result = self._update(*args, **words)
        if not any(self._open) and not self._scheduler.has_unfinished_requests():
            self._last_end = None
        return result


def composition(output: Any) -> Composition:
    """Of one SchedulerOutput. Contexts of an engine ahead are long by the drafts of the step in flight."""
    tokens, guesses = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    decodes = context = prefill = behind = prompts = drafts = 0
    attention = 0.0
    pieces = [(tokens[new.req_id], new.num_computed_tokens) for new in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    known = cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens
    for name, computed, put_out in zip(*known, strict=True):
        drafted = len(guesses.get(name, ()))
        if put_out and tokens[name] == 1 + drafted and name not in resumed:
            decodes += 1
            context += computed + 1
            drafts += drafted
        else:
            pieces.append((tokens[name], computed))
    for piece, start in pieces:
        prompts += 1
        prefill += piece
        behind += start
        attention += piece * (start + piece / 2)
    return Composition(decodes, context, prefill, behind, prompts, attention, drafts)
