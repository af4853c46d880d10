"""One request inside the router, from its body to its last byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headgate.live.route.access_log import clean
from headgate.live.route.body import Asked
from headgate.live.route.config import Class

if TYPE_CHECKING:
    from aiohttp import web


@dataclass
class Job:
    """What the router knows of a request; written to the access log and the trace when it ends."""

    request: web.BaseRequest
    path: str
    asked: Asked
    kind: Class
    key: str  # the name of its API key
    id: str
    arrived: float  # seconds, monotonic
    wall: float  # seconds since 1970
    prompt: int  # tokens, estimated until the engine says
    queue_none: bool = False  # refuse rather than queue
    tries: int = 0
    placed: float | None = None  # first placed at
    first_token: float | None = None
    engine: int = -1
    engines: list[int] = field(default_factory=list)  # all that were tried
    output: int = 0
    cached: int = 0
    counted: bool = False  # the engine told its usage
    status: int = 0
    outcome: str = "failed"
    fault: str = ""
    generated: int = 0  # events so far
    late: bool = False  # the first token came too late once
    stalled: bool = False  # its client did not read

    def log_record(self, now: float) -> dict[str, Any]:
        """The line of the access log."""
        return {
            "time": round(self.wall, 3),
            "id": clean(self.id),
            "key": self.key,
            "class": self.kind.name,
            "path": self.path,
            "model": clean(self.asked.model),
            "stream": self.asked.stream,
            "status": self.status,
            "outcome": self.outcome,
            "fault": self.fault,
            "engine": self.engine,
            "tries": self.tries,
            "wait_ms": _ms(self.arrived, self.placed),
            "first_token_ms": _ms(self.arrived, self.first_token),
            "total_ms": _ms(self.arrived, now),
            "prompt": self.prompt,
            "output": self.output,
        }

    def trace_record(self, now: float, origin: float, router: str, mean_output: float) -> dict[str, Any]:
        """The line of the trace: all that is needed to replay the request in the simulator.

        `replay_output` is the output's length where it is known, else the mean of its class: requests that
        were refused or hung up would have gone on.
        """
        finished = self.outcome == "ok"
        return {
            "route": 1,
            "router": router,
            "class": self.kind.name,
            "arrival": round(self.arrived - origin, 6),
            "placed": _since(origin, self.placed),
            "first_token": _since(origin, self.first_token),
            "finished": round(now - origin, 6),
            "prompt": max(self.prompt, 1),
            "output": self.output,
            "replay_output": max(1, self.output if finished else max(self.output, round(mean_output))),
            "limit": self.asked.limit,
            "priority": self.kind.priority,
            "engine": self.engine,
            "tries": self.tries,
            "cached": self.cached,
            "outcome": self.outcome,
        }


def _ms(start: float, end: float | None) -> float | None:
    return None if end is None else round(1000 * (end - start), 3)


def _since(origin: float, moment: float | None) -> float | None:
    return None if moment is None else round(moment - origin, 6)
