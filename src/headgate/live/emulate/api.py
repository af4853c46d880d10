"""OpenAI's dialect as vLLM speaks it: bodies and their problems, answers whole or as events."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from math import isfinite
from os import write
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from aiohttp import web

from headgate.live.emulate.engine import EmulatedJob
from headgate.live.emulate.faults import EmulatedFault
from headgate.live.emulate.text import LITTLE, ByteRule, Ids, Text, Tokens, fingerprint

Kind = TypeVar("Kind")
Fields = dict[str, Any]

encode = msgspec.json.encode


def as_json(body: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=encode(body), content_type="application/json")


TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "Service Unavailable"}
BUSY = (
    "The engine is currently busy and cannot accept new requests. "
    "Please try again later or on a different instance."
)


class ProblemError(Exception):
    def __init__(self, message: str, status: int = 400, param: str | None = None, type: str = "") -> None:
        super().__init__(message)
        self.message, self.status, self.param = message, status, param
        self.type = type or TYPES.get(status, "Bad Request")

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return encode({"error": error})

    def response(self) -> web.Response:
        return web.Response(status=self.status, body=self.body(), content_type="application/json")


def invalid(message: str, param: str | None = None) -> ProblemError:
    return ProblemError(f"1 validation error:\n  {message}", 400, param, "Bad Request")


def parameter(message: str, name: str, value: object = None) -> ProblemError:
    shown = "" if value is None else f", value={value}"
    return ProblemError(f"{message} (parameter={name}{shown})", 400, name)


def busy() -> ProblemError:
    return ProblemError(BUSY, 503)


def detail(status: int, text: str) -> web.Response:
    return web.json_response({"detail": text}, status=status)


# -- bodies, read in bounded time and size

BODY_PATIENCE = 60.0  # seconds to send a body


async def read_bytes(request: web.Request, count: Callable[[int], None]) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise invalid("Unsupported Media Type: Only 'application/json' is allowed")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_PATIENCE):
            # not `request.read()`, which would keep the body for as long as the answer takes
            async for piece in request.content.iter_any():
                body += piece
                count(len(piece))
                if len(body) > request.client_max_size:
                    raise ProblemError("The body is too large.", 413, type="Bad Request")
    except TimeoutError:
        raise ProblemError("The body did not come in time.", 408, type="Bad Request") from None
    return bytes(body)


async def read_json(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await read_bytes(request, lambda more: None))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise invalid(f"JSON decode error: {str(error)[:200]}", "body") from None
    if not isinstance(body, dict):
        raise invalid("Input should be a valid dictionary", "body")
    return body


MOST_CHOICES = 128  # n times prompts of one request
LONGEST_ID = 256
INT64 = 2**63


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Sampling(msgspec.Struct):
    """Of completions and of SGLang's /generate, by the same names."""

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class Body(Sampling):
    """The fields that change what the emulator does; all others are accepted and ignored."""

    model: str | None = None
    prompt: str | list[Any] | None = None
    messages: list[Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    seed: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    echo: bool | None = False
    priority: int = 0
    request_id: str | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None


DECODER = msgspec.json.Decoder(Body, strict=False)


def read_body(data: bytes, chat: bool) -> Body:
    body = _decoded(DECODER, data)
    if chat and body.messages is None:
        raise invalid("Field required: body.messages", "body.messages")
    _check_fields(body)
    if not chat and not body.prompt:
        raise parameter("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    return body


def _decoded(decoder: msgspec.json.Decoder[Kind], data: bytes) -> Kind:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        place = where.strip("`").removeprefix("$").lstrip(".") or None
        raise invalid(what, None if place is None else f"body.{place}") from None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise invalid(f"JSON decode error: {str(error)[:200]}", "body") from None


class SamplingParams(Sampling):
    """What SGLang's /generate takes besides, by the names of a completion; others are ignored."""

    max_tokens: int | None = msgspec.field(default=128, name="max_new_tokens")
    min_tokens: int = msgspec.field(default=0, name="min_new_tokens")
    n: int = 1
    include_stop_str_in_output: bool = msgspec.field(default=False, name="no_stop_trim")
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = msgspec.field(
        default=None, name="custom_params"
    )


class GenerateBody(msgspec.Struct):
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: SamplingParams | None = None
    stream: bool = False
    rid: str | None = None
    priority: int | None = None


GENERATE = msgspec.json.Decoder(GenerateBody, strict=False)


def read_generate(data: bytes) -> Body:
    asked = _decoded(GENERATE, data)
    if (asked.text is None) == (asked.input_ids is None):
        raise parameter("Either text, input_ids or input_embeds should be provided.", "text")
    told = asked.sampling_params or SamplingParams()
    if asked.stream and told.n > 1:
        raise parameter("The emulator streams one answer of /generate; drop n or stream.", "n", told.n)
    body = Body(
        prompt=asked.input_ids if asked.text is None else asked.text,
        stream=asked.stream,
        priority=asked.priority or 0,
        request_id=asked.rid,
        **msgspec.structs.asdict(told),
    )
    _check_fields(body)
    if not body.prompt:
        raise parameter("The prompt is empty.", "text")
    if body.stream and len(prompts_of(body.prompt)) > 1:
        raise parameter("The emulator streams one prompt of /generate; send the others alone.", "text")
    return body


def _check_fields(body: Body) -> None:
    """What vLLM refuses before it looks at the model: nothing is freed anywhere for such a request."""
    if body.stream_options is not None and not body.stream:
        raise parameter("Stream options can only be defined when `stream=True`.", "stream_options")
    for name in ("seed", "priority"):
        value = getattr(body, name)
        if value is not None and not -INT64 <= value < INT64:
            raise invalid(f"Input should be a 64-bit integer: body.{name}", f"body.{name}")


Check = tuple[str, Callable[[Any], bool], str]
NUMBERS: tuple[Check, ...] = (
    ("temperature", lambda v: v >= 0, "temperature must be non-negative, got {}."),
    ("top_p", lambda v: 0 < v <= 1, "top_p must be in (0, 1], got {}."),
    ("presence_penalty", lambda v: -2 <= v <= 2, "presence_penalty must be in [-2, 2], got {}."),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "frequency_penalty must be in [-2, 2], got {}."),
)


def check_sampling(body: Body, limit: int) -> None:
    """What vLLM refuses after the prompt has been read; `limit` is the most output tokens."""
    for name, fine, message in NUMBERS:
        value = getattr(body, name)
        if value is not None and not (isfinite(value) and fine(value)):
            wrong = message.format(value)
            raise ProblemError(wrong) if name.endswith("penalty") else parameter(wrong, name, value)
    n = 1 if body.n is None else body.n
    if n < 1:
        raise ProblemError(f"n must be at least 1, got {n}.")
    if n > 1 and body.temperature == 0:
        raise ProblemError(f"n must be 1 when using greedy sampling, got {n}.")
    if body.min_tokens < 0:
        raise ProblemError(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if body.min_tokens > limit:
        raise ProblemError(
            f"min_tokens must be less than or equal to max_tokens={limit}, got {body.min_tokens}."
        )
    if any(not stop for stop in stops_of(body)):
        raise ProblemError("stop cannot contain an empty string.")
    if body.use_beam_search:
        raise ProblemError("The emulator has no beam search; drop use_beam_search.")


def stops_of(body: Body) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else body.stop or []


def turns_of(messages: list[Any]) -> list[tuple[str, str]]:
    if not messages:
        raise ProblemError(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    turns: list[tuple[str, str]] = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(f"Field required: body.messages.{place}.role", f"body.messages.{place}.role")
        content, where = message.get("content"), f"body.messages.{place}"
        parts = content if isinstance(content, list) else [{"text": "" if content is None else content}]
        texts: list[Any] = [part.get("text", "") if isinstance(part, dict) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise invalid(f"Input should be text or parts: {where}", f"{where}.content")
        turns.append((message["role"], "".join(texts)))
    return turns


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    if isinstance(prompt, str) or _ids(prompt):
        return [prompt]
    if all(isinstance(each, str) for each in prompt) or all(_ids(each) for each in prompt):
        if not all(prompt):
            raise parameter("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        return list(prompt)
    raise invalid("Input should be a string, token ids, or a list of these: body.prompt", "body.prompt")


def _ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id) is int and id >= 0 for id in value)


# -- answers, in vLLM's order of fields

LIKELY, UNLIKELY = -0.25, -1.75  # log probabilities of the token that was chosen and of those that were not


class Head:
    def __init__(self, id: str, created: int, model: str, fingerprint: str, chat: bool) -> None:
        self.id, self.created, self.model, self.fingerprint, self.chat = id, created, model, fingerprint, chat
        self.prefix = encode(self.fields(True))[:-1] + b',"choices":['

    def fields(self, stream: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(prompt: int, completion: int, details: bool = True) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + completion}
    counts["completion_tokens"] = completion
    return {**counts, "prompt_tokens_details": None, "completion_tokens_details": None} if details else counts


def choice(job: EmulatedJob, text: str, chat: bool, logprobs: Any, ids: Any, prompt: Any) -> dict[str, Any]:
    if chat:
        nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        message = {"role": "assistant", "content": text, **nothing}
        start: dict[str, Any] = {"index": job.choice, "message": message}
    else:
        start = {"index": job.choice, "text": text}
    start |= {"logprobs": logprobs, "finish_reason": job.reason, "stop_reason": job.stop_reason}
    start["token_ids"] = ids
    if not chat:
        start |= {"prompt_logprobs": None, "prompt_token_ids": prompt}
    return start | {"routed_experts": None}


def stream_choice(job: EmulatedJob, text: str, chat: bool, logprobs: Any, ids: Any, prompt: Any) -> Fields:
    reason = None if job.how is None else job.reason
    found: dict[str, Any] = {"index": job.choice}
    if chat:
        found |= {"delta": {"content": text}, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            found["stop_reason"] = job.stop_reason
    else:
        found |= {"text": text, "logprobs": logprobs, "finish_reason": reason}
        found |= {"stop_reason": job.stop_reason if reason else None, "prompt_token_ids": prompt}
    found["token_ids"] = ids
    return found


def completion_logprobs(pieces: list[str], offset: int, count: int) -> dict[str, Any]:
    offsets, tops = [], []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece)
        tops.append({piece: LIKELY} | {f"{piece}{'?' * i}": UNLIKELY - i for i in range(1, count)})
    likely = [LIKELY] * len(pieces)
    return {"text_offset": offsets, "token_logprobs": likely, "tokens": pieces, "top_logprobs": tops}


def chat_logprobs(pieces: list[str], count: int) -> dict[str, Any]:
    def one(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    return {
        "content": [
            one(piece, LIKELY)
            | {"top_logprobs": [one(piece + "?" * i, UNLIKELY - i if i else LIKELY) for i in range(count)]}
            for piece in pieces
        ]
    }


FULL = 1 << 18  # bytes a slow reader may leave in the socket's buffer before events are merged
DONE = b"data: [DONE]\n\n"
NULLS = ("logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")
TAIL = b'"' + b"".join(b',"%b":null' % name.encode() for name in NULLS) + b"}]}\n\n"
CHAT_TAIL = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'


class Extras(NamedTuple):
    usage: bool = False
    running_usage: bool = False
    ids: bool = False
    logprobs: int | None = None
    echo: tuple[str, ...] = ()  # texts of the prompts, to stand before the answer
    stamps: bool = False  # emulated times
    cached: bool = False  # prompt tokens that were found in the prefix cache


class WholeAnswer:
    streams = False

    def __init__(self, head: Head, wanted: Extras, prompts: list[Ids], each: int) -> None:
        self.head, self.wanted = head, wanted
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.jobs: list[EmulatedJob] = []
        self.error: str | None = None
        self._prompts, self._each, self._open = prompts, each, 0
        self.prompt_tokens = sum(map(len, prompts))
        self.now: Callable[[], float] = lambda: 0.0

    def add(self, job: EmulatedJob) -> None:
        self.jobs.append(job)
        self._open += 1

    def tokens(self, job: EmulatedJob) -> None:
        """Not of interest before the end."""

    def end(self, job: EmulatedJob) -> None:
        self._open -= 1
        self.error = self.error or job.error
        if not self._open and not self.done.done():
            self.done.set_result(None)

    def whole(self, params: dict[str, Any] | None = None) -> dict[str, Any]:
        made = sum(job.made for job in self.jobs)
        found = self.head.fields(False) | {
            "choices": [self._choice(job, 0, job.made, choice) for job in self.jobs],
            "service_tier": None,
            "system_fingerprint": self.head.fingerprint,
            "usage": usage(self.prompt_tokens, made) | self._cached(),
        }
        if self.head.chat:
            ids = self._prompts[0].tolist() if self.wanted.ids else None
            found |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
        found |= {"kv_transfer_params": params, "ec_transfer_params": None, "metrics": None}
        return found | ({"emulated": self._times(self.jobs[0])} if self.wanted.stamps else {})

    def _cached(self) -> dict[str, Any]:
        if not self.wanted.cached:
            return {}
        return {"prompt_tokens_details": {"cached_tokens": self.jobs[-1].cached + self.jobs[-1].loaded}}

    def _choice(self, job: EmulatedJob, begin: int, end: int, shape: Callable[..., Fields]) -> Fields:
        wanted, chat = self.wanted, self.head.chat
        text, logprobs = job.text.text(begin, end), None
        prompt = self._prompts[job.choice // self._each].tolist() if wanted.ids and not begin else None
        if wanted.logprobs is not None:
            pieces = job.text.pieces(begin, end)
            if chat:
                logprobs = chat_logprobs(pieces, wanted.logprobs)
            else:
                before = len(job.text.text(0, begin))
                logprobs = completion_logprobs(pieces, before, wanted.logprobs)
        if wanted.echo and not begin:
            text = wanted.echo[job.choice // self._each] + text
        ids = job.text.ids(begin, end) if wanted.ids else None
        return shape(job, text, chat, logprobs, ids, prompt)

    def _times(self, job: EmulatedJob) -> dict[str, float]:
        names = ("arrival", "admitted", "first", "finished")
        return {name: value for name in names if (value := getattr(job, name)) >= 0}


class EventHeads(dict[int, bytes]):
    """What stands before the text of an event, by the length of the text: chunks begin with their size."""

    def __init__(self, start: bytes, tail: bytes, chunked: bool) -> None:
        self._start, self._rest, self._chunked = start, len(start) + len(tail), chunked

    def __missing__(self, length: int) -> bytes:
        size = b"%x\r\n" % (self._rest + length) if self._chunked else b""
        made = self[length] = size + self._start
        return made


class StreamedAnswer(WholeAnswer):
    """Nothing is awaited: a slow reader gets fewer events with more text in each, as from vLLM. Events of
    tokens go to the socket itself: a transport costs more, and that of uvloop writes only when the whole step
    has been handed out. All else goes through the transport, and so do tokens while it holds something.
    """

    streams = True

    def __init__(
        self, head: Head, wanted: Extras, prompts: list[Ids], each: int,
        transport: asyncio.WriteTransport, chunked: bool, fault: EmulatedFault | None,
    ) -> None:  # fmt: skip
        super().__init__(head, wanted, prompts, each)
        self._transport, self._chunked, self._fault = transport, chunked, fault
        self._closing, self._soon = transport.is_closing, asyncio.get_running_loop().call_soon
        self.silent = False  # a fault has ended the stream: nothing more is written
        socket = transport.get_extra_info("socket")
        plain = wanted._replace(usage=False, cached=False) == Extras() and fault is None
        direct = plain and socket is not None and sys.platform != "win32"
        self._file = int(socket.fileno()) if direct else -1
        self._behind = True  # the transport may hold bytes that come first
        tail = CHAT_TAIL if head.chat else TAIL
        self._tail, self._end = tail, tail + b"\r\n" if chunked else tail
        self._fronts: list[EventHeads] = []

    def add(self, job: EmulatedJob) -> None:
        super().add(job)
        middle = b',"delta":{"content":"' if self.head.chat else b',"text":"'
        start = b"data: " + self.head.prefix + b'{"index":%d' % job.choice + middle
        self._fronts.append(EventHeads(start, self._tail, self._chunked))

    def tokens(self, job: EmulatedJob) -> None:
        if self._behind:
            self._behind = self._transport.get_write_buffer_size() > 0
        events = job.events
        if self._behind or job.sent + 1 < job.made or not (events or self._prepare(job)):
            self._by_transport(job)
        elif not self._closing():
            event = events.pop()
            try:
                written = write(self._file, event)
            except OSError:  # full, or gone: the next token goes through the transport, with this one
                return
            job.sent += 1
            if not events:
                self._soon(self._prepare, job)
            if written < len(event):
                self._behind = True
                self._transport.write(event[written:])

    def _prepare(self, job: EmulatedJob) -> bool:
        if self._file < 0 or job.events or (self.head.chat and not job.sent):
            return bool(job.events)
        front, end = self._fronts[job.choice], self._end
        job.events += [front[len(text)] + text + end for text in reversed(job.text.some(job.sent))]
        return bool(job.events)

    def _by_transport(self, job: EmulatedJob) -> None:
        transport = self._transport
        job.events.clear()
        if self._fault is not None and self._strike(job):
            return
        if not transport.is_closing() and transport.get_write_buffer_size() <= FULL:
            self._write_tokens(job)

    def _write_tokens(self, job: EmulatedJob) -> None:
        if not job.sent and self.head.chat:
            self.write(self._role(job))
        self.write(self._event(job, job.sent, job.made))
        job.sent = job.made

    def end(self, job: EmulatedJob) -> None:
        strikes = self._fault is not None and self._strike(job)
        if not strikes and not self._transport.is_closing():
            if job.error is not None:
                self.write(b"data: " + ProblemError(job.error, 500).body() + b"\n\n")
                job.sent = job.made
            else:
                self._write_tokens(job)
        super().end(job)

    def closing(self) -> bytes:
        if self.silent:
            return b""
        if not self.wanted.usage or self.error is not None:
            return DONE
        made = sum(job.made for job in self.jobs)
        event = self.head.fields(True) | {
            "choices": [],
            "usage": usage(self.prompt_tokens, made, details=False) | self._cached(),
            "system_fingerprint": self.head.fingerprint,
        }
        return b"data: " + encode(event) + b"\n\n" + DONE

    def write(self, data: bytes) -> None:
        if self.silent or self._transport.is_closing():
            return
        self._behind = True
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def _role(self, job: EmulatedJob) -> bytes:
        first = {"index": job.choice, "delta": {"role": "assistant", "content": ""}}
        event = self.head.fields(True) | {"choices": [first | {"logprobs": None, "finish_reason": None}]}
        if self.wanted.running_usage:
            event["usage"] = self._usage(job, 0)
        event["prompt_token_ids"] = self._prompts[0].tolist() if self.wanted.ids else None
        event["prompt_text"] = None
        return b"data: " + encode(event) + b"\n\n"

    def _event(self, job: EmulatedJob, begin: int, end: int) -> bytes:
        event = self.head.fields(True)
        event["choices"] = [self._choice(job, begin, end, stream_choice)]
        if job.how is not None and not self.wanted.usage:
            event["system_fingerprint"] = self.head.fingerprint
        if self.wanted.running_usage:
            event["usage"] = self._usage(job, end)
        if self.wanted.stamps:
            event["emulated"] = {"time": self.now()} if job.how is None else self._times(job)
        return b"data: " + encode(event) + b"\n\n"

    def _usage(self, job: EmulatedJob, made: int) -> dict[str, Any]:
        counts = usage(len(self._prompts[job.choice // self._each]), made, details=False)
        return counts | ({"completion_tokens_details": None} if self.head.chat else {})

    def _strike(self, job: EmulatedJob) -> bool:
        assert self._fault is not None
        if self.silent:
            return True
        kind, at = self._fault
        if job.made < at:
            return False
        if kind == "error-event":
            self.write(b"data: " + ProblemError("emulated fault", 500).body() + b"\n\n" + DONE)
        elif kind == "reset-mid-event":
            self.write(self._event(job, job.sent, job.made)[:-20])
        self.silent = True
        if kind == "drop":
            self._transport.abort()
        elif kind == "reset-mid-event":
            self._transport.close()  # what was written goes out before the end
        if kind != "stall" and not self.done.done():
            self.done.set_result(None)
        return True


class GeneratedWhole(WholeAnswer):
    def whole(self, params: dict[str, Any] | None = None) -> Any:
        found = [self._generated(job, job.made) for job in self.jobs]
        return found[0] if len(found) == 1 else found

    def _generated(self, job: EmulatedJob, end: int) -> dict[str, Any]:
        reason: dict[str, Any] | None = None
        if job.how is not None:
            reason = {"type": job.reason}
            if job.reason == "length":
                reason["length"] = job.made
            elif job.reason == "stop":
                reason["matched"] = job.stop_reason
        about: dict[str, Any] = {
            "id": self.head.id,
            "finish_reason": reason,
            "prompt_tokens": job.prompt,
            "weight_version": "default",
            "num_retractions": job.evictions,
            "completion_tokens": end,
            "cached_tokens": job.cached,
        }
        if self.wanted.stamps:
            about["emulated"] = {"time": self.now()} if job.how is None else self._times(job)
        if job.how is not None and job.finished >= 0:
            about["e2e_latency"] = job.finished - job.arrival
        return {"text": job.text.text(0, end), "output_ids": job.text.ids(0, end), "meta_info": about}


class GeneratedStream(StreamedAnswer, GeneratedWhole):
    def _event(self, job: EmulatedJob, begin: int, end: int) -> bytes:
        return b"data: " + encode(self._generated(job, end)) + b"\n\n"


RULE = ByteRule()


def answer(prompt: str | list[int], count: int, choice: int = 0, tokens: Tokens = RULE) -> str:
    ids = tokens.encode(prompt) if isinstance(prompt, str) else np.array(prompt, LITTLE)
    return Text(fingerprint(ids.tobytes()), choice, tokens.vocabulary).text(0, count)


def chat_answer(messages: list[dict[str, Any]], count: int, choice: int = 0, tokens: Tokens = RULE) -> str:
    return answer(tokens.chat(turns_of(messages)).tolist(), count, choice, tokens)
