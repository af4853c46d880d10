"""One request inside the gate: what routers may read of it, where it is, and what its handler waits for."""

from __future__ import annotations

from asyncio import Future
from enum import Enum

from headgate.core.fleet import Move
from headgate.core.request import Slo
from headgate.live.route.prompt_content import Content

NO_SLO = Slo()


class State(Enum):
    """Where a request is. It is in exactly one of these."""

    QUEUED = "queued"  # in the queue of its class
    PREFILLING = "prefilling"  # holds a prompt seat at an engine, sent WHOLE or for its PREFILL
    HANDED_OVER = "handed over"  # prompt done, waits for a decode place; its KV stays at the prefill engine
    DECODING = "decoding"  # holds a decode seat at an engine
    GONE = "gone"


class Refused(Exception):  # noqa: N818  (an answer to the client, not a fault)
    """The gate does not serve this request. `retry_after` is in whole seconds."""

    def __init__(self, status: int, reason: str, retry_after: int) -> None:
        super().__init__(f"{status} {reason}; retry after {retry_after} s")
        self.status = status  # 429: the queue is full or too slow; 503: no engine, or the router ends
        self.reason = reason  # one of REASONS
        self.retry_after = retry_after


REASONS = ("queue full", "queue time", "wait too long", "router", "no engines", "draining")


class Lapsed(Exception):  # noqa: N818  (news, not a fault)
    """No decode place was found before the KV's deadline. The KV must be given up.

    The request is at the head of its queue again, to be sent WHOLE: wait for `place` once more.
    """


class Ticket:
    """A request in the gate; routers see it as a read-only `Request`.

    `prompt` is an estimate. The handler may write `generated` while tokens come; estimators read it.
    """

    __slots__ = (
        "answer",
        "arrival",
        "avoid",
        "cached",
        "content",
        "deadline",
        "ended",
        "engine",
        "generated",
        "guess",
        "id",
        "kind",
        "lapsed",
        "last_token",
        "limit",
        "priority",
        "prompt",
        "queued",
        "slo",
        "state",
        "tries",
        "waiter",
        "whole",
    )

    evictions = 0
    wasted = 0

    def __init__(
        self,
        id: int,
        kind: str,
        arrival: float,
        prompt: int,
        limit: int,
        guess: int | None = None,
        priority: int = 0,
        slo: Slo = NO_SLO,
        whole: bool = False,
        content: Content | None = None,
    ) -> None:
        self.content = content  # None: nobody asks what it shares with others
        self.id, self.kind, self.arrival = id, kind, arrival
        self.queued = arrival  # when it entered its queue; later where a failed leg brought it back
        self.prompt, self.limit, self.guess = prompt, limit, guess
        self.priority, self.slo = priority, slo
        self.whole = whole  # never split, whatever the router says
        self.state = State.QUEUED
        self.engine = -1  # where it is; for HANDED_OVER where its KV is
        self.tries = 0  # engines it was sent to that failed
        self.avoid: set[int] = set()  # those engines
        self.generated = 0
        self.cached = 0  # prompt tokens its engine had, where it says so at the end
        self.last_token: float | None = None
        self.deadline = 0.0  # of its state: the end of its time in the queue, or of its KV
        self.ended = False  # its handler said so
        self.lapsed = False  # its handler must give up its KV before anything else
        self.answer: Move | Refused | None = None  # what `place` will return or raise
        self.waiter: Future[None] | None = None

    @property
    def room(self) -> int:
        return self.todo

    @property
    def todo(self) -> int:
        """Prompt tokens still to prefill."""
        return self.prompt if self.state in (State.QUEUED, State.PREFILLING) else 0

    def tell(self, answer: Move | Refused | None) -> None:
        """The handler that waits for a place learns what became of it; None: it has to wait again."""
        self.answer = answer
        if (answer is not None or self.lapsed) and self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def __repr__(self) -> str:
        return (
            f"Ticket({self.id}, {self.kind!r}, {self.state.value}, engine={self.engine}, tries={self.tries})"
        )
