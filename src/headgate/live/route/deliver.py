"""Passes an engine's answer to the client, from the first token on, as fast as the client reads."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web

from headgate.live.route.answers import error_event, own_headers
from headgate.live.route.client_writer import ClientWriter
from headgate.live.route.job import Job
from headgate.live.route.legs import OpenLeg
from headgate.live.route.progress import Progress
from headgate.live.route.relay import Counted
from headgate.live.route.verdict import Fault, LegError

if TYPE_CHECKING:
    from headgate.live.route.service import Service

NO_LINGER = struct.pack("ii", 1, 0)
FAILED_STATUS = {Fault.IDLE: 504, Fault.CUT: 503}


class _Streamed(web.StreamResponse):
    """Its head is written together with the first event."""

    _send_headers_immediately = False


async def deliver(
    job: Job, call: OpenLeg, service: Service, counted: Counted | None = None
) -> web.StreamResponse:
    """The engine's status, headers and bytes. A stream that breaks ends with an error event."""
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
    response = _Streamed(status=leg.status, headers=headers)
    limits = service.legs.config.limits
    progress = Progress(limits.idle, limits.client_stall, leg.close, lambda: abort(job.request))
    progress.writing = True  # the head and the first event
    try:
        writer = await response.prepare(job.request)
        assert writer is not None
        client = ClientWriter(response, writer, job.request.transport)
        await _pass_on(job, call, response, client, progress, counted or job)
    except (ConnectionResetError, ConnectionAbortedError, BrokenPipeError):
        job.outcome = "client-gone"
    finally:
        progress.stop()
        job.stalled = progress.stalled
        _booked(job, call, service)
        call.close()
    return response


async def write_out(job: Job, response: web.StreamResponse, stall: float) -> None:
    """Write a whole answer, which no longer holds a seat; a client that does not read it is cut."""
    progress = Progress(stall, stall, lambda: abort(job.request), lambda: abort(job.request))
    progress.writing = True
    try:
        await response.prepare(job.request)
        await response.write_eof()
    finally:
        progress.stop()
        job.stalled = progress.stalled


async def _pass_on(
    job: Job,
    call: OpenLeg,
    response: web.StreamResponse,
    client: ClientWriter,
    progress: Progress,
    counted: Counted,
) -> None:
    leg = call.leg
    try:
        await client.write(leg.head)
        await response.write_eof(await leg.pump(client, progress, counted))
        job.outcome = "ok" if leg.scanner.error is None else "failed"
    except LegError as fault:
        progress.writing = True
        progress.touch()
        call.fail(fault)
        whole = leg.scanner.done and leg.scanner.error is None
        job.fault, job.outcome = fault.fault.value, "ok" if whole else "failed"
        if leg.scanner.done:  # the client has everything
            await response.write_eof()
        elif leg.scans:
            if not client.chunked:
                response.force_close()  # its length was announced and is not kept
            status = FAILED_STATUS.get(fault.fault, 502)
            events = leg.scanner.events
            await response.write(error_event(status, fault.message, job.path, leg.torn, events))
            await response.write_eof()
        else:
            abort(job.request)  # a body that ends early must not look whole


def _booked(job: Job, call: OpenLeg, service: Service) -> None:
    """What the engine counted, or what was seen of it."""
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
    """Reset the client's connection, which ends whatever waits for it.

    Only a reset tells a client of HTTP/1.0, which reads until the connection ends, that bytes are missing.
    """
    transport = request.transport
    if transport is not None:
        with suppress(OSError, AttributeError):  # it is closed already
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        transport.abort()
