"""Calls to engines with their accounting: open legs, breakers, faults."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType

from multidict import CIMultiDict

from headgate.live.route.body import Body, Turns
from headgate.live.route.breaker import State
from headgate.live.route.config import Config
from headgate.live.route.connections import Connections
from headgate.live.route.headers import to_engine
from headgate.live.route.job import Job
from headgate.live.route.metrics import Metrics
from headgate.live.route.relay import Leg, Times
from headgate.live.route.upstream import Upstream
from headgate.live.route.verdict import Fault, LegError

log = logging.getLogger("headgate.route")
SHUTTING_DOWN = "the router is shutting down"


class Legs:
    """Opens calls and keeps what they tell of their engines."""

    def __init__(
        self,
        connections: Connections,
        config: Config,
        metrics: Metrics,
        changed: Callable[[Upstream], None],
        now: Callable[[], float],
        upstreams: Mapping[int, Upstream],
    ) -> None:
        self.config, self.metrics, self.now = config, metrics, now
        self._connections, self._changed, self._upstreams = connections, changed, upstreams
        self.stopping = False
        self.open_calls: set[OpenLeg] = set()
        self.turns = Turns()  # for all work on bodies

    def open(self, upstream: Upstream, path: str, last: bool = False) -> OpenLeg:
        """A call to be made; leaving it as a context closes it and frees its place.

        When the router ends no call is begun any more, except `last` ones, which release KV.
        """
        if self.stopping and not last:
            raise LegError(Fault.CUT, SHUTTING_DOWN, retry=False)
        limits = self.config.limits
        times = Times(
            limits.connect,
            limits.first_token,
            limits.idle,
            limits.answer_buffer,
            limits.event,
            limits.retry_500 or upstream.breaker.suspected,
        )
        return OpenLeg(self, upstream, Leg(self._connections, upstream.url, path, times))

    def break_off(self) -> None:
        """The router ends: calls that still run are cut, and their clients get an error."""
        self.stopping = True
        for call in list(self.open_calls):
            call.leg.break_off(SHUTTING_DOWN)

    def began(self, upstream: Upstream) -> None:
        upstream.legs += 1
        upstream.breaker.sent()

    def ended(self, upstream: Upstream, told: bool) -> None:
        """One fewer; `told` if its result was booked."""
        upstream.legs -= 1
        if not told:
            upstream.breaker.gone()
        self._changed(upstream)

    def tell(self, upstream: Upstream) -> None:
        """What it may be sent may have changed."""
        self._changed(upstream)

    def good(self, upstream: Upstream) -> None:
        upstream.breaker.succeeded()

    def failed(self, upstream: Upstream, fault: LegError) -> None:
        """It did not; the breaker counts what is surely the engine's failure."""
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
        """Another engine has served the request that this one answered with an error."""
        self._count(upstream, True, f"it answered with an error to what engine {better.id} served")
        self._changed(upstream)

    def _count(self, upstream: Upstream, answered: bool, why: str) -> None:
        may_open = not answered or self._may_close_off(upstream)
        upstream.breaker.failed(self.now(), may_open, answered)
        log.warning("engine %d: %s", upstream.id, why)

    def _may_close_off(self, upstream: Upstream) -> bool:
        """Would half of the engines that answer still be up? The last ones are used as long as they do."""
        now = self.now()
        others = [each for each in self._upstreams.values() if each is not upstream and each.healthy]
        others = [each for each in others if not (each.retired or each.draining)]
        up = sum(each.up(now) for each in others)
        closed_off = sum(each.breaker.on_answers and not each.up(now) for each in others)
        return up >= closed_off + 1

    def headers(self, job: Job, upstream: Upstream, id: str = "") -> CIMultiDict[str]:
        """The headers of a call for this request to this engine; `id` where it is not the request's own."""
        passes = self.config.front.pass_authorization
        return to_engine(job.request.headers, id or job.id, upstream.authorization, job.kind.priority, passes)


class OpenLeg(AbstractContextManager["OpenLeg"]):
    """One call as a context: its connection is closed before its place is free."""

    def __init__(self, legs: Legs, upstream: Upstream, leg: Leg) -> None:
        self.leg, self.upstream = leg, upstream
        self._legs, self._told, self._open = legs, False, True
        legs.began(upstream)
        legs.open_calls.add(self)

    async def start(self, job: Job, body: Body, id: str = "") -> None:
        """Send it and wait for the first token or the whole answer; raises LegError, which is booked."""
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
            if self.upstream.breaker.state is State.HALF_OPEN:
                self.good()  # a probe has told enough; the next may come
                self._legs.tell(self.upstream)

    def fail(self, fault: LegError) -> None:
        if not self._told:
            self._told = True
            self._legs.failed(self.upstream, fault)

    def good(self) -> None:
        if not self._told:
            self._told = True
            self._legs.good(self.upstream)

    def close(self) -> None:
        """Close the connection, then free the place. Again does nothing."""
        if self._open:
            self._open = False
            self._legs.open_calls.discard(self)
            self.leg.close()
            self.upstream.events += self.leg.scanner.events
            self._legs.ended(self.upstream, self._told)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
