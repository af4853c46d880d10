"""A vLLM scheduler kept busy, a model that takes no time, and a meter that tells our time from vLLM's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from time import thread_time_ns
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from headgate.cost.card import load_card
from headgate.cost.model import Shape
from headgate.methods.make import make_policy, split_name
from headgate.sim.engine.engine import Engine
from studies.h200.models import TINY
from studies.h200.record import shape

SHORTEST, LONGEST = 128, 384  # output tokens, uniform
BUDGET, BLOCK = 16384, 16
PLAIN = "plain"
KINDS = ("decode", "prefill", "mixed", "empty")
TIMED = ("schedule", "update_from_output")
NEITHER, VLLM, OURS = "neither", "vllm", "ours"
WITHIN = ("_preempt_request", "_free_request", "_handle_stopped_request")  # vLLM calls ours from within those


class Load(NamedTuple):
    """What the engine is kept busy with."""

    prompt: int = 256  # tokens of each prompt
    shared: int = 0  # of those, the first that all prompts have in common
    waiting: int | None = None  # requests in the queue; None: a quarter of the slots
    card: str = "linear-h200-qwen3-8b"  # how long steps take, and what policies know of it

    @property
    def longest(self) -> int:
        """Tokens of a request."""
        return self.prompt + LONGEST


class Step(NamedTuple):
    """Nanoseconds of one step, ours and vLLM's, and what it held."""

    kind: str
    running: int
    ours: int
    theirs: int


class Meter:
    """Tells our time from vLLM's while its scheduler runs."""

    def __init__(self) -> None:
        self.ours = self.theirs = 0
        self._turn = NEITHER

    @contextmanager
    def watching(self, base: Any, mixin: Any) -> Iterator[None]:
        """Time vLLM's two functions, and of ours the parts that are called from within them."""
        with ExitStack() as patched:
            for name in TIMED:
                patched.enter_context(mock.patch.object(base, name, self._vllm(getattr(base, name))))
            for name in WITHIN:
                patched.enter_context(mock.patch.object(base, name, self._back(getattr(base, name))))
                patched.enter_context(mock.patch.object(mixin, name, self._within(getattr(mixin, name))))
            yield

    def whole(self, call: Callable[..., Any], *args: Any) -> Any:
        """A call whose every nanosecond is either ours or vLLM's."""
        before = self.theirs
        began = thread_time_ns()
        result = call(*args)
        self.ours += thread_time_ns() - began - (self.theirs - before)
        return result

    def take(self) -> tuple[int, int]:
        """What was counted since last asked."""
        taken = self.ours, self.theirs
        self.ours = self.theirs = 0
        return taken

    def _vllm(self, function: Any) -> Any:
        @wraps(function)  # headgate reads what it stands before
        def timed(scheduler: Any, *args: Any, **words: Any) -> Any:
            self._turn = VLLM
            began = thread_time_ns()
            result = function(scheduler, *args, **words)
            self.theirs += thread_time_ns() - began
            self._turn = NEITHER
            return result

        return timed

    def _within(self, function: Any) -> Any:
        """Ours, called from within vLLM's."""
        return self._nested(function, VLLM, OURS, -1)

    def _back(self, function: Any) -> Any:
        """vLLM's, called from within ours."""
        return self._nested(function, OURS, VLLM, 1)

    def _nested(self, function: Any, around: str, turn: str, sign: int) -> Any:
        @wraps(function)
        def timed(scheduler: Any, *args: Any, **words: Any) -> Any:
            if self._turn != around:
                return function(scheduler, *args, **words)
            self._turn = turn
            began = thread_time_ns()
            result = function(scheduler, *args, **words)
            self.theirs += sign * (thread_time_ns() - began)
            self._turn = around
            return result

        return timed


class Busy:
    """A scheduler whose every slot is taken and whose queue never runs empty."""

    def __init__(self, slots: int, folder: Path, load: Load, meter: Meter, bare: bool = False) -> None:
        self.slots, self.now, self.load, self.bare = slots, 0.0, load, bare
        self.cost = load_card(load.card).cost
        self.scheduler = scheduler_for(slots, folder, load, bare)
        if not bare:
            live = self.scheduler._headgate
            live.clock, live.origin = (
                partial(getattr, self, "now"),
                0.0,
            )  # as quick as the clock it stands for
            self.scheduler._headgate_books.wall = lambda: 0.0
        self.meter = meter
        self._rng = np.random.default_rng(slots)
        self._shared = self._rng.integers(2, TINY.vocabulary, load.shared).tolist()
        self._flying: deque[tuple[Any, Any, int, str]] = deque()
        self._next = 0

    def follow(self, policy: str) -> None:
        """This policy decides from now on."""
        if self.bare:
            return
        blocks = self.scheduler.cache_config.num_gpu_blocks - 1
        engine = Engine(self.cost, blocks * BLOCK, self.load.longest, BUDGET, self.slots, BLOCK)
        made = None if policy == PLAIN else make_policy(*split_name(policy), engine)[0]
        self.scheduler._headgate.take_over(made)

    def fill(self) -> None:
        """Take the slots, as vLLM does it."""
        self.follow(PLAIN)
        for _ in range(self.slots):
            self.another(1)  # as requests are met under way: some have nearly ended
        waiting = self.load.waiting
        for _ in range(self.slots // 4 if waiting is None else waiting):
            self.another()
        while len(self.scheduler.running) < self.slots:
            self.step()

    def another(self, shortest: int = SHORTEST) -> None:
        """One more request in the queue."""
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        limit = int(self._rng.integers(shortest, LONGEST, endpoint=True))
        own = self.load.prompt - self.load.shared
        prompt = self._shared + self._rng.integers(2, TINY.vocabulary, own).tolist()
        request = Request(
            request_id=str(self._next),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self._next += 1
        self.scheduler.add_request(request)

    def step(self) -> Step | None:
        """Compose a step, then hear the tokens of the one before; that one's times."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.meter.whole(self.scheduler.schedule)
        decodes, context, prefill, behind = shape(output)
        self.now += self.cost.seconds(Shape(decodes, context, prefill, behind))
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        said = [[] if requests[name].is_prefill_chunk else [7] for name in names]
        places = {name: place for place, name in enumerate(names)}
        answer = ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=said)
        kind = KINDS[(2 if prefill else 0) if decodes else (1 if prefill else 3)]
        self._flying.append((output, answer, len(self.scheduler.running), kind))
        if len(self._flying) < 2:
            return None
        done, answer, running, kind = self._flying.popleft()
        before = len(requests)
        self.meter.whole(self.scheduler.update_from_output, done, answer)
        ours, theirs = self.meter.take()
        for _ in range(before - len(self.scheduler.requests)):
            self.another()
        return Step(kind, running, ours, theirs)


class NoGrammars:
    """Stands for vLLM's structured outputs, which nobody here asks for."""

    def should_advance(self, request: Any, **words: Any) -> bool:
        """Never."""
        return False

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        """Always."""
        return True


def scheduler_for(slots: int, folder: Path, load: Load, bare: bool) -> Any:
    """The asynchronous scheduler of vLLM with headgate before it, or `bare`; no model behind."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from headgate.vllm import scheduler

    blocks = 1 + 2 * slots * load.longest // BLOCK
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=load.longest),
        scheduler_config=SchedulerConfig(
            max_model_len=load.longest,
            is_encoder_decoder=False,
            max_num_seqs=slots,
            max_num_batched_tokens=BUDGET,
        ),
        cache_config=cache,
        additional_config={"headgate": {"policy": "mixed", "watchdog": "1h"}},
    )
    # A platform without a GPU switches these; there is no device here to mind.
    config.scheduler_config.async_scheduling = config.cache_config.enable_prefix_caching = True
    config.scheduler_config.max_num_batched_tokens = BUDGET
    init_none_hash(sha256)
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    layer = KVCacheGroupSpec(["layer"], attention)
    return (AsyncScheduler if bare else scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[layer]),
        structured_output_manager=NoGrammars(),
        include_finished_set=False,
        log_stats=True,
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )
