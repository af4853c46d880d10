"""Answers in OpenAI's shape with vLLM's fields, in vLLM's order."""

from __future__ import annotations

from typing import Any

import msgspec

from headgate.live.emulate.job import Job

LIKELY, UNLIKELY = -0.25, -1.75  # log probabilities of the token that was chosen and of those that were not
encode = msgspec.json.encode


def json_text(text: str) -> bytes:
    """A text as it stands inside a JSON string."""
    return encode(text)[1:-1]


class Head:
    """What all events of an answer have in common."""

    def __init__(self, id: str, created: int, model: str, fingerprint: str, chat: bool) -> None:
        self.id, self.created, self.model, self.fingerprint, self.chat = id, created, model, fingerprint, chat
        self.prefix = encode(self.fields(True))[:-1] + b',"choices":['

    def fields(self, stream: bool) -> dict[str, Any]:
        """Of the answer, or of one event."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(prompt: int, completion: int, details: bool = True) -> dict[str, Any]:
    """Token counts; the last event of a stream leaves the details out."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    return {**counts, "prompt_tokens_details": None, "completion_tokens_details": None} if details else counts


def whole(
    head: Head, choices: list[dict[str, Any]], prompt: int, completion: int, **more: Any
) -> dict[str, Any]:
    """An answer that is not streamed."""
    found = head.fields(False) | {
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": head.fingerprint,
        "usage": usage(prompt, completion),
    }
    if head.chat:
        ids = more.pop("prompt_token_ids", None)
        found |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
    more.pop("prompt_token_ids", None)
    params = more.pop("kv_transfer_params", None)
    return found | {"kv_transfer_params": params, "ec_transfer_params": None, "metrics": None} | more


def choice(
    job: Job, text: str, chat: bool, logprobs: Any, ids: list[int] | None, prompt: Any
) -> dict[str, Any]:
    """One choice of an answer that is not streamed."""
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


def stream_choice(
    job: Job, text: str, chat: bool, logprobs: Any, ids: list[int] | None, prompt: Any
) -> dict[str, Any]:
    """One choice in an event."""
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


def completion_logprobs(pieces: list[str], ids: list[int], offset: int, count: int) -> dict[str, Any]:
    """Of a completion: the chosen token, and `count` made-up others."""
    offsets, tops = [], []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece)
        tops.append({piece: LIKELY} | {f"{piece}{'?' * i}": UNLIKELY - i for i in range(1, count)})
    return {
        "text_offset": offsets,
        "token_logprobs": [LIKELY] * len(pieces),
        "tokens": pieces,
        "top_logprobs": tops,
    }


def chat_logprobs(pieces: list[str], count: int) -> dict[str, Any]:
    """Of a chat."""

    def one(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    return {
        "content": [
            one(piece, LIKELY)
            | {"top_logprobs": [one(piece + "?" * i, UNLIKELY - i if i else LIKELY) for i in range(count)]}
            for piece in pieces
        ]
    }
