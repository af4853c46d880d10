"""The engines behind the router: watched, scraped, ejected, closed off by breakers, discovered."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from statistics import median
from typing import Any

import aiohttp

from headgate.core.errors import InputError
from headgate.live.route.config import (
    Config,
    Discovery,
    EngineAt,
    Health,
    address,
    checked,
    read_text,
    tables_in,
)
from headgate.live.route.observe import clean
from headgate.live.route.view.counters import (
    EVICTED,
    KV,
    OUTPUT,
    RUNNING,
    WAITING,
    in_vllm_names,
    of_both,
    parsed,
)
from headgate.live.tasks import end_all, read_bounded, why

log = logging.getLogger("headgate.route")
ENOUGH = 20  # first tokens before an engine is compared with others
LEAST_GAP = 0.25  # seconds by which an outlier is slower at least
METRICS_CAP = 16 << 20  # bytes of an engine's /metrics
OUTLIER_EVERY = 5.0  # seconds
ENOUGH_EVENTS = 500  # before tokens per event are learned
SHOWN_AFTER = 10.0  # seconds in which an engine surely counts what it was told
FOREIGN_WINDOW = 3  # scrapes whose least difference counts as others' load


class EngineWatch:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        health: Health,
        changed: Callable[[Upstream], None],
        now: Callable[[], float],
    ) -> None:
        self.health = health
        self.engines: dict[int, Upstream] = {}
        self._session, self._changed, self._now = session, changed, now
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outliers: asyncio.Task[None] | None = None

    async def start(self, engines: Iterable[Upstream]) -> None:
        new = list(engines)
        await asyncio.gather(*(self._probe(engine) for engine in new))
        for engine in new:
            self.add(engine)
        self._outliers = asyncio.create_task(self._look_for_outliers())

    def add(self, engine: Upstream) -> None:
        self.engines[engine.id] = engine
        self._tasks[engine.id] = asyncio.create_task(self._watch(engine))
        self.tell(engine)

    def drop(self, engine: Upstream) -> None:
        if (task := self._tasks.pop(engine.id, None)) is not None:
            task.cancel()
        self.engines.pop(engine.id, None)

    async def stop(self) -> None:
        await end_all([*self._tasks.values(), *([self._outliers] if self._outliers else [])])

    def tell(self, engine: Upstream) -> None:
        slots = engine.slots(self._now())
        if engine.said != slots:
            engine.said = slots
            self._changed(engine)

    async def _watch(self, engine: Upstream) -> None:
        while True:
            if engine.probed:
                await asyncio.sleep(self.health.every)
            await self._probe(engine)
            self.tell(engine)

    async def _probe(self, engine: Upstream) -> None:
        try:
            async with asyncio.timeout(self.health.timeout):
                good = await self.get(engine, "/health", 0) is not None
                metrics = await self.get(engine, "/metrics", METRICS_CAP) if good else None
            fault = "/health does not answer 200"
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            good, metrics = False, None
            fault = clean(why(error)) if str(error) else f"no answer within {self.health.timeout:g} s"
        was = engine.healthy if engine.probed else None
        engine.failed_probes = 0 if good else engine.failed_probes + 1
        if good or engine.failed_probes >= self.health.fails or not engine.probed:
            engine.healthy = good
        engine.probed = True
        if was != engine.healthy:
            log.warning("engine %d, %s, is %s", engine.id, engine.url, "up" if good else f"down: {fault}")
        if metrics is not None:
            try:
                self._scraped(engine, metrics)
            except (ValueError, OverflowError):
                log.warning("engine %d: its metrics cannot be read", engine.id)

    def _scraped(self, engine: Upstream, metrics: bytes) -> None:
        before = engine.load
        engine.load = read_load(metrics, self._now())
        engine.sglang = SGLANG_MARK in metrics
        engine.reads_words = any(mark in metrics for mark in PLUG_IN)
        engine.busy = False
        engine.extra.append(engine.load.running + engine.load.waiting - engine.legs - engine.peers)
        engine.foreign = max(min(engine.extra), 0)
        self._learn_tokens(engine)
        for name, value in engine.load.alarms.items():
            if "expiry" in name and before.at and value > before.alarms.get(name, 0.0):
                # one that gives KV up, or has no client any more, tells its owner, too
                if engine.may_be_misread(self._now(), SHOWN_AFTER + 2 * self.health.every):
                    log.error("engine %d: %s rose to %d: an answer may be wrong", engine.id, name, value)
                else:
                    log.warning("engine %d: %s rose to %d: KV was given up late", engine.id, name, value)

    def _learn_tokens(self, engine: Upstream) -> None:
        """Its counter over the events relayed; only while all its requests are ours."""
        engine.counted = generated, events = engine.counted or (engine.load.generated, engine.events)
        passed = engine.events - events
        if engine.foreign or engine.peers or engine.load.generated < generated:
            engine.counted = None
        elif passed >= ENOUGH_EVENTS:
            engine.tokens_per_event = min(max((engine.load.generated - generated) / passed, 1.0), 100.0)

    async def get(self, engine: Upstream, path: str, most: int) -> bytes | None:
        headers = {"Authorization": engine.authorization} if engine.authorization else {}
        async with self._session.get(engine.url + path, headers=headers, allow_redirects=False) as response:
            body = await read_bounded(response.content, most) if most else b""
            return body[:most] if response.status == 200 else None

    async def _look_for_outliers(self) -> None:
        while True:
            await asyncio.sleep(OUTLIER_EVERY)
            for engine in outliers(list(self.engines.values()), self.health, self._now()):
                engine.eject(self._now(), self.health.eject)
                log.warning("engine %d is ejected: first tokens after %.2f s", engine.id, engine.first_token)
                self.tell(engine)
            for engine in self.engines.values():
                self.tell(engine)  # pauses of breakers and ejections end by themselves


def outliers(engines: list[Upstream], health: Health, now: float) -> list[Upstream]:
    judged = [each for each in engines if each.samples >= ENOUGH and each.slots(now)]
    if len(judged) < 3:
        return []
    typical = median(each.first_token for each in judged)
    least = max(health.outlier * typical, typical + LEAST_GAP)
    slow = [engine for engine in judged if engine.first_token > least]
    out = sum(each.ejected_until > now for each in engines)
    most = max(int(health.outlier_share * len(engines)) - out, 0)
    return sorted(slow, key=lambda each: -each.first_token)[:most]


# -- the metrics of vLLM and SGLang that are read

ALARMS = (
    "vllm:nixl_num_notifications_after_expiry_total",
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_failed_transfers_total",
    EVICTED,
)
LOAD = {"running": RUNNING, "waiting": WAITING, "kv_usage": KV, "generated": OUTPUT}
READ = of_both((*LOAD.values(), *ALARMS))
SGLANG_MARK = b"\nsglang:num_running_reqs"
PLUG_IN = b"headgate_info", b"headgate_queue"  # an engine that shows one of these reads class and tenant


def read_load(text: bytes, now: float) -> EngineLoad:
    """Sums over all label sets (several engine cores behind one address); absent ones are 0."""
    read = in_vllm_names(parsed(text.decode("utf-8", "replace"), READ))
    totals = {name: sum(max(value, 0.0) for value in values.values()) for name, values in read.items()}
    load = EngineLoad(alarms={name: totals[name] for name in ALARMS if name in totals}, at=now)
    for field_name, name in LOAD.items():
        setattr(load, field_name, type(getattr(load, field_name))(totals.get(name, 0.0)))
    return load


# -- circuit breakers

IN_A_ROW = 5
WINDOW = 20
SHARE = 0.5
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 120.0  # seconds
CLOSES_AFTER = 2  # successes of probes
SUSPECT, OFTEN = 3, 5  # answered errors in a row, or of WINDOW answers: then it is found out whose they are


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Opens after 5 failures in a row or 10 of the last 20, for 10 s, doubled to 120 s while probes fail. An
    error that the engine answered may be the request's: a doubt, which raises suspicion and opens nothing.
    """

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0  # how often
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._row = 0
        self._doubts = 0  # in a row
        self._doubted: deque[bool] = deque(maxlen=WINDOW)  # which of the newest answers were errors
        self.on_answers = False  # it is open for errors that the engine answered
        self._pause = FIRST_PAUSE
        self._until = 0.0
        self._probes = 0  # probe requests under way
        self._good = 0

    def allows(self, now: float) -> int | None:
        if self.state is BreakerState.CLOSED:
            return None
        if self.state is BreakerState.OPEN and now >= self._until:
            self.state, self._probes, self._good = BreakerState.HALF_OPEN, 0, 0
        return max(0, 1 - self._probes) if self.state is BreakerState.HALF_OPEN else 0

    @property
    def reopens_at(self) -> float | None:
        return self._until if self.state is BreakerState.OPEN else None

    @property
    def suspected(self) -> bool:
        often = self._doubts >= SUSPECT or self._doubted.count(True) >= OFTEN
        return often or self.state is not BreakerState.CLOSED

    def sent(self) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self._probes += 1

    def gone(self) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self._probes = max(0, self._probes - 1)

    def doubted(self) -> None:
        """It answered with an error; whether that is the engine's or the request's is not known."""
        self._doubts += 1
        self._doubted.append(True)
        self.gone()

    def cleared(self) -> None:
        """It serves others: a token came, or its error was the request's, which failed elsewhere too."""
        self._doubts = 0

    def succeeded(self) -> None:
        self._row = self._doubts = 0
        self._doubted.append(False)
        self._recent.append(True)
        if self.state is BreakerState.HALF_OPEN:
            self.gone()
            self._good += 1
            if self._good >= CLOSES_AFTER:
                self.state, self._pause, self.on_answers = BreakerState.CLOSED, FIRST_PAUSE, False
                self._recent.clear()

    def failed(self, now: float, may_open: bool = True, answered: bool = False) -> None:
        self._row += 1
        self._recent.append(False)
        if not may_open:
            self.gone()
        elif self.state is BreakerState.HALF_OPEN:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._open(now, answered)
        elif self.state is BreakerState.CLOSED:
            half = len(self._recent) == WINDOW and self._recent.count(False) >= SHARE * WINDOW
            if half or self._row >= IN_A_ROW:
                self._open(now, answered)

    def _open(self, now: float, answered: bool) -> None:
        self.on_answers = answered
        self.state, self._until, self._row = BreakerState.OPEN, now + self._pause, 0
        self.opened += 1
        self._recent.clear()


# -- one engine, and how much it may be sent

SMOOTHING = 0.1  # of the newest time to first token in its mean
LONGEST_EJECTION = 300.0  # seconds


@dataclass
class EngineLoad:
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    generated: float = 0.0
    alarms: dict[str, float] = field(default_factory=dict)
    at: float = 0.0


def engine_key(spec: EngineAt) -> str | None:
    if spec.key_env is None:
        return None
    key = os.environ.get(spec.key_env)
    if not key:
        raise InputError(f"engine {spec.url}: environment variable {spec.key_env} is not set; set it")
    return f"Bearer {key}"


@dataclass
class Upstream:
    id: int
    spec: EngineAt
    breaker: Breaker = field(default_factory=Breaker)
    healthy: bool = False
    probed: bool = False
    failed_probes: int = 0
    draining: bool = False
    retired: bool = False
    busy: bool = False  # its queue was full; until the next scrape
    reads_words: bool = False  # it has headgate's plug-in
    sglang: bool = False  # by its metrics
    ejected_until: float = 0.0
    ejections: int = 0
    legs: int = 0  # calls of ours that are open there
    peers: int = 0  # requests there of routers with which we share it
    foreign: int = 0  # requests there of neither
    extra: deque[int] = field(default_factory=lambda: deque(maxlen=FOREIGN_WINDOW))  # newest ones
    said: int | None = None  # slots that the gate was told
    counted: tuple[float, int] | None = None  # tokens and events from which on `tokens_per_event` is learned
    load: EngineLoad = field(default_factory=EngineLoad)
    first_token: float = 0.0  # mean of the newest, seconds
    samples: int = 0  # of it since the last check for outliers
    events: int = 0  # relayed
    tokens_per_event: float = 1.0  # learned from its counter of tokens
    warned_no_params: bool = False
    reading: list[float] = field(default_factory=list)  # of its KV, now: when each began to be late
    read_late: float = -inf  # when KV of it was last read late, or could have been

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def authorization(self) -> str | None:
        return engine_key(self.spec)

    def up(self, now: float) -> bool:
        """May it be sent requests at all? One that is full is up, and requests wait for it."""
        return not self._out(now) and self.breaker.allows(now) != 0

    def _out(self, now: float) -> bool:
        return self.retired or self.draining or not self.healthy or self.ejected_until > now

    def slots(self, now: float) -> int:
        if self._out(now):
            return 0
        if (allowed := self.breaker.allows(now)) is not None:
            return self.legs + allowed if allowed else 0
        return self.legs if self.busy else max(self.spec.slots - self.foreign, 0)

    def took_first_token(self, seconds: float) -> None:
        self.samples += 1
        weight = SMOOTHING if self.samples > 1 or self.first_token else 1
        self.first_token += (seconds - self.first_token) * weight

    def may_be_misread(self, now: float, span: float) -> bool:
        return now - self.read_late <= span or any(now > late for late in self.reading)

    def eject(self, now: float, pause: float) -> None:
        self.ejections += 1
        self.ejected_until = now + min(pause * 2 ** (self.ejections - 1), LONGEST_EJECTION)
        self.samples = 0

    def status(self, now: float) -> str:
        states = {
            "retired": self.retired,
            "draining": self.draining,
            "unknown": not self.probed,
            "down": not self.healthy,
            self.breaker.state.value: self.breaker.state is not BreakerState.CLOSED,
            "ejected": self.ejected_until > now,
            "busy": self.busy,
        }
        return next((state for state, holds in states.items() if holds), "up")


def refuse_handover(upstreams: Iterable[Upstream], hands_over: bool) -> None:
    """SGLang's KV goes to no other engine of ours, whatever router, group or role asks for it."""
    for upstream in upstreams:
        spec = upstream.spec
        if upstream.sglang and (hands_over or spec.kv_group or spec.role in ("prefill", "decode")):
            raise InputError(
                f"engine {spec.url} is SGLang, whose KV is not handed over; choose a router that sends "
                "requests whole, such as least-loaded, and drop kv_group and the roles prefill and decode"
            )


# -- from a file or DNS

MOST = 1000  # engines


async def discover(config: Config) -> tuple[EngineAt, ...]:
    found = list(config.engines)
    if config.discovery.file is not None:
        found += from_file(config.discovery)
    if config.discovery.dns is not None:
        found += await from_dns(config.discovery)
    return tuple({each.url: each for each in reversed(found)}.values())[::-1][:MOST]


def from_file(discovery: Discovery) -> list[EngineAt]:
    path = discovery.file or ""
    if path.endswith(".toml"):
        given: Any = tables_in(path).get("engines", [])
    else:
        lines = (line.partition("#")[0].strip() for line in read_text(path).splitlines())
        given = [{"url": line} for line in lines if line]
    if not isinstance(given, list):
        raise InputError(f"{path}: engines is not a list of tables; write [[engines]]")
    defaults = _defaults(discovery)
    tables = [{**defaults, **table} if isinstance(table, dict) else table for table in given[:MOST]]
    return list(checked({"engines": tables}, f"{path}: ").engines) if tables else []


async def from_dns(discovery: Discovery) -> list[EngineAt]:
    host, port = address(discovery.dns or "")
    try:
        answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InputError(f"DNS name {host}: {error}; check discovery.dns") from None
    hosts = sorted({str(answer[4][0]) for answer in answers})
    shown = [f"[{each}]" if ":" in each else each for each in hosts]
    return [EngineAt(url=f"http://{each}:{port}", **_defaults(discovery)) for each in shown]


def _defaults(discovery: Discovery) -> dict[str, Any]:
    return {"slots": discovery.slots, "kv_group": discovery.kv_group}
