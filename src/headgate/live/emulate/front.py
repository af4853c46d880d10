"""The HTTP application of one port: paths, methods and errors as vLLM has them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from headgate.core.errors import one_line
from headgate.live.emulate.bodies import prompts_of, turns_of
from headgate.live.emulate.completions import complete
from headgate.live.emulate.metrics import PlaceMetrics
from headgate.live.emulate.peers import PATH
from headgate.live.emulate.place import PLACE, Place
from headgate.live.emulate.problems import ProblemError, detail, invalid
from headgate.live.emulate.reading import read_json

LOG = logging.getLogger("headgate.emulate")
VERSION = "0.32.0"  # the vLLM whose answers these are
PROMETHEUS = "text/plain; version=1.0.0; charset=utf-8"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(place: Place) -> web.Application:
    """All paths of one port."""
    app = web.Application(middlewares=[_errors], client_max_size=place.made.options.body_limit)
    app[PLACE] = place
    metrics = PlaceMetrics(place)

    async def show_metrics(request: web.Request) -> web.Response:
        return web.Response(text=metrics.text(), headers={"Content-Type": PROMETHEUS})

    paths: dict[str, dict[str, Handler]] = {
        "/v1/completions": {"POST": complete},
        "/v1/chat/completions": {"POST": complete},
        "/v1/models": {"GET": _models},
        "/version": {"GET": _version},
        "/load": {"GET": _load},
        "/health": {"GET": _health},
        "/ping": {"GET": _health, "POST": _health},
        "/metrics": {"GET": show_metrics},
        "/tokenize": {"POST": _tokenize},
        "/detokenize": {"POST": _detokenize},
        PATH: {"POST": _kv},
    }

    async def other(request: web.Request) -> web.Response:
        methods = paths.get(request.path)
        if methods is None:
            return detail(404, "Not Found")
        answer = detail(405, "Method Not Allowed")
        answer.headers["Allow"] = ",".join(methods)
        return answer

    for path, methods in paths.items():
        for method, handler in methods.items():
            app.router.add_route(method, path, handler, expect_handler=_expect)
    app.router.add_route("*", "/{rest:.*}", other, expect_handler=_expect)
    return app


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Say "go on" where a client waits for it; any other expectation is ignored, as vLLM's server does."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    return None


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A client's mistake is an error in vLLM's shape; a fault of ours is a 500 and a line in the log."""
    try:
        return await handler(request)
    except ProblemError as problem:
        return problem.response()
    except web.HTTPException as error:
        return ProblemError(error.reason, error.status, type="Bad Request").response()
    except ConnectionResetError:
        if request.transport is not None:
            request.transport.close()
        return web.Response()  # nobody is there to read it, and aiohttp does not log that
    except Exception as error:
        LOG.exception("emulator: %s %s failed: %s", request.method, request.path[:80], one_line(error))
        return ProblemError("Internal server error", 500).response()


async def _models(request: web.Request) -> web.Response:
    place, now = request.app[PLACE], int(time.time())
    permission = {
        "id": f"modelperm-{place.fingerprint[-8:]}",
        "object": "model_permission",
        "created": now,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    model = {
        "id": place.made.model,
        "object": "model",
        "created": now,
        "owned_by": "vllm",
        "root": place.made.card.model,
        "parent": None,
        "max_model_len": place.made.engine.longest,
        "permission": [permission],
    }
    return web.json_response({"object": "list", "data": [model]})


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": VERSION})


async def _load(request: web.Request) -> web.Response:
    return web.json_response({"server_load": request.app[PLACE].inside})


async def _health(request: web.Request) -> web.Response:
    """An engine whose policy failed is not well; one that drains says it is, as vLLM does."""
    dead = any(engine.dead is not None for engine in request.app[PLACE].engines)
    return web.Response(status=503 if dead else 200)


async def _tokenize(request: web.Request) -> web.Response:
    place, body = request.app[PLACE], await read_json(request)
    if body.get("messages") is not None:
        messages = body["messages"]
        if not isinstance(messages, list):
            raise invalid("Input should be a valid list", "body.messages")
        ids = place.tokens.chat(turns_of(messages)).tolist()
    else:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise invalid("Input should be a valid string", "body.prompt")
        ids = place.tokens.encode(prompt).tolist()
    strings = place.tokens.pieces(ids) if body.get("return_token_strs") is True else None
    length = place.made.engine.longest
    return _json({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings})


async def _detokenize(request: web.Request) -> web.Response:
    place, body = request.app[PLACE], await read_json(request)
    tokens = body.get("tokens")
    ids = prompts_of(tokens)[0] if isinstance(tokens, list) and tokens else []
    if not isinstance(ids, list) or any(id >= 2**32 for id in ids):
        raise invalid("Input should be a list of token ids", "body.tokens")
    return _json({"prompt": place.tokens.decode(ids)})


async def _kv(request: web.Request) -> web.Response:
    """Another process reads KV of ours, or says that it will not."""
    place, body = request.app[PLACE], await read_json(request)
    exports = next((each for each in place.exports if each.id == body.get("engine")), None)
    if exports is None or exports.engine.dead is not None:
        raise ProblemError("no such engine", 404)
    if "free" in body:
        return _json({"freed": exports.free(str(body["free"]))})
    mark = str(body.get("mark"))
    if not mark.isascii() or not mark.isdigit() or len(mark) > 20:
        raise invalid("Input should be a number", "body.mark")
    return _json({"mark": str(exports.read(str(body.get("read")), int(mark)))})


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
