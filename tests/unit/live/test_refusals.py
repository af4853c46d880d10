"""From a refused answer to an HTTP status: streamed or not, and nothing else is touched."""

from __future__ import annotations

import asyncio
import json

import pytest

from headgate.live.vllm.refusals import REFUSED, Refusals

START = {"type": "http.response.start", "status": 200, "headers": []}


def through(messages, method="POST", status=503):
    """What a client is sent when the application sends these messages."""
    got = []

    async def app(scope, receive, send):
        for message in messages:
            await send(message)

    async def send(message):
        got.append(message)

    refusals = Refusals(app)
    refusals._status = status
    asyncio.run(refusals({"type": "http", "method": method}, None, send))
    return got


def body(text, more=False):
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


ROLE = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
PLAIN = json.dumps({"choices": [{"text": "", "finish_reason": "abort", "stop_reason": REFUSED}]})


@pytest.mark.parametrize("status", [503, 429])
@pytest.mark.parametrize(
    "messages",
    [
        [START, body(PLAIN)],
        [START, body("data: " + PLAIN + "\n\n", True), body("data: [DONE]\n\n", True), body("")],
        [START, body(ROLE, True), body("data: " + PLAIN + "\n\n", True), body("")],
    ],
    ids=["whole", "streamed", "chat"],
)
def test_a_refused_request_gets_its_status(status, messages):
    start, answer = through(messages, status=status)
    assert start["status"] == status
    assert dict(start["headers"])[b"retry-after"] == b"1"
    assert json.loads(answer["body"])["error"]["code"] == status


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_other_answers_pass_unchanged(method):
    messages = [START, body("data: a\n\n", True), body("data: " + PLAIN, True), body("")]
    assert through(messages, method) == messages
    chat = [START, body(ROLE, True), body("data: b\n\n", True), body("")]
    assert through(chat, method) == chat
