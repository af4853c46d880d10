"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from aiohttp import web

from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.live.emulate.answers import Answer, Stream, Wanted
from headgate.live.emulate.bodies import (
    LONGEST_ID,
    MOST_CHOICES,
    Body,
    check_sampling,
    prompts_of,
    read_body,
    stops_of,
    turns_of,
)
from headgate.live.emulate.faults import HEADER, IN_STREAM, Fault
from headgate.live.emulate.job import Job
from headgate.live.emulate.kv import wants_export, wants_import
from headgate.live.emulate.peers import LoadFailedError
from headgate.live.emulate.place import Place
from headgate.live.emulate.problems import ProblemError, busy, invalid, parameter
from headgate.live.emulate.shapes import Head
from headgate.live.emulate.text import Echo, Text, fingerprint
from headgate.live.emulate.tokens import LITTLE, Ids
from headgate.live.vllm.requests import promises
from headgate.live.vllm.fields import Settings

PLACE: web.AppKey[Place] = web.AppKey("place", Place)
BODY_PATIENCE = 60.0  # seconds to send a body
DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI and vLLM have it
SETTINGS = Settings()
CLEAN = str.maketrans("", "", "".join(map(chr, (*range(32), 127))))
LOOP = "headgate-emulate"


@dataclass
class Prompt:
    """One prompt, its answers' most tokens, and what its KV really holds."""

    ids: Ids
    mark: int
    limit: int
    loaded: int = 0
    true_mark: int = 0


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
    body = read_body(await _read(request), chat)
    if fault is not None and (struck := await _strike_early(request, fault, body, place)) is not None:
        return struck
    try:
        prompts = _prompts(body, chat, place)
        rank = place.choose(_number(request, "x-data-parallel-rank"))
        engine = place.engines[rank]
        if engine.dead is not None:
            raise ProblemError(engine.dead, 500)
        total = len(prompts) * (body.n or 1)
        place.check_room(engine, total, sum(len(prompt.ids) for prompt in prompts))
        await _load(body, prompts, place, rank)
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
    id = ("chatcmpl-" if chat else "cmpl-") + base[:LONGEST_ID].translate(CLEAN)
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
    for job in _jobs(body, prompts, each, answer, place, _priority(request, body)):
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


# -- the request ----------------------------------------------------------------------------------------------


async def _read(request: web.Request) -> bytes:
    """The body, in bounded time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise invalid("Unsupported Media Type: Only 'application/json' is allowed")
    try:
        async with asyncio.timeout(BODY_PATIENCE):
            return await request.read()
    except TimeoutError:
        raise ProblemError("The body did not come in time.", 408, type="Bad Request") from None
    except web.HTTPRequestEntityTooLarge:
        raise ProblemError("The body is too large.", 413, type="Bad Request") from None


async def read_json(request: web.Request) -> dict[str, Any]:
    """A body that is an object, for the small endpoints."""
    try:
        found = msgspec.json.decode(await _read(request))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise invalid(f"JSON decode error: {str(error)[:200]}", "body") from None
    if not isinstance(found, dict):
        raise invalid("Input should be a valid dictionary", "body")
    return found


def _prompts(body: Body, chat: bool, place: Place) -> list[Prompt]:
    """The prompts as tokens; their lengths and limits are checked as vLLM does it."""
    made, tokens = place.made, place.tokens
    if body.model is not None and body.model != made.model:
        text = f"The model `{body.model[:200]}` does not exist. Valid aliases: {made.model}."
        raise ProblemError(text, 404, "model")
    if chat:
        encoded = [tokens.chat(turns_of(body.messages or []))]
    else:
        assert body.prompt is not None
        texts = prompts_of(body.prompt)
        encoded = [tokens.encode(each) if isinstance(each, str) else _ids(each) for each in texts]
    if len(encoded) * max(1, body.n or 1) > MOST_CHOICES:
        raise ProblemError(f"The emulator answers at most {MOST_CHOICES} choices in a request.")
    limit = body.max_tokens
    if chat and body.max_completion_tokens is not None:
        limit = body.max_completion_tokens
    found = [Prompt(ids, fingerprint(ids.tobytes()), _limit(limit, len(ids), chat, made.engine.longest))
             for ids in encoded]  # fmt: skip
    for prompt in found:
        check_sampling(body, prompt.limit)
        prompt.true_mark = prompt.mark
    return found


def _ids(ids: list[int]) -> Ids:
    if max(ids) >= 2**32:
        raise ProblemError(f"Token id {max(ids)} is out of vocabulary")
    return np.array(ids, LITTLE)


def _limit(wanted: int | None, prompt: int, chat: bool, longest: int) -> int:
    """The most output tokens."""
    if wanted is not None and wanted > longest:
        text = f"max_tokens={wanted} cannot be greater than max_model_len={longest}."
        raise parameter(f"{text} Please request fewer output tokens.", "max_tokens", wanted)
    if wanted is not None and wanted < 1:
        raise parameter(f"max_tokens must be at least 1, got {wanted}.", "max_tokens", wanted)
    asked = wanted if wanted is not None else (1 if chat else DEFAULT_MAX_TOKENS)
    if prompt >= longest or (wanted is not None and prompt + asked > longest):
        raise parameter(
            f"This model's maximum context length is {longest} tokens. However, you requested {asked} output "
            f"tokens and your prompt contains {prompt} input tokens, for a total of {prompt + asked} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
            prompt,
        )
    if wanted is None and chat:
        return longest - prompt
    return min(asked, longest - prompt)


async def _load(body: Body, prompts: list[Prompt], place: Place, rank: int) -> None:
    """KV from another engine; the first prompt of a list gets it, the others read blocks that are not theirs."""
    params, options = body.kv_transfer_params, place.made.options
    if params is None or not wants_import(params) or not options.kv_connector:
        return
    nixl = place.engines[rank].tally.nixl
    for prompt in prompts:
        try:
            prompt.true_mark = await place.peers.read(place.exports[rank].id, params, prompt.mark)
            prompt.loaded = len(prompt.ids) - 1
            nixl["transfers"] += 1
        except LoadFailedError:
            nixl["failed_transfers"] += 1
            if options.kv_load_failure == "fail":
                raise ProblemError("The KV of the request could not be loaded.", 500) from None


def _jobs(
    body: Body, prompts: list[Prompt], each: int, answer: Answer, place: Place, priority: int
) -> list[Job]:
    """One job for each choice of each prompt."""
    said = promises(body.vllm_xargs, SETTINGS)
    jobs = []
    for number, prompt in enumerate(prompts):
        for copy in range(each):
            text: Text = Text(prompt.true_mark, copy, place.tokens.vocabulary)
            job = Job(len(prompt.ids), 0, prompt.limit, text, answer, number * each + copy)
            job.mark, job.loaded, job.priority = prompt.mark, prompt.loaded, priority
            job.kind, job.slo, job.guess = said
            _decide_length(job, body, prompt, copy, place)
            jobs.append(job)
    return jobs


def _decide_length(job: Job, body: Body, prompt: Prompt, copy: int, place: Place) -> None:
    """How long the answer really is, and what ends it."""
    lengths, given = place.made.lengths, body.max_tokens or body.max_completion_tokens
    natural = job.limit + 1  # never reached: the limit ends it
    if place.made.options.echo:
        pieces = place.tokens.pieces(prompt.ids.tolist())
        encoded = [msgspec.json.encode(piece)[1:-1] for piece in pieces]
        job.text = Echo(pieces, prompt.ids.tolist(), encoded)
        natural = len(pieces)
        job.limit = min(job.limit, natural)
    elif not body.ignore_eos and (lengths.decides or given is None):
        natural = max(body.min_tokens, 1, lengths.draw(prompt.mark, copy))
    stop = _stop_at(job, body, min(natural, job.limit))
    if stop is not None:
        natural, job.stop_reason = stop
    job.length, job.stops = natural, natural <= job.limit


def _stop_at(job: Job, body: Body, length: int) -> tuple[int, str | int] | None:
    """The position after which a stop string or stop token ends the answer, and which of them."""
    stops, ids = stops_of(body), set(body.stop_token_ids or ())
    if not stops and not ids:
        return None
    text = ""
    known = job.text.ids(0, length) if ids else []
    for place, piece in enumerate(job.text.pieces(0, length), 1):
        text += piece
        if place < body.min_tokens:
            continue
        hit = next((stop for stop in stops if stop in text), None)
        if hit is not None:
            return place, hit
        if ids and known[place - 1] in ids:
            return place, known[place - 1]
        text = text[-4096:]
    return None


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


# -- the answer ---------------------------------------------------------------------------------------------------


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
            request.transport.abort()  # type: ignore[attr-defined]
        raise ConnectionResetError
    elif fault.kind == "error" or (fault.kind == "error-event" and not body.stream):
        raise ProblemError("emulated fault", int(fault.at) if fault.kind == "error" else 500)
    elif fault.kind == "abort":
        head = Head("cmpl-fault", int(time.time()), place.made.model, place.fingerprint, False)
        return web.json_response(_drained(head, 1, [[0]]))
    return None
