"""A prompt on one engine, its output on another: bodies of the two legs and the parameters between them.

NIXL's pull protocol: the prefill answers with opaque parameters, the decode engine pulls the KV they name.
vLLM answers 200 with wrong tokens when parameters are used twice, late, or after a rejected decode. So they
are one-shot: sent once, before their deadline, or given up.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headgate.live.route.body import TURN, Body, Steps, at_once, fields_of
from headgate.live.route.verdict import Fault, LegError

SHARE_OF_LEASE = 0.6  # after which a waiting hand-over is given up
REFUSED_LENGTH = 2147483647  # output tokens that every engine refuses, which frees the KV at its owner
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    choices: list[dict[str, Any]] = []


_PREFILLED = msgspec.json.Decoder(_Prefilled)


class KvParams:
    """The parameters of one prefill. `take` gives them out once, and never after the deadline."""

    __slots__ = ("_raw", "deadline", "owner", "taken")

    def __init__(self, raw: dict[str, msgspec.Raw], owner: int, deadline: float) -> None:
        self._raw, self.owner, self.deadline, self.taken = raw, owner, deadline, False

    def take(self, now: float) -> bytes | None:
        """The parameters as JSON for a decode; None when they are spent or late."""
        if self.taken or now >= self.deadline:
            return None
        self.taken = True
        return msgspec.json.encode(self._raw)

    def not_sent(self) -> None:
        """The decode that took them never left the router: no connection was made."""
        self.taken = False

    def give_up(self) -> bytes | None:
        """The parameters as JSON for a release, at any time; None when they are spent."""
        if self.taken:
            return None
        self.taken = True
        return msgspec.json.encode(self._raw)


def prefill_body(body: Body, reuse_tokens: bool = False) -> bytes:
    """The client's body for the prompt alone: one token, no stream, KV kept for another engine."""
    return at_once(making_prefill(body, reuse_tokens))


def making_prefill(body: Body, reuse_tokens: bool = False) -> Steps[bytes]:
    """The same in turns."""
    fields: dict[str, Any] = dict((yield from fields_of(body)))
    for name in ("stream_options", "min_tokens"):
        fields.pop(name, None)
    fields.update(stream=False, max_tokens=1, kv_transfer_params=REMOTE_DECODE)
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    if reuse_tokens:
        fields["return_token_ids"] = True
    return msgspec.json.encode(fields)


def decode_body(body: Body, params: bytes) -> bytes:
    """The client's body, byte for byte, with the parameters as one more field."""
    end, view = body.rindex(b"}"), memoryview(body)
    comma = b"" if bytes(view[max(0, end - TURN) : end]).rstrip().endswith(b"{") else b","
    return b"".join((view[:end], comma, b'"kv_transfer_params":', params, view[end:]))


def release_body(body: Body, params: bytes) -> bytes:
    """A decode that is refused for its length and so frees the KV at its owner; valid in all else."""
    return at_once(making_release(body, params))


def making_release(body: Body, params: bytes) -> Steps[bytes]:
    """The same in turns."""
    fields: dict[str, Any] = dict((yield from fields_of(body)))
    for name in ("stream_options", "min_tokens", "max_completion_tokens"):
        fields.pop(name, None)
    fields.update(stream=False, max_tokens=REFUSED_LENGTH, kv_transfer_params=msgspec.Raw(params))
    return msgspec.json.encode(fields)


def read_params(answer: bytes, owner: int, sent: float, lease: float, reuse_tokens: bool = False) -> KvParams:
    """The parameters of a prefill's answer.

    The lease began at some moment after the prefill was sent, and nobody knows how long its answer was on its
    way. So the deadline counts from when it was sent, and uses 60 % of the lease.
    """
    try:
        found = _PREFILLED.decode(answer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise LegError(Fault.GARBAGE, "the prefill's answer is not JSON") from None
    if found.kv_transfer_params is None:
        raise LegError(Fault.NO_PARAMS, "the prefill gave no KV parameters")
    raw = dict(found.kv_transfer_params)
    ids = _token_ids(found)
    if reuse_tokens and ids is not None:
        raw["prompt_token_ids"] = ids
    return KvParams(raw, owner, sent + SHARE_OF_LEASE * lease)


def _token_ids(found: _Prefilled) -> msgspec.Raw | None:
    if bytes(found.prompt_token_ids).startswith(b"["):
        return found.prompt_token_ids
    ids = found.choices[0].get("prompt_token_ids") if found.choices else None
    return msgspec.Raw(msgspec.json.encode(ids)) if isinstance(ids, list) and ids else None
