"""Watches engines: probes, scrapes, outliers, drain. Tells the gate how much each may be sent."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

import aiohttp

from headgate.live.route.access_log import clean
from headgate.live.route.config import Health
from headgate.live.route.scrape import read_load
from headgate.live.route.upstream import Upstream

log = logging.getLogger("headgate.route")
ENOUGH = 20  # first tokens before an engine is compared with others
LEAST_GAP = 0.25  # seconds by which an outlier is slower at least
METRICS_CAP = 16 << 20  # bytes of an engine's /metrics
OUTLIER_EVERY = 5.0  # seconds
ENOUGH_EVENTS = 500  # before tokens per event are learned
SHOWN_AFTER = 10.0  # seconds in which an engine surely counts what it was told
FOREIGN_WINDOW = 3  # scrapes whose least difference counts as others' load


class Watch:
    """One task per engine. `changed` is called whenever an engine may be sent more or less than before."""

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
        self._differences: dict[int, deque[int]] = {}
        self._said: dict[int, int] = {}
        self._counted: dict[int, tuple[float, int]] = {}
        self._outliers: asyncio.Task[None] | None = None

    async def start(self, engines: Iterable[Upstream]) -> None:
        """Probe all once, then go on in the background."""
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
        task = self._tasks.pop(engine.id, None)
        if task is not None:
            task.cancel()
        self.engines.pop(engine.id, None)

    async def stop(self) -> None:
        """End all tasks."""
        tasks = [*self._tasks.values(), *([self._outliers] if self._outliers else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def tell(self, engine: Upstream) -> None:
        """Pass on what it may be sent, if that changed."""
        seats = engine.seats(self._now())
        if self._said.get(engine.id) != seats:
            self._said[engine.id] = seats
            self._changed(engine)

    async def _watch(self, engine: Upstream) -> None:
        while True:
            if engine.probed:
                await asyncio.sleep(self.health.every)
            await self._probe(engine)
            self.tell(engine)

    async def _probe(self, engine: Upstream) -> None:
        """Ask for its health, then for its load. An engine that does not answer is down after a few."""
        try:
            async with asyncio.timeout(self.health.timeout):
                good = await self._get(engine, "/health") is not None
                metrics = await self._get(engine, "/metrics") if good else None
            why = "/health does not answer 200"
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            good, metrics = False, None
            why = clean(str(error)) or f"no answer within {self.health.timeout:g} s"
        was = engine.healthy if engine.probed else None
        engine.failed_probes = 0 if good else engine.failed_probes + 1
        if good or engine.failed_probes >= self.health.fails or not engine.probed:
            engine.healthy = good
        engine.probed = True
        if was != engine.healthy:
            log.warning("engine %d, %s, is %s", engine.id, engine.url, "up" if good else f"down: {why}")
        if metrics is not None:
            try:
                self._scraped(engine, metrics)
            except (ValueError, OverflowError):
                log.warning("engine %d: its metrics cannot be read", engine.id)

    def _scraped(self, engine: Upstream, metrics: bytes) -> None:
        before = engine.load
        engine.load = read_load(metrics, self._now())
        engine.busy = False
        recent = self._differences.setdefault(engine.id, deque(maxlen=FOREIGN_WINDOW))
        recent.append(engine.load.running + engine.load.waiting - engine.legs)
        engine.foreign = max(min(recent), 0)
        self._learn_tokens(engine)
        for name, value in engine.load.alarms.items():
            if "expiry" in name and before.at and value > before.alarms.get(name, 0.0):
                # one that gives KV up, or has no client any more, tells its owner, too
                if engine.may_be_misread(self._now(), SHOWN_AFTER + 2 * self.health.every):
                    log.error("engine %d: %s rose to %d: an answer may be wrong", engine.id, name, value)
                else:
                    log.warning("engine %d: %s rose to %d: KV was given up late", engine.id, name, value)

    def _learn_tokens(self, engine: Upstream) -> None:
        """Tokens per event, from its counter of tokens over the events relayed since it was first seen.

        Only while all its requests are ours; requests under way distort it little once there are many.
        """
        generated, events = self._counted.setdefault(engine.id, (engine.load.generated, engine.events))
        passed = engine.events - events
        if engine.foreign or engine.load.generated < generated:
            self._counted.pop(engine.id)
        elif passed >= ENOUGH_EVENTS:
            engine.tokens_per_event = min(max((engine.load.generated - generated) / passed, 1.0), 100.0)

    async def _get(self, engine: Upstream, path: str) -> bytes | None:
        headers = {"Authorization": engine.authorization} if engine.authorization else {}
        async with self._session.get(engine.url + path, headers=headers, allow_redirects=False) as response:
            body = await response.content.read(METRICS_CAP) if path == "/metrics" else b""
            while body and not response.content.at_eof() and len(body) < METRICS_CAP:
                body += await response.content.read(METRICS_CAP - len(body))
            return body if response.status == 200 else None

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
    """Engines whose first tokens take several times the median of all, slowest first, at most a share."""
    judged = [each for each in engines if each.samples >= ENOUGH and each.seats(now)]
    if len(judged) < 3:
        return []
    typical = median(each.first_token for each in judged)
    slow = [
        each
        for each in judged
        if each.first_token > health.outlier * typical and each.first_token > typical + LEAST_GAP
    ]
    out = sum(each.ejected_until > now for each in engines)
    most = max(int(health.outlier_share * len(engines)) - out, 0)
    return sorted(slow, key=lambda each: -each.first_token)[:most]
