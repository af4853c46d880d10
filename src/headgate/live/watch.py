"""`headgate watch`: engines' counters, scraped or asked of Prometheus, become `headgate_engines_needed`."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from headgate.core.errors import InputError
from headgate.live.predict import listening
from headgate.live.route.view.counters import (
    ENDED,
    INPUT,
    OUTPUT,
    RUNNING,
    WAITING,
    Counts,
    in_vllm_names,
    of_both,
    parsed,
)
from headgate.live.scaling import WatchOptions
from headgate.live.tasks import fetched, says, until_stopped, why
from headgate.methods.scaling import Seen

LOG = logging.getLogger("headgate.watch")
TIMEOUT = 5.0  # seconds for one answer
MOST_BYTES = 16 << 20  # of one answer
STALE = 4  # looks in a row that told nothing, after which we are not healthy
COUNTERS = {"ended": ENDED, "prompt": INPUT, "output": OUTPUT}
GAUGES = {"running": RUNNING, "waiting": WAITING}
FIELDS = COUNTERS | GAUGES  # what is read of an engine
NAMES = of_both(FIELDS.values())
CAME = "came"  # requests: those that ended, wait or run
FORGOTTEN = 200  # looks in a row without an engine, after which it would be a new one
LARGEST = 1e15  # of a counter; beyond, it is not one
Readings = dict[str, dict[str, float]]  # engine: field: value


class FleetCounters:
    """Sums of engines that come, go and begin anew: what each gained since it was seen last."""

    def __init__(self) -> None:
        self._last: Readings = {}
        self._unseen: dict[str, int] = {}  # looks in a row
        self._sums = dict.fromkeys((*COUNTERS, CAME), 0.0)

    def add(self, readings: Readings) -> tuple[Seen, float, float]:
        for engine, now in readings.items():
            came = sum(now.get(name, 0.0) for name in ("ended", *GAUGES))
            before = self._last.get(engine, {**now, CAME: came})
            anew = now.get("ended", 0.0) < before.get("ended", 0.0)
            # An aborted request leaves the gauges and is never counted as ended.
            now = self._last[engine] = {**now, CAME: came if anew else max(came, before[CAME])}
            for name in self._sums:
                self._sums[name] += max(0.0, now.get(name, 0.0) - (0.0 if anew else before.get(name, 0.0)))
        self._unseen = {name: self._unseen.get(name, 0) + 1 for name in self._last if name not in readings}
        for name in [name for name, looks in self._unseen.items() if looks > FORGOTTEN]:
            del self._last[name]
        waiting = sum(now.get("waiting", 0.0) for now in readings.values())
        running = sum(now.get("running", 0.0) for now in readings.values())
        ended, prompts, outputs, came = self._sums.values()
        return Seen(came, prompts, ended, outputs), waiting, running


class Watch:
    def __init__(self, options: WatchOptions, session: aiohttp.ClientSession) -> None:
        self._options, self._session = options, session
        self._counters = FleetCounters()
        self.scaling = options.scaling(len(options.engine))
        self.missed, self._looked = 0, False  # looks in a row; whether one ever told anything
        self._failing: set[str] = set()  # engines whose failure was told
        self.app = web.Application()
        health = says(
            lambda: 503 if self.missed >= STALE else 200, lambda status: web.Response(status=status)
        )
        self.app.router.add_get("/metrics", says(self._text, lambda text: web.Response(text=text)))
        self.app.router.add_get("/healthz", health)

    async def look(self) -> None:
        try:
            readings = await (self._ask() if self._options.prometheus else self._scrape())
            if readings:
                if not self._looked:  # Prometheus knows the engines that there are
                    self.scaling, self._looked = self._options.scaling(len(readings)), True
                self.scaling.look(time.monotonic(), *self._counters.add(readings))
            self.missed = 0 if readings else self.missed + 1
        except Exception as error:  # whatever metrics say: the next ones may be right
            LOG.warning("no metrics: %s", why(error))
            self.missed += 1

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self.scaling.every)

    async def _scrape(self) -> Readings:
        pages = await asyncio.gather(
            *(self._get(f"{url.rstrip('/')}/metrics") for url in self._options.engine), return_exceptions=True
        )
        readings: Readings = {}
        for url, page in zip(self._options.engine, pages, strict=True):
            fault = "none are there"
            if isinstance(page, BaseException):
                fault = why(page)
            elif found := _reading(parsed(page.decode("utf-8", "replace"))):
                readings[url], fault = found, ""
            if fault and url not in self._failing:
                LOG.warning("%s shows no metrics of an engine: %s", url, fault)
            (self._failing.add if fault else self._failing.discard)(url)
        return readings

    async def _ask(self) -> Readings:
        select = f",{self._options.select}" if self._options.select else ""
        query = f'{{__name__=~"{"|".join(NAMES)}"{select}}}'
        url = f"{(self._options.prometheus or '').rstrip('/')}/api/v1/query"
        answer = json.loads(await self._get(url, {"query": query}))
        if not isinstance(answer, dict) or answer.get("status") != "success":
            raise InputError(f"{url} does not answer as Prometheus does; correct --prometheus")
        counts: dict[str, Counts] = {}  # by engine
        for sample in answer["data"]["result"]:
            labels, (_, value) = sample["metric"], sample["value"]
            of_name = counts.setdefault(labels["instance"], {}).setdefault(labels["__name__"], {})
            of_name[tuple(labels.items())] = float(value)
        readings = {engine: _reading(each) for engine, each in counts.items()}
        return {engine: found for engine, found in readings.items() if found}

    async def _get(self, url: str, params: Mapping[str, str] | None = None) -> bytes:
        limit = aiohttp.ClientTimeout(total=TIMEOUT)
        return await fetched(self._session, url, MOST_BYTES, params=params, timeout=limit)

    def _text(self) -> str:
        return self.scaling.text() if self._looked and self.missed < STALE else ""


def _reading(counts: Counts) -> dict[str, float]:
    """Nothing where a value is none that a counter can have."""
    read = in_vllm_names(counts)
    found = {field: sum(read[name].values()) for field, name in FIELDS.items() if name in read}
    return found if all(0 <= value <= LARGEST for value in found.values()) else {}


@asynccontextmanager
async def watching(options: WatchOptions) -> AsyncIterator[tuple[Watch, str]]:
    async with aiohttp.ClientSession(trust_env=False) as session:
        watch = Watch(options, session)
        async with listening(watch.app, options.host, options.port) as url:
            yield watch, url


def run(options: WatchOptions, say: Callable[[str], None]) -> None:
    async def serve() -> None:
        async with watching(options) as (watch, url):
            say(f"{url}/metrics  headgate_engines_needed of {watch.scaling.model}")
            looking: asyncio.Task[Any] = asyncio.create_task(watch.run())
            await until_stopped()
            looking.cancel()

    asyncio.run(serve())
