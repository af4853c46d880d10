"""What the router reads of a request's body; the bytes themselves are passed on untouched."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from headgate.live.route.answers import RefusedError

DEPTH = 64
FIELDS = 10_000  # of the body itself, not of what is in it; each takes 0.6 us of the event loop
NOT_STRUCTURE = bytes(sorted(set(range(256)) - set(b'[]{}":')))
STEP = bytes.maketrans(b'[{]}":', b"\x01\x01\xff\xff\x00\x00")  # what a character adds to the depth, as int8
BLOCK = 1 << 16  # of them that are looked at together
LOOKED_AT = (
    "model", "prompt", "messages", "input", "max_tokens", "max_completion_tokens", "max_output_tokens",
    "stream", "n", "best_of", "use_beam_search", "echo", "prompt_logprobs", "kv_transfer_params", "metadata",
    "cache_salt", "tools", "prompt_cache_key", "user", "ec_transfer_params", "vllm_xargs",
)  # fmt: skip
QUOTED = [(name, b'"%b"' % name.encode()) for name in LOOKED_AT]
WHOLE_ONLY = frozenset(("kv_transfer_params", "prompt_logprobs", "n", "best_of", "use_beam_search", "echo"))
UNBOUNDED = 1 << 20  # output tokens of a request without a limit
ABSENT = msgspec.Raw()


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
Fields = dict[str, msgspec.Raw]  # lengths of texts are taken from their raw bytes


class Asked(msgspec.Struct, frozen=True):
    """One request as the gate and the relay need it."""

    body: bytes
    model: str
    stream: bool
    prompt_bytes: int  # of the prompt or the messages as JSON
    limit: int  # output tokens at most
    splittable: bool  # may its prompt and its output be on two engines
    field_class: str | None  # metadata.class
    prompt_tokens: int | None = None  # exact, where the prompt is a list of token ids
    text: msgspec.Raw = ABSENT  # the prompt or the messages as JSON
    salt: tuple[msgspec.Raw, ...] = ()  # what else decides whether two equal prompts have the same KV
    session: msgspec.Raw = ABSENT  # prompt_cache_key or user


def read_body(body: bytes, path: str, allow_kv_params: bool = False) -> Asked:
    """Understand a JSON body once. Refuses what is no object, too deep or too broad, or repeats a field."""
    counted = None if _is_small(body) else _count_fields(body)
    try:
        fields = _TOP.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise RefusedError(400, "json", "the body is not a JSON object") from None
    _check_duplicates(body, fields, counted)
    if not allow_kv_params:
        _check_handed(fields)
    get = fields.get
    text = get("prompt") or get("messages") or get("input") or ABSENT
    model = _value(fields, "model")
    return Asked(
        body=body,
        model=model if isinstance(model, str) else "",
        stream=_value(fields, "stream") is True,
        prompt_bytes=len(bytes(text)),
        limit=_limit(fields),
        splittable=_splittable(fields, path),
        field_class=_field_class(fields),
        prompt_tokens=_token_ids(get("prompt", ABSENT)),
        text=text,
        salt=(get("cache_salt", ABSENT), get("tools", ABSENT)),
        session=get("prompt_cache_key") or get("user", ABSENT),
    )


def _value(fields: Fields, name: str) -> Any:
    """One field decoded; None for null or a missing one. A list or an object stays as it is."""
    raw = fields.get(name)
    if raw is None or bytes(memoryview(raw)[:1]) in (b"[", b"{"):
        return raw
    try:
        return _ANY.decode(raw)
    except (msgspec.DecodeError, ValueError):
        raise RefusedError(400, "json", "the body is not a JSON object") from None


def _check_handed(fields: Fields) -> None:
    """Refuse parameters of connectors, wherever the engine would find them."""
    try:
        extra = _HANDED.decode(fields.get("vllm_xargs", b"null"))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise RefusedError(400, "json", "vllm_xargs is not a JSON object") from None
    for name in _Handed.__struct_fields__:
        if _value(fields, name) is not None or getattr(extra, name, None) is not None:
            raise RefusedError(400, "kv_params", f"{name} is not accepted from clients")


def _field_class(fields: Fields) -> str | None:
    try:
        return _METADATA.decode(fields.get("metadata", b"{}")).named
    except (msgspec.DecodeError, ValueError):  # what else it may be is the engine's matter
        return None


def _limit(fields: Fields) -> int:
    """Output tokens at most, of each choice."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = _value(fields, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return min(value, UNBOUNDED)
    return UNBOUNDED


def _splittable(fields: Fields, path: str) -> bool:
    """Whether KV parameters describe this request fully: one prompt, one output, nothing about the prompt."""
    if path not in ("/v1/completions", "/v1/chat/completions"):
        return False
    if not WHOLE_ONLY.isdisjoint(fields) and not _plain(fields):
        return False
    prompt = fields.get("prompt", ABSENT)
    return not bytes(prompt).startswith(b"[") or _is_tokens(prompt)


def _plain(fields: Fields) -> bool:
    """Whether fields that forbid to split a request are there without effect."""
    if "kv_transfer_params" in fields or _value(fields, "prompt_logprobs") is not None:
        return False
    if _value(fields, "n") not in (None, 1) or _value(fields, "best_of") not in (None, 1):
        return False
    return not (_value(fields, "use_beam_search") or _value(fields, "echo"))


def _is_tokens(prompt: msgspec.Raw) -> bool:
    """Whether a list is one prompt of token ids, not several prompts."""
    inside = bytes(prompt)[1:].lstrip()
    return bool(inside) and inside[:1] in b"0123456789"


def _token_ids(prompt: msgspec.Raw) -> int | None:
    if not bytes(prompt).startswith(b"[") or not _is_tokens(prompt):
        return None
    return bytes(prompt).count(b",") + 1


def _is_small(body: bytes) -> bool:
    """Few brackets and colons: it can be neither deep nor have many fields, whatever its texts say."""
    return body.count(b"[") + body.count(b"{") <= DEPTH and body.count(b":") <= FIELDS


def _count_fields(body: bytes) -> int:
    """Fields of the body itself. Refuses deep nesting and too many fields before anything is made of them."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, NOT_STRUCTURE)
    marks, steps = np.frombuffer(plain, dtype=np.uint8), np.frombuffer(plain.translate(STEP), dtype=np.int8)
    depth = fields = text = 0
    for start in range(0, len(plain), BLOCK):
        block = marks[start : start + BLOCK]
        texts = (text + (block == ord('"')).cumsum(dtype=np.uint8)) & 1  # 1 from a quote to the next one
        outside = texts == 0
        depths = depth + (steps[start : start + BLOCK] * outside).cumsum(dtype=np.int32)
        if int(depths.max()) > DEPTH:
            raise RefusedError(400, "depth", f"the body nests deeper than {DEPTH} levels")
        fields += int(np.count_nonzero((block == ord(":")) & outside & (depths == 1)))
        if fields > FIELDS:
            raise RefusedError(400, "fields", f"the body has more than {FIELDS} fields")
        depth, text = int(depths[-1]), int(texts[-1])
    return fields


def _check_duplicates(body: bytes, fields: Fields, counted: int | None) -> None:
    """Refuse a field that stands twice, where parsers may disagree on which one counts.

    Linear, because a body is hostile and the loop waits for it. Where every name that we read occurs once in
    all of the body none of them stands twice; else no field may. Escapes outside of the values are in names.
    """
    if b"\\" in body and body.count(b"\\") != sum(bytes(raw).count(b"\\") for raw in fields.values()):
        raise RefusedError(400, "duplicate", "field names must stand once and without escapes")
    if any(name in fields and body.count(quoted) > 1 for name, quoted in QUOTED):
        there = _count_fields(body) if counted is None else counted
        if there > len(fields):
            raise RefusedError(400, "duplicate", "a field stands twice in the body")
