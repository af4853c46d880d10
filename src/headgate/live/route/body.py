"""What the router reads of a request's body; the bytes themselves are passed on untouched.

A small body is parsed at once. A larger one is read in turns, between which the event loop goes on: its
fields are found by its brackets and quotes, and what is inside of them is the engine's to parse. A thread
would not help: it holds the interpreter's lock while a parser runs, and takes it at every call of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, TypeVar

import msgspec
import numpy as np

from headgate.live.route.answers import RefusedError

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
LOOKED_AT = (
    "model", "prompt", "messages", "input", "max_tokens", "max_completion_tokens", "max_output_tokens",
    "stream", "n", "best_of", "use_beam_search", "echo", "prompt_logprobs", "kv_transfer_params", "metadata",
    "cache_salt", "tools", "prompt_cache_key", "user", "ec_transfer_params", "vllm_xargs",
    "prompt_embeds", "system", "instructions",
)  # fmt: skip
QUOTED = [(name, b'"%b"' % name.encode()) for name in LOOKED_AT]
WHOLE_ONLY = frozenset(("kv_transfer_params", "prompt_logprobs", "n", "best_of", "use_beam_search", "echo"))
TEXTS: dict[str, tuple[str, ...]] = {  # what prompts are made of, the main field first
    "/v1/completions": ("prompt", "prompt_embeds"),
    "/v1/chat/completions": ("messages", "tools"),
    "/v1/messages": ("messages", "system", "tools"),
    "/v1/responses": ("input", "instructions", "tools"),
}
LIMITS: dict[str, tuple[str, ...]] = {  # of output tokens: the first that is given counts
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
OTHER_TEXTS = ("prompt", "messages", "input")  # of all other paths: the first that is given
OTHER_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
UNBOUNDED = 1 << 20  # output tokens of a request without a limit
ABSENT = msgspec.Raw()
NO_OBJECT = "the body is not a JSON object"


class _Metadata(msgspec.Struct):
    named: str | None = msgspec.field(default=None, name="class")


class _Handed(msgspec.Struct):
    """What tells an engine's connectors where to fetch from. vLLM takes it from `vllm_xargs`, too."""

    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])
_HANDED = msgspec.json.Decoder(_Handed | None)
_ANY = msgspec.json.Decoder()
_METADATA = msgspec.json.Decoder(_Metadata)
Body = bytes | bytearray  # a large one grows while it comes
Fields = dict[str, msgspec.Raw]  # lengths of texts are taken from their raw bytes
Made = TypeVar("Made")
Numbers = Any  # of numpy
SOME = 250  # fields that are cut in one turn
Steps = Generator[None, None, Made]  # work in turns, and what it makes


class Asked(msgspec.Struct, frozen=True):
    """One request as the gate and the relay need it."""

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


class Turns:
    """Work on large bodies goes on by one step in each turn of the event loop, whosever bodies they are."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # in the order of asking: a body of two steps is not behind one of 500

    async def finish(self, work: Steps[Made]) -> Made:
        """What the work makes. What takes one step is done at once."""
        try:
            next(work)
            while True:
                async with self._turn:
                    await asyncio.sleep(0)
                    next(work)
        except StopIteration as made:
            return made.value  # type: ignore[no-any-return]


def at_once(work: Steps[Made]) -> Made:
    """The same in one turn."""
    while True:
        try:
            next(work)
        except StopIteration as made:
            return made.value  # type: ignore[no-any-return]


def read_body(body: Body, path: str, allow_kv_params: bool = False) -> Asked:
    """Understand a JSON body once. Refuses what is no object, too deep or too broad, or repeats a field."""
    return at_once(reading(body, path, allow_kv_params))


def reading(body: Body, path: str, allow_kv_params: bool = False) -> Steps[Asked]:
    """The same in turns."""
    fields = yield from fields_of(body)
    if not allow_kv_params:
        _check_handed(fields)
    get = fields.get
    names = TEXTS.get(path) or [name for name in OTHER_TEXTS if name in fields][:1]
    texts = {name: fields[name] for name in names if name in fields}
    model = _value(fields, "model")
    return Asked(
        body=body,
        model=model if isinstance(model, str) else "",
        stream=_value(fields, "stream") is True,
        prompt_bytes=sum(len(memoryview(text)) for text in texts.values()),
        limit=_limit(fields, path),
        splittable=_splittable(fields, path),
        field_class=_field_class(fields),
        prompt_tokens=(yield from _token_ids(texts["prompt"] if [*texts] == ["prompt"] else ABSENT)),
        text=texts.get(names[0], ABSENT) if names else ABSENT,
        salt=(get("cache_salt", ABSENT), get("tools", ABSENT)),
        session=get("prompt_cache_key") or get("user", ABSENT),
    )


def fields_of(body: Body) -> Steps[Fields]:
    """The fields of the body itself, as they stand there; refuses what no engine should be asked to parse.

    Of a body of one turn all is known to be JSON. Of a larger one the names of its fields and where they end,
    if an engine's parser accepts it at all.
    """
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
    """One field decoded; None for null or a missing one. A list or an object stays as it is."""
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
    """Refuse parameters of connectors, wherever the engine would find them."""
    given = fields.get("vllm_xargs", b"null")
    if len(memoryview(given)) > EXTRA:
        raise RefusedError(400, "json", f"vllm_xargs is larger than {EXTRA} bytes")
    try:
        extra = _HANDED.decode(given)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise RefusedError(400, "json", "vllm_xargs is not a JSON object") from None
    for name in _Handed.__struct_fields__:
        if _value(fields, name) is not None or getattr(extra, name, None) is not None:
            raise RefusedError(400, "kv_params", f"{name} is not accepted from clients")


def _field_class(fields: Fields) -> str | None:
    given = fields.get("metadata", b"{}")
    try:
        return _METADATA.decode(given).named if len(memoryview(given)) <= EXTRA else None
    except (msgspec.DecodeError, ValueError):  # what else it may be is the engine's matter
        return None


def _limit(fields: Fields, path: str) -> int:
    """Output tokens at most, of each choice."""
    for name in LIMITS.get(path, OTHER_LIMITS):
        value = _value(fields, name)
        if value is not None:  # an engine may take a text for a number, and not the next field
            return min(value, UNBOUNDED) if type(value) is int and value > 0 else UNBOUNDED
    return UNBOUNDED


def _splittable(fields: Fields, path: str) -> bool:
    """Whether KV parameters describe this request fully: one prompt, one output, nothing about the prompt."""
    if path not in ("/v1/completions", "/v1/chat/completions"):
        return False
    if not WHOLE_ONLY.isdisjoint(fields) and not _plain(fields):
        return False
    prompt = fields.get("prompt", ABSENT)
    return _begins(prompt) != b"[" or _is_tokens(prompt)


def _plain(fields: Fields) -> bool:
    """Whether fields that forbid to split a request are there without effect."""
    if "kv_transfer_params" in fields or _value(fields, "prompt_logprobs") is not None:
        return False
    if _value(fields, "n") not in (None, 1) or _value(fields, "best_of") not in (None, 1):
        return False
    return not (_value(fields, "use_beam_search") or _value(fields, "echo"))


def _is_tokens(prompt: msgspec.Raw) -> bool:
    """Whether a list is one prompt of token ids, not several prompts."""
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
        part = _whole_escapes(body[at : at + TURN])
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
    """The kind of each byte. What is escaped is none; the part ends with no half of an escape."""
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


def _whole_escapes(part: Body) -> Body:
    """Without the backslash that belongs to what follows."""
    return part[:-1] if (len(part) - len(part.rstrip(b"\\"))) % 2 and len(part) > 1 else part


def _check_whole(body: Body, colons: Numbers, ends: Numbers, closed: int, text: int) -> None:
    """A colon and an end in turn, and nothing after the last end."""
    in_turn = len(colons) == len(ends) and bool((colons < ends).all() and (ends[:-1] < colons[1:]).all())
    if closed != 1 or text or not (in_turn or (len(ends) == 1 and not len(colons))):
        raise RefusedError(400, "json", NO_OBJECT)
    rest = body[int(ends[-1]) + 1 :] if len(body) - int(ends[-1]) <= TURN else b"x"
    if rest.strip(SPACE):
        raise RefusedError(400, "json", NO_OBJECT)


def _cut(body: Body, places: Numbers, ends: Numbers) -> Steps[Fields]:
    """Names and values."""
    view, fields = memoryview(body), Fields()
    for start in range(0, len(places), SOME):
        yield
        some = zip(places[start : start + SOME].tolist(), ends[start : start + SOME].tolist(), strict=True)
        for (first, last, colon), end in some:
            _add(fields, view, first, last, colon + 1, end)
    return fields


def _add(fields: Fields, view: memoryview, first: int, last: int, start: int, end: int) -> None:
    """One more: where its name is, and its value with the spaces around it."""
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
    """Refuse a field that stands twice, where parsers may disagree on which one counts.

    Where every name that we read occurs once in all of the body none of them stands twice; else no field may.
    Escapes outside of the values are in names.
    """
    if b"\\" in body and body.count(b"\\") != sum(bytes(raw).count(b"\\") for raw in fields.values()):
        raise RefusedError(400, "duplicate", "field names must stand once and without escapes")
    if any(name in fields and body.count(quoted) > 1 for name, quoted in QUOTED):
        at_once(_scan(body))
