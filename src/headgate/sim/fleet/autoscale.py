"""Engines of a simulated fleet that start and stop while it serves, as `methods.scaling` decides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from headgate.methods.scaling import EnginesNeeded, Scaling, Seen
from headgate.sim.fleet.fleet import FleetSimulator
from headgate.workloads.workload import Workload

OUTPUTS_KNOWN = 30.0  # seconds after its arrival from which on a request's output counts as seen


class FleetScaler:
    """Opens and closes the engines of a fleet whose size is the most it may have.

    An engine is paid from its order until it is empty, and serves `start` seconds after it was ordered. One
    that drains is taken back at once. What is given up first: engines that are starting, then those with the
    fewest requests.
    """

    def __init__(
        self,
        fleet: FleetSimulator,
        scaling: Scaling,
        seconds: Callable[[float, float], float],
        workload: Workload,
        begin: int,
    ) -> None:
        self._fleet, self._scaling = fleet, scaling
        self.needed = EnginesNeeded(scaling, seconds, begin)
        outputs = np.minimum(workload.output, workload.limit)
        self._arrival = workload.arrival
        self._prompts, self._outputs = (
            np.cumsum(np.append(0.0, each)) for each in (workload.prompt, outputs)
        )
        self._paid: dict[int, float] = {}  # engines that serve or drain, and since when
        self._starting: dict[int, float] = {}
        self._draining: set[int] = set()
        self._spans: list[tuple[float, float]] = []
        self._sizes: list[int] = []  # how many serve
        self._end: float | None = None  # all requests were served
        for station in fleet.stations:
            if station.id < self.needed.last.engines:
                self._paid[station.id] = 0.0
            else:
                fleet.dispatch.close(station.id)
        fleet.at(scaling.every, self._tick)

    def about(self) -> dict[str, Any]:
        now = self._fleet.now if self._end is None else self._end
        open_spans = sum(now - since for since in (*self._paid.values(), *self._starting.values()))
        seconds = open_spans + sum(end - begun for begun, end in self._spans)
        sizes = self._sizes or [self.needed.last.engines]
        return {
            "rule": self._scaling.rule,
            "engine_hours": seconds / 3600,
            "least": min(sizes),
            "most": max(sizes),
            "start": self._scaling.start,
        }

    def _tick(self) -> None:
        fleet, now = self._fleet, self._fleet.now
        for engine in [each for each in self._draining if not fleet.stations[each].replica.occupied]:
            self._draining.discard(engine)
            self._spans.append((self._paid.pop(engine), now))
        wanted = self.needed.decide(now, self._seen(now), *self._inside()).engines
        serving = len(self._paid) - len(self._draining)
        change = wanted - serving - len(self._starting)
        if change > 0:
            self._add(change, now)
        elif change < 0:
            self._drop(-change, now)
        self._sizes.append(len(self._paid) - len(self._draining))
        if fleet.arrivals.pending or fleet.arrivals.outstanding:
            fleet.at(now + self._scaling.every, self._tick)
        else:
            self._end = now

    def _seen(self, now: float) -> Seen:
        came = int(np.searchsorted(self._arrival, now, "right"))
        ended = int(np.searchsorted(self._arrival, now - OUTPUTS_KNOWN, "right"))
        return Seen(came, float(self._prompts[came]), ended, float(self._outputs[ended]))

    def _inside(self) -> tuple[float, float]:
        waiting, running = len(self._fleet.dispatch.roster.waiting), 0
        for engine in self._paid:
            station = self._fleet.stations[engine]
            ledger = station.replica.ledger
            waiting += len(ledger.waiting) + len(station.sent)
            running += len(ledger.prefilling) + len(ledger.decoding)
        return waiting, running

    def _add(self, count: int, now: float) -> None:
        for engine in sorted(self._draining)[:count]:
            self._draining.discard(engine)
            self._fleet.dispatch.open(engine)
            count -= 1
        idle = (each.id for each in self._fleet.stations if each.id not in self._paid | self._starting.keys())
        for _, engine in zip(range(count), list(idle), strict=False):
            self._starting[engine] = now
            self._fleet.at(now + self._scaling.start, partial(self._ready, engine, now))

    def _ready(self, engine: int, ordered: float) -> None:
        if self._end is None and self._starting.get(engine) == ordered:
            self._paid[engine] = self._starting.pop(engine)
            self._fleet.dispatch.open(engine)

    def _drop(self, count: int, now: float) -> None:
        for engine in sorted(self._starting, key=lambda each: -self._starting[each])[:count]:
            self._spans.append((self._starting.pop(engine), now))
            count -= 1
        serving = [each for each in self._paid if each not in self._draining]

        def load(engine: int) -> tuple[int, int]:
            ledger = self._fleet.stations[engine].replica.ledger
            return len(ledger.waiting) + len(ledger.prefilling) + len(ledger.decoding), -engine

        for engine in sorted(serving, key=load)[:count]:
            self._draining.add(engine)
            self._fleet.dispatch.close(engine)
