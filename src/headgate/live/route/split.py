"""The calls of a split request: prefill, decode, and giving KV up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from secrets import token_hex

from headgate.core.policy import End
from headgate.live.route.body import Body
from headgate.live.route.gate import Gate, Ticket
from headgate.live.route.handover import (
    SHARE_OF_LEASE,
    KvParams,
    decode_body,
    making_prefill,
    making_release,
    read_params,
)
from headgate.live.route.job import Job
from headgate.live.route.legs import Legs, OpenLeg
from headgate.live.route.upstream import Upstream
from headgate.live.route.verdict import Fault, LegError

log = logging.getLogger("headgate.route")
RELEASE_TIMEOUT = 5.0  # seconds
RELEASES = 3  # engines that are asked to release KV, where the first cannot be reached
SOON = 0.1  # of a lease, from the prefill on: KV is there, even where leases are shorter than we are told
CONSUMED = 5.0  # seconds in which a decode that does not stream has surely read its KV


class Splitter:
    """Makes those calls. KV parameters leave it once: in a decode, or in a release."""

    def __init__(
        self, gate: Gate, upstreams: Mapping[int, Upstream], legs: Legs, now: Callable[[], float]
    ) -> None:
        self.gate, self.upstreams, self.legs, self.now = gate, upstreams, legs, now
        self.background: set[asyncio.Task[None]] = set()

    async def prefill(
        self, job: Job, ticket: Ticket, upstream: Upstream, detach: Callable[[], None]
    ) -> KvParams | None:
        """The prompt's KV parameters, None where the engine gave none.

        When the client hangs up the call is left to end, so that the KV it pins can be released; the seat is
        held until then.
        """
        task = asyncio.create_task(self._prefill(job, upstream))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done() or (not task.cancelled() and task.exception() is None):
                detach()
                self._keep(self._abandoned(job, ticket, task))
            raise

    async def _abandoned(self, job: Job, ticket: Ticket, task: asyncio.Task[KvParams | None]) -> None:
        try:
            params = await task
            if params is not None:
                self.release(job, params)
        except LegError:
            pass
        finally:
            self.gate.end(ticket, End.ABORTED)

    async def decode(
        self, job: Job, ticket: Ticket, call: OpenLeg, params: KvParams, detach: Callable[[], None]
    ) -> None:
        """Send the decode and wait for its first token.

        When the client hangs up before it, the call is left to go on until then: only an engine that has read
        the KV tells its owner so, and parameters that were sent cannot be released by another call. The seat
        is held meanwhile. A decode that could not be sent releases its KV.
        """
        body = self.decode_body(job, params, call.upstream)
        if body is job.asked.body:  # no parameters: an abort leaves nothing behind
            return await call.start(job, body)
        task = asyncio.create_task(self._decode(job, call, body, params))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                detach()
                self._keep(self._consumed(job, ticket, call, task))
            raise

    async def _decode(self, job: Job, call: OpenLeg, body: Body, params: KvParams) -> None:
        owner = self.upstreams[params.owner]
        late = params.deadline - (SHARE_OF_LEASE - SOON) * self.legs.config.kv.lease
        owner.reading.append(late)
        try:
            await call.start(job, body)
            if self.now() > late:
                owner.read_late = self.now()
        except LegError as fault:
            if fault.fault is Fault.CONNECT:
                params.not_sent()
                self.release(job, params)
            raise
        finally:
            owner.reading.remove(late)

    async def _consumed(self, job: Job, ticket: Ticket, call: OpenLeg, task: asyncio.Task[None]) -> None:
        """Wait for the first token of a decode without a client; an answer that does not stream has none."""
        self.legs.metrics.consumed.inc()
        try:
            await asyncio.wait((task,), timeout=self.legs.config.kv.lease if job.asked.stream else CONSUMED)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        finally:
            call.close()
            self.gate.end(ticket, End.ABORTED)

    async def _prefill(self, job: Job, upstream: Upstream) -> KvParams | None:
        kv = self.legs.config.kv
        body = await self.legs.turns.finish(making_prefill(job.asked.body, kv.reuse_tokens))
        sent = self.now()
        with self.legs.open(upstream, job.path) as call:
            # KV is named after its prefill: two prompts of a request, or of two with one id, must differ
            await call.start(job, body, f"hg-{token_hex(12)}")
            if call.leg.status >= 400 or not call.leg.whole:
                raise self._refused(call.leg.status, call.leg.head, call.leg.headers.get("Content-Type", ""))
            call.good()
            try:
                return read_params(call.leg.head, upstream.id, sent, kv.lease, kv.reuse_tokens)
            except LegError as fault:
                if fault.fault is not Fault.NO_PARAMS:
                    call.fail(fault)
                    raise
        self.legs.metrics.no_params.labels(str(upstream.id)).inc()
        if not upstream.warned_no_params:
            upstream.warned_no_params = True
            log.warning("engine %d answers prefills without KV parameters: no KV connector?", upstream.id)
        return None

    def _refused(self, status: int, body: bytes, kind: str) -> LegError:
        """A prefill that was answered, but not with a prompt: the client's fault below 500."""
        fault = LegError(Fault.STATUS, f"the prefill was answered {status}", status, body, kind)
        fault.retry = status >= 500 or status == 200
        return fault

    def decode_body(self, job: Job, params: KvParams, target: Upstream) -> Body:
        """The body of the decode. At the engine of the prompt, or too late, it goes without parameters."""
        if target.id == params.owner or not self._same_group(target.id, params.owner):
            self.release(job, params)
            return job.asked.body
        taken = params.take(self.now())
        if taken is None:
            self.release(job, params)
            return job.asked.body
        self.legs.metrics.handovers.inc()
        return decode_body(job.asked.body, taken)

    def release(self, job: Job, params: KvParams) -> None:
        """Give the KV up in the background: a decode that another engine refuses frees it at its owner."""
        raw = params.give_up()
        if raw is None:
            return
        others = [
            each
            for each in self.upstreams.values()
            if each.id != params.owner
            and each.healthy
            and not each.retired
            and self._same_group(each.id, params.owner)
        ]
        if not others:
            self.legs.metrics.released.labels("no-engine").inc()
            return
        others.sort(key=lambda each: each.legs)
        self._keep(self._release(job, others[:RELEASES], raw))

    async def _release(self, job: Job, upstreams: list[Upstream], params: bytes) -> None:
        body, result = await self.legs.turns.finish(making_release(job.asked.body, params)), "failed"
        for upstream in upstreams:
            try:
                with self.legs.open(upstream, job.path, last=True) as call:
                    await call.leg.start(body, self.legs.headers(job, upstream), RELEASE_TIMEOUT)
                    result = "ok" if call.leg.status == 400 else f"status-{call.leg.status}"
                break
            except LegError as fault:
                if fault.fault is not Fault.CONNECT:  # it may have arrived
                    break
        self.legs.metrics.released.labels(result).inc()

    def _same_group(self, first: int, second: int) -> bool:
        owner = self.upstreams.get(second)
        return owner is not None and self.upstreams[first].spec.kv_group == owner.spec.kv_group

    async def stop(self, seconds: float) -> None:
        """End what goes on in the background; releases have a moment."""
        if self.background:
            _, left = await asyncio.wait(self.background, timeout=seconds)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _keep(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self.background.add(task)
        task.add_done_callback(self.background.discard)
