"""Emulators as a process and as a fleet of ports: routes, limits, administration, start, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

from aiohttp import web

from headgate.core.errors import InputError, one_line
from headgate.core.policy import BatchPolicy
from headgate.cost.card import load_card
from headgate.cost.likeness import error_bar
from headgate.live.emulate import api
from headgate.live.emulate.clock import Clock, VirtualClock, WallClock
from headgate.live.emulate.engine import LATE, EmulatedEngine, Histogram
from headgate.live.emulate.faults import Faults
from headgate.live.emulate.kv import PATH, Peers
from headgate.live.emulate.metrics import PlaceMetrics, SGLangMetrics, discard, traces
from headgate.live.emulate.options import Options
from headgate.live.emulate.service import PLACE, EmulatorSetup, PortState, complete
from headgate.live.emulate.text import ByteRule, FileTokenizer, Tokens
from headgate.live.engine.reload import LOOK_EVERY, Reload, Renewals
from headgate.live.engine.settings import read_settings
from headgate.live.engine.trace import Trace
from headgate.live.files import more_files
from headgate.live.tasks import BACKLOG, Handler, end_all, listen, on_stop, says
from headgate.settings_base import checked

LOOK = 10.0  # seconds between two looks at the lateness
TOO_LATE = 0.005  # seconds at the 99th percentile
FEW = 20  # steps: too few for a percentile
KILLED = 1  # exit code of an emulated crash
LOG = logging.getLogger("headgate.emulate")
VERSION = "0.32.0"  # the vLLM whose answers these are
SGLANG = "0.5.23"  # the SGLang


def run(options: Options, say: Callable[[str], None]) -> None:
    """Serve until a signal, on uvloop where it is installed; returns when everything is closed."""
    more_files()
    loops: Any = importlib.import_module("uvloop") if find_spec("uvloop") else asyncio
    loops.run(_serve(options, say))


async def _serve(options: Options, say: Callable[[str], None]) -> None:
    stop = asyncio.Event()

    def signalled() -> None:
        if stop.is_set():
            os._exit(KILLED)
        stop.set()

    on_stop(signalled)
    if options.slow_start:
        say(f"starts in {options.slow_start:g} s")
    running = await start(options)
    if len(running.ports) == 1:
        for engine in running.engines:
            engine.on_crash = lambda: os._exit(KILLED)
    for line in (*running.describe(), *error_bar(load_card(options.card))):
        say(line)
    gc.collect()
    gc.freeze()  # what is there now stays; collections look at the rest only
    watch = asyncio.create_task(warn_when_late(running, say))
    try:
        await stop.wait()
        say(f"drains, {options.shutdown_timeout:g} s at most; a second signal ends at once")
        if not await running.drain(options.shutdown_timeout):
            say("requests were still running; they are cut off")
    finally:
        watch.cancel()
        await running.stop()


async def warn_when_late(running: Emulators, say: Callable[[str], None], every: float = LOOK) -> None:
    before = [list(engine.tally.late.counts) for engine in running.engines]
    while True:
        await asyncio.sleep(every)
        for number, engine in enumerate(running.engines):
            counts = list(engine.tally.late.counts)
            recent = Histogram(LATE)
            recent.counts = [new - old for new, old in zip(counts, before[number], strict=True)]
            before[number] = counts
            late = recent.quantile(0.99)
            if sum(recent.counts) >= FEW and late > TOO_LATE:
                say(
                    f"cannot keep up: engine {number} is over {TOO_LATE * 1e3:g} ms late (p99 {late * 1e3:g} "
                    "ms); do not trust its times (fewer streams, a free core, a lower --speed)"
                )


PATIENCE = 30.0  # seconds until a new connection must have sent its first request
KEEP_ALIVE = 75.0
TASKS: deque[asyncio.Task[None]] = deque(maxlen=64)  # so that they are not collected while they run


class Emulators(Sequence[str]):
    def __init__(self, ports: list[Port], clock: Clock, peers: Peers, kept: list[Trace]) -> None:
        self.ports, self.clock, self._peers, self._traces = ports, clock, peers, kept
        self.admin_url = ""
        self._admin: web.AppRunner | None = None
        self._following: asyncio.Task[None] | None = None

    def follow(self, path: str) -> None:
        places = [(port.place, rank) for port in self.ports for rank in range(len(port.place.engines))]
        renewals = [
            renewals_of(path, place, rank, self.clock, self._traces[number : number + 1])
            for number, (place, rank) in enumerate(places)
        ]

        async def look() -> None:
            while True:
                await asyncio.sleep(LOOK_EVERY / 2 / self.clock.speed)
                for each, engine in zip(renewals, self.engines, strict=True):
                    each.look()
                    if each.waiting:
                        engine.look()

        self._following = asyncio.create_task(look())

    async def open_admin(self, host: str, port: int) -> None:
        self._admin = web.AppRunner(admin_application(self), access_log=None)
        self.admin_url = f"http://{host}:{await listen(self._admin, host, port)}"

    def __getitem__(self, index: Any) -> Any:
        return [port.url for port in self.ports][index]

    def __len__(self) -> int:
        return len(self.ports)

    @property
    def engines(self) -> list[EmulatedEngine]:
        return [engine for port in self.ports for engine in port.place.engines]

    @property
    def faults(self) -> list[Faults]:
        return [port.place.faults for port in self.ports]

    @property
    def at_rest(self) -> bool:
        return not any(each.running or each.waiting or each.kv_usage for each in self.engines)

    def describe(self) -> list[str]:
        lines = []
        for port in self.ports:
            count = len(port.place.engines)
            lines.append(f"{port.url}  {port.place.setup.model}" + (f", {count} ranks" if count > 1 else ""))
        return [*lines, f"{self.admin_url}  admin"] if self.admin_url else lines

    async def drain(self, timeout: float) -> bool:
        for port in self.ports:
            port.place.draining = True
        end = asyncio.get_running_loop().time() + timeout
        while any(port.place.inside for port in self.ports):
            if asyncio.get_running_loop().time() >= end:
                return False
            await asyncio.sleep(0.02)
        return True

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
        await asyncio.gather(*(port.stop() for port in self.ports))
        if self._admin is not None:
            await self._admin.cleanup()
        await self._peers.close()
        for trace in self._traces:
            trace.close()


async def start(options: Options) -> Emulators:
    setup = EmulatorSetup(options)
    clock: Clock = VirtualClock() if options.virtual else WallClock(options.speed)
    tokens: Tokens = ByteRule() if options.tokenizer is None else FileTokenizer(options.tokenizer)
    peers = Peers(options.kv_hosts)
    ranks = options.engines if options.ranks else 1
    kept = traces(setup, clock, options.engines)
    hear: list[list[Trace]] = [[trace] for trace in kept] or [[]] * options.engines
    shares = [hear[first : first + ranks] for first in range(0, options.engines, ranks)]
    places = [PortState(setup, clock, tokens, peers, share) for share in shares]
    running = Emulators([Port(place) for place in places], clock, peers, kept)
    if options.slow_start:
        await asyncio.sleep(options.slow_start)
    try:
        for number, port in enumerate(running.ports):
            await port.start(options.host, options.port + number if options.port else 0)
        if options.admin_port is not None:
            await running.open_admin(options.admin_host, options.admin_port)
        if options.config:
            running.follow(options.config)
    except BaseException:
        await running.stop()
        discard(kept)
        raise
    return running


def renewals_of(path: str, place: PortState, rank: int, clock: Clock, hear: Sequence[Trace]) -> Renewals:
    setup, engine = place.setup, place.engines[rank]
    renewals = Renewals(
        Reload(path, read_settings, clock=clock.now),
        setup.settings,
        setup.from_settings,
        fallen=lambda: False,
        background=False,
    )

    def renew(now: float) -> BatchPolicy | None:
        ready, mark = renewals.take(), renewals.take_mark()
        if ready is not None:
            setup.settings = ready.settings
            place.renewals[rank] += 1
        for trace in hear:
            if ready is not None:
                trace.renewed(ready.settings.policy, ready.parameters, now)
            if mark is not None:
                trace.marked(mark, now)
        return None if ready is None else ready.policy

    engine.renew = renew
    return renewals


@asynccontextmanager
async def emulated(options: Options | None = None, **words: Any) -> AsyncIterator[Emulators]:
    running = await start(options or checked(Options, {"port": 0} | words))
    try:
        yield running
    finally:
        await running.stop()


class Listening:
    def __init__(self, app: web.Application, most: int, remedy: str, **settings: Any) -> None:
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEP_ALIVE, **settings)
        self._most, self._remedy = most, remedy
        self._listener: asyncio.Server | None = None
        self._host, self._port, self.url = "", 0, ""

    async def start(self, host: str, port: int) -> None:
        await self._runner.setup()
        assert self._runner.server is not None
        self._silent = SilentConnections(self._runner.server)
        self._host, self._port = host, port
        await self.listen()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._port}"

    async def listen(self) -> None:
        if self._listener is not None:
            return
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._accept, self._host, self._port, backlog=BACKLOG)
        except OSError as error:
            where, why = f"{self._host}:{self._port}", error.strerror or error
            raise InputError(f"cannot listen on {where}: {why}; {self._remedy}") from None
        self._port = self._listener.sockets[0].getsockname()[1]

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        if server is None or len(server.connections) >= self._most:
            return TooMany()
        handler = server()
        self._silent.watch(handler)
        return handler

    def refuse(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def cut(self) -> None:
        server = self._runner.server
        for handler in list(server.connections) if server is not None else ():
            if handler.transport is not None:
                handler.transport.abort()

    async def stop(self) -> None:
        self.refuse()
        await self._runner.cleanup()


class Port(Listening):
    def __init__(self, place: PortState) -> None:
        most = place.setup.options.max_connections
        running = {"handler_cancellation": True, "shutdown_timeout": 0.5}
        super().__init__(application(place), most, "choose another port", **running)
        self.place = place
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> None:
        await super().start(host, port)
        self.place.port = self._port
        for exports in self.place.exports:
            exports.host, exports.port = host, self._port
        for engine in self.place.engines:
            engine.on_crash = lambda: TASKS.append(asyncio.create_task(self.crash()))
        self._tasks = [asyncio.create_task(engine.run()) for engine in self.place.engines]

    async def crash(self) -> None:
        self.refuse()
        self.cut()
        for task in self._tasks:
            task.cancel()
        for engine in self.place.engines:
            engine.die("the engine has crashed")

    async def stop(self) -> None:
        self.refuse()
        await end_all(self._tasks)
        self.cut()
        await super().stop()


class TooMany(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        out = cast(asyncio.Transport, transport)  # uvloop's is not derived from it
        body = api.busy().body()
        head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
        out.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        out.close()


class SilentConnections:
    """aiohttp's handlers have no place for a timer, and one that outlives them keeps them in memory."""

    def __init__(self, server: web.Server) -> None:
        self._timers: dict[Any, asyncio.TimerHandle] = {}
        lost = server.connection_lost

        def connection_lost(handler: Any, exc: BaseException | None = None) -> None:
            self._stop(handler)
            lost(handler, exc)

        server.connection_lost = connection_lost  # type: ignore[method-assign]

    def watch(self, handler: Any) -> None:
        self._timers[handler] = asyncio.get_running_loop().call_later(PATIENCE, self._over, handler)

    def _over(self, handler: Any) -> None:
        self._stop(handler)
        under_way = getattr(handler, "_current_request", None) is not None
        silent = not under_way and not getattr(handler, "_request_count", 1)
        if silent and handler.transport is not None:
            handler.transport.close()

    def _stop(self, handler: Any) -> None:
        if (timer := self._timers.pop(handler, None)) is not None:
            timer.cancel()


def application(place: PortState) -> web.Application:
    app = web.Application(middlewares=[ERRORS], client_max_size=place.setup.options.body_limit)
    app[PLACE] = place
    metrics = (SGLangMetrics if place.setup.sglang else PlaceMetrics)(place)

    def shown(text: str) -> web.Response:
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    paths: dict[str, dict[str, Handler]] = {
        "/v1/completions": {"POST": complete},
        "/v1/chat/completions": {"POST": complete},
        "/v1/models": {"GET": _models},
        "/version": {"GET": says(lambda: {"version": VERSION})},
        "/load": {"GET": says(lambda: {"server_load": place.inside})},
        "/health": {"GET": _health},
        "/ping": {"GET": _health, "POST": _health},
        "/metrics": {"GET": says(metrics.text, shown)},
        "/tokenize": {"POST": _tokenize},
        "/detokenize": {"POST": _detokenize},
        PATH: {"POST": _kv},
    }
    if place.setup.sglang:
        for path in ("/version", "/load", "/tokenize", "/detokenize", PATH):
            del paths[path]
        tells = {"/model_info": _about_model, "/server_info": _about_server}
        about = {path: says(partial(told, place), api.as_json) for path, told in tells.items()}
        paths |= {
            "/generate": {"POST": complete, "PUT": complete},
            "/health_generate": {"GET": _health},
            **{path: {"GET": handler} for path, handler in about.items()},
            **{f"/get_{path[1:]}": {"GET": handler} for path, handler in about.items()},  # their old names
        }

    async def other(request: web.Request) -> web.Response:
        if (methods := paths.get(request.path)) is None:
            return api.detail(404, "Not Found")
        answer = api.detail(405, "Method Not Allowed")
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


def errors_as(show: Callable[[api.ProblemError], web.Response], what: str) -> Any:
    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except api.ProblemError as problem:
            return show(problem)
        except web.HTTPException as error:
            return show(api.ProblemError(error.reason, error.status, type="Bad Request"))
        except ConnectionResetError:
            if request.transport is not None:
                request.transport.close()
            return web.Response()  # no client is there to read it, and aiohttp does not log that
        except Exception as error:
            LOG.exception("%s: %s %s failed: %s", what, request.method, request.path[:80], one_line(error))
            return show(api.ProblemError("Internal server error", 500))

    return errors


ERRORS = errors_as(api.ProblemError.response, "emulator")


async def _models(request: web.Request) -> web.Response:
    place, now = request.app[PLACE], int(time.time())
    permission = {
        "id": f"modelperm-{place.fingerprint[-8:]}", "object": "model_permission", "created": now,
        "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True,
        "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False,
        "organization": "*", "group": None, "is_blocking": False,
    }  # fmt: skip
    model = {
        "id": place.setup.model,
        "object": "model",
        "created": now,
        "owned_by": place.setup.options.engine,
        "root": place.setup.card.model,
        "parent": None,
        "max_model_len": place.setup.engine.longest,
        "permission": [permission],
    }
    return web.json_response({"object": "list", "data": [model]})


async def _health(request: web.Request) -> web.Response:
    """An engine whose policy failed is not well; one that drains is well in vLLM, and not in SGLang."""
    place = request.app[PLACE]
    dead = any(engine.dead is not None for engine in place.engines)
    return web.Response(status=503 if dead or (place.setup.sglang and place.draining) else 200)


def _about_server(place: PortState) -> dict[str, Any]:
    setup, engine = place.setup, place.setup.engine
    limits = {
        "context_length": engine.max_model_len,
        "page_size": engine.block,
        "max_running_requests": engine.running,
        "max_total_num_tokens": engine.kv_tokens,
        "chunked_prefill_size": engine.batch_tokens,
        "disable_radix_cache": not engine.prefix_cache,
    }
    ranks = {"tp_size": setup.card.tensor_parallel, "dp_size": len(place.engines), "port": place.port}
    states = [{"waiting": each.waiting, "running": each.running} for each in place.engines]
    return _about_model(place) | limits | ranks | {"internal_states": states, "version": SGLANG}


def _about_model(place: PortState) -> dict[str, Any]:
    card = place.setup.card.model
    return {
        "model_path": card,
        "served_model_name": place.setup.model,
        "tokenizer_path": card,
        "is_generation": True,
        "weight_version": "default",
        "disaggregation_mode": "null",
    }


async def _tokenize(request: web.Request) -> web.Response:
    place, body = request.app[PLACE], await api.read_json(request)
    if (messages := body.get("messages")) is not None:
        if not isinstance(messages, list):
            raise api.invalid("Input should be a valid list", "body.messages")
        ids = place.tokens.chat(api.turns_of(messages)).tolist()
    else:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise api.invalid("Input should be a valid string", "body.prompt")
        ids = place.tokens.encode(prompt).tolist()
    strings = place.tokens.pieces(ids) if body.get("return_token_strs") is True else None
    length = place.setup.engine.longest
    return api.as_json({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings})


async def _detokenize(request: web.Request) -> web.Response:
    place, body = request.app[PLACE], await api.read_json(request)
    tokens = body.get("tokens")
    ids = api.prompts_of(tokens)[0] if isinstance(tokens, list) and tokens else []
    if not isinstance(ids, list) or any(id >= 2**32 for id in ids):
        raise api.invalid("Input should be a list of token ids", "body.tokens")
    return api.as_json({"prompt": place.tokens.decode(ids)})


async def _kv(request: web.Request) -> web.Response:
    place, body = request.app[PLACE], await api.read_json(request)
    exports = next((each for each in place.exports if each.id == body.get("engine")), None)
    if exports is None or exports.engine.dead is not None:
        raise api.ProblemError("no such engine", 404)
    if "free" in body:
        return api.as_json({"freed": exports.free(str(body["free"]))})
    mark = str(body.get("mark"))
    if not mark.isascii() or not mark.isdigit() or len(mark) > 20:
        raise api.invalid("Input should be a number", "body.mark")
    return api.as_json({"mark": str(exports.read(str(body.get("read")), int(mark)))})


ACTIONS = "crash|refuse|listen|drain"


def admin_application(running: Emulators) -> web.Application:
    """`GET /engines`, `POST /engines/N/faults`, `POST /engines/N/(crash|refuse|listen|drain)`."""
    app = web.Application(middlewares=[ERRORS], client_max_size=1 << 16)

    async def show(request: web.Request) -> web.Response:
        return web.json_response([_shown(port) for port in running.ports])

    async def faults(request: web.Request) -> web.Response:
        port = _port(running, request)
        try:
            port.place.faults.set(await api.read_json(request))
        except InputError as error:
            raise api.ProblemError(str(error)) from None
        return web.json_response(_shown(port))

    async def act(request: web.Request) -> web.Response:
        port, action = _port(running, request), request.match_info["action"]
        if action == "crash":
            await port.crash()
        elif action == "refuse":
            port.refuse()
        elif action == "listen" and (dead := port.place.engines[0].dead) is not None:
            raise api.ProblemError(f"{dead}; start the emulator again", 409)
        else:
            port.place.draining = action == "drain"
            if action == "listen":
                await port.listen()
        return web.json_response(_shown(port))

    app.router.add_get("/engines", show)
    app.router.add_post("/engines/{number:[0-9]{1,4}}/faults", faults)
    app.router.add_post("/engines/{number:[0-9]{1,4}}/{action:" + ACTIONS + "}", act)
    return app


def _port(running: Emulators, request: web.Request) -> Port:
    number = int(request.match_info["number"])
    if number >= len(running.ports):
        raise api.ProblemError(f"There is no port {number}; there are {len(running.ports)}.", 404)
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
                "late_p99": engine.tally.late.quantile(0.99),
                "dead": engine.dead,
            }
            for engine in place.engines
        ],
    }
