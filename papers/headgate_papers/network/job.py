"""One request of a stochastic network, and the token counter of one engine."""

from __future__ import annotations

from math import inf

from headgate.core.request import Identity
from headgate.core.roster import Member, Roster
from headgate.methods.fluid.flows import Instance
from headgate_papers.network.source import Block

WAITS_PROMPT, IN_PREFILL, WAITS_DECODE, DECODING, GONE = range(5)
NO_LIMIT = 2**31 - 1
ROUNDING = 1e-6  # tokens


class Clock:
    """Tokens that each slot of an engine has produced since the run began."""

    __slots__ = ("_fleet", "_since", "_speed", "_tokens", "due", "ends")

    def __init__(self, fleet: Roster, speed: float) -> None:
        self._fleet = fleet
        self._tokens, self._since, self._speed = 0.0, 0.0, speed
        self.ends: list[tuple[float, int, Job]] = []  # a heap of the counts at which its decodes end
        self.due = inf  # when the next event of this engine is set

    def count(self, now: float) -> float:
        return self._tokens + (now - self._since) * self._speed

    def so_far(self) -> float:
        """The same, at the fleet's time."""
        return self.count(self._fleet.now)

    def set_speed(self, now: float, speed: float) -> None:
        """From now on so many tokens per second."""
        self._tokens += (now - self._since) * self._speed
        self._since, self._speed = now, speed

    def next_end(self) -> float:
        """When the next decode ends at this speed."""
        if not self.ends:
            return inf
        return self._since + (self.ends[0][0] - self._tokens) / self._speed


class Job(Identity):
    """One request; routers see it as a read-only `Request`. Its phases and patience are the driver's."""

    __slots__ = (
        "clock",
        "decode_patience",
        "done_at",
        "end",
        "member",
        "number",
        "output",
        "patience",
        "seconds",
        "state",
        "whole",
    )

    clock: Clock
    member: Member
    end: float
    done_at: float  # when its prompt will be done, if its engine lives so long
    evictions = 0
    wasted = 0
    cached = 0
    last_token: float | None = None

    def __init__(
        self, id: int, instance: Instance, number: int, arrival: float, block: Block, place: int
    ) -> None:
        flow = instance.flows[number]
        # Its prompt is the mean of its class: a router knows no more.
        Identity.__init__(self, id, arrival, round(flow.prompt), NO_LIMIT, flow.name)
        self.number = number
        self.seconds, self.output = block.prompt[place], block.output[place]
        self.patience, self.decode_patience = block.patience[place], block.decode_patience[place]
        self.state, self.whole = WAITS_PROMPT, False

    @property
    def queued(self) -> float:
        """It waits in one queue."""
        return self.arrival

    @property
    def room(self) -> int:
        return self.todo

    @property
    def todo(self) -> int:
        """Prompt tokens still to prefill."""
        return self.prompt if self.state in (WAITS_PROMPT, IN_PREFILL) else 0

    @property
    def generated(self) -> int:
        if self.state in (DECODING, GONE) and hasattr(self, "end"):
            return int(self.output - max(0.0, self.end - self.clock.so_far()) + ROUNDING)
        return 0

    def __repr__(self) -> str:
        return f"Job({self.id}, {self.kind!r}, state={self.state})"
