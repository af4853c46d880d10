"""Limits in tokens a minute, per API key and per class: prompts and outputs count, requests do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil

from headgate.live.route.answers import RefusedError
from headgate.live.route.estimates import Estimates
from headgate.live.route.job import Job

MINUTE = 60.0
SOONEST, LATEST = 1, 60  # seconds of Retry-After


class Allowance:
    """Tokens that may be used: full at first, filled at a steady rate, at most one minute's worth.

    A request is charged what it is expected to use, and the difference when it has ended; the level may fall
    below 0 by that. A request larger than a minute's worth is let in when the level is full.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level, self._at = float(per_minute), 0.0

    def level(self, now: float) -> float:
        """Tokens there now."""
        if now > self._at:
            filled = self._level + (now - self._at) * self.per_minute / MINUTE
            self._level, self._at = min(filled, float(self.per_minute)), now
        return self._level

    def wait(self, tokens: float, now: float) -> float:
        """Seconds until so many may be used, 0 if now."""
        missing = min(tokens, self.per_minute) - self.level(now)
        return max(0.0, missing * MINUTE / self.per_minute)

    def use(self, tokens: float, now: float) -> None:
        """Negative: some were not used after all."""
        self._level = min(self.level(now) - tokens, float(self.per_minute))


class TokenLimits:
    """The allowances of a router; those that a reload does not change keep their level."""

    def __init__(self) -> None:
        self.keys: dict[str, Allowance] = {}
        self.classes: dict[str, Allowance] = {}

    def set(self, keys: Mapping[str, int], classes: Mapping[str, int]) -> None:
        """Tokens a minute by name; names that are not there have no limit."""
        self.keys, self.classes = _kept(self.keys, keys), _kept(self.classes, classes)

    def check_key(self, key: str, now: float) -> None:
        """Refuse before the body is read where no request of the key could be let in, whatever is in it."""
        allowance = self.keys.get(key)
        if allowance is not None:
            _check("API key", allowance, 1, now)

    @contextmanager
    def charged(self, job: Job, now: Callable[[], float], estimates: Estimates) -> Iterator[None]:
        """Charge a request before it is served and settle when it has ended; 429 where it must wait.

        A request that the router or its engines fail costs nothing. One whose client hangs up does, from the
        moment it is sent: the engine works on its prompt whether or not a token has come back.
        """
        named = (("API key", self.keys.get(job.key)), ("class", self.classes.get(job.kind.name)))
        limits = [(what, each) for what, each in named if each is not None]
        expected = job.prompt + min(estimates.output(job.kind.name), job.asked.limit)
        for what, each in limits:
            _check(what, each, expected, now())
        for _, each in limits:
            each.use(expected, now())
        gone = False
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            gone = True
            raise
        finally:
            used = _used(job, expected, gone)
            for _, each in limits:
                each.use(used - expected, now())


def _check(what: str, allowance: Allowance, tokens: float, now: float) -> None:
    if wait := allowance.wait(tokens, now):
        after = min(max(ceil(wait), SOONEST), LATEST)
        raise RefusedError(429, "tokens", f"the {what} may use {allowance.per_minute} tokens a minute", after)


def _used(job: Job, expected: float, gone: bool) -> float:
    """Tokens of a request that has ended; `gone` if its client ended it."""
    if job.first_token is not None:
        return job.prompt + job.output
    if not gone or job.placed is None:
        return 0
    return job.prompt if job.asked.stream else expected  # without a stream nobody knows how far it is


def _kept(before: Mapping[str, Allowance], wanted: Mapping[str, int]) -> dict[str, Allowance]:
    made = {}
    for name, per_minute in wanted.items():
        old = before.get(name)
        made[name] = old if old is not None and old.per_minute == per_minute else Allowance(per_minute)
    return made
