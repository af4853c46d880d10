"""The two addresses of a router: that of the clients (paths, keys, limits) and that of the operator."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from headgate.core.errors import InputError
from headgate.core.version import VERSION
from headgate.live.route.classes import Key, tenant_of
from headgate.live.route.config import forwarded_for
from headgate.live.route.deliver.connections import decoded
from headgate.live.route.deliver.legs import RoutedRequest, Uses, charged
from headgate.live.route.deliver.service import write_out
from headgate.live.route.engines import Upstream
from headgate.live.route.request import (
    APIS,
    NAMED,
    TURN,
    AskedRequest,
    Body,
    RefusedError,
    Shares,
    Steps,
    answer,
    loops,
    reading,
    reading_form,
    request_id,
    telling,
)
from headgate.live.route.view.feed import Feed, only_own_page
from headgate.live.scaling import GAUGE
from headgate.live.tasks import says

if TYPE_CHECKING:
    from headgate.live.route.server import RouterApp

log = logging.getLogger("headgate.route")
HURRY = 1.0  # seconds to read an answer beyond the client's share
OWN = frozenset(("/health", "/ping", "/version", "/v1/models"))
GONE = 499  # in logs: the client hung up


class Front:
    def __init__(self, app: RouterApp) -> None:
        self.app = app
        self.requests = Shares(app.config.limits.inflight, app.config.limits.client_inflight)
        self.refusing = False  # after the delay of a drain
        self._models = Models(app)

    @property
    def inflight(self) -> int:
        return self.requests.held

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.app.server.began(request.protocol)
        began = self.app.now()
        try:
            response = await self._answer(request)
        except RefusedError as refused:
            if not refused.written:  # one that never became a request of a class
                self.app.wrote_refusal(request, refused, began)
            response = self._refuse(refused, request)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("a request failed inside the router")
            response = self._refuse(RefusedError(500, "internal", "the router failed"), request)
        if not response.prepared:
            if self.app.replaced:
                response.force_close()
            await write_out(request, response, self.app.config.limits.client_stall)
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        if path in OWN:
            if request.method not in ("GET", "HEAD"):
                raise RefusedError(405, "method", f"{path} takes GET")
            return await self._own(request, path)
        if path not in APIS:
            raise RefusedError(404, "path", "this path is not served here")
        if request.method != "POST":
            raise RefusedError(405, "method", f"{path} takes POST")
        return await self._generate(request, path)

    async def _own(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        if path == "/version":
            return web.json_response({"version": VERSION, "server": "headgate"}, headers=NAMED)
        if path == "/v1/models":
            self._key(request)
            return web.json_response(await self._models.listed(), headers=NAMED)
        now = self.app.now()
        up = any(each.up(now) for each in self.app.upstreams.values()) and not self.app.draining
        return web.Response(status=200 if up else 503, headers=NAMED)

    def _key(self, request: web.BaseRequest) -> Key | None:
        keys = self.app.keys
        if not keys.required:
            return None
        shown = request.headers.get("Authorization")
        if shown is None and "x-api-key" in request.headers:  # Anthropic's clients
            shown = f"Bearer {request.headers['x-api-key']}"
        if (key := keys.find(shown)) is None:
            raise RefusedError(401, "key", "wrong or missing API key")
        return key

    async def _generate(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        app = self.app
        if self.refusing:
            raise RefusedError(503, "draining", "the router is shutting down", 5)
        if loops(request.headers):
            raise RefusedError(508, "loop", "the request has been through this kind of router already")
        key = self._key(request)
        origin = self._origin(request)
        client = origin if key is None else f"key {key.name}"
        if not self.requests.take(client):
            if self.inflight >= self.requests.most:
                raise RefusedError(429, "inflight", "too many requests in flight", 1)
            raise RefusedError(429, "client", "this client has too many requests in flight", 1)
        arrived, wall, held = app.now(), time.time(), 0
        name, tenant = "" if key is None else key.name, self._tenant(request, key)
        try:
            if app.replicas is not None:
                await app.replicas.ready(app.limits.of(name, tenant or client, arrived, origin))
            with app.limits.inside(name, tenant or client, arrived, origin) as uses:
                body = await self._read(request, client)
                held = len(body)
                asked = await app.legs.turns.finish(self._reading(request, body, path))
                job = self._job(request, path, asked, key, tenant, arrived, wall)
                self._queue_share(job, key, origin)
                if words := app.words_for(job):
                    job.asked = await app.legs.turns.finish(telling(asked, path, words, app.words_into))
                return await self._serve(job, client, uses)
        except RefusedError as refused:
            refused.key, refused.tenant = name, tenant
            refused.client = origin if self.app.by_address else ""
            raise
        finally:
            self.requests.give_back(client)
            app.body_bytes.give_back(client, held)

    def _reading(self, request: web.BaseRequest, body: Body, path: str) -> Steps[AskedRequest]:
        if APIS[path].form:
            return reading_form(body, ", ".join(request.headers.getall("Content-Type", ())))
        return reading(body, path, self.app.config.front.allow_kv_params)

    def _tenant(self, request: web.BaseRequest, key: Key | None) -> str:
        header = self.app.config.tenants.header
        shown = request.headers.getall(header, []) if header is not None else []
        return tenant_of(key, self.app.keys.required, shown)

    def _origin(self, request: web.BaseRequest) -> str:
        proxies = self.app.config.front.proxies
        if not proxies or request.transport is None:
            return self.app.server.client(request.protocol)
        peer = request.transport.get_extra_info("peername")
        return forwarded_for(peer, request.headers.getall("X-Forwarded-For", []), proxies)

    def _queue_share(self, job: RoutedRequest, key: Key | None, origin: str) -> None:
        bounds = self.app.address_bounds
        if self.app.by_address:
            job.client = origin
        if key is not None:
            job.queue_share = key.limits.queue
        elif bounds.queue is not None and not job.tenant:
            job.queues_as, job.queue_share = origin, bounds.queue

    async def _serve(self, job: RoutedRequest, client: str, uses: Uses) -> web.StreamResponse:
        app = self.app
        try:
            limits = app.limits.tokens(job.kind.name, uses)
            expected = job.prompt + min(app.service.estimates.output(job.kind.name), job.asked.limit)
            if app.replicas is not None:
                await app.replicas.ready((), *limits.values(), tokens=expected)
            with charged(job, app.now, expected, limits):
                response = await app.service.serve(job)
            job.status = job.status or response.status
            if app.replaced and not response.prepared:
                response.force_close()
            if isinstance(response, web.Response):  # whole, and no longer at an engine
                with app.body_bytes.answer(client, response.body) as fits:
                    stall = app.config.limits.client_stall
                    read = await write_out(job.request, response, stall if fits else min(stall, HURRY))
                    job.stalled = not read
            return response
        except RefusedError as refused:
            if refused.reason == "tenant-queue" and not job.tenant:
                refused.reason = "address-queue"
            job.status, job.outcome = refused.status, "refused"
            job.fault = job.fault or refused.reason
            refused.tries, refused.written = job.tries, True
            refused.waited = (job.placed or app.now()) - job.arrived
            raise
        except (asyncio.CancelledError, ConnectionError):
            job.outcome, job.status = "client-gone", job.status or GONE
            raise
        finally:
            if job.stalled:
                job.outcome = "client-stalled"
            app.wrote(job)

    def _job(
        self,
        request: web.BaseRequest,
        path: str,
        asked: AskedRequest,
        key: Key | None,
        tenant: str,
        arrived: float,
        wall: float,
    ) -> RoutedRequest:
        app, headers = self.app, request.headers
        guess = app.service.estimates.prompt("", asked)
        kind = app.classes.of(key, headers.get("x-headgate-class"), asked.model, asked.field_class, guess)
        return RoutedRequest(
            request=request,
            path=path,
            asked=asked,
            kind=kind,
            key=key.name if key is not None else "",
            tenant=tenant,
            queues_as=tenant,
            queue_share=None,
            id=request_id(headers.get("x-request-id")),
            arrived=arrived,
            wall=wall,
            prompt=app.service.estimates.prompt(kind.name, asked),
            queue_none=headers.get("x-headgate-queue", "").lower() == "none",
        )

    async def _read(self, request: web.BaseRequest, client: str) -> Body:
        front, length = self.app.config.front, self._announced(request, client)
        taken = length or 0
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(front.body_timeout):
                whole = bytearray()  # grows as it comes; to join 32 MiB at the end would take 30 ms
                async for part in request.content.iter_any():
                    if length is None:
                        taken += self._take(client, len(part), taken, front.body_limit)
                    whole += part
        except BaseException as error:
            self.app.body_bytes.give_back(client, taken)
            if isinstance(error, TimeoutError):
                why = f"the body did not come within {front.body_timeout:g} s"
                raise RefusedError(408, "slow", why) from None
            raise
        return whole if len(whole) > TURN else bytes(whole)

    def _announced(self, request: web.BaseRequest, client: str) -> int | None:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RefusedError(415, "encoding", "compressed request bodies are not accepted")
        if (length := request.content_length) is not None:
            self._take(client, length, 0, self.app.config.front.body_limit)
        return length

    def _take(self, client: str, more: int, taken: int, limit: int) -> int:
        if taken + more > limit:
            raise RefusedError(413, "body", f"the body is larger than {limit} bytes")
        body_bytes = self.app.body_bytes
        if not body_bytes.take(client, more):
            if body_bytes.held + more > body_bytes.most:
                raise RefusedError(429, "memory", "the router holds too many bytes", 1)
            raise RefusedError(429, "client", "the router holds too many bytes of this client", 1)
        return more

    def _refuse(self, refused: RefusedError, request: web.BaseRequest) -> web.StreamResponse:
        self.app.metrics.refused.labels(refused.reason).inc()
        if refused.tenant:
            self.app.metrics.refused_tenant(refused.tenant, refused.reason)
        status, headers, body = answer(refused, request.raw_path)
        response = web.Response(status=status, body=body, headers=headers)
        if refused.status in (408, 413, 415) or self.refusing:
            response.force_close()
        return response


# -- the models of all engines, as one list

KEPT = 5.0  # seconds
ASKED = 16  # engines at most
LARGEST = 1 << 20  # bytes of one engine's list


class Models:
    def __init__(self, app: RouterApp) -> None:
        self.app = app
        self._list: list[Any] = []
        self._at = 0.0
        self._asking = asyncio.Lock()

    async def listed(self) -> dict[str, Any]:
        came = self.app.now()
        async with self._asking:  # an answer that was awaited here is not asked for again, even if it is none
            if came - self._at >= (KEPT if self._list else 0.0):
                up = [each for each in self.app.upstreams.values() if each.healthy and not each.retired]
                answers = await asyncio.gather(*(self._ask(each) for each in up[:ASKED]))
                models = {str(model.get("id")): model for found in reversed(answers) for model in found}
                self._list, self._at = [*models.values()], self.app.now()
        if not self._list:
            raise RefusedError(503, "no-engines", "no engine is up", 5)
        return {"object": "list", "data": self._list}

    async def _ask(self, upstream: Upstream) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(self.app.config.health.timeout):
                body = await self.app.watch.get(upstream, "/v1/models", LARGEST) or b""
        except (aiohttp.ClientError, OSError, TimeoutError):
            return []
        data = decoded(body).get("data")
        return [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []


# -- the operator's address, loopback by default


class Admin:
    def __init__(self, app: RouterApp) -> None:
        self.app = app
        self.feed = Feed(app.view.history, lambda: app.view.snapshot(app.now()))

    def application(self) -> web.Application:
        guard = only_own_page(self.app.config.front.admin)
        application = web.Application(client_max_size=1 << 16, middlewares=[guard])
        application.on_shutdown.append(self.feed.close)
        add_get, add_post = application.router.add_get, application.router.add_post
        add_get("/", self.first)
        add_get("/events", self.feed.events)
        add_get("/metrics", self.metrics)
        for path, about in {
            "/books": lambda: {**self.app.gate.books(), "faults": self.app.gate.check()},
            "/plan": lambda: plan(self.app),
            "/engines": lambda: [described(each, self.app) for each in self.app.upstreams.values()],
        }.items():
            add_get(path, says(about))
        add_get("/health", says(lambda: None, lambda nothing: web.Response()))
        for action in ("drain", "undrain"):
            add_post(f"/admin/engines/{{id:[0-9]{{1,6}}}}/{action}", partial(self._set_draining, action))
        add_post("/admin/reload", self.reload)
        return application

    async def first(self, request: web.Request) -> web.Response:
        if "text/html" in request.headers.get("Accept", ""):
            return await self.feed.page(request)
        routes = [route for route in request.app.router.routes() if route.method != "HEAD"]
        lines = [
            f"{route.method} {route.resource.canonical}" for route in routes if route.resource is not None
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def metrics(self, request: web.Request) -> web.Response:
        measure(self.app)
        return web.Response(body=self.app.metrics.text(), content_type="text/plain", charset="utf-8")

    async def reload(self, request: web.Request) -> web.Response:
        try:
            return web.json_response({"changes": await self.app.reload()})
        except InputError as error:
            return web.json_response({"error": str(error)}, status=400)

    async def _set_draining(self, action: str, request: web.Request) -> web.Response:
        if (upstream := self.app.upstreams.get(int(request.match_info["id"]))) is None:
            return web.json_response({"error": "there is no such engine"}, status=404)
        self.app.drain_engine(upstream, action == "drain")
        return web.json_response(described(upstream, self.app))


# -- for the operator: engines, plan, gauges


def described(upstream: Upstream, app: RouterApp) -> dict[str, Any]:
    now = app.now()
    member = app.gate.roster.replicas[upstream.id]
    return {
        "id": upstream.id,
        "url": upstream.url,
        "status": upstream.status(now),
        "role": member.role,
        "slots": upstream.slots(now),
        "prompts": member.prompts,
        "decodes": member.decodes,
        "legs": upstream.legs,
        "foreign": upstream.foreign,
        **({} if app.replicas is None else {"lease": app.replicas.held(upstream), "peers": upstream.peers}),
        "running": upstream.load.running,
        "waiting": upstream.load.waiting,
        "kv_usage": upstream.load.kv_usage,
        "first_token_s": round(upstream.first_token, 4),
        "breaker": upstream.breaker.state.value,
        "alarms": upstream.load.alarms,
    }


def plan(app: RouterApp) -> dict[str, Any]:
    gate = app.gate
    return {
        "router": app.config.router.name,
        "policy": type(gate.router).__name__,
        "fallen": gate.fallen,
        "gauges": gate.gauges(),
        "plan": app.policy.described(gate.seconds),
        "prompt_estimate_error": round(app.service.estimates.error, 4),
    }


def measure(app: RouterApp) -> None:
    now, metrics = app.now(), app.metrics
    for gauge in metrics.engine.values():
        gauge.clear()  # an engine that is out shows no old values, and numbers are used again
    for upstream in app.upstreams.values():
        load, seen = upstream.load, upstream.healthy
        metrics.engine["info"].labels(str(upstream.id), upstream.url).set(1)
        values = {
            "up": float(upstream.up(now)),
            "slots": upstream.slots(now),
            "legs": upstream.legs,
            "foreign": upstream.foreign,
            "first_token_seconds": upstream.first_token,
            **({name: getattr(load, name) for name in ("running", "waiting", "kv_usage")} if seen else {}),
        }
        for name, value in values.items():
            metrics.engine[name].labels(str(upstream.id)).set(value)
        if app.replicas is not None:
            metrics.set("engine_lease", app.replicas.held(upstream), engine=str(upstream.id))
            metrics.set("engine_peers", upstream.peers, engine=str(upstream.id))
    for name, value in app.replicas.gauges().items() if app.replicas is not None else ():
        metrics.set(name, value)
    for kind, queue in app.gate.roster.queues.items():
        metrics.set("queue", len(queue), **{"class": kind})
    metrics.set("handoff", len(app.gate.roster.handoff))
    metrics.set("inflight", app.front.inflight)
    metrics.set("inflight_bytes", app.body_bytes.held)
    metrics.set("router_disabled", float(app.gate.fallen is not None))
    metrics.set("connections", app.server.open.held)
    metrics.set("refused_connections", app.server.refused)
    metrics.estimate.set(app.service.estimates.error)
    if app.scaling is not None:
        for pool, made in app.scaling.decisions().items():
            metrics.set(GAUGE, made.engines, model=app.scaling.model, pool=pool)
    for name, value in app.gate.gauges().items():
        metrics.set("router_value", value, name=name)
