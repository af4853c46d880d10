"""The router as a whole: its parts, their start and end, reload and drain."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

import aiohttp
from aiohttp import web

from headgate.core.errors import InputError
from headgate.live.route.access_log import JsonLines, refusal_record
from headgate.live.route.addresses import address
from headgate.live.route.admin import Admin
from headgate.live.route.answers import RefusedError
from headgate.live.route.classes import Classes
from headgate.live.route.config import Config, EngineAt
from headgate.live.route.connections import KEEP_ALIVE, Connections
from headgate.live.route.discovery import discover
from headgate.live.route.front import Front
from headgate.live.route.gate import EngineState, Gate
from headgate.live.route.gate_engines import UNBOUNDED
from headgate.live.route.headers import request_id
from headgate.live.route.job import Job
from headgate.live.route.keys import read_keys
from headgate.live.route.legs import Legs
from headgate.live.route.metrics import Metrics
from headgate.live.route.policy import LivePolicy
from headgate.live.route.reload import changes
from headgate.live.route.server import GuardedServer, engine_tls, server_tls
from headgate.live.route.service import Service
from headgate.live.route.shares import BodyBytes
from headgate.live.route.token_limits import TokenLimits
from headgate.live.route.upstream import Upstream, engine_key
from headgate.live.route.watch import Watch

log = logging.getLogger("headgate.route")
LAST_WORDS = 2.0  # seconds at the end: for clients to read their error, and for KV to be released


class RouterApp:
    """One router in one event loop. `start` listens; `drain` and `stop` end it."""

    def __init__(self, config: Config, reread: Callable[[], Config] | None = None) -> None:
        self.config, self._reread = config, reread
        self.now = time.monotonic
        self.origin = self.now() - time.time()  # times of the trace go on over restarts
        self.keys = read_keys(config.front.key_file)
        self.classes = Classes(config, self.keys.required)
        self.metrics = Metrics()
        self.access_log, self.trace = JsonLines(config.front.access_log), JsonLines(config.front.trace)
        self.body_bytes = BodyBytes(config.limits.inflight_bytes)
        self.token_limits = TokenLimits()
        self._set_token_limits()
        self.upstreams: dict[int, Upstream] = {}
        self.draining = False
        self._changing = asyncio.Lock()  # one change of the engines at a time
        self._runners: list[web.BaseRunner] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Find engines, probe them, listen on both addresses."""
        engines = await discover(self.config)
        if not engines:
            raise InputError("no engine was found; check [discovery] or give --engine")
        self._make_parts(len(engines))
        for spec in engines:
            self._add(spec)
        await self.watch.start(self.upstreams.values())
        await self._listen()
        for line in self.config.doubts(self.keys.names):
            log.warning("%s", line)
        self._tasks += [asyncio.create_task(self._follow()), asyncio.create_task(self._tidy())]

    def _make_parts(self, engines: int) -> None:
        front = self.config.front
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
        config = self.config
        self.gate = Gate(
            self.policy.router, config.kinds, limits=config.class_limits, clock=self.now, on_fall=self._fell
        )
        self.watch = Watch(self.session, self.config.health, self.set_room, self.now)
        self.legs = Legs(
            self.connections, self.config, self.metrics, self.watch.tell, self.now, self.upstreams
        )
        self.service = Service(self.gate, self.upstreams, self.legs, self.now)
        self.front = Front(self)
        self.server = GuardedServer(self.front.handle, front, server_tls(front))

    async def _listen(self) -> None:
        front = self.config.front
        runner = web.ServerRunner(self.server, shutdown_timeout=LAST_WORDS)
        await self._bind(runner, front.host, front.port)
        admin = web.AppRunner(Admin(self).application(), access_log=None, shutdown_timeout=LAST_WORDS)
        await self._bind(admin, *address(front.admin))
        self.port = runner.addresses[0][1]
        self.admin_port = admin.addresses[0][1]

    async def _bind(self, runner: web.BaseRunner, host: str, port: int) -> None:
        await runner.setup()
        self._runners.append(runner)
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
        except OSError as error:
            raise InputError(
                f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; choose another port"
            ) from None

    # -- engines -----------------------------------------------------------------------------------------

    def _add(self, spec: EngineAt) -> Upstream:
        engine_key(spec)  # a missing key is an error before the gate knows the engine
        prompts = spec.prompts_at_once or self.policy.prompts_at_once(spec.seats)
        state = EngineState(spec.seats, prompts, spec.role, group=spec.kv_group or "")
        state.up = False
        upstream = Upstream(self.gate.add_engine(state), spec)
        self.upstreams[upstream.id] = upstream
        return upstream

    def set_room(self, upstream: Upstream) -> None:
        """Tell the gate what an engine may be sent now."""
        if upstream.retired:
            return
        now = self.now()
        allowed = upstream.seats(now)
        most = allowed if allowed < upstream.spec.seats else UNBOUNDED
        self.gate.set_engine(upstream.id, up=upstream.up(now), most=most)

    def drain_engine(self, upstream: Upstream, draining: bool) -> None:
        """Nothing more is sent there, or again."""
        upstream.draining = draining
        self.watch.tell(upstream)

    def _set_engines(self, specs: tuple[EngineAt, ...]) -> None:
        """Engines are matched by URL: new ones are added, absent ones drained, others changed."""
        for spec in specs:
            engine_key(spec)  # all of them, before anything changes
        here = {each.url: each for each in self.upstreams.values() if not each.retired}
        for spec in specs:
            known = here.pop(spec.url, None)
            if known is None:
                log.warning("engine %s is added", spec.url)
                self.watch.add(self._add(spec))
            elif known.spec != spec:
                known.spec = spec
                self.gate.set_engine(
                    known.id,
                    seats=spec.seats,
                    prompts=spec.prompts_at_once,
                    role=spec.role,
                    group=spec.kv_group or "",
                )
                self.set_room(known)
        for gone in here.values():
            log.warning("engine %s is drained and retired", gone.url)
            gone.retired, gone.healthy = True, False
            self.watch.drop(gone)
            self.gate.retire(gone.id)

    # -- while it runs -------------------------------------------------------------------------------------

    async def reload(self) -> list[str]:
        """Read the configuration again, check all of it, then apply it. A bad one changes nothing."""
        async with self._changing:
            return await self._reload()

    async def _reload(self) -> list[str]:
        try:
            new = self._reread() if self._reread is not None else self.config
            found = changes(self.config, new)
            keys, engines = read_keys(new.front.key_file), await discover(new)
            if not engines:
                raise InputError("no engine would be left; keep at least one")
            self.policy.check(new, len(engines))
            for spec in engines:
                engine_key(spec)
        except InputError as error:
            self.metrics.reloads.labels("refused").inc()
            log.error("reload: %s; the old configuration stays", error)
            raise
        old, self.config, self.keys = self.config, new, keys
        self.classes = Classes(new, keys.required)
        self._set_token_limits()
        self.legs.config, self.watch.health = new, new.health
        self.body_bytes.most, self.service.budget.share = new.limits.inflight_bytes, new.limits.retry_share
        self.front.requests.most, self.front.requests.each = new.limits.inflight, new.limits.client_inflight
        self.gate.set_classes(new.kinds, new.class_limits)
        self._set_engines(engines)
        if old.router != new.router or old.classes != new.classes:
            self.policy.swap(new, len(engines), self.gate)
        self.metrics.reloads.labels("done").inc()
        for line in found.lines:
            log.warning("reload: %s", line)
        return found.lines

    async def _follow(self) -> None:
        """Engines of [discovery] come and go by themselves."""
        while True:
            await asyncio.sleep(self.config.discovery.every)
            if self.config.discovery.file or self.config.discovery.dns:
                async with self._changing:  # else a reload meanwhile would be undone by what is found now
                    await self._find_engines()

    async def _find_engines(self) -> None:
        try:
            engines = await discover(self.config)
            if engines:
                self._set_engines(engines)
        except InputError as error:
            log.error("discovery: %s; the engines stay as they are", error)
        except Exception:
            log.exception("discovery failed; the engines stay as they are")

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.access_log.flush()
            self.trace.flush()
            self.connections.forget_idle()
            self.server.cut_hung_up()

    def _set_token_limits(self) -> None:
        every = (*self.config.classes, self.config.default)
        self.token_limits.set(self.keys.tokens, {each.name: each.tokens for each in every if each.tokens})

    def _fell(self, reason: str) -> None:
        log.error("router %s is disabled, least-loaded goes on: %s", self.config.router.name, reason)

    def wrote(self, job: Job) -> None:
        """A request has ended: count it and write it down."""
        now, kind = self.now(), job.kind.name
        self.metrics.requests.labels(kind, job.outcome).inc()
        ended = self.metrics.ended(kind)
        ended.total.observe(now - job.arrived)
        if job.placed is not None:
            ended.queued.observe(job.placed - job.arrived)
        if job.first_token is not None and job.asked.stream:
            ended.first_token.observe(job.first_token - job.arrived)
        if job.output:
            ended.prompt_tokens.inc(job.prompt)
            ended.output_tokens.inc(job.output)
        if self.access_log.wanted:
            self.access_log.write(job.log_record(now))
        if self.trace.wanted:
            mean = self.service.estimates.output(kind)
            self.trace.write(job.trace_record(now, self.origin, self.config.router.name, mean))

    def wrote_refusal(self, request: web.BaseRequest, refused: RefusedError, began: float) -> None:
        """The same for one that was refused before it had a class."""
        if self.access_log.wanted:
            path, id = request.raw_path.partition("?")[0], request_id(request.headers.get("x-request-id"))
            self.access_log.write(refusal_record(time.time(), self.now() - began, path, id, refused))

    # -- the end ---------------------------------------------------------------------------------------------

    async def drain(self) -> bool:
        """Refuse new requests after a delay, wait for the others. True if all of them ended by themselves."""
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

    def _cut(self) -> None:
        """Whoever is left gets an error: those that wait are refused, calls are broken off."""
        self.front.refusing = True
        self.gate.shut()
        self.legs.break_off()

    async def stop(self) -> None:
        """Close everything."""
        self.draining = True
        if hasattr(self, "front"):
            self._cut()
            await self.watch.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for runner in self._runners:
            await runner.cleanup()
        if hasattr(self, "service"):
            await self.service.splitter.stop(LAST_WORDS)
        if hasattr(self, "session"):
            self.connections.forget_idle(0.0)
            await self.session.close()
        self.access_log.close()
        self.trace.close()
