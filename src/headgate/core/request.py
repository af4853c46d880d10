"""What is known of one request, never its true output length."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from headgate.core.build import mypyc_attr

GAP, MEAN, ENVELOPE = "gap", "mean", "envelope"  # what a promise between tokens is about
MOST_URGENT = 6  # a priority beyond it, or below its opposite, weighs no more or less
OUTPUT_SERVICE = 2.0  # what an output token counts in a tenant's account, as in VTC; a prompt token counts 1
MOST_TENANTS = 1024  # that are told apart at a time; further ones share an account
OTHER_TENANTS = "others"  # the name of those that are not told apart


class Slo(NamedTuple):
    """What one kind of user was promised, in seconds. None: no promise.

    `between_tokens` is the longest gap between two tokens of a request, or where `between_kind` is "mean" the
    mean of its gaps (TPOT); where it is "envelope", token j is due at arrival + `first_token` + j times it.
    Policies may take each for a gap: where the first token is in time and no gap is longer, all are kept.

    `weight` says what a kept promise is worth beside others, where not all can be kept. `background` work was
    promised nothing, and may be evicted for a request that was.

    Examples:
        >>> import headgate
        >>> chat = headgate.Kind("chat", headgate.Slo(first_token=0.5, between_tokens=0.05))
        >>> chat.slo.first_token
        0.5
    """

    first_token: float | None = None
    between_tokens: float | None = None
    between_kind: str = GAP
    weight: float | None = None  # None: by the priority, see `weight_of`
    background: bool = False

    def said(self) -> dict[str, float | str | None]:
        """As JSON; `weight` and `background` only where they were given."""
        words: dict[str, float | str | None] = dict(zip(self._fields, self[:3], strict=False))
        if self.weight is not None:
            words["weight"] = self.weight
        if self.background:
            words["background"] = True
        return words


NO_SLO = Slo()
MOST_WEIGHT = 1e9  # of a class: sums of weights stay exact enough


def weight_remedy(weight: float) -> str:
    return f"give at most {MOST_WEIGHT:,.0f}" if weight > MOST_WEIGHT else "give a number above 0"


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(slots=True, eq=False, init=False)
class Identity:
    """What a request brings with it. It is written once, when the request arrives, and never changes.

    This is the one list of these fields: a workload's columns, the handles that policies see, the recorder's
    table and the live trace follow it. A field that is a column of a workload (`workloads/workload.py`) is
    handed on by itself up to `Entry`, whose constructor is compiled and names each.
    """

    id: int  # arrival number: 0, 1, 2, ... the same in every driver
    arrival: float  # when its client sent it, on the driver's clock
    prompt: int  # tokens
    limit: int  # most output tokens it may have
    kind: str = ""  # workload class, "" when there is only one
    guess: int | None = None  # predicted output tokens, where there is a prediction
    priority: int = 0  # smaller is more urgent, as in vLLM
    slo: Slo = NO_SLO  # what its user was promised
    tenant: str = ""  # whose it is, where tenants share the engine

    def __init__(  # a dataclass's own is never compiled
        self,
        id: int,
        arrival: float,
        prompt: int,
        limit: int,
        kind: str = "",
        guess: int | None = None,
        priority: int = 0,
        slo: Slo = NO_SLO,
        tenant: str = "",
    ) -> None:
        self.id, self.arrival, self.prompt, self.limit = id, arrival, prompt, limit
        self.kind, self.guess, self.priority, self.slo = kind, guess, priority, slo
        self.tenant = tenant


FIELDS = tuple(field.name for field in fields(Identity))
RECORDED = tuple(name for name in FIELDS if name not in ("id", "arrival", "limit", "guess", "slo", "tenant"))


def weight_of(request: Request) -> float:
    """What a kept promise of it is worth: its class's weight, or by its priority. Ten times for each step of
    urgency, six steps at most.
    """
    weight = request.slo.weight
    if weight is not None:
        return weight
    urgency = -request.priority
    if urgency == 0:
        return 1.0
    return 10.0 ** max(-MOST_URGENT, min(urgency, MOST_URGENT))


def uncached(request: Request) -> int:
    """Prompt tokens that the prefix cache does not have; all of them where KV comes from another engine.

    There `cached` is the whole prompt, which no cache ever has.
    """
    left = request.prompt - request.cached
    return left if left > 0 else request.prompt


class Request(Protocol):
    """A live, read-only handle: its `Identity`, and how far it has come. Its true output is not on it.

    Attributes:
        id: Arrival number: 0, 1, 2, ... the same in every driver.
        arrival: When its client sent it.
        queued: When it reached this queue; later than `arrival` where a router held it back.
        kind: Workload class, "" when there is only one.
        prompt: Prompt tokens.
        limit: Most output tokens it may have.
        guess: Predicted output tokens, where there is a prediction.
        priority: Smaller is more urgent, as in vLLM.
        slo: What its user was promised.
        tenant: Whose it is, "" where that is not known.
        todo: Tokens still to prefill (after an eviction: its output so far too). While it waits, what it will
            find in the prefix cache is left out: what was there when it was last looked up, and what it
            shares with requests before it, which will have computed it by then.
        room: KV tokens its admission takes from `kv_free`: `todo`, and blocks that no request holds yet.
        generated: Output tokens so far.
        last_token: When its newest output token came, None before the first.
        evictions: How often its KV was dropped.
        cached: Prompt tokens whose KV was already there when it was first admitted (prefix cache). Before
            that, those that it is expected to find.
        wasted: KV tokens those evictions threw away, to be computed again.

    Examples:
        >>> import headgate
        >>> class LongestPrompt(headgate.Observer):
        ...     prompt = 0
        ...     def arrived(self, request, now):
        ...         self.prompt = max(self.prompt, request.prompt)
        >>> seen = LongestPrompt()
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=8)
        >>> requests = headgate.Workload.of([300, 700], [20, 20])
        >>> _ = headgate.simulate(engine, "mixed", requests, observers=(seen,))
        >>> seen.prompt
        700
    """

    @property
    def id(self) -> int: ...
    @property
    def arrival(self) -> float: ...
    @property
    def queued(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def prompt(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def guess(self) -> int | None: ...
    @property
    def priority(self) -> int: ...
    @property
    def slo(self) -> Slo: ...
    @property
    def tenant(self) -> str: ...
    @property
    def todo(self) -> int: ...
    @property
    def room(self) -> int: ...
    @property
    def generated(self) -> int: ...
    @property
    def last_token(self) -> float | None: ...
    @property
    def evictions(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def wasted(self) -> int: ...
