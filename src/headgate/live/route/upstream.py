"""What the router knows of one engine, and how much it may be sent."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from math import inf

from headgate.core.errors import InputError
from headgate.live.route.breaker import Breaker, State
from headgate.live.route.config import EngineAt

SMOOTHING = 0.1  # of the newest time to first token in its mean
LONGEST_EJECTION = 300.0  # seconds


@dataclass
class Load:
    """What an engine's /metrics last said."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens: float = 0.0
    generated: float = 0.0
    alarms: dict[str, float] = field(default_factory=dict)
    at: float = 0.0


def engine_key(spec: EngineAt) -> str | None:
    """The header with an engine's key, None where it needs none; an error where the key is not set."""
    if spec.key_env is None:
        return None
    key = os.environ.get(spec.key_env)
    if not key:
        raise InputError(f"engine {spec.url}: environment variable {spec.key_env} is not set; set it")
    return f"Bearer {key}"


@dataclass
class Upstream:
    """One engine: its settings, its health, and what the router has there."""

    id: int
    spec: EngineAt
    breaker: Breaker = field(default_factory=Breaker)
    healthy: bool = False
    probed: bool = False
    failed_probes: int = 0
    draining: bool = False
    retired: bool = False
    busy: bool = False  # its queue was full; until the next scrape
    ejected_until: float = 0.0
    ejections: int = 0
    legs: int = 0  # calls of ours that are open there
    foreign: int = 0  # requests there that are not ours
    load: Load = field(default_factory=Load)
    first_token: float = 0.0  # mean of the newest, seconds
    samples: int = 0  # of it since the last check for outliers
    events: int = 0  # relayed
    tokens_per_event: float = 1.0  # learned from its counter of tokens
    warned_no_params: bool = False
    reading: list[float] = field(default_factory=list)  # of its KV, now: when each began to be late
    read_late: float = -inf  # when KV of it was last read late, or could have been

    @property
    def url(self) -> str:
        """Its address without a slash at the end."""
        return self.spec.url

    @property
    def authorization(self) -> str | None:
        """The header with its key, None where it needs none."""
        return engine_key(self.spec)

    def up(self, now: float) -> bool:
        """May it be sent requests at all? One that is full is up, and requests wait for it."""
        out = self.retired or self.draining or not self.healthy or self.ejected_until > now
        return not out and self.breaker.allows(now) != 0

    def seats(self, now: float) -> int:
        """How many requests of ours it may have in all; 0 while it is down, drained or ejected."""
        if self.retired or self.draining or not self.healthy or self.ejected_until > now:
            return 0
        allowed = self.breaker.allows(now)
        if allowed is not None:
            return self.legs + allowed if allowed else 0
        if self.busy:
            return self.legs
        return max(self.spec.seats - self.foreign, 0)

    def took_first_token(self, seconds: float) -> None:
        """A stream's first token came so long after it was sent."""
        self.samples += 1
        self.first_token += (seconds - self.first_token) * (
            SMOOTHING if self.samples > 1 or self.first_token else 1
        )

    def may_be_misread(self, now: float, span: float) -> bool:
        """Whether an answer of the last `span` seconds may rest on KV that it did not hold any more."""
        return now - self.read_late <= span or any(now > late for late in self.reading)

    def eject(self, now: float, pause: float) -> None:
        """It is much slower than the others: leave it alone for a while, longer each time."""
        self.ejections += 1
        self.ejected_until = now + min(pause * 2 ** (self.ejections - 1), LONGEST_EJECTION)
        self.samples = 0

    def status(self, now: float) -> str:
        for there, word in (
            (self.retired, "retired"),
            (self.draining, "draining"),
            (not self.probed, "unknown"),
            (not self.healthy, "down"),
            (self.breaker.state is not State.CLOSED, self.breaker.state.value),
            (self.ejected_until > now, "ejected"),
            (self.busy, "busy"),
        ):
            if there:
                return word
        return "up"
