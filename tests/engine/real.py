"""A real vLLM engine in this process, plain or under a policy, watched from outside."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler must be within reach
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")  # no warm-up

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import RequestOutputKind

from headgate.cost.card import load_card
from headgate.methods.make import make_policy, split_name
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine

SLOTS, BUDGET, BLOCK, BLOCKS, LENGTH = 16, 256, 32, 400, 1024
OWN = {"eb": "eb:refill=4"}
EVERY_POLICY = [OWN.get(name, name) for name in BATCH if name != "sglang"]  # the simulator's alone
NEVER_MIXES = ("eb", "eb-online", "v0", "request-level")
MANY_STEPS = 20_000
PAUSE = 25  # steps between two inputs of a session
OVERRIDES = "register_triton_kernel_overrides"  # once is enough; it stumbles over what numba leaves behind
_made: list[bool] = []


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: Sequence[int]
    limit: int = 16
    words: Mapping[str, Any] = field(default_factory=dict)  # more sampling parameters
    priority: int = 0
    adapter: LoRARequest | None = None
    step: int = 0  # of the engine, before which it comes
    gone: int | None = None  # of the engine, before which its client hangs up


class Kinds(NamedTuple):
    """What the steps of a run held."""

    mixed: int
    decode: int
    prefill: int
    preempted: int
    drafted: int  # decodes that came with guesses to be verified


class Watch:
    """Tells prefill from decode by the tokens alone, not by what the scheduler thinks."""

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[tuple[int, int]] = []  # decodes and prompts in each
        self.preempted = self.drafted = 0
        self._prompt: dict[str, int] = {}
        self._due: dict[str, int] = {}  # tokens to compute before the next output
        self._inner = scheduler.schedule
        scheduler.schedule = self._schedule

    def _schedule(self, *args: Any, **words: Any) -> Any:
        output = self._inner(*args, **words)
        decodes, prompts = 0, len(output.scheduled_new_reqs)
        for new in output.scheduled_new_reqs:
            self._prompt[new.req_id] = len(new.prompt_token_ids)
            self._due[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
        cached = output.scheduled_cached_reqs
        columns = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        for name, computed, said in columns:
            if name in cached.resumed_req_ids:
                self._due[name] = self._prompt[name] + said
            prompts += computed < self._due[name]
            decodes += computed >= self._due[name]
        self.preempted += len(output.preempted_req_ids or ())
        self.drafted += len(output.scheduled_spec_decode_tokens)
        self.steps.append((decodes, prompts))
        return output

    def kinds(self) -> Kinds:
        """What was seen since last asked."""
        steps, self.steps = self.steps, []
        preempted, drafted = self.preempted, self.drafted
        self.preempted = self.drafted = 0
        return Kinds(
            sum(1 for decodes, prompts in steps if decodes and prompts),
            sum(1 for decodes, prompts in steps if decodes and not prompts),
            sum(1 for decodes, prompts in steps if prompts and not decodes),
            preempted,
            drafted,
        )


class Served(NamedTuple):
    """What came of a list of requests; nothing for those whose client hung up."""

    tokens: list[list[list[int]] | None]  # by request and sample
    outputs: list[Any]  # vLLM's own
    kinds: Kinds


class Real:
    """One engine; every run begins and ends with it empty."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.front = llm.llm_engine
        self.core = self.front.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.watch = Watch(self.scheduler)
        self._runs = 0

    def serve(self, asks: Sequence[Ask], arm: str | None = None) -> Served:
        """Everything asked for, under a policy or plain."""
        self.follow(arm)
        self._runs += 1
        self.watch.kinds()
        answers: dict[str, Any] = {}
        names = [f"{self._runs}.{number}" for number in range(len(asks))]
        steps, gone = 0, {name for name, ask in zip(names, asks, strict=True) if ask.gone is not None}
        while len(answers) < len(asks) - len(gone) or steps <= max(ask.gone or 0 for ask in asks):
            for name, ask in zip(names, asks, strict=True):
                if ask.step == steps:
                    self._queue(name, ask)
                if ask.gone == steps:
                    self.front.abort_request([name])
            for output in self.front.step():
                if output.finished and output.request_id not in gone:
                    answers[output.request_id] = output
            steps += 1
            assert steps < MANY_STEPS, f"{arm}: it hangs, {len(answers)} of {len(asks)} are served"
        self.drained()
        outputs = [answers.get(name) for name in names]
        tokens = [output and [list(each.token_ids) for each in output.outputs] for output in outputs]
        return Served(tokens, outputs, self.watch.kinds())

    def talk(
        self, sessions: Sequence[Sequence[Sequence[int]]], limit: int, arm: str | None
    ) -> list[list[int]]:
        """Clients that go on writing: the next input of a session comes some steps after the one before."""
        self.follow(arm)
        self._runs += 1
        self.watch.kinds()
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=limit)
        said: dict[str, list[int]] = {f"{self._runs}.{each}": [] for each in range(len(sessions))}
        steps, rounds = 0, max(map(len, sessions))
        while steps <= rounds * PAUSE or self.scheduler.has_requests():
            number, due = divmod(steps, PAUSE)
            for name, inputs in zip(said, sessions, strict=True):
                if not due and number <= len(inputs):
                    self._say(name, inputs[number] if number < len(inputs) else None, params)
            for output in self.front.engine_core.get_output().outputs:
                said[output.request_id] += output.new_token_ids
            steps += 1
            assert steps < MANY_STEPS, f"{arm}: it hangs"
        self.drained()
        return list(said.values())

    def _say(self, name: str, tokens: Sequence[int] | None, params: SamplingParams) -> None:
        """One more input of a session; None ends it. The front end for this is asynchronous: go round it."""
        prompt = {"prompt_token_ids": [0] if tokens is None else list(tokens)}
        tasks = self.front.get_supported_tasks()
        request = self.front.input_processor.process_inputs(
            name, prompt, params, supported_tasks=tasks, resumable=tokens is not None
        )
        self.front.engine_core.add_request(request)

    def follow(self, arm: str | None) -> None:
        """This policy decides from now on; None: vLLM as it is."""
        self.front.reset_prefix_cache()
        live = getattr(self.scheduler, "_headgate", None)
        if live is None:
            assert arm is None, "this engine was started without headgate"
            return
        live.take_over(arm and make_policy(*split_name(arm), self.limits())[0])

    def limits(self) -> Engine:
        """The engine as policies are told of it; any card will do for the tokens."""
        config, cost = self.core.vllm_config, load_card("linear-h200-qwen3-8b").cost
        kv_tokens = (config.cache_config.num_gpu_blocks - 1) * BLOCK
        return Engine(cost, kv_tokens, config.model_config.max_model_len, BUDGET, SLOTS, BLOCK)

    def drained(self) -> None:
        """Let steps in flight end; then nobody is left, every block is free, and the policy did not fall."""
        for _ in range(8):
            self.front.step()
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        assert not getattr(self.core, "batch_queue", None)
        assert not scheduler.running and not scheduler.requests and not scheduler.has_requests()
        assert scheduler.get_request_counts() == (0, 0)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        live = getattr(scheduler, "_headgate", None)
        if live is not None:
            assert live.fallen is None, live.fallen
            assert not live.occupied

    def _queue(self, name: str, ask: Ask) -> None:
        words = {"temperature": 0.0, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        params = SamplingParams(max_tokens=ask.limit, **{**words, **ask.words})
        prompt = {"prompt_token_ids": list(ask.prompt)}
        self.front.add_request(name, prompt, params, lora_request=ask.adapter, priority=ask.priority)


class Stream:
    """Stands in for CUDA streams and events, which the asynchronous path names even where there is no GPU."""

    def __init__(self, *args: Any, **words: Any) -> None:
        self.device = torch.device("cpu")

    def record(self, *args: Any) -> None:
        pass

    synchronize = wait = wait_stream = wait_event = record


@contextmanager
def stays_asynchronous() -> Iterator[None]:
    """The platform switches asynchronous scheduling off on a CPU, where nothing is gained by it: not for an
    engine that is made in here."""
    update = CpuPlatform.check_and_update_config.__func__

    def and_stay(cls: type, config: Any) -> None:
        update(cls, config)
        config.scheduler_config.async_scheduling = True

    with mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(and_stay)):
        yield


@contextmanager
def streams() -> Iterator[None]:
    """What vLLM's asynchronous path needs on a CPU as long as the engine lives."""
    with ExitStack() as stack:
        patch = stack.enter_context
        for place, name in ((torch, "Event"), (torch.cuda, "Event"), (torch.cuda, "Stream")):
            patch(mock.patch.object(place, name, Stream))
        patch(mock.patch.object(torch.cuda, "current_stream", Stream))
        patch(mock.patch.object(torch.cuda, "stream", lambda stream: nullcontext()))
        yield


@contextmanager
def engine(model: Path, asynchronous: bool = False, plugin: bool = True, **words: Any) -> Iterator[Real]:
    """An engine for the tiny model, gone at the end."""
    given: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": LENGTH,
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": BUDGET,
        "num_gpu_blocks_override": BLOCKS,
        "block_size": BLOCK,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        **words,
    }
    if plugin:
        given["scheduler_cls"] = "headgate.vllm.scheduler"
        given["additional_config"] = {"headgate": {"policy": "mixed"}}
    with ExitStack() as stack:
        if asynchronous:
            stack.enter_context(streams())
        if _made:
            stack.enter_context(mock.patch.object(CpuPlatform, OVERRIDES, create=True))
        with stays_asynchronous() if asynchronous else nullcontext():
            real = Real(LLM(**given))
        assert real.core.vllm_config.scheduler_config.async_scheduling == asynchronous
        _made.append(True)
        try:
            yield real
        finally:
            real.front.engine_core.shutdown()
            del real
            gc.collect()
            cleanup_dist_env_and_memory()
