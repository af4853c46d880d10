"""Serves one generation: a place from the gate, one or two calls, tries elsewhere, and the answer."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from math import inf

from aiohttp import web

from headgate.core.fleet import Move, Stage
from headgate.core.policy import End
from headgate.live.route.deliver.connections import Fault, LegError
from headgate.live.route.deliver.handover import KvParams, Splitter
from headgate.live.route.deliver.legs import SHUTTING_DOWN, Legs, OpenLeg, RetryBudget, RoutedRequest, backoff
from headgate.live.route.deliver.relay import HIGH, ClientWriter, CountsEvents, Progress, Streamed
from headgate.live.route.engines import Upstream
from headgate.live.route.gate.gate import Gate, Lapsed, Refused, Ticket, TicketState
from headgate.live.route.request import Estimates, RefusedError, content_of, error_event, own_headers

PANIC_AT_ONCE = 8  # tries while no engine is up
PASSED_ON = ("status", "busy")  # faults whose answer the client gets when nothing else is left


class Service:
    def __init__(
        self, gate: Gate, upstreams: Mapping[int, Upstream], legs: Legs, now: Callable[[], float]
    ) -> None:
        self.gate, self.upstreams, self.legs, self.now = gate, upstreams, legs, now
        self.estimates = Estimates()
        self.budget = RetryBudget(legs.config.limits.retry_share)
        self.splitter = Splitter(gate, upstreams, legs, now)
        self._panics = 0
        self.came, self.came_tokens = 0, 0  # requests so far, and their prompt tokens

    async def serve(self, job: RoutedRequest) -> web.StreamResponse:
        self.budget.arrived(job.arrived)
        self.came += 1
        self.came_tokens += job.prompt
        if not any(each.up(self.now()) for each in self.upstreams.values()):
            return await self._panic(job)
        ticket = self._arrive(job)
        handling = _Handling(self, job, ticket)
        try:
            return await handling.run()
        except Refused as refusal:
            raise self._refusal(refusal) from None
        finally:
            await handling.close()

    def _arrive(self, job: RoutedRequest) -> Ticket:
        kind = job.kind
        patience = inf if kind.patience is None else kind.patience
        try:
            return self.gate.arrive(
                kind.name,
                job.prompt,
                job.asked.limit,
                priority=kind.priority,
                slo=kind.slo,
                tenant=job.queues_as,
                share=job.queue_share,
                whole=not job.asked.splittable,
                most_wait=0.0 if job.queue_none else patience,
                content=content_of(job.asked) if self.gate.router.reads_contents else None,
            )
        except Refused as refusal:
            raise self._refusal(refusal) from None

    def _refusal(self, refusal: Refused) -> RefusedError:
        if refusal.reason == "draining":
            return RefusedError(503, "draining", SHUTTING_DOWN, refusal.retry_after)
        why = "no engine is up" if refusal.status == 503 else f"too many requests: {refusal.reason}"
        return RefusedError(refusal.status, refusal.reason.replace(" ", "-"), why, refusal.retry_after)

    async def _panic(self, job: RoutedRequest) -> web.StreamResponse:
        able = [each for each in self.upstreams.values() if not each.draining and not each.retired]
        refused = RefusedError(503, "no-engines", "no engine is up", 5)
        if not able or self._panics >= PANIC_AT_ONCE:
            raise refused
        least = min(able, key=lambda each: (each.failed_probes, each.breaker.opened, each.legs))
        self._panics += 1
        job.tries, job.engine, job.placed = 1, least.id, self.now()
        try:
            with closing(self.legs.open(least, job.path)) as call:
                await call.start(job, job.asked.body)
                job.first_token = self.now()
                return await deliver(job, call, self)
        except LegError as fault:
            job.fault = fault.fault.value
            raise refused from None
        finally:
            self._panics -= 1

    def may_retry(self, job: RoutedRequest, fault: LegError) -> bool:
        limits = self.legs.config.limits
        if not fault.retry or self.legs.stopping or job.tries >= limits.tries:
            return False
        if fault.fault is Fault.FIRST_TOKEN and job.late:
            return False
        job.late |= fault.fault is Fault.FIRST_TOKEN
        if self.now() > job.arrived + limits.queue_ttl + 2 * limits.first_token:
            return False
        return self.budget.take(self.now())

    def final(self, job: RoutedRequest, fault: LegError) -> web.StreamResponse:
        if fault.fault.value in PASSED_ON and fault.status:
            headers = own_headers(job.tries, (job.placed or job.arrived) - job.arrived)
            if fault.content_type:
                headers["Content-Type"] = fault.content_type
            if fault.status in (429, 503):
                headers["Retry-After"] = fault.retry_after or str(max(1, round(1 + 4 * random.random())))
            return web.Response(status=fault.status, body=fault.body, headers=headers)
        if self.legs.stopping:
            raise RefusedError(503, "draining", SHUTTING_DOWN, 5)
        if not any(each.up(self.now()) for each in self.upstreams.values()):
            raise RefusedError(503, "no-engines", "no engine is up", 5)
        if fault.fault is Fault.CONNECT:  # before any probe has noticed
            raise RefusedError(503, "unreachable", "no engine could be reached", 5)
        status = 504 if fault.fault is Fault.FIRST_TOKEN else 502
        raise RefusedError(status, fault.fault.value, fault.message)


class _Handling:
    def __init__(self, service: Service, job: RoutedRequest, ticket: Ticket) -> None:
        self.service, self.job, self.ticket = service, job, ticket
        self.call: OpenLeg | None = None
        self.how = End.ABORTED
        self._timer: asyncio.TimerHandle | None = None
        self._last_failed = -1
        self._detached = False  # a call that outlives its client ends the ticket
        self._doubted: Upstream | None = None  # it answered with an error that may be the request's own

    async def run(self) -> web.StreamResponse:
        service, job = self.service, self.job
        while True:
            try:
                move = await self._place()
                job.tries += 1
                call = await self._call(move)
            except LegError as fault:
                job.fault = fault.fault.value
                self._drop_call()
                if not self._worth_a_try(fault) or not service.may_retry(job, fault):
                    self.how = End.ABORTED
                    return service.final(job, fault)
                service.legs.metrics.retries.labels(fault.fault.value).inc()
                self._go_back()
                continue
            job.first_token = service.now()
            service.gate.first_token(self.ticket)
            if self._doubted is not None and self._doubted is not call.upstream:
                self._compare(self._doubted, call.upstream, call.leg.status)
            response = await deliver(job, call, service, self.ticket)
            self.how = End.STOPPED if job.outcome == "ok" else End.ABORTED
            return response

    def _worth_a_try(self, fault: LegError) -> bool:
        """What two engines have answered with an error is the request's own, and counts against none."""
        if not fault.doubtful:
            return True
        here, before = self.service.upstreams[self.job.engine], self._doubted
        if before is None:
            self._doubted, now = here, self.service.now()
            return any(each.up(now) for each in self.service.upstreams.values() if each is not here)
        if before is not here:
            self._compare(before, here, fault.status or 500)
        return False

    def _compare(self, doubted: Upstream, other: Upstream, status: int) -> None:
        self._doubted = None
        if status < 400:
            self.service.legs.blame(doubted, other)
            return
        doubted.breaker.cleared()
        if status >= 500:
            other.breaker.cleared()

    def _go_back(self) -> None:
        """To the head of the queue. After two tries, or to find out whose an error is, it is sent whole."""
        self._last_failed = self.ticket.engine
        if self.ticket.state not in (TicketState.QUEUED, TicketState.GONE):
            whole = self.job.tries >= 2 or self._doubted is not None
            self.service.gate.back(self.ticket, whole=True if whole else None)

    async def _call(self, move: Move) -> OpenLeg:
        upstream = self.service.upstreams[move.replica]
        return await (self._split(upstream) if move.stage is Stage.PREFILL else self._start(upstream))

    async def _place(self) -> Move:
        service, job = self.service, self.job
        move: Move | None = None
        while move is None:
            with suppress(Lapsed):
                move = await service.gate.place(self.ticket)
        if job.placed is None:
            job.placed = service.now()
        job.engine = move.replica
        job.engines.append(move.replica)
        if move.replica == self._last_failed:
            await asyncio.sleep(backoff(max(job.tries, 1), random.random))
        return move

    async def _start(self, upstream: Upstream, params: KvParams | None = None) -> OpenLeg:
        service, job = self.service, self.job
        call = self.call = service.legs.open(upstream, job.path)
        if not job.asked.stream:
            loop = asyncio.get_running_loop()
            guess = service.estimates.first_token(job.kind.name)
            self._timer = loop.call_later(guess, service.gate.first_token, self.ticket)
            service.legs.metrics.unstreamed.labels(job.kind.name).inc()
        sent = service.now()
        try:
            if params is None:
                await call.start(job, job.asked.body)
            else:
                await service.splitter.decode(job, self.ticket, call, params, self._detach)
        finally:
            self._stop_timer()
        if job.asked.stream and call.leg.streaming:
            service.estimates.saw_first_token(job.kind.name, service.now() - sent)
        return call

    async def _split(self, upstream: Upstream) -> OpenLeg:
        service, job = self.service, self.job
        params = await service.splitter.prefill(job, self.ticket, upstream, self._detach)
        if params is None:  # no KV connector: the whole request at this engine
            service.gate.first_token(self.ticket)
            return await self._start(upstream)
        try:
            service.gate.parted(self.ticket, service.legs.config.kv.lease)
            move = await service.gate.place(self.ticket)
        except Lapsed:
            service.legs.metrics.stripped.inc()
            service.splitter.release(job, params)
            return await self._call(await self._place())
        except BaseException:
            service.splitter.release(job, params)
            raise
        job.engine = move.replica
        job.engines.append(move.replica)
        try:
            call = await self._start(service.upstreams[move.replica], params)
        finally:
            service.splitter.release(job, params)  # if the decode never took them
        leg = call.leg
        if leg.status >= 500:  # the parameters are spent and nothing was shown: a new prompt, elsewhere
            why = f"the decode was answered {leg.status}"
            raise LegError(Fault.STATUS, why, leg.status, leg.head, leg.headers.get("Content-Type", ""))
        return call

    def _detach(self) -> None:
        self._detached, self.call = True, None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop_call(self) -> None:
        self._stop_timer()
        if self.call is not None:
            self.call.close()
            self.call = None

    async def close(self) -> None:
        self._drop_call()
        if not self._detached:
            self.ticket.cached = self.job.cached
            self.service.gate.end(self.ticket, self.how, self.job.output)


# -- the engine's answer, as fast as the client reads

NO_LINGER = struct.pack("ii", 1, 0)
FAILED_STATUS = {Fault.IDLE: 504, Fault.CUT: 503}


async def deliver(
    job: RoutedRequest, call: OpenLeg, service: Service, counted: CountsEvents | None = None
) -> web.StreamResponse:
    leg, headers = call.leg, call.leg.headers
    headers.update(own_headers(max(job.tries, 1), (job.placed or job.arrived) - job.arrived))
    if service.legs.config.front.show_engine:
        headers["x-headgate-engine"] = str(call.upstream.id)
    job.status = leg.status
    if leg.whole:
        job.outcome = "ok" if leg.status < 400 else "passed-on"
        _booked(job, call, service)
        call.close()
        return web.Response(status=leg.status, headers=headers, body=leg.head)
    response = Streamed(status=leg.status, headers=headers)
    if service.legs.closing:
        response.force_close()
    limits = service.legs.config.limits
    progress = Progress(limits.idle, limits.client_stall, leg.close, lambda: abort(job.request))
    progress.writing = True  # the head and the first event
    try:
        client = ClientWriter(response, job.request)
        await client.begin(job.request)
        await _pass_on(job, call, response, client, progress, counted or job)
    except (ConnectionResetError, ConnectionAbortedError, BrokenPipeError):
        job.outcome = "client-gone"
    except Exception:
        abort(job.request)  # an answer that was begun is not followed by our 500
        raise
    finally:
        progress.stop()
        job.stalled = progress.stalled
        _booked(job, call, service)
        call.close()
    return response


async def write_out(request: web.BaseRequest, response: web.StreamResponse, stall: float) -> bool:
    """Whether its client has read it in so many seconds; else the client is cut."""
    try:
        async with asyncio.timeout(stall):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        abort(request)
        return False
    return True


async def _pass_on(
    job: RoutedRequest,
    call: OpenLeg,
    response: web.StreamResponse,
    client: ClientWriter,
    progress: Progress,
    counted: CountsEvents,
) -> None:
    leg = call.leg
    try:
        if leg.has_ended and len(leg.head) <= HIGH:
            client.hold(leg.head)
        else:
            await client.write(leg.head)
        await client.end(await leg.pump(client, progress, counted))
        job.outcome = "ok" if leg.scanner.error is None else "failed"
    except LegError as fault:
        progress.writing = True
        progress.touch()
        call.fail(fault)
        whole = leg.scanner.done and leg.scanner.error is None
        job.fault, job.outcome = fault.fault.value, "ok" if whole else "failed"
        if leg.scanner.done:  # the client has everything
            await client.end()
        elif leg.scans:
            if not client.chunked:
                response.force_close()  # its length was announced and is not kept
            status = FAILED_STATUS.get(fault.fault, 502)
            events = leg.scanner.events
            await client.end(error_event(status, fault.message, job.path, leg.torn, events))
        else:
            abort(job.request)  # a body that ends early must not look whole


def _booked(job: RoutedRequest, call: OpenLeg, service: Service) -> None:
    leg, usage = call.leg, call.leg.usage
    if leg.status < 500 and job.outcome != "failed":
        call.good()
    if usage is not None:
        job.output, job.cached, job.counted = usage.output, usage.cached, True
        job.prompt = usage.prompt or job.prompt
        service.estimates.saw_usage(job.kind.name, job.asked, usage.prompt, usage.output)
    elif leg.streaming:
        events = leg.scanner.events - leg.scanner.done
        job.output = round(events * call.upstream.tokens_per_event)
        if job.asked.splittable:  # one answer, which is no longer than its limit
            job.output = min(job.output, job.asked.limit)


def abort(request: web.BaseRequest) -> None:
    """Reset the connection: only that tells a client of HTTP/1.0 that bytes are missing."""
    if (transport := request.transport) is not None:
        with suppress(OSError, AttributeError):  # it is closed already
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        transport.abort()
