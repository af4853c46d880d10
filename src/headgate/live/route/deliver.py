"""Passes an engine's answer to the client, from the first token on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from headgate.live.route.answers import error_event
from headgate.live.route.job import Job
from headgate.live.route.legs import OpenLeg
from headgate.live.route.relay import Counted
from headgate.live.route.verdict import Fault, LegError

if TYPE_CHECKING:
    from headgate.live.route.service import Service

FAILED_STATUS = {Fault.IDLE: 504, Fault.CUT: 503}


async def deliver(
    job: Job, call: OpenLeg, service: Service, counted: Counted | None = None
) -> web.StreamResponse:
    """The engine's status, headers and bytes. A stream that breaks ends with an error event."""
    leg, headers = call.leg, call.leg.headers
    headers["x-headgate-tries"] = str(max(job.tries, 1))
    waited = (job.placed or job.arrived) - job.arrived
    headers["x-headgate-wait-ms"] = f"{1000 * waited:.1f}"
    headers["Server"] = "headgate"
    if service.legs.config.front.show_engine:
        headers["x-headgate-engine"] = str(call.upstream.id)
    job.status = leg.status
    if leg.whole:
        _booked(job, call, service)
        job.outcome = "ok" if leg.status < 400 else "passed-on"
        call.close()
        return web.Response(status=leg.status, headers=headers, body=leg.head)
    response = web.StreamResponse(status=leg.status, headers=headers)
    try:
        await response.prepare(job.request)
        await _pass_on(job, call, response, counted or job)
    except (ConnectionResetError, ConnectionAbortedError, BrokenPipeError):
        job.outcome = "client-gone"
    finally:
        _booked(job, call, service)
        call.close()
    return response


async def _pass_on(job: Job, call: OpenLeg, response: web.StreamResponse, counted: Counted) -> None:
    leg = call.leg
    try:
        await response.write(leg.head)
        await leg.pump(response.write, lambda: _abort(job), counted)
        await response.write_eof()
        job.outcome = "ok" if leg.scanner.error is None else "failed"
    except LegError as fault:
        call.fail(fault)
        job.fault, job.outcome = fault.fault.value, "failed"
        response.force_close()
        if leg.streaming:
            status = FAILED_STATUS.get(fault.fault, 502)
            await response.write(error_event(status, fault.message, leg.torn))
            await response.write_eof()
        else:
            _abort(job)  # a body that ends early must not look whole


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


def _abort(job: Job) -> None:
    if job.request.transport is not None:
        job.request.transport.abort()
