"""What clients hear of us: that a request was turned away, and that a server is not warm yet."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

REFUSED = "headgate_refused"  # the stop reason by which the API server's side knows it
Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


def tell_refused(requests: Sequence[Any], outputs: dict[int, Any]) -> None:
    """By front end. An answer holds one token, which no client sees: a stream drops answers without any."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    for request in requests:
        token = list((request.prompt_token_ids or [0])[-1:])
        answer = EngineCoreOutput(
            request.request_id, token, finish_reason=FinishReason.ABORT, stop_reason=REFUSED
        )
        client = outputs.setdefault(request.client_index, EngineCoreOutputs())
        client.outputs = [*client.outputs, answer]


class Refusals:
    """ASGI middleware: an answer that was refused before its first token becomes a 503 or 429.

    The status line is held back until the first part of the body is there, streamed or not. A chat stream
    begins with the role of the speaker, sent together with the first token: it is held back with it.
    Everything else passes unchanged.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        from headgate.live.vllm.settings import read_settings

        self._app, self._status = app, read_settings().refuse or 503

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("method") != "POST":
            await self._app(scope, receive, send)
            return
        held: list[Message] = []  # the status line, and the role
        refused = False

        async def sent(message: Message) -> None:
            nonlocal refused
            body = message.get("body", b"")
            if refused:
                return
            if message["type"] == "http.response.start" or (held and _only_role(body)):
                held.append(message)
                return
            if held and REFUSED.encode() in body:
                refused = True
                await self._refuse(send)
                return
            while held:
                await send(held.pop(0))
            await send(message)

        await self._app(scope, receive, sent)

    async def _refuse(self, send: Send) -> None:
        error = {
            "message": "the first token could not come within the promised time; try again or elsewhere",
            "type": "overloaded",
            "param": None,
            "code": self._status,
        }
        kind = (b"content-type", b"application/json")
        await _answer(send, self._status, json.dumps({"error": error}).encode(), kind)


# -- not ready before it is warm

WARM_FILE = "HEADGATE_WARM"  # the environment variable that names a file; it is there when the server is warm
OURS = b"x-headgate-warm-up"  # a header: it asks whether vLLM is up, and the answer names the file


class Warming:
    """ASGI middleware: until a file is there, /health answers 503. All else is served as it comes."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._file = app, os.environ.get(WARM_FILE)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if self._file is None or scope["type"] != "http" or scope.get("path") != "/health":
            await self._app(scope, receive, send)
        elif os.path.exists(self._file):
            self._file = None
            await self._app(scope, receive, send)
        elif any(name == OURS for name, _ in scope["headers"]):
            mark = (OURS, self._file.encode())

            async def marked(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", []), mark]}
                await send(message)

            await self._app(scope, receive, marked)
        else:
            await _answer(send, 503, b"")


async def _answer(send: Send, status: int, body: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [*more, (b"content-length", str(len(body)).encode()), (b"retry-after", b"1")]  # seconds
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _only_role(body: bytes) -> bool:
    return b'"role":"assistant"' in body and body.count(b"data: ") == 1 and b'"content":""' in body
