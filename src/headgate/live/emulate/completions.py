"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any
from uuid import uuid4

import msgspec
from aiohttp import web

from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.live.emulate.answers import Answer, Stream, Wanted
from headgate.live.emulate.bodies import LONGEST_ID, Body, read_body
from headgate.live.emulate.faults import HEADER, IN_STREAM, Fault
from headgate.live.emulate.job import Job
from headgate.live.emulate.kv import wants_export, wants_import
from headgate.live.emulate.place import Place
from headgate.live.emulate.problems import ProblemError, busy
from headgate.live.emulate.reading import read_bytes
from headgate.live.emulate.shapes import Head
from headgate.live.emulate.text import Text
from headgate.live.emulate.work import Prompt, jobs_for, load_kv, prompts_in

PLACE: web.AppKey[Place] = web.AppKey("place", Place)
UNPRINTED = re.compile("[^!-~]")


async def complete(request: web.Request) -> web.StreamResponse:
    """Both endpoints."""
    place = request.app[PLACE]
    if place.inside >= place.made.options.max_requests:
        raise busy()
    place.inside += 1
    try:
        return await _complete(request, place, request.path.startswith("/v1/chat/"))
    finally:
        place.inside -= 1


async def _complete(request: web.Request, place: Place, chat: bool) -> web.StreamResponse:
    fault = _fault(request, place)
    body = read_body(await read_bytes(request), chat)
    if fault is not None and (struck := await _strike_early(request, fault, body, place)) is not None:
        return struck
    try:
        prompts = prompts_in(body, chat, place)
        rank = place.choose(_number(request, "x-data-parallel-rank"))
        engine = place.engines[rank]
        if engine.dead is not None:
            raise ProblemError(engine.dead, 500)
        total = len(prompts) * (body.n or 1)
        place.check_room(engine, total, sum(len(prompt.ids) for prompt in prompts))
        await load_kv(body, prompts, place, rank)
    except ProblemError as problem:
        if wants_import(body.kv_transfer_params) and problem.status != 500:
            await place.peers.free(body.kv_transfer_params or {})
        raise
    return await _serve(request, place, rank, body, prompts, chat, fault)


async def _serve(
    request: web.Request, place: Place, rank: int, body: Body, prompts: list[Prompt], chat: bool,
    fault: Fault | None,
) -> web.StreamResponse:  # fmt: skip
    """Hand the jobs to the engine, and write what it makes of them."""
    engine = place.engines[rank]
    base = request.headers.get("x-request-id") or body.request_id or uuid4().hex[:16]
    id = ("chatcmpl-" if chat else "cmpl-") + UNPRINTED.sub("", base[:LONGEST_ID])
    head = Head(id, int(time.time()), body.model or place.made.model, place.fingerprint, chat)
    shown = [prompt.ids.tolist() for prompt in prompts]
    each = body.n or 1
    if place.draining:
        return web.json_response(_drained(head, each * len(prompts), shown))
    wanted = _wanted(body, chat, place, shown)
    answer: Answer
    response: web.StreamResponse | None = None
    if body.stream:
        response, answer = await _open(request, head, wanted, shown, each, fault)
    else:
        answer = Answer(head, wanted, shown, each)
    answer.now = lambda: engine.replica.now
    for job in jobs_for(body, prompts, each, answer, place, _priority(request, body)):
        if wants_export(body.kv_transfer_params) and place.made.options.kv_connector:
            job.export = f"{id}-{job.choice}"
        answer.add(job)
    arrival = _arrival(request) if place.clock.virtual else None
    try:
        for job in answer.jobs:
            engine.submit(job, arrival)
        place.arrived()
        await answer.done
        if response is not None:
            assert isinstance(answer, Stream)
            return await _close(response, answer, fault)
    finally:
        for job in answer.jobs:
            engine.abort(job)
    if answer.error is not None:
        raise ProblemError(answer.error, 500)
    params = place.exports[rank].params(answer.jobs[0]) if answer.jobs[0].export else None
    return _whole(answer.whole(params), fault)


# -- the request --------------------------------------------------------------------------------


def _wanted(body: Body, chat: bool, place: Place, prompts: list[list[int]]) -> Wanted:
    options = body.stream_options
    logprobs = body.logprobs
    count: int | None = None
    if chat and logprobs:
        count = min(20, max(0, body.top_logprobs or 0))
    elif not chat and logprobs is not None and logprobs is not False:
        count = min(20, max(0, int(logprobs)))
    echo = tuple(place.tokens.decode(ids) for ids in prompts) if body.echo and not chat else ()
    usage = bool(options and options.include_usage)
    running = bool(usage and options and options.continuous_usage_stats)
    return Wanted(usage, running, bool(body.return_token_ids), count, echo, place.clock.virtual)


def _priority(request: web.Request, body: Body) -> int:
    found = _number(request, "x-vllm-priority")
    return body.priority if found is None else found


def _number(request: web.Request, header: str) -> int | None:
    text = request.headers.get(header, "")
    return int(text) if len(text) < 19 and text.lstrip("-").isascii() and text.lstrip("-").isdigit() else None


def _arrival(request: web.Request) -> float | None:
    """With a virtual clock a request may say when it comes."""
    try:
        when = float(request.headers["x-emulate-arrival"])
    except (KeyError, ValueError):
        return None
    return when if 0 <= when < 1e9 else None


# -- the answer --------------------------------------------------------------------------------


async def _open(
    request: web.Request, head: Head, wanted: Wanted, shown: list[list[int]], each: int, fault: Fault | None
) -> tuple[web.StreamResponse, Stream]:
    """A stream is answered 200 at once, whatever happens later."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    if fault is not None and fault.kind == "wrong-length":
        response.content_length = int(fault.at) + 1_000_000
    writer = await response.prepare(request)
    assert writer is not None and request.transport is not None
    writer.send_headers()
    chunked = "chunked" in response.headers.get("Transfer-Encoding", "")
    struck = fault if fault is not None and fault.kind in IN_STREAM else None
    return response, Stream(head, wanted, shown, each, request.transport, chunked, struck)


async def _close(response: web.StreamResponse, answer: Stream, fault: Fault | None) -> web.StreamResponse:
    """The end of a stream, unless a fault has taken it away."""
    if answer.silent and fault is not None and fault.kind == "stall":
        await asyncio.Event().wait()  # until the client has enough of it
    if fault is not None and fault.kind == "wrong-length":
        answer.write(answer.closing())
        raise ConnectionResetError
    closing = answer.closing()
    if closing:
        await response.write(closing)
    await response.write_eof()
    return response


def _whole(body: dict[str, Any], fault: Fault | None) -> web.Response:
    data = msgspec.json.encode(body)
    response = web.Response(body=data, content_type="application/json")
    if fault is not None and fault.kind == "wrong-length":
        response.headers["Content-Length"] = str(len(data) + int(fault.at))
        response.force_close()
    return response


def _drained(head: Head, choices: int, prompts: list[list[int]]) -> dict[str, Any]:
    """What a draining vLLM says: 200, no text, abort."""
    answer = Answer(head, Wanted(), prompts, 1)
    for number in range(choices):
        job = Job(1, 1, 1, Text(0), answer, number)
        job.how = End.ABORTED
        answer.jobs.append(job)
    return answer.whole()


def _fault(request: web.Request, place: Place) -> Fault | None:
    try:
        return place.faults.of(request.headers.get(HEADER))
    except InputError as error:
        raise ProblemError(str(error)) from None


async def _strike_early(
    request: web.Request, fault: Fault, body: Body, place: Place
) -> web.StreamResponse | None:
    """Faults that come before the first token."""
    if fault.kind == "slow-head":
        await asyncio.sleep(fault.at)
    elif fault.kind == "reset-before-head":
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError
    elif fault.kind == "error" or (fault.kind == "error-event" and not body.stream):
        raise ProblemError("emulated fault", int(fault.at) if fault.kind == "error" else 500)
    elif fault.kind == "abort":
        head = Head("cmpl-fault", int(time.time()), place.made.model, place.fingerprint, False)
        return web.json_response(_drained(head, 1, [[0]]))
    return None
