"""The router as a whole: its parts, their start and end, reload and drain; its server and TLS."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import aiohttp
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from headgate.core.errors import InputError
from headgate.live.route.classes import Classes, Keys, read_keys
from headgate.live.route.config import Addresses, Config, EngineAt, FrontSettings, address, changes, client_at
from headgate.live.route.deliver.connections import KEEP_ALIVE, Connections
from headgate.live.route.deliver.legs import Legs, RoutedRequest, TenantBounds, TenantLimits
from headgate.live.route.deliver.service import Service
from headgate.live.route.engines import EngineWatch, Upstream, discover, engine_key, refuse_handover
from headgate.live.route.front import Admin, Front
from headgate.live.route.gate.gate import EngineState, Gate
from headgate.live.route.gate.policy import LivePolicy
from headgate.live.route.gate.queue import UNBOUNDED
from headgate.live.route.observe import JsonLines, RouterMetrics, refusal_record
from headgate.live.route.replicas import ReplicaStore
from headgate.live.route.request import BodyBytes, RefusedError, Shares, request_id
from headgate.live.route.view.counters import RouterView
from headgate.live.scaling import ANY, PoolScaling
from headgate.live.tasks import Tasks, end_all, keep, listen
from headgate.methods.scaling import DECODE, PREFILL, Seen, read_scaling

app_log = logging.getLogger("headgate.route")
LAST_WORDS = 2.0  # seconds at the end: for clients to read their error, and for KV to be released


class RouterApp:
    def __init__(
        self,
        config: Config,
        reread: Callable[[], Config] | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        self.config, self._reread, self._sockets = config, reread, [*sockets]
        self.now = time.monotonic
        self.origin = self.now() - time.time()  # times of the trace go on over restarts
        self.keys = read_keys(config.front.key_file)
        self.classes = Classes(config, self.keys.required)
        self.metrics = RouterMetrics()
        self.view = RouterView(self)
        self.access_log, self.trace = JsonLines(config.front.access_log), JsonLines(config.front.trace)
        self.body_bytes = BodyBytes(config.limits.inflight_bytes)
        self.limits = TenantLimits()
        self._set_limits()
        self.upstreams: dict[int, Upstream] = {}
        self.draining = False
        self.replaced = False  # another process has the listening sockets, this one serves what it has
        self.replicas: ReplicaStore | None = None
        self.scaling: PoolScaling | None = None
        self._ended, self._ended_tokens = 0, 0  # requests that brought output, and its tokens
        self._changing = asyncio.Lock()  # one change of the engines at a time
        self._runners: list[web.BaseRunner] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        engines = await discover(self.config)
        if not engines:
            raise InputError("no engine was found; check [discovery] or give --engine")
        self._make_parts(len(engines))
        for spec in engines:
            self._add(spec)
        await self.watch.start(self.upstreams.values())
        refuse_handover(self.upstreams.values(), self.policy.router.hands_over)
        if self.config.replicas.store is not None:
            self.replicas = ReplicaStore(self.config.replicas, self)
            await self.replicas.start()
        self.scaling = self._make_scaling(self.config)
        await self._listen()
        for line in self.config.doubts(self.keys.names):
            app_log.warning("%s", line)
        self.view.sample(self.now())
        self._tasks += [asyncio.create_task(self._follow()), asyncio.create_task(self._tidy())]

    def _make_parts(self, engines: int) -> None:
        config, front = self.config, self.config.front
        self.policy = LivePolicy(self.config, engines)  # first: a mistake of the user ends here
        tls = engine_tls(front)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE, ssl=tls)
        self.connections = Connections(tls)
        self.session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.config.limits.connect),
        )
        self.gate = Gate(self.policy.router, config.kinds, limits=config.class_limits, clock=self.now)
        self.watch = EngineWatch(self.session, config.health, self.set_room, self.now)
        self.legs = Legs(self.connections, config, self.metrics, self.watch.tell, self.now, self.upstreams)
        self.service = Service(self.gate, self.upstreams, self.legs, self.now)
        self.front = Front(self)
        self.server = GuardedServer(self.front.handle, front, server_tls(front))

    async def _listen(self) -> None:
        front = self.config.front
        runner = web.ServerRunner(self.server, shutdown_timeout=LAST_WORDS)
        self.admin = Admin(self)
        admin = web.AppRunner(self.admin.application(), access_log=None, shutdown_timeout=LAST_WORDS)
        self._runners += [runner, admin]
        own, operator = self._sockets or (None, None)
        self.port = await listen(runner, front.host, front.port, own)
        self.admin_port = await listen(admin, *address(front.admin), operator)

    # -- engines

    def _add(self, spec: EngineAt) -> Upstream:
        engine_key(spec)  # a missing key is an error before the gate knows the engine
        prompts = spec.prompts_at_once or self.policy.prompts_at_once(spec.slots)
        state = EngineState(spec.slots, prompts, spec.role, group=spec.kv_group or "")
        state.up = False
        upstream = Upstream(self.gate.add_engine(state), spec)
        self.upstreams[upstream.id] = upstream
        return upstream

    def set_room(self, upstream: Upstream) -> None:
        if upstream.retired:
            return
        most, prompts = self.room_of(upstream)
        shared = prompts if self.replicas is not None else None
        self.gate.set_engine(upstream.id, up=upstream.up(self.now()), most=most, prompts=shared)

    def room_of(self, upstream: Upstream) -> tuple[int, int]:
        spec, allowed = upstream.spec, upstream.slots(self.now())
        most = allowed if allowed < spec.slots else UNBOUNDED
        prompts = spec.prompts_at_once or self.policy.prompts_at_once(spec.slots)
        return (most, prompts) if self.replicas is None else self.replicas.room(upstream, most, prompts)

    @property
    def leaving(self) -> bool:
        return self.draining or self.replaced

    def drain_engine(self, upstream: Upstream, draining: bool) -> None:
        upstream.draining = draining
        self.watch.tell(upstream)

    def _set_engines(self, specs: tuple[EngineAt, ...]) -> None:
        for spec in specs:
            engine_key(spec)  # all of them, before anything changes
        absent = {upstream.url: upstream for upstream in self.upstreams.values() if not upstream.retired}
        for spec in specs:
            if (known := absent.pop(spec.url, None)) is None:
                app_log.warning("engine %s is added", spec.url)
                self.watch.add(self._add(spec))
            elif known.spec != spec:
                known.spec = spec
                self.gate.set_engine(
                    known.id,
                    slots=spec.slots,
                    prompts=spec.prompts_at_once,
                    role=spec.role,
                    group=spec.kv_group or "",
                )
                self.set_room(known)
        for gone in absent.values():
            app_log.warning("engine %s is drained and retired", gone.url)
            gone.retired, gone.healthy = True, False
            self.watch.drop(gone)
            self.gate.retire(gone.id)

    # -- how many there should be

    def _pools(self) -> dict[str, int]:
        members = [each.id for each in self.upstreams.values() if not each.retired]
        roles = [self.gate.roster.member(id).role for id in members]
        first = roles.count(PREFILL)
        return {PREFILL: first, DECODE: len(roles) - first} if first else {ANY: len(roles)}

    def _make_scaling(self, config: Config) -> PoolScaling | None:
        if (table := config.scaling) is None:
            return None
        card = table.card or config.router.card
        assert card is not None  # the configuration was checked
        rule = read_scaling(table.rule)
        return PoolScaling(rule, card, config.fewest_slots, table.budget, table.model, self._pools())

    def _set_pools(self) -> None:
        if self.scaling is not None and self.scaling.pools.keys() != self._pools().keys():
            self.scaling = self._make_scaling(self.config)

    def _look_at_load(self, now: float) -> None:
        if self.scaling is None or not self.scaling.due(now):
            return
        service, loads = self.service, [each.load for each in self.upstreams.values() if not each.retired]
        seen = Seen(service.came, service.came_tokens, self._ended, self._ended_tokens)
        waiting = len(self.gate.roster.waiting) + sum(load.waiting for load in loads)
        self.scaling.look(now, seen, waiting, sum(load.running for load in loads))

    # -- while it runs

    async def reload(self) -> list[str]:
        """Read the configuration again, check all of it, then apply it. A bad one changes nothing."""
        async with self._changing:
            try:
                new = self._reread() if self._reread is not None else self.config
                differences = changes(self.config, new)
                keys, engines = read_keys(new.front.key_file), await discover(new)
                if not engines:
                    raise InputError("no engine would be left; keep at least one")
                self.policy.check(new, len(engines))
                self._make_scaling(new)
                for spec in engines:
                    engine_key(spec)
            except InputError as error:
                self.metrics.reloads.labels("refused").inc()
                app_log.error("reload: %s; the old configuration stays", error)
                raise
            self._apply(new, keys, engines)
            for line in differences:
                app_log.warning("reload: %s", line)
            return differences

    def _apply(self, new: Config, keys: Keys, engines: tuple[EngineAt, ...]) -> None:
        old, self.config, self.keys = self.config, new, keys
        self.classes = Classes(new, keys.required)
        self._set_limits()
        self.legs.config, self.watch.health = new, new.health
        self.body_bytes.most, self.service.budget.share = new.limits.inflight_bytes, new.limits.retry_share
        self.front.requests.most, self.front.requests.each = new.limits.inflight, new.limits.client_inflight
        self.gate.set_classes(new.kinds, new.class_limits)
        self._set_engines(engines)
        if old.router != new.router or old.classes != new.classes:
            self.policy.swap(new, len(engines), self.gate)
        if old.scaling != new.scaling or old.router != new.router:
            self.scaling = self._make_scaling(new)
        self._set_pools()
        self.metrics.reloads.labels("done").inc()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self.config.discovery.every)
            if self.config.discovery.file or self.config.discovery.dns:
                async with self._changing:  # else a reload meanwhile would be undone by what is found now
                    try:
                        if engines := await discover(self.config):
                            self._set_engines(engines)
                            self._set_pools()
                    except InputError as error:
                        app_log.error("discovery: %s; the engines stay as they are", error)
                    except Exception:
                        app_log.exception("discovery failed; the engines stay as they are")

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.access_log.flush()
            self.trace.flush()
            self.view.sample(self.now())
            try:
                self._look_at_load(self.now())
            except Exception:
                app_log.exception("engines_needed stays as it is")
            self.connections.forget_idle()
            self.server.cut_hung_up()

    def _set_limits(self) -> None:
        every = (*self.config.classes, self.config.default)
        addresses = self.config.address_bounds
        self.address_bounds, self.by_address = addresses, addresses != Addresses()
        self.limits.set(
            {key.name: TenantBounds.of(key.limits) for key in self.keys.all},
            TenantBounds.of(self.config.tenants),
            TenantBounds.of(addresses),
            {each.name: each.tokens for each in every if each.tokens},
        )

    def words_for(self, job: RoutedRequest) -> dict[str, str]:
        """What engines with the plug-in are told of a request, "" where it must say nothing of that.

        Of classes where the file has some, of tenants where keys or a header name them; else what clients say
        is the engine's matter. Where engines are told nothing, what clients say is dropped all the same: a
        plug-in that shows no metrics would believe it.
        """
        words = {}
        if self.config.classes:
            words["headgate_class"] = "" if job.kind.name == self.config.default.name else job.kind.name
        if self.keys.required or self.config.tenants.header is not None:
            words["headgate_tenant"] = job.tenant
        if not words:
            return words
        tells, engines = self.config.front.tell_engines, self.upstreams.values()
        told = tells == "always" or (tells == "auto" and any(each.reads_words for each in engines))
        return words if told else dict.fromkeys(words, "")

    @property
    def words_into(self) -> Sequence[str]:
        """The fields that engines hand to the plug-in: which engine a request will have is not known yet."""
        kinds = {engine.sglang for engine in self.upstreams.values()}
        return [name for name, kind in (("vllm_xargs", False), ("custom_params", True)) if kind in kinds]

    def wrote(self, job: RoutedRequest) -> None:
        now, kind, kept = self.now(), job.kind.name, None
        self.metrics.request_ended(kind, job.outcome)
        ended = self.metrics.ended(kind)
        ended.total.observe(now - job.arrived)
        if job.placed is not None:
            ended.queued.observe(job.placed - job.arrived)
        if job.first_token is not None and job.asked.stream:
            ended.first_token.observe(job.first_token - job.arrived)
        if job.output or job.counted:
            ended.prompt_tokens.inc(job.prompt)
            ended.output_tokens.inc(job.output)
            self._ended += 1
            self._ended_tokens += job.output
            if job.tenant:
                self.metrics.served(job.tenant, job.prompt, job.output)
        if job.kind.ttft is not None and job.asked.stream:
            took = (job.first_token or now) - job.arrived
            if job.first_token is not None or took > job.kind.ttft or job.outcome in ("refused", "failed"):
                kept = job.first_token is not None and took <= job.kind.ttft
                self.metrics.promises.labels(kind, "ttft", "true" if kept else "false").inc()
        self.view.ended(job, kept)
        if self.access_log.wanted:
            self.access_log.write(job.log_record(now))
        if self.trace.wanted:
            mean = self.service.estimates.output(kind)
            self.trace.write(job.trace_record(now, self.origin, self.config.router.name, mean))

    def wrote_refusal(self, request: web.BaseRequest, refused: RefusedError, began: float) -> None:
        id = request_id(request.headers.get("x-request-id"))
        self.view.refused(id, refused)
        if self.access_log.wanted:
            path = request.raw_path.partition("?")[0]
            self.access_log.write(refusal_record(time.time(), self.now() - began, path, id, refused))

    # -- the end

    async def drain(self) -> bool:
        front = self.config.front
        self.draining = True
        await asyncio.sleep(front.drain_delay)
        self.front.refusing = True
        deadline = self.now() + front.drain_timeout
        while self.front.inflight and self.now() < deadline:
            await asyncio.sleep(0.05)
        clean = not self.front.inflight
        self._cut()
        return clean

    async def finish(self) -> None:
        """Answers tell clients to close their connections, so no request meets one closed for this."""
        self.replaced = self.legs.closing = True
        for runner in self._runners:
            for site in runner.sites:
                await site.stop()
        deadline = self.now() + self.config.front.drain_timeout
        while self.server.open.held and self.now() < deadline:
            await asyncio.sleep(0.05)

    def _cut(self) -> None:
        self.front.refusing = True
        self.gate.shut()
        self.legs.break_off()

    async def stop(self) -> None:
        self.draining = True
        if hasattr(self, "front"):
            self._cut()
            await self.watch.stop()
        await end_all(self._tasks)
        for runner in self._runners:
            await runner.cleanup()
        if hasattr(self, "service"):
            await self.service.splitter.stop(LAST_WORDS)
        if hasattr(self, "session"):
            self.connections.forget_idle(0.0)
            await self.session.close()
        if self.replicas is not None:
            await self.replicas.stop()
        self.access_log.close()
        self.trace.close()


# -- the HTTP server: limits that aiohttp lacks

server_log = logging.getLogger("headgate.route.http")
server_log.addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)
# what is no HTTP is answered with 400; a log of it would hold a client's raw bytes
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
LINGER = 2.0  # seconds for which the rest of a refused body is read
BUFFER = 1 << 16


class GuardedServer(web.Server):
    """Connections count from their acceptance on, TLS handshake included."""

    def __init__(self, handler: Handler, front: FrontSettings, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,  # a client that hangs up cancels its handler
            max_line_size=front.header_limit,
            max_field_size=front.header_limit,
            max_headers=front.headers,
            keepalive_timeout=front.keep_alive,
            lingering_time=LINGER,
            read_bufsize=BUFFER,
            auto_decompress=False,
            access_log=None,
            logger=server_log,
        )
        self.refused = 0
        self.open = Shares(front.connections, front.client_connections)
        self._front, self._tls = front, tls
        self._clients: dict[RequestHandler, str] = {}
        self._guards: dict[RequestHandler, asyncio.TimerHandle] = {}
        self._handshakes: Tasks = set()

    def __call__(self) -> RequestHandler:
        return super().__call__() if self._tls is None else _Accepted(self)  # type: ignore[return-value]

    def accepted(self, accepted: socket.socket, peer: object) -> None:
        client = client_at(peer)
        if not self.open.take(client):
            self.refused += 1
            accepted.close()
            return
        keep(self._handshakes, self._shake(accepted, client))

    async def _shake(self, accepted: socket.socket, client: str) -> None:
        handler = super().__call__()
        self._clients[handler] = client
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handler, accepted, ssl=self._tls, ssl_handshake_timeout=self._front.head_timeout
            )
        except BaseException as error:
            self._gone(handler)
            if not isinstance(error, OSError):
                raise
            self.refused += 1  # of TLS, too: it is no handshake, or none in time

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if handler not in self._clients:
            client = client_at(transport.get_extra_info("peername"))
            if not self.open.take(client):
                self.refused += 1
                transport.abort()
                return
            self._clients[handler] = client
        loop = asyncio.get_running_loop()
        self._guards[handler] = loop.call_later(self._front.head_timeout, self._check, handler, transport)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        self.began(handler)
        self._gone(handler)
        super().connection_lost(handler, exc)

    async def shutdown(self, timeout: float | None = None) -> None:
        await end_all(self._handshakes)
        await super().shutdown(timeout)

    def began(self, handler: RequestHandler) -> None:
        if (guard := self._guards.pop(handler, None)) is not None:
            guard.cancel()

    def client(self, handler: RequestHandler) -> str:
        return self._clients.get(handler, "")

    def _gone(self, handler: RequestHandler) -> None:
        if (client := self._clients.pop(handler, None)) is not None:
            self.open.give_back(client)

    def cut_hung_up(self) -> None:
        """Behind pipelined requests nothing is read, so Linux is asked for their end."""
        if not hasattr(select, "POLLRDHUP"):
            return
        gone = select.poll()
        paused = {}
        for handler in self._connections:
            transport = handler.transport
            if transport is not None and (handler._reading_paused or handler._buffer_paused):
                number = transport.get_extra_info("socket").fileno()
                if number >= 0:
                    paused[number] = transport
                    gone.register(number, select.POLLRDHUP)
        for number, _ in gone.poll(0) if paused else ():
            paused[number].abort()

    def _check(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        if self._guards.pop(handler, None) is not None:
            self.refused += 1
            transport.abort()


class _Accepted(asyncio.Protocol):
    """asyncio tells of a connection only when its TLS handshake is done: it is taken before."""

    def __init__(self, server: GuardedServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        accepted = cast(asyncio.Transport, transport)
        peer = accepted.get_extra_info("peername")
        try:
            taken = socket.socket(fileno=os.dup(accepted.get_extra_info("socket").fileno()))
        except OSError:  # no descriptor is left
            self._server.refused += 1
        else:
            self._server.accepted(taken, peer)
        accepted.abort()  # it has read nothing yet, and the other descriptor stays open


def server_tls(front: FrontSettings) -> ssl.SSLContext | None:
    if front.tls_cert is None or front.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(front.tls_cert, front.tls_key)
        if front.client_ca is not None:
            context.load_verify_locations(front.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"TLS of the front: {error}; check tls_cert, tls_key and client_ca") from None
    return context


def engine_tls(front: FrontSettings) -> ssl.SSLContext | bool:
    if front.engine_ca is None and front.engine_cert is None:
        return True
    try:
        context = ssl.create_default_context(cafile=front.engine_ca)
        if front.engine_cert is not None:
            context.load_cert_chain(front.engine_cert, front.engine_cert_key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"TLS to engines: {error}; check engine_ca, engine_cert and engine_cert_key"
        ) from None
    return context
