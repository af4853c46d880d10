"""What a batch policy may read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from headgate.core.request import Request


class Limits(NamedTuple):
    """Hard limits of the engine; a plan may ask for less, never get more."""

    batch_tokens: int  # tokens in one step
    running: int  # requests that may hold KV at once
    block: int = 1  # KV is handed out in blocks of this many tokens
    decode_width: int = 1  # tokens one decode costs in a step at most (> 1 with speculation)
    tokens_per_step: float = 1.0  # tokens a decode gets in a step on average, as measured (likewise)
    ahead: bool = False  # a step is composed while the one before it runs: its tokens have not been seen


class View(Protocol):
    """Live and read-only. Lengths and look-ups are O(1); only iterating costs.

    Attributes:
        now: Seconds since the run began.
        waiting: They hold no KV; arrival order, evicted ones first.
        prefilling: They hold KV, their prompt is unfinished; admission order.
        decoding: They hold KV, their prompt is finished.
        oldest_token: When the decode that has waited longest for a token got its last one; infinity without
            decodes.
        kv_free: Tokens, whole free blocks only.
        kv_total: Tokens.
        kv_shared: Tokens that requests hold beyond those in use: a cached block that several hold is in use
            once. Decodes read `kv_total - kv_free + kv_shared` tokens, with what half-done prompts hold. In
            vLLM it is estimated, from below.
        limits: What the engine cannot exceed.

    Examples:
        >>> import headgate
        >>> class Watched(headgate.Mixed):
        ...     deepest = 0
        ...     def plan(self, view):
        ...         self.deepest = max(self.deepest, len(view.waiting))
        ...         return super().plan(view)
        >>> policy = Watched(slots=4, budget=2048)
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=4)
        >>> _ = headgate.simulate(engine, policy, headgate.Workload.of([100] * 10, [20] * 10))
        >>> policy.deepest
        10
    """

    @property
    def now(self) -> float: ...
    @property
    def waiting(self) -> Mapping[int, Request]: ...
    @property
    def prefilling(self) -> Mapping[int, Request]: ...
    @property
    def decoding(self) -> Mapping[int, Request]: ...
    @property
    def oldest_token(self) -> float: ...
    @property
    def kv_free(self) -> int: ...
    @property
    def kv_total(self) -> int: ...
    @property
    def kv_shared(self) -> int: ...
    @property
    def limits(self) -> Limits: ...
