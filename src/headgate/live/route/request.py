"""One request as the router reads it: its body, prefix, lengths, headers, share, and refusals."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from os import urandom
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from multidict import CIMultiDict, MultiMapping

from headgate.live.route.gate.queue import Content

# -- the body: read once, passed on untouched but for what engines are told

DEPTH = 64
FIELDS = 10_000  # of the body itself, not of what is in it; each takes 0.6 us of the event loop
TURN = 1 << 16  # bytes of a body that are looked at in one turn of the event loop; 2 at least
EXTRA = 1 << 18  # bytes of a field that is decoded, in one turn
NAME = 256  # bytes of a field's name, in a body of more than one turn
SPACE = b" \t\n\r"
QUOTE, OPEN, CLOSE, COLON, COMMA = range(1, 6)
KINDS = bytearray(256)  # of structure that a byte is, 0 for all others
for _byte, _kind in zip(b'"[{]}:,', (QUOTE, OPEN, OPEN, CLOSE, CLOSE, COLON, COMMA), strict=True):
    KINDS[_byte] = _kind
STEPS = np.array([0, 0, 1, -1, 0, 0], dtype=np.int8)  # what each kind adds to the depth
WHOLE_ONLY = frozenset(("kv_transfer_params", "prompt_logprobs", "n", "best_of", "use_beam_search", "echo"))

SPLITTABLE = ("/v1/completions", "/v1/chat/completions")


class Api(NamedTuple):
    texts: tuple[str, ...]  # what prompts are made of, the main field first
    limits: tuple[str, ...] = ()  # of output tokens: the first given counts; none: it generates nothing
    either: bool = False  # of the texts only the first that is given counts
    streams: bool = False  # its streams end with [DONE] or with one of `ends`
    ends: frozenset[bytes] = frozenset()  # names of last events
    opens: frozenset[bytes] = frozenset()  # names of events that come before the engine has done anything
    form: bool = False  # its body is multipart/form-data


_EMBEDS, _SCORES = Api(("messages", "input"), either=True), Api(("query", "documents"))
_AUDIO = Api(("prompt",), ("max_completion_tokens",), streams=True, form=True)
APIS: dict[str, Api] = {
    "/v1/completions": Api(("prompt", "prompt_embeds"), ("max_tokens",), streams=True),
    "/v1/chat/completions": Api(("messages", "tools"), ("max_completion_tokens", "max_tokens"), streams=True),
    "/v1/messages": Api(
        ("messages", "system", "tools"),
        ("max_tokens",),
        streams=True,
        ends=frozenset((b"message_stop", b"error")),
        opens=frozenset((b"message_start", b"ping")),
    ),
    "/v1/responses": Api(
        ("input", "instructions", "tools"),
        ("max_output_tokens",),
        streams=True,
        ends=frozenset((b"response.completed", b"response.failed", b"response.incomplete", b"error")),
        opens=frozenset((b"response.created", b"response.queued", b"response.in_progress")),
    ),
    "/v1/audio/transcriptions": _AUDIO,
    "/v1/audio/translations": _AUDIO,
    "/v1/messages/count_tokens": Api(("messages", "system", "tools")),
    "/v1/embeddings": _EMBEDS,
    "/v2/embed": Api(("texts", "inputs", "images")),
    "/classify": _EMBEDS,
    "/pooling": Api(("messages", "input", "data"), either=True),
    "/v1/rerank": _SCORES,
    "/v2/rerank": _SCORES,
    "/rerank": _SCORES,
    "/v1/score": Api(("queries", "documents", "items", "text_1", "text_2", "data_1", "data_2")),
    "/tokenize": Api(("prompt", "messages"), either=True),
    "/detokenize": Api(("tokens",)),
}
APIS["/score"] = APIS["/v1/score"]
NO_API = Api(("prompt", "messages", "input"), either=True)
_NAMES = frozenset(
    ("model", "stream", "n", "best_of", "use_beam_search", "echo", "prompt_logprobs", "kv_transfer_params",
     "metadata", "cache_salt", "prompt_cache_key", "user", "ec_transfer_params", "vllm_xargs", "priority",
     "custom_params", *(name for api in APIS.values() for name in api.texts + api.limits))
)  # fmt: skip
LOOKED_AT = {name: b'"%b"' % name.encode() for name in _NAMES}  # as they stand in a body
UNBOUNDED = 1 << 20  # output tokens of a request without a limit
ABSENT = msgspec.Raw()
CLIENTS_OWN = ("headgate_class", "headgate_tenant")  # where the router has no word for it
NO_OBJECT = "the body is not a JSON object"


class _Metadata(msgspec.Struct):
    named: str | None = msgspec.field(default=None, name="class")


class _Handed(msgspec.Struct):
    """What tells an engine's connectors where to fetch from. vLLM takes it from `vllm_xargs`, too."""

    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


HANDED = frozenset(("vllm_xargs", *_Handed.__struct_fields__))
_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])
_HANDED = msgspec.json.Decoder(_Handed | None)
_ANY = msgspec.json.Decoder()
_METADATA = msgspec.json.Decoder(_Metadata)
Body = bytes | bytearray  # a large one grows while it comes
Fields = dict[str, msgspec.Raw]  # lengths of texts are taken from their raw bytes
Result = TypeVar("Result")
Numbers = Any  # of numpy
SOME = 250  # fields that are cut in one turn
Steps = Generator[None, None, Result]  # work in turns, and what it makes


class AskedRequest(msgspec.Struct, frozen=True):
    body: Body
    model: str
    stream: bool
    prompt_bytes: int  # of all that the prompt is made of, as JSON
    limit: int  # output tokens at most
    splittable: bool  # may its prompt and its output be on two engines
    field_class: str | None  # metadata.class
    prompt_tokens: int | None = None  # exact, where the prompt is a list of token ids
    text: msgspec.Raw = ABSENT  # the prompt or the messages as JSON
    salt: tuple[msgspec.Raw, ...] = ()  # what else decides whether two equal prompts have the same KV
    session: msgspec.Raw = ABSENT  # prompt_cache_key or user
    extra: msgspec.Raw = ABSENT  # vllm_xargs
    custom: msgspec.Raw = ABSENT  # custom_params, which SGLang has instead
    urgent: bool = False  # it names a priority


class Turns:
    """Work on large bodies goes on by one step in each turn of the event loop, whosever bodies they are."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # in the order of asking: a body of two steps is not behind one of 500

    async def finish(self, work: Steps[Result]) -> Result:
        try:
            next(work)
            while True:
                async with self._turn:
                    await asyncio.sleep(0)
                    next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def at_once(work: Steps[Result]) -> Result:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def read_body(body: Body, path: str, allow_kv_params: bool = False) -> AskedRequest:
    return at_once(reading(body, path, allow_kv_params))


def reading(body: Body, path: str, allow_kv_params: bool = False) -> Steps[AskedRequest]:
    fields = yield from fields_of(body)
    if not allow_kv_params:
        _check_handed(fields)
    get = fields.get
    api = APIS.get(path, NO_API)
    names: Sequence[str] = api.texts
    if api.either:
        names = [name for name in names if name in fields][:1]
    texts = {name: fields[name] for name in names if name in fields}
    model = _value(fields, "model")
    return AskedRequest(
        body=body,
        model=model if isinstance(model, str) else "",
        stream=_value(fields, "stream") is True,
        prompt_bytes=sum(len(memoryview(text)) for text in texts.values()),
        limit=_limit(fields, api),
        splittable=path in SPLITTABLE and _splittable(fields),
        field_class=_field_class(fields),
        prompt_tokens=(yield from _token_ids(*texts.values() if len(texts) == 1 else (ABSENT,))),
        text=texts.get(names[0], ABSENT) if names else ABSENT,
        salt=(get("cache_salt", ABSENT), get("tools", ABSENT)),
        session=get("prompt_cache_key") or get("user", ABSENT),
        extra=get("vllm_xargs", ABSENT),
        custom=get("custom_params", ABSENT),
        urgent="priority" in fields,
    )


def telling(
    asked: AskedRequest, path: str, words: Mapping[str, str], into: Sequence[str] = ("vllm_xargs",)
) -> Steps[AskedRequest]:
    """The request with these words for the engine's plug-in, an empty one for a word that it must not have.

    Where the body has no field of `into` these are added, and all else stays byte for byte. Else its fields
    are written anew: what a client says under such a name, escaped or twice, is never passed on. Nor is any
    other `headgate_` word, such as a promise: where the router names class or tenant, these decide.
    """
    api = APIS.get(path, NO_API)
    if not api.limits or not words:
        return asked
    said = {name: word for name, word in words.items() if word}
    if api.form:
        return msgspec.structs.replace(asked, body=_with_part(asked.body, said)) if said else asked
    given = {"vllm_xargs": asked.extra, "custom_params": asked.custom}
    extras = {name: _decoded(_TOP, raw, name) for name, raw in given.items() if _begins(raw) == b"{"}
    if not any(_is_ours(word, words) for extra in extras.values() for word in extra):
        if not said:
            return asked
        if not any(len(memoryview(given[name])) for name in into):
            field = b",".join(b'"%b":%b' % (name.encode(), msgspec.json.encode(said)) for name in into)
            return msgspec.structs.replace(asked, body=with_field(asked.body, field))
    fields: dict[str, Any] = dict((yield from fields_of(asked.body)))
    for name, extra in extras.items():
        fields[name] = {word: value for word, value in extra.items() if not _is_ours(word, words)}
    for name in into if said else ():
        fields[name] = {**(fields[name] if name in extras else {}), **said}
    return msgspec.structs.replace(asked, body=msgspec.json.encode(fields))


def _is_ours(name: str, words: Mapping[str, str]) -> bool:
    return name in words or (name.startswith("headgate_") and name not in CLIENTS_OWN)


def with_field(body: Body, field: bytes) -> bytes:
    end, view = body.rindex(b"}"), memoryview(body)
    comma = b"," if b'"' in body else b""  # an object without a name in it is empty
    return b"".join((view[:end], comma, field, view[end:]))


def _decoded(decoder: msgspec.json.Decoder[Result], raw: Body | msgspec.Raw, name: str) -> Result:
    if len(memoryview(raw)) > EXTRA:
        raise RefusedError(400, "json", f"{name} is larger than {EXTRA} bytes")
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise RefusedError(400, "json", f"{name} is not a JSON object") from None


def fields_of(body: Body) -> Steps[Fields]:
    """Only in a body of one turn all is known to be JSON; of a larger one an engine's parser decides."""
    if len(body) > TURN:
        return (yield from _scan(body))
    try:
        if body.count(b"[") + body.count(b"{") > DEPTH:
            structure = _structure(body)
            _levels(structure[structure != 0], 0, 0)
        fields = _TOP.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise RefusedError(400, "json", NO_OBJECT) from None
    _check_number(len(fields))
    _check_duplicates(body, fields)
    return fields


def _value(fields: Fields, name: str) -> Any:
    raw = fields.get(name)
    if raw is None or _begins(raw) in (b"[", b"{"):
        return raw
    if len(memoryview(raw)) > EXTRA:
        raise RefusedError(400, "json", f"{name} is larger than {EXTRA} bytes")
    try:
        return _ANY.decode(raw)
    except (msgspec.DecodeError, ValueError):
        raise RefusedError(400, "json", NO_OBJECT) from None


def _begins(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def _check_handed(fields: Fields) -> None:
    if HANDED.isdisjoint(fields):
        return
    extra = _decoded(_HANDED, fields.get("vllm_xargs", b"null"), "vllm_xargs")
    for name in _Handed.__struct_fields__:
        if _value(fields, name) is not None or getattr(extra, name, None) is not None:
            raise RefusedError(400, "kv_params", f"{name} is not accepted from clients")


def _field_class(fields: Fields) -> str | None:
    if (given := fields.get("metadata")) is None:
        return None
    try:
        return _METADATA.decode(given).named if len(memoryview(given)) <= EXTRA else None
    except (msgspec.DecodeError, ValueError):  # what else it may be is the engine's matter
        return None


def _limit(fields: Fields, api: Api) -> int:
    if not api.limits:
        return 1  # what no request is without
    for name in api.limits:
        value = _value(fields, name)
        if value is not None:  # an engine may take a text for a number, and not the next field
            return min(value, UNBOUNDED) if type(value) is int and value > 0 else UNBOUNDED
    return UNBOUNDED


def _splittable(fields: Fields) -> bool:
    if not WHOLE_ONLY.isdisjoint(fields):  # are they there without effect?
        if "kv_transfer_params" in fields or _value(fields, "prompt_logprobs") is not None:
            return False
        if _value(fields, "n") not in (None, 1) or _value(fields, "best_of") not in (None, 1):
            return False
        if _value(fields, "use_beam_search") or _value(fields, "echo"):
            return False
    prompt = fields.get("prompt", ABSENT)
    return _begins(prompt) != b"[" or _is_tokens(prompt)


def _is_tokens(prompt: msgspec.Raw) -> bool:
    inside = bytes(memoryview(prompt)[1:NAME]).lstrip()
    return bool(inside) and inside[:1] in b"0123456789"


def _token_ids(prompt: msgspec.Raw) -> Steps[int | None]:
    if _begins(prompt) != b"[" or not _is_tokens(prompt):
        return None
    view, commas = memoryview(prompt), 0
    for start in range(0, len(view), TURN):
        if start:
            yield
        commas += bytes(view[start : start + TURN]).count(b",")
    return commas + 1


def _scan(body: Body) -> Steps[Fields]:
    """Find the fields of a body by its structure. Refuses deep nesting, too many fields and repeated ones.

    For whatever a JSON parser accepts these are the fields that it finds. NUL would make Python's take the
    body for UTF-16, in which the structure is elsewhere.
    """
    if not body[:TURN].lstrip(SPACE).startswith(b"{"):
        raise RefusedError(400, "json", NO_OBJECT)
    at = depth = text = 0
    quotes = np.empty(0, dtype=np.int64)  # the last two of the body's own level
    places = [np.empty((0, 3), dtype=np.int64)]  # of each field: name from, name to, colon
    ends = [quotes]
    fields = closed = 0
    while at < len(body):
        part = body[at : at + TURN]
        if (len(part) - len(part.rstrip(b"\\"))) % 2 and len(part) > 1:
            part = part[:-1]  # no half of an escape at its end
        structure = _structure(part)
        where = np.flatnonzero(structure)
        if len(where):
            kinds = structure[where]
            where += at
            outside, depths = _levels(kinds, text, depth)
            own = depths == 1
            colons = where[own & outside & (kinds == COLON)]
            closing = outside & (kinds == CLOSE) & (depths <= 0)
            ends.append(where[(own & outside & (kinds == COMMA)) | closing])
            closed += int(np.count_nonzero(closing))
            quotes = np.concatenate((quotes, where[own & (kinds == QUOTE)]))
            if len(colons):
                after = np.searchsorted(quotes, colons)
                if int(after[0]) < 2:
                    raise RefusedError(400, "json", NO_OBJECT)
                places.append(np.stack((quotes[after - 2] + 1, quotes[after - 1], colons), axis=1))
            fields += max(len(colons), len(ends[-1]) - 1)
            _check_number(fields)
            quotes = quotes[-2:]
            depth, text = int(depths[-1]), int(not outside[-1])
        at += len(part)
        yield
    found, until = np.concatenate(places), np.concatenate(ends)
    _check_whole(body, found[:, 2], until, closed, text)
    return (yield from _cut(body, found, until))


def _structure(part: Body) -> Numbers:
    if b"\0" in part:
        raise RefusedError(400, "json", NO_OBJECT)
    plain = part.replace(b"\\\\", b"__").replace(b'\\"', b"__").translate(KINDS)
    return np.frombuffer(plain, dtype=np.uint8)


def _levels(kinds: Numbers, text: int, depth: int) -> tuple[Numbers, Numbers]:
    """Which marks are outside of texts, and how deep; `text` is 1 and `depth` that of what was before."""
    texts = (text + (kinds == QUOTE).cumsum(dtype=np.uint8)) & 1  # 1 from a quote to the next one
    outside = texts == 0
    depths = depth + (STEPS[kinds] * outside).cumsum(dtype=np.int32)
    if int(depths.max(initial=0)) > DEPTH:
        raise RefusedError(400, "depth", f"the body nests deeper than {DEPTH} levels")
    return outside, depths


def _check_number(fields: int) -> None:
    if fields > FIELDS:
        raise RefusedError(400, "fields", f"the body has more than {FIELDS} fields")


def _check_whole(body: Body, colons: Numbers, ends: Numbers, closed: int, text: int) -> None:
    in_turn = len(colons) == len(ends) and bool((colons < ends).all() and (ends[:-1] < colons[1:]).all())
    if closed != 1 or text or not (in_turn or (len(ends) == 1 and not len(colons))):
        raise RefusedError(400, "json", NO_OBJECT)
    rest = body[int(ends[-1]) + 1 :] if len(body) - int(ends[-1]) <= TURN else b"x"
    if rest.strip(SPACE):
        raise RefusedError(400, "json", NO_OBJECT)


def _cut(body: Body, places: Numbers, ends: Numbers) -> Steps[Fields]:
    view, fields = memoryview(body), Fields()
    for start in range(0, len(places), SOME):
        yield
        some = zip(places[start : start + SOME].tolist(), ends[start : start + SOME].tolist(), strict=True)
        for (first, last, colon), end in some:
            _add(fields, view, first, last, colon + 1, end)
    return fields


def _add(fields: Fields, view: memoryview, first: int, last: int, start: int, end: int) -> None:
    if last - first > NAME:
        raise RefusedError(400, "json", f"the name of a field is longer than {NAME} bytes")
    try:
        name = str(view[first:last], "utf-8")
    except ValueError:
        raise RefusedError(400, "json", NO_OBJECT) from None
    if "\\" in name or name in fields:
        raise RefusedError(400, "duplicate", "field names must stand once and without escapes")
    spaces = min(start + NAME, end)
    while start < spaces and view[start] in SPACE:
        start += 1
    if start < end and view[start] in SPACE:
        raise RefusedError(400, "json", f"more than {NAME} spaces before a value")
    fields[name] = msgspec.Raw(view[start:end])


def _check_duplicates(body: Body, fields: Fields) -> None:
    """Parsers may disagree on which counts. Where every name we read occurs once none stands twice."""
    if b"\\" in body and body.count(b"\\") != sum(bytes(raw).count(b"\\") for raw in fields.values()):
        raise RefusedError(400, "duplicate", "field names must stand once and without escapes")
    for name in fields:
        if name in LOOKED_AT and body.count(LOOKED_AT[name]) > 1:
            at_once(_scan(body))
            return


# -- forms, of which all but a few small fields passes unread

FORM = re.compile(r"""multipart/form-data; *boundary=("?)([\w'()+,./:=?-]{1,70})\1""", re.ASCII | re.I)
FILE_HEAD = 1 << 12  # bytes of the headers of a part
PARTS_OF_FORM = 64
SAID = rb'; *(name|filename|filename\*)=("[^"\\]*"|[^" \\;]+)'
IN_PART, SAID_IN_PART = re.compile(rb"form-data(?:%b)+" % SAID, re.I), re.compile(SAID, re.I)
PART_NAME = re.compile(rb"[\w.\[\]-]{1,64}")  # parsers strip, unquote or decode what is not so plain
HEADERS_OF_PART = {b"content-disposition", b"content-type", b"content-length", b"content-transfer-encoding"}
CONTROL = re.compile(rb"[\0-\x08\x0a-\x1f]")
READ_IN_FORM = frozenset(("model", "stream", "prompt", "max_completion_tokens"))
NOT_IN_FORM = frozenset(("vllm_xargs", "kv_transfer_params", "ec_transfer_params", "priority"))
TRUE = frozenset((b"true", b"1", b"yes", b"on", b"t", b"y"))
BYTES_OF_AUDIO = 640  # of one token: 16-bit samples at 16 kHz, 50 tokens a second
NO_FORM = "the body is not the form that its Content-Type says"


def reading_form(body: Body, kind: str) -> Steps[AskedRequest]:
    """Parsers differ in what they forgive: nothing is, so no field unseen here reaches an engine."""
    if (written := FORM.fullmatch(kind.strip())) is None:
        raise RefusedError(400, "form", "this path takes multipart/form-data with a boundary")
    line = b"--" + written[2].encode()
    if not body.startswith(line + b"\r\n"):
        raise RefusedError(400, "form", NO_FORM)
    fields: dict[str, bytes] = {}
    at, parts, audio = len(line), 0, 0
    while body[at : at + 2] == b"\r\n":
        end = body.find(b"\r\n\r\n", at, at + FILE_HEAD)
        parts += 1
        if end < 0 or parts > PARTS_OF_FORM:
            raise RefusedError(400, "form", NO_FORM if end < 0 else f"more than {PARTS_OF_FORM} parts")
        name, is_file = _part(bytes(body[at + 2 : end]))
        start = end + 4
        at = yield from _find(body, b"\r\n" + line, start)
        if name in NOT_IN_FORM:
            raise RefusedError(400, "form", f"{name} is not accepted in a form")
        if is_file:
            audio += at - start
        elif name in READ_IN_FORM:
            if name in fields or at - start > EXTRA:
                raise RefusedError(400, "form", f"{name} is there twice or too long")
            fields[name] = bytes(body[start:at])
        at += 2 + len(line)
    if len(body) - at > 4 or bytes(body[at:]) not in (b"--", b"--\r\n"):
        raise RefusedError(400, "form", NO_FORM)
    limit = fields.get("max_completion_tokens", b"")
    return AskedRequest(
        body=body,
        model=fields.get("model", b"").decode(errors="replace"),
        stream=fields.get("stream", b"").lower() in TRUE,
        prompt_bytes=0,
        limit=max(1, min(int(limit), UNBOUNDED)) if limit.isdigit() and len(limit) < 9 else UNBOUNDED,
        splittable=False,
        field_class=None,
        prompt_tokens=1 + audio // BYTES_OF_AUDIO + len(fields.get("prompt", b"")) // BYTES,
    )


def _part(head: bytes) -> tuple[str, bool]:
    headers = [line.partition(b":") for line in head.split(b"\r\n")]
    values = {name.lower(): value.strip() for name, _, value in headers}
    said = values.get(b"content-disposition", b"")
    names = SAID_IN_PART.findall(said) if IN_PART.fullmatch(said) else []
    found = {name.lower(): value.strip(b'"') for name, value in names}
    unclear = (
        len(values) != len(headers) or not HEADERS_OF_PART.issuperset(values) or len(found) != len(names)
    )
    lines = b"".join(values.values())
    if unclear or not PART_NAME.fullmatch(found.get(b"name", b"")) or CONTROL.search(lines):
        raise RefusedError(400, "form", NO_FORM)
    return found[b"name"].decode(), len(found) > 1


def _find(body: Body, what: bytes, start: int) -> Steps[int]:
    for first in range(start, len(body), 4 * TURN):
        found = body.find(what, first, first + 4 * TURN + len(what) - 1)
        if found >= 0:
            return found
        yield
    raise RefusedError(400, "form", NO_FORM)


def _with_part(body: Body, said: Mapping[str, str]) -> bytes:
    line = bytes(body[: body.index(b"\r\n") + 2])
    head = b'Content-Disposition: form-data; name="vllm_xargs"\r\n\r\n'
    return b"".join((line, head, msgspec.json.encode(said), b"\r\n", body))


# -- keys of the first parts of a prompt, for prefix caches

BYTES = 4  # of a token, in text; a token id is four bytes, too
FIRST = 128  # tokens of the first parts
ALIKE = 16  # parts of one length; the next ones are twice as long
PARTS = 6 * ALIKE  # at most: 129,024 tokens
MOST_BYTES = BYTES * FIRST * ALIKE * (2 ** (PARTS // ALIKE) - 1)
DIGITS = 12  # characters of a token id in JSON, with what separates it from the next
LONGEST_SESSION = 256  # bytes
KEY = (1 << 62) - 1

_numbers = count(1)
_ids = msgspec.json.Decoder(list[int])


def content_of(asked: AskedRequest) -> Content:
    """Keys of a prompt's parts. A match is a sixteenth too short at most, for parts grow with their place.

    Token ids are taken as such; text and messages as the bytes of their JSON, in which a longer conversation
    begins with a shorter one. Model (which names an adapter, too), cache salt and tools are in the first key.
    At most PARTS parts and MOST_BYTES bytes are looked at, whatever a client sends; the rest counts as new.
    """
    data, tokens = _measured(asked)
    pieces: list[tuple[int, int]] = []
    start, length = 0, FIRST * BYTES
    first: object = (asked.model, *(bytes(memoryview(each)[:MOST_BYTES]) for each in asked.salt))
    while start < len(data):
        part = data[start : start + length]
        pieces.append((hash((first, part)) & KEY, max(1, len(part) // BYTES)))
        start, first = start + length, None
        if len(pieces) % ALIKE == 0:
            length *= 2
    rest = max(0, tokens - sum(size for _, size in pieces))
    pieces.append((-next(_numbers), rest))  # what it puts out, and what was not looked at
    session = bytes(memoryview(asked.session)[:LONGEST_SESSION])
    return Content(pieces, sum(size for _, size in pieces), session or None)


def _measured(asked: AskedRequest) -> tuple[bytes, int]:
    whole = memoryview(asked.text)
    if asked.prompt_tokens is None:  # without the bracket at the end
        return bytes(whole[: min(MOST_BYTES, len(whole) - 1)]), len(whole) // BYTES
    most = MOST_BYTES // BYTES * DIGITS
    text = bytes(whole[:most])
    if len(whole) > most:
        text = text.rpartition(b",")[0] + b"]"
    try:
        ids = np.array(_ids.decode(text), dtype=np.uint32).tobytes()
    except (msgspec.DecodeError, OverflowError, ValueError):  # the engine will say what is wrong with it
        return b"", asked.prompt_tokens
    return ids[:MOST_BYTES], asked.prompt_tokens


# -- lengths and times, learned from what passes by

TOKENS_PER_BYTE = 0.25  # before anything was learned
SMOOTHING = 0.05
FIRST_TOKEN = 0.5  # seconds, before any stream of a class was seen
MEAN_OUTPUT = 128.0


class Estimates:
    def __init__(self) -> None:
        self.error = 0.0  # mean relative error of prompt lengths
        self._ratio: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._output: dict[str, float] = {}

    def prompt(self, kind: str, asked: AskedRequest) -> int:
        if asked.prompt_tokens is not None:
            return asked.prompt_tokens
        return max(1, round(asked.prompt_bytes * self._ratio.get(kind, TOKENS_PER_BYTE)))

    def saw_usage(self, kind: str, asked: AskedRequest, prompt: int, output: int) -> None:
        if prompt > 0 and asked.prompt_bytes > 0 and asked.prompt_tokens is None:
            wrong = abs(self.prompt(kind, asked) - prompt) / prompt
            self.error += SMOOTHING * (wrong - self.error)
            _blend(self._ratio, kind, prompt / asked.prompt_bytes)
        if output > 0:
            _blend(self._output, kind, float(output))

    def saw_first_token(self, kind: str, seconds: float) -> None:
        _blend(self._first, kind, seconds)

    def first_token(self, kind: str) -> float:
        return self._first.get(kind, FIRST_TOKEN)

    def output(self, kind: str) -> float:
        return self._output.get(kind, MEAN_OUTPUT)


def _blend(table: dict[str, float], kind: str, value: float) -> None:
    old = table.get(kind)
    table[kind] = value if old is None else old + SMOOTHING * (value - old)


# -- headers that pass, and in which direction

HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
     "trailer", "trailers", "transfer-encoding", "upgrade")
)  # fmt: skip
FROM_CLIENT = HOP_BY_HOP | frozenset(
    ("host", "content-length", "content-encoding", "accept-encoding", "expect", "authorization", "x-api-key",
     "x-request-id", "via", "x-vllm-priority", "x-data-parallel-rank", "x-prefiller-host-port", "cookie")
)  # fmt: skip
FROM_CLIENT_PREFIX = ("x-headgate-", "x-emulate-", "x-gateway-")
FROM_ENGINE = HOP_BY_HOP | frozenset(("server", "date", "content-length", "via", "set-cookie", "alt-svc"))
VIA = "1.1 headgate-route"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def to_engine(
    headers: MultiMapping[str],
    request_id: str,
    authorization: str | None,
    priority: int | None,
    passes_key: bool,
    tenant_header: str = "",
) -> CIMultiDict[str]:
    kept = _passed(headers, FROM_CLIENT, FROM_CLIENT_PREFIX)
    if tenant_header:
        kept.popall(tenant_header, None)
    kept["Accept-Encoding"] = "identity"  # compressed events could not be read
    kept["X-Request-Id"] = request_id
    kept["Via"] = ", ".join((*headers.getall("Via"), VIA)) if "Via" in headers else VIA
    if authorization is not None:
        kept["Authorization"] = authorization
    elif passes_key and "Authorization" in headers:
        kept["Authorization"] = headers["Authorization"]
    if priority is not None:
        kept["X-Vllm-Priority"] = str(priority)
    return kept


def to_client(headers: MultiMapping[str]) -> CIMultiDict[str]:
    return _passed(headers, FROM_ENGINE, ("x-headgate-",))


def _passed(headers: MultiMapping[str], not_these: frozenset[str], nor: tuple[str, ...]) -> CIMultiDict[str]:
    if "Connection" in headers:
        named = ",".join(headers.getall("Connection")).lower().split(",")
        not_these = not_these.union(name.strip() for name in named)
    passed = [
        (name, value)
        for name, value in headers.items()
        if (low := name.lower()) not in not_these and not low.startswith(nor)
    ]
    return CIMultiDict(passed)


def request_id(shown: str | None) -> str:
    return shown if shown is not None and REQUEST_ID.fullmatch(shown) else f"hg-{urandom(12).hex()}"


def loops(headers: MultiMapping[str]) -> bool:
    return "Via" in headers and any("headgate-route" in via for via in headers.getall("Via"))


# -- what clients share: connections, requests, memory

SHARE = 8  # times what is left: as much may one client hold


class Shares:
    """One client may hold SHARE times what is left: alone eight ninths. `each` is a fixed bound."""

    def __init__(self, most: int, each: int | None = None) -> None:
        self.most, self.each, self.held = most, each, 0
        self._of: dict[str, int] = {}  # by client, of those that hold something

    def take(self, client: str, many: int = 1) -> bool:
        if fits := self.fits(client, many):
            self._hold(client, many)
        return fits

    def fits(self, client: str, many: int = 1) -> bool:
        free, mine = self.most - self.held, self._of.get(client, 0) + many
        shared = mine == many or mine <= SHARE * (free - many)  # one that holds nothing may have the last
        return many <= free and shared and (self.each is None or mine <= self.each)

    def give_back(self, client: str, many: int = 1) -> None:
        self._hold(client, -many)

    def _hold(self, client: str, many: int) -> None:
        self.held += many
        self._of[client] = self._of.get(client, 0) + many
        if not self._of[client]:
            del self._of[client]


class BodyBytes(Shares):
    @contextmanager
    def answer(self, client: str, body: object) -> Iterator[bool]:
        many = len(body) if isinstance(body, bytes) else 0
        fits = self.fits(client, many)
        self._hold(client, many)
        try:
            yield fits
        finally:
            self.give_back(client, many)


# -- refusals, in the shape of the path's clients

INVALID = "invalid_request_error"
TYPES = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
ANTHROPIC_TYPES = TYPES | {413: "request_too_large"}


class RefusedError(Exception):
    def __init__(self, status: int, reason: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after
        self.key = self.tenant = ""  # whose key it came with, and whose request it was
        self.client = ""  # its address, where addresses have bounds
        self.tries = 0  # engines that were tried
        self.waited = 0.0  # seconds in the queue
        self.written = False  # is it in the access log?


def error_object(status: int, message: str, path: str = "") -> dict[str, object]:
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else INVALID)
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = TYPES.get(status, "server_error" if status >= 500 else INVALID)
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


NAMED = {"Server": "headgate"}  # else aiohttp names itself and its version


def answer(error: RefusedError, path: str) -> tuple[int, dict[str, str], bytes]:
    headers = {"Content-Type": "application/json", **own_headers(error.tries, error.waited)}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return error.status, headers, json.dumps(error_object(error.status, error.message, path)).encode()


def own_headers(tries: int, waited: float) -> dict[str, str]:
    return {**NAMED, "x-headgate-tries": str(tries), "x-headgate-wait-ms": f"{1000 * waited:.1f}"}


def error_event(status: int, message: str, path: str = "", torn: bool = False, number: int = 0) -> bytes:
    """In the shape that clients of the path read. `number` is that of the event, for /v1/responses."""
    error: dict[str, object] = {"message": message, "type": "server_error", "param": None, "code": status}
    body: dict[str, object] = {"error": error}
    name = b"event: error\n"
    if path == "/v1/messages":
        body = error_object(status, message, path)
    elif path == "/v1/responses":
        flat = {"code": "server_error", "message": message, "param": None, "sequence_number": number}
        body = {"type": "error", **flat, **body}
    else:
        name = b""
    return (b"\n\n" if torn else b"") + name + b"data: " + json.dumps(body).encode() + b"\n\n"
