"""Requests and their calls to engines: accounts of both, retries, limits of keys, classes and tenants."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any, NamedTuple

from aiohttp import web
from multidict import CIMultiDict

from headgate.core.request import MOST_TENANTS
from headgate.live.route.config import Addresses, Class, Config
from headgate.live.route.deliver.connections import Connections, Fault, LegError
from headgate.live.route.deliver.relay import Leg
from headgate.live.route.engines import BreakerState, Upstream
from headgate.live.route.observe import RouterMetrics, clean
from headgate.live.route.request import AskedRequest, Body, RefusedError, Turns, to_engine


@dataclass
class RoutedRequest:
    request: web.BaseRequest
    path: str
    asked: AskedRequest
    kind: Class
    key: str  # the name of its API key
    tenant: str
    queues_as: str  # the tenant in whose turn it waits; without one the address, where those share queues
    queue_share: float | None  # of its class's queue that it may have
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
    client: str = ""  # its address, where addresses have bounds

    def log_record(self, now: float) -> dict[str, Any]:
        return {
            "time": round(self.wall, 3),
            "id": clean(self.id),
            "key": self.key,
            **({"tenant": self.tenant} if self.tenant != self.key else {}),
            **({"client": self.client} if self.client else {}),
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
        """`replay_output` is the mean of the class where the output was cut short: it would have gone on."""
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
            **({"tenant": self.tenant} if self.tenant else {}),
        }


def _ms(start: float, end: float | None) -> float | None:
    return None if end is None else round(1000 * (end - start), 3)


def _since(origin: float, moment: float | None) -> float | None:
    return None if moment is None else round(moment - origin, 6)


# -- calls, with open legs, breakers and faults

log = logging.getLogger("headgate.route")
SHUTTING_DOWN = "the router is shutting down"


class Legs:
    def __init__(
        self,
        connections: Connections,
        config: Config,
        metrics: RouterMetrics,
        changed: Callable[[Upstream], None],
        now: Callable[[], float],
        upstreams: Mapping[int, Upstream],
    ) -> None:
        self.config, self.metrics, self.now = config, metrics, now
        self.changed = changed  # what an engine may be sent may have changed
        self._connections, self._upstreams = connections, upstreams
        self.stopping = False
        self.closing = False  # clients are told to use their connections no more
        self.open_calls: set[OpenLeg] = set()
        self.turns = Turns()  # for all work on bodies

    def open(self, upstream: Upstream, path: str, last: bool = False) -> OpenLeg:
        """When the router ends no call is begun any more, except `last` ones, which release KV."""
        if self.stopping and not last:
            raise LegError(Fault.CUT, SHUTTING_DOWN, retry=False)
        limits, suspected = self.config.limits, upstream.breaker.suspected
        return OpenLeg(self, upstream, Leg(self._connections, upstream.url, path, limits, suspected))

    def break_off(self) -> None:
        self.stopping = True
        for call in list(self.open_calls):
            call.leg.break_off(SHUTTING_DOWN)

    def failed(self, upstream: Upstream, fault: LegError) -> None:
        self.metrics.faults.labels(str(upstream.id), fault.fault.value).inc()
        if fault.fault is Fault.BUSY:
            upstream.busy = True
        if fault.doubtful:
            upstream.breaker.doubted()
        elif fault.trips:
            self._count(upstream, fault.answered, fault.message)
        else:
            upstream.breaker.gone()

    def blame(self, upstream: Upstream, better: Upstream) -> None:
        self._count(upstream, True, f"it answered with an error to what engine {better.id} served")
        self.changed(upstream)

    def _count(self, upstream: Upstream, answered: bool, why: str) -> None:
        may_open = not answered or self._may_close_off(upstream)
        now, opened = self.now(), upstream.breaker.opened
        upstream.breaker.failed(now, may_open, answered)
        log.warning("engine %d: %s", upstream.id, why)
        if upstream.breaker.opened > opened:
            pause = (upstream.breaker.reopens_at or now) - now
            log.warning("engine %d, %s, is out of rotation for %g s", upstream.id, upstream.url, pause)

    def _may_close_off(self, upstream: Upstream) -> bool:
        """Would half of the engines that answer still be up? The last ones are used as long as they do."""
        now = self.now()
        others = [other for other in self._upstreams.values() if other is not upstream and other.healthy]
        others = [other for other in others if not (other.retired or other.draining)]
        up = sum(other.up(now) for other in others)
        closed_off = sum(other.breaker.on_answers and not other.up(now) for other in others)
        return up >= closed_off + 1

    def headers(self, job: RoutedRequest, upstream: Upstream, id: str = "") -> CIMultiDict[str]:
        config, priority = self.config, job.kind.priority
        decides = bool(priority) or (job.asked.urgent and bool(config.classes))  # 0 undoes what a body says
        return to_engine(
            job.request.headers,
            id or job.id,
            upstream.authorization,
            priority if decides else None,
            config.front.pass_authorization,
            (config.tenants.header or "").lower(),
        )


class OpenLeg:
    def __init__(self, legs: Legs, upstream: Upstream, leg: Leg) -> None:
        self.leg, self.upstream = leg, upstream
        self._legs, self._told, self._open = legs, False, True
        upstream.legs += 1
        upstream.breaker.sent()
        legs.open_calls.add(self)

    async def start(self, job: RoutedRequest, body: Body, id: str = "") -> None:
        sent = self._legs.now()
        try:
            await self.leg.start(body, self._legs.headers(job, self.upstream, id))
        except LegError as fault:
            self.fail(fault)
            raise
        if self.leg.status >= 500:
            self.fail(LegError(Fault.STATUS, f"the engine answered {self.leg.status}", self.leg.status))
        elif self.leg.streaming:
            self.upstream.took_first_token(self._legs.now() - sent)
            self.upstream.breaker.cleared()
            if self.upstream.breaker.state is BreakerState.HALF_OPEN:
                self.good()  # a probe has told enough; the next may come
                self._legs.changed(self.upstream)

    def fail(self, fault: LegError) -> None:
        if not self._told:
            self._told = True
            self._legs.failed(self.upstream, fault)

    def good(self) -> None:
        if not self._told:
            self._told = True
            closed = self.upstream.breaker.state is BreakerState.CLOSED
            self.upstream.breaker.succeeded()
            if not closed and self.upstream.breaker.state is BreakerState.CLOSED:
                log.warning("engine %d, %s, is back in rotation", self.upstream.id, self.upstream.url)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._legs.open_calls.discard(self)
            self.leg.close()
            self.upstream.events += self.leg.scanner.events
            self.upstream.legs -= 1
            if not self._told:
                self.upstream.breaker.gone()
            self._legs.changed(self.upstream)


# -- how often a request may be tried again

SPAN = 60.0  # seconds over which the share is taken
FLOOR = 10  # retries a minute that are always allowed, so that a quiet router retries too
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds


class RetryBudget:
    def __init__(self, share: float) -> None:
        self.share = share
        self.denied = 0
        self._requests: Counter[int] = Counter()  # by second
        self._retries: Counter[int] = Counter()

    def arrived(self, now: float) -> None:
        self._requests[int(now)] += 1
        if len(self._requests) > 2 * SPAN:
            _of_last_minute(self._requests, now)

    def take(self, now: float) -> bool:
        most = max(FLOOR, self.share * _of_last_minute(self._requests, now))
        if _of_last_minute(self._retries, now) >= most or self.share == 0:
            self.denied += 1
            return False
        self._retries[int(now)] += 1
        return True


def _of_last_minute(seconds: Counter[int], now: float) -> int:
    for second in [each for each in seconds if each <= now - SPAN]:
        del seconds[second]
    return seconds.total()


def backoff(attempt: int, draw: Callable[[], float]) -> float:
    pause: float = min(FIRST_PAUSE * 2.0 ** (attempt - 1), LONGEST_PAUSE)
    return pause * (0.5 + 0.5 * draw())


# -- tokens a minute

MINUTE = 60.0
SOONEST, LATEST = 1, 60  # seconds of Retry-After


class Allowance:
    """Full at first and filled at a steady rate, to one minute's worth or `most`. A request is charged what
    it is expected to use, and the difference at its end; the level may fall below 0 by that. One larger than
    a minute's worth is let in when the level is full. Each of several routers has a part, says what it has
    `spent`, and fills its `share` by itself only while it is `alone`.
    """

    def __init__(self, per_minute: float, most: float | None = None, name: str = "") -> None:
        self.name = name  # the same at all routers
        self.per_minute, self.most = per_minute, float(per_minute if most is None else most)
        self._level, self._at = self.most, 0.0
        self.share, self.alone = 1.0, True
        self.spent = self.wanted = 0.0
        self.told = 0.0  # of what was spent, as the store has it
        self.elsewhere = 0.0  # that other routers have
        self.used_at = self.compared = -inf  # when a request asked for some, and the others were asked

    @property
    def full(self) -> float:
        return self.most * self.share if self.alone else self.most

    def level(self, now: float) -> float:
        if now > self._at:
            if self.alone:
                filled = self._level + (now - self._at) * self.per_minute * self.share / MINUTE
                self._level = min(filled, self.full)
            self._at = now
        return self._level

    def wait(self, tokens: float, now: float) -> float:
        missing = min(tokens, self.full) - self.level(now)
        return max(0.0, missing * MINUTE / (self.per_minute * self.share))

    def use(self, tokens: float, now: float) -> None:
        """Negative: some were not used after all."""
        self._level = min(self.level(now) - tokens, self.full)
        self.spent += tokens

    def compare(self, part: float, share: float, now: float) -> None:
        self._at, self.share, self.compared, self.alone = now, share, now, False
        self._level = part - self.spent

    def rests(self, now: float) -> bool:
        return self.level(now) >= self.most * self.share


def _check(what: str, allowance: Allowance, tokens: float, now: float) -> None:
    if wait := allowance.wait(tokens, now):
        after = min(max(ceil(wait), SOONEST), LATEST)
        reason = "address-tokens" if what == "address" else "tokens"
        raise RefusedError(429, reason, f"the {what} may use {allowance.per_minute} tokens a minute", after)


@contextmanager
def charged(
    job: RoutedRequest, now: Callable[[], float], expected: float, limits: Mapping[str, Allowance]
) -> Iterator[None]:
    """What the router or engines fail costs nothing. A client that hangs up pays: the engine works on."""
    for what, allowance in limits.items():
        _check(what, allowance, expected, now())
    for allowance in limits.values():
        allowance.use(expected, now())
    gone = False
    try:
        yield
    except (asyncio.CancelledError, ConnectionError):
        gone = True
        raise
    finally:
        used = _used(job, expected, gone)
        for allowance in limits.values():
            allowance.use(used - expected, now())


def _used(job: RoutedRequest, expected: float, gone: bool) -> float:
    if job.first_token is not None:
        return job.prompt + job.output
    if not gone or job.placed is None:
        return 0
    return job.prompt if job.asked.stream else expected  # without a stream it is not known how far it is


# -- what keys, tenants, addresses and classes may have

SWEEP = 1.0  # seconds between two looks for accounts at rest; one of 1,024 takes about 2 ms of the event loop
MOST_ADDRESSES = 4096


class TenantBounds(NamedTuple):
    requests: float | None = None  # a second
    tokens: int | None = None  # a minute
    inflight: int | None = None

    @classmethod
    def of(cls, words: Addresses) -> TenantBounds:
        return cls(words.requests, words.tokens, words.inflight)


NO_BOUNDS = TenantBounds()
Uses = Sequence[tuple[str, "TenantUse"]]


class TenantUse:
    __slots__ = (
        "give", "inflight", "lease", "most", "name", "requests", "tokens", "used_at", "wanted",
    )  # fmt: skip

    def __init__(self, bounds: TenantBounds, name: str = "") -> None:
        self.name, per_second = name, bounds.requests
        self.requests = (
            Allowance(60 * per_second, max(1.0, per_second), f"requests {name}") if per_second else None
        )
        self.tokens = Allowance(bounds.tokens, name=f"tokens {name}") if bounds.tokens else None
        self.inflight, self.most = 0, bounds.inflight
        self.lease: int | None = None  # of `most`, where several routers share it
        self.give, self.wanted, self.used_at = 0, 0, -inf

    @property
    def bound(self) -> int | None:
        return self.most if self.most is None or self.lease is None else min(self.most, self.lease)

    def rests(self, now: float) -> bool:
        full = [each.rests(now) for each in (self.requests, self.tokens) if each is not None]
        return not self.inflight and all(full)


class TenantLimits:
    """The bounds of keys, by the words of the key file, of tenants, by `[tenants]`, of addresses and classes.

    A tenant that is a key has the words of its key before those of `[tenants]`, and an account that no name
    in a header reaches. Tokens of a key are counted for all the tenants that it names. Of other tenants
    `MOST_TENANTS` have an account and of addresses `MOST_ADDRESSES`; beyond them accounts at rest are
    forgotten, and further ones share one.
    """

    def __init__(self) -> None:
        self._keys: dict[str, TenantBounds] = {}
        self._of_keys: dict[tuple[str, str, TenantBounds], TenantUse] = {}  # as API key or tenant, its name
        self.classes: dict[str, Allowance] = {}
        self._tenants = Accounts("tenant", MOST_TENANTS)  # that are no keys
        self._addresses = Accounts("address", MOST_ADDRESSES)

    def set(
        self,
        keys: Mapping[str, TenantBounds],
        every: TenantBounds,
        addresses: TenantBounds = NO_BOUNDS,
        classes: Mapping[str, int] | None = None,
    ) -> None:
        """An account whose own bounds change begins anew; its requests here stay counted in the old one."""
        kept = self.classes
        self.classes = {
            name: kept[name]
            if name in kept and kept[name].per_minute == tokens
            else Allowance(tokens, name=f"tokens-class {name}")
            for name, tokens in (classes or {}).items()
        }
        self._tenants.set(every)
        self._addresses.set(addresses)
        self._of_keys = {each: use for each, use in self._of_keys.items() if each[1] in keys}
        self._keys = dict(keys)

    def inside(self, key: str, tenant: str, now: float, address: str = "") -> AbstractContextManager[Uses]:
        """While a request is here; 429 where it must not be."""
        if not self._keys and self._tenants.bounds == NO_BOUNDS == self._addresses.bounds:
            return nullcontext(())
        return self._inside(self.of(key, tenant, now, address), now)

    @contextmanager
    def _inside(self, uses: Uses, now: float) -> Iterator[Uses]:
        for what, use in uses:
            _check_use(what, use, now)
        for _, use in uses:
            use.inflight += 1
            use.used_at = now
            if use.requests is not None:
                use.requests.use(1, now)
        try:
            yield uses
        finally:
            for _, use in uses:
                use.inflight -= 1

    def tokens(self, kind: str, uses: Uses) -> dict[str, Allowance]:
        of_class = [] if (allowance := self.classes.get(kind)) is None else [("class", allowance)]
        return dict([*((what, use.tokens) for what, use in uses if use.tokens is not None), *of_class])

    def of(self, key: str, tenant: str, now: float, address: str = "") -> list[tuple[str, TenantUse]]:
        own, every = self._keys.get(key, NO_BOUNDS), self._tenants.bounds
        uses: list[tuple[str, TenantUse]] = []
        if address and any(self._addresses.bounds):
            uses.append(("address", self._addresses.of(address, now)))
        if own.tokens:
            uses.append(("API key", self._of_key("API key", key, TenantBounds(tokens=own.tokens))))
        if tenant == key:
            tokens = None if own.tokens else every.tokens
            bounds = TenantBounds(own.requests or every.requests, tokens, own.inflight or every.inflight)
            if any(bounds):
                uses.append(("tenant", self._of_key("tenant", key, bounds)))
        else:
            if own.requests or own.inflight:
                bounds = own._replace(tokens=None)
                uses.append(("API key", self._of_key("API key", key, bounds)))
            if any(every):
                uses.append(("tenant", self._tenants.of(tenant, now)))
        return uses

    def _of_key(self, what: str, key: str, bounds: TenantBounds) -> TenantUse:
        if (use := self._of_keys.get((what, key, bounds))) is None:
            use = self._of_keys[what, key, bounds] = TenantUse(bounds, f"{what}-key {key}")
        return use


class Accounts:
    def __init__(self, what: str, most: int) -> None:
        self.bounds, self._what, self._most = NO_BOUNDS, what, most
        self._uses: dict[str, TenantUse] = {}
        self._others, self._swept = TenantUse(NO_BOUNDS), -inf

    def set(self, bounds: TenantBounds) -> None:
        if bounds != self.bounds:
            self.bounds, self._uses, self._others = bounds, {}, TenantUse(bounds, f"{self._what}s")

    def of(self, name: str, now: float) -> TenantUse:
        if (use := self._uses.get(name)) is not None:
            return use
        if len(self._uses) >= self._most and now >= self._swept + SWEEP:
            self._uses = {name: use for name, use in self._uses.items() if not use.rests(now)}
            self._swept = now
        if len(self._uses) >= self._most:
            return self._others
        use = self._uses[name] = TenantUse(self.bounds, f"{self._what} {name}")
        return use


def _check_use(what: str, use: TenantUse, now: float) -> None:
    """Before the body is read: where no request could be let in, whatever is in it."""
    reason = "address" if what == "address" else "tenant"
    bound = use.bound
    if bound is not None and use.inflight >= bound:
        raise RefusedError(429, f"{reason}-inflight", f"the {what} may have {use.most} requests in flight", 1)
    if use.requests is not None and (wait := use.requests.wait(1, now)):
        after = min(max(ceil(wait), SOONEST), LATEST)
        rate = f"{use.requests.per_minute / 60:g}"
        raise RefusedError(429, f"{reason}-requests", f"the {what} may send {rate} requests a second", after)
    if use.tokens is not None:
        _check(what, use.tokens, 1, now)
