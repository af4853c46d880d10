"""A server is loaded before it is called ready, by requests that were promised nothing."""

from __future__ import annotations

import asyncio
import os

import pytest

from headgate.core.errors import InputError
from headgate.live.engine.requests import CLASS, promises
from headgate.live.engine.settings import WARM_UP, Settings
from headgate.live.vllm.refusals import OURS, WARM_FILE, Warming
from headgate.live.warm_up import warm_up


def test_its_requests_are_promised_nothing_whatever_the_settings_declare():
    settings = Settings(ttft=0.5, tbt=0.1, classes={"chat": {"ttft": 0.2}})
    terms = promises({CLASS: WARM_UP}, settings)
    assert terms.kind == WARM_UP and terms.slo.background
    assert terms.slo.first_token is None and terms.slo.between_tokens is None


def test_it_needs_no_leave_and_keeps_its_tenant():
    settings = Settings(ttft=0.5, clients_may=["tenant"])
    terms = promises({CLASS: WARM_UP, "headgate_tenant": "ann"}, settings)
    assert (terms.slo.background, terms.tenant) == (True, "ann")


def ask(middleware, path="/health", headers=()):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers)}
    asyncio.run(middleware(scope, None, send))
    return sent[0]["status"], dict(sent[0]["headers"])


async def vllm(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_health_is_503_until_the_file_is_there_and_all_else_is_served(tmp_path, monkeypatch):
    file = tmp_path / "warm"
    monkeypatch.setenv(WARM_FILE, str(file))
    middleware = Warming(vllm)
    status, headers = ask(middleware)
    assert status == 503 and headers[b"retry-after"] == b"1"
    assert ask(middleware, "/v1/completions")[0] == 200
    assert ask(middleware, headers=[(OURS, b"1")]) == (200, {OURS: os.fsencode(file)})
    file.touch()
    assert ask(middleware) == (200, {})
    file.unlink()
    assert ask(middleware)[0] == 200  # once warm, always warm


def test_without_the_variable_it_changes_nothing(monkeypatch):
    monkeypatch.delenv(WARM_FILE, raising=False)
    assert ask(Warming(vllm)) == (200, {})


@pytest.fixture
def server(aiohttp_unused_port):
    """A server that streams tokens, slowly at first; what it was asked."""
    from aiohttp import web

    port, asked = aiohttp_unused_port(), []

    async def models(request):
        if request.headers.get("Authorization") != "Bearer secret":
            return web.Response(status=401)
        return web.json_response({"data": [{"id": "m", "max_model_len": 400}]})

    async def complete(request):
        body = await request.json()
        asked.append(body)
        assert request.headers["Connection"] == "close"  # none is sent where the server closes an idle one
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"data: {}\n\n")
        await asyncio.sleep(0.3 if len(asked) < 8 else 0.01)
        await answer.write(b"data: {}\n\n")
        return answer

    async def run(work):
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            return await work(f"http://127.0.0.1:{port}/")
        finally:
            await runner.cleanup()

    return run, asked


@pytest.fixture
def aiohttp_unused_port():
    import socket

    def find():
        with socket.create_server(("127.0.0.1", 0)) as found:
            return found.getsockname()[1]

    return find


def test_rounds_go_on_until_the_longest_gap_no_longer_falls(server):
    run, asked = server
    said = []
    asyncio.run(run(lambda url: warm_up(url, 4, 30.0, "secret", said.append)))
    assert len(asked) == 8 * sum(line.startswith("round") for line in said)
    assert said[0] == "up to 4 requests at once to m, for at most 30 s"
    assert len(said) >= 4 and said[1].startswith("round 1: 8 requests, longest gap")
    assert said[-1].startswith("done after")
    for body in asked:
        assert body["vllm_xargs"] == {CLASS: WARM_UP} and body["ignore_eos"]
        assert len(body["prompt"]) + body["max_tokens"] < 400  # what the model takes
    assert len({tuple(body["prompt"]) for body in asked}) == len(asked)  # no prefix cache helps


@pytest.mark.parametrize(
    ("key", "url", "fragment"),
    [
        ("", None, "wants a key; give --api-key"),
        ("secret", "http://127.0.0.1:9", "no server answers at"),
        ("secret", "localhost:8000", "localhost:8000 is no URL; write http://localhost:8000"),
    ],
)
def test_what_is_wrong_is_one_line(server, key, url, fragment):
    run, _ = server
    with pytest.raises(InputError, match=fragment):
        asyncio.run(run(lambda found: warm_up(url or found, 2, 10.0, key, print)))


def test_no_answer_in_time_is_said(server):
    run, _ = server
    with pytest.raises(InputError, match="no request was answered within"):
        asyncio.run(run(lambda url: warm_up(url, 2, 0.05, "secret", print)))
