"""The admin port: faults and the clock, changed while the emulators run. Bound to loopback unless told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from headgate.core.errors import InputError
from headgate.live.emulate.problems import ProblemError
from headgate.live.emulate.reading import read_json

if TYPE_CHECKING:
    from headgate.live.emulate.server import Emulators, Port

LATE = 0.99  # the share of steps that `late_p99` speaks of


def admin_application(running: Emulators) -> web.Application:
    """`GET /engines`, `POST /engines/N/faults`, `POST /engines/N/(crash|refuse|listen|drain)`, `POST /go`."""
    app = web.Application(middlewares=[_errors], client_max_size=1 << 16)

    async def show(request: web.Request) -> web.Response:
        return web.json_response([_shown(port) for port in running.ports])

    async def faults(request: web.Request) -> web.Response:
        port = _port(running, request)
        try:
            port.place.faults.set(await read_json(request))
        except InputError as error:
            raise ProblemError(str(error)) from None
        return web.json_response(_shown(port))

    async def act(request: web.Request) -> web.Response:
        port = _port(running, request)
        await ACTIONS[request.match_info["action"]](port)
        return web.json_response(_shown(port))

    async def go(request: web.Request) -> web.Response:
        running.go()
        return web.json_response({"running": True})

    app.router.add_get("/engines", show)
    app.router.add_post("/engines/{number:[0-9]{1,4}}/faults", faults)
    app.router.add_post("/engines/{number:[0-9]{1,4}}/{action:" + "|".join(ACTIONS) + "}", act)
    app.router.add_post("/go", go)
    return app


async def _refuse(port: Port) -> None:
    port.refuse()


async def _drain(port: Port) -> None:
    port.place.draining = True


async def _crash(port: Port) -> None:
    await port.crash()


async def _listen(port: Port) -> None:
    port.place.draining = False
    await port.listen()


ACTIONS: dict[str, Callable[[Port], Awaitable[None]]] = {
    "crash": _crash,
    "refuse": _refuse,
    "listen": _listen,
    "drain": _drain,
}


def _port(running: Emulators, request: web.Request) -> Port:
    number = int(request.match_info["number"])
    if number >= len(running.ports):
        raise ProblemError(f"There is no port {number}; there are {len(running.ports)}.", 404)
    return running.ports[number]


def _shown(port: Port) -> dict[str, Any]:
    place = port.place
    return {
        "url": port.url,
        "faults": place.faults.shown(),
        "draining": place.draining,
        "requests": place.inside,
        "engines": [
            {
                "running": engine.running,
                "waiting": engine.waiting,
                "kv_usage": engine.kv_usage,
                "time": engine.replica.now,
                "tokens": engine.tally.generation_tokens,
                "late_p99": engine.tally.late.quantile(LATE),
                "dead": engine.dead,
            }
            for engine in place.engines
        ],
    }


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ProblemError as problem:
        return problem.response()
