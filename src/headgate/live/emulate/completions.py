"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import numpy as np
from aiohttp import web

from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.live.emulate.answers import Answer, Stream, Wanted
from headgate.live.emulate.bodies import LONGEST_ID, Body, read_body
from headgate.live.emulate.faults import HEADER, IN_STREAM, Fault
from headgate.live.emulate.job import Job
from headgate.live.emulate.kv import wants_export, wants_import
from headgate.live.emulate.place import PLACE, Place
from headgate.live.emulate.problems import ProblemError, busy
from headgate.live.emulate.reading import read_bytes
from headgate.live.emulate.shapes import Head
from headgate.live.emulate.text import Text
from headgate.live.emulate.tokens import LITTLE, Ids
from headgate.live.emulate.work import Prompt, jobs_for, load_kv, prompts_in

UNPRINTED = re.compile("[^!-~]")


async def complete(request: web.Request) -> web.StreamResponse:
    """Both endpoints."""
    place = request.app[PLACE]
    if place.inside >= place.made.options.max_requests:
        raise busy()
    place.inside += 1
    try:
        fault = _fault(request, place)
        call = await _read(request, place)
        if fault is not None and (struck := await _strike_early(request, fault, call, place)) is not None:
            return struck
        return await _answer(request, place, call, await _admit(request, place, call), fault)
    finally:
        place.inside -= 1


class Call(NamedTuple):
    """What is asked: the body and, until they have been looked at, nothing more."""

    body: Body
    chat: bool

    @property
    def each(self) -> int:
        return self.body.n or 1

    @property
    def params(self) -> dict[str, Any]:
        return self.body.kv_transfer_params or {}


class Admitted(NamedTuple):
    """A call that the engine of this rank will work on."""

    prompts: list[Prompt]
    rank: int


async def _read(request: web.Request, place: Place) -> Call:
    chat = request.path.startswith("/v1/chat/")
    with place.reading() as count:
        return Call(read_body(await read_bytes(request, count), chat), chat)


async def _admit(request: web.Request, place: Place, call: Call) -> Admitted:
    """Refuse what vLLM refuses; whoever kept KV for a call that is refused is told."""
    try:
        prompts = prompts_in(call.body, call.chat, place)
        rank = place.choose(_number(request, "x-data-parallel-rank"))
        engine = place.engines[rank]
        if engine.dead is not None:
            raise ProblemError(engine.dead, 500)
        total = len(prompts) * call.each
        place.check_room(engine, total, sum(len(prompt.ids) for prompt in prompts))
        return Admitted(prompts, rank)
    except ProblemError:
        if wants_import(call.params):
            await place.peers.free(call.params)
        raise


async def _answer(
    request: web.Request, place: Place, call: Call, admitted: Admitted, fault: Fault | None
) -> web.StreamResponse:
    """Hand the jobs to the engine, and write what it makes of them."""
    (prompts, rank), engine = admitted, place.engines[admitted.rank]
    answer, response = await _open(request, place, call, prompts, fault)
    answer.now = lambda: engine.replica.now
    try:
        failed = await _load(call, admitted, place)
        for job in jobs_for(call.body, prompts, call.each, answer, place, _priority(request, call.body)):
            if wants_export(call.params) and place.made.options.kv_connector:
                job.export = f"{answer.head.id}-{job.choice}"
            answer.add(job)
        for job in answer.jobs:
            if failed or place.draining:
                job.error, job.how = failed, End.ABORTED
                job.sink.end(job)
            else:
                engine.submit(job, _arrival(request) if place.clock.virtual else None)
        place.arrived()
        await answer.done
        if isinstance(answer, Stream):
            assert response is not None
            return await _close(response, answer, fault)
    finally:
        for job in answer.jobs:
            engine.abort(job)
    if answer.error is not None:
        raise ProblemError(answer.error, 500)
    if fault is not None:
        await _strike_late(request, fault)
    params = place.exports[rank].params(answer.jobs[0]) if answer.jobs[0].export else None
    return _whole(answer.whole(params), fault)


async def _load(call: Call, admitted: Admitted, place: Place) -> str | None:
    """KV from another engine; why it did not come. A stream is told so after its 200, as by vLLM."""
    try:
        await load_kv(call.body, admitted.prompts, place, admitted.rank)
    except ProblemError as problem:
        return problem.message
    return None


# -- the request --------------------------------------------------------------------------------


def _wanted(body: Body, chat: bool, place: Place, prompts: list[Ids]) -> Wanted:
    options = body.stream_options
    logprobs = body.logprobs
    count: int | None = None
    if chat and logprobs:
        count = min(20, max(0, body.top_logprobs or 0))
    elif not chat and logprobs is not None and logprobs is not False:
        count = min(20, max(0, int(logprobs)))
    echo = tuple(place.tokens.decode(ids.tolist()) for ids in prompts) if body.echo and not chat else ()
    usage = bool(options and options.include_usage)
    running = bool(usage and options and options.continuous_usage_stats)
    details = place.made.options.prompt_tokens_details
    return Wanted(usage, running, bool(body.return_token_ids), count, echo, place.clock.virtual, details)


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
    request: web.Request, place: Place, call: Call, prompts: list[Prompt], fault: Fault | None
) -> tuple[Answer, web.StreamResponse | None]:
    """Where the tokens go. A stream is answered 200 at once, whatever happens later."""
    body, chat = call.body, call.chat
    base = request.headers.get("x-request-id") or body.request_id or uuid4().hex[:16]
    id = ("chatcmpl-" if chat else "cmpl-") + UNPRINTED.sub("", base[:LONGEST_ID])
    head = Head(id, int(time.time()), body.model or place.made.model, place.fingerprint, chat)
    ids = [prompt.ids for prompt in prompts]
    wanted = _wanted(body, chat, place, ids)
    if not body.stream:
        return Answer(head, wanted, ids, call.each), None
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    if fault is not None and fault.kind == "wrong-length":
        response.content_length = int(fault.at) + 1_000_000
    writer = await response.prepare(request)
    assert writer is not None and request.transport is not None
    writer.send_headers()
    chunked = "chunked" in response.headers.get("Transfer-Encoding", "")
    struck = fault if fault is not None and fault.kind in IN_STREAM else None
    return Stream(head, wanted, ids, call.each, request.transport, chunked, struck), response


async def _close(response: web.StreamResponse, answer: Stream, fault: Fault | None) -> web.StreamResponse:
    """The end of a stream, unless a fault has taken it away."""
    if answer.silent and fault is not None and fault.kind == "stall":
        await asyncio.Event().wait()  # until the client has enough of it
    if fault is not None and fault.kind == "wrong-length":
        answer.write(answer.closing())
        raise ConnectionResetError
    closing = answer.closing()
    with suppress(ConnectionResetError):  # the client has gone with its last token
        if closing:
            await response.write(closing)
        await response.write_eof()
    return response


async def _strike_late(request: web.Request, fault: Fault) -> None:
    """Faults of a stream, for an answer in one piece: it never comes, or the connection ends instead."""
    if fault.kind == "stall":
        await asyncio.Event().wait()
    if fault.kind in ("drop", "reset-mid-event") and request.transport is not None:
        request.transport.abort()
        raise ConnectionResetError


def _whole(body: dict[str, Any], fault: Fault | None) -> web.Response:
    data = msgspec.json.encode(body)
    response = web.Response(body=data, content_type="application/json")
    if fault is not None and fault.kind == "wrong-length":
        response.headers["Content-Length"] = str(len(data) + int(fault.at))
        response.force_close()
    return response


def _drained(head: Head) -> dict[str, Any]:
    """What a draining vLLM says: 200, no text, abort."""
    answer = Answer(head, Wanted(), [np.zeros(1, LITTLE)], 1)
    job = Job(1, 1, 1, Text(0), answer)
    job.how = End.ABORTED
    answer.jobs.append(job)
    return answer.whole()


def _fault(request: web.Request, place: Place) -> Fault | None:
    try:
        return place.faults.of(request.headers.get(HEADER))
    except InputError as error:
        raise ProblemError(str(error)) from None


async def _strike_early(
    request: web.Request, fault: Fault, call: Call, place: Place
) -> web.StreamResponse | None:
    """Faults that come before the first token."""
    if fault.kind == "slow-head":
        await asyncio.sleep(fault.at)
    elif fault.kind == "reset-before-head":
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError
    elif fault.kind == "error" or (fault.kind == "error-event" and not call.body.stream):
        raise ProblemError("emulated fault", int(fault.at) if fault.kind == "error" else 500)
    elif fault.kind == "abort":
        head = Head("cmpl-fault", int(time.time()), place.made.model, place.fingerprint, call.chat)
        return web.json_response(_drained(head))
    return None
