"""What clients may ask: paths, keys, limits; then the request goes to the service."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from aiohttp import web

from headgate.core.version import VERSION
from headgate.live.route.addresses import client_at
from headgate.live.route.answers import NAMED, RefusedError, answer
from headgate.live.route.body import TURN, Asked, reading
from headgate.live.route.deliver import abort, write_out
from headgate.live.route.headers import loops, request_id
from headgate.live.route.job import Job
from headgate.live.route.keys import Key
from headgate.live.route.models import Models
from headgate.live.route.shares import Shares

if TYPE_CHECKING:
    from headgate.live.route.app import RouterApp

log = logging.getLogger("headgate.route")
GENERATIONS = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/tokenize",
        "/detokenize",
    )
)
HURRY = 1.0  # seconds to read an answer beyond the client's share
OWN = frozenset(("/health", "/ping", "/version", "/v1/models"))
GONE = 499  # in logs: the client hung up


class Front:
    """The handler of every request on the clients' address."""

    def __init__(self, app: RouterApp) -> None:
        self.app = app
        self.requests = Shares(app.config.limits.inflight, app.config.limits.client_inflight)
        self.refusing = False  # after the delay of a drain
        self._models = Models(app)

    @property
    def inflight(self) -> int:
        """Requests inside, from their heads to the ends of their answers."""
        return self.requests.held

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer, whatever happens; a fault of ours is 500 and logged, without the request's content."""
        self.app.server.began(request.protocol)
        began = self.app.now()
        try:
            response = await self._answer(request)
        except RefusedError as refused:
            if not refused.written:  # one that never became a request of a class
                self.app.wrote_refusal(request, refused, began)
            response = self._refuse(refused)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("a request failed inside the router")
            response = self._refuse(RefusedError(500, "internal", "the router failed"))
        if not response.prepared:
            await self._write_own(request, response)
        return response

    async def _write_own(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Write an answer of the router's own, which is short; a client that reads none of them is cut."""
        try:
            response.headers["Server"] = "headgate"
            async with asyncio.timeout(self.app.config.limits.client_stall):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            abort(request)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        if path in OWN:
            if request.method not in ("GET", "HEAD"):
                raise RefusedError(405, "method", f"{path} takes GET")
            return await self._own(request, path)
        if path not in GENERATIONS:
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
        key = keys.find(shown)
        if key is None:
            raise RefusedError(401, "key", "wrong or missing API key")
        return key

    async def _generate(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        app = self.app
        if self.refusing:
            raise RefusedError(503, "draining", "the router is shutting down", 5)
        if loops(request.headers):
            raise RefusedError(508, "loop", "the request has been through this kind of router already")
        key = self._key(request)
        client = _client(request, key)
        if not self.requests.take(client):
            if self.inflight >= self.requests.most:
                raise RefusedError(429, "inflight", "too many requests in flight", 1)
            raise RefusedError(429, "client", "this client has too many requests in flight", 1)
        arrived, wall, held = app.now(), time.time(), 0
        try:
            app.token_limits.check_key("" if key is None else key.name, arrived)
            body = await self._read(request, client)
            held = len(body)
            asked = await app.legs.turns.finish(reading(body, path, app.config.front.allow_kv_params))
            job = self._job(request, path, asked, key, arrived, wall)
            return await self._serve(job, client)
        except RefusedError as refused:
            refused.key = "" if key is None else key.name
            raise
        finally:
            self.requests.give_back(client)
            app.body_bytes.give_back(client, held)

    async def _serve(self, job: Job, client: str) -> web.StreamResponse:
        """Serve it and write it down, however it ends."""
        app = self.app
        try:
            with app.token_limits.charged(job, app.now, app.service.estimates):
                response = await app.service.serve(job)
            job.status = job.status or response.status
            if isinstance(response, web.Response):  # whole, and no longer at an engine
                with app.body_bytes.answer(client, response.body) as fits:
                    stall = app.config.limits.client_stall
                    await write_out(job, response, stall if fits else min(stall, HURRY))
            return response
        except RefusedError as refused:
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
        self, request: web.BaseRequest, path: str, asked: Asked, key: Key | None, arrived: float, wall: float
    ) -> Job:
        app, headers = self.app, request.headers
        guess = app.service.estimates.prompt("", asked)
        kind = app.classes.of(key, headers.get("x-headgate-class"), asked.model, asked.field_class, guess)
        return Job(
            request=request,
            path=path,
            asked=asked,
            kind=kind,
            key=key.name if key is not None else "",
            id=request_id(headers.get("x-request-id")),
            arrived=arrived,
            wall=wall,
            prompt=app.service.estimates.prompt(kind.name, asked),
            queue_none=headers.get("x-headgate-queue", "").lower() == "none",
        )

    async def _read(self, request: web.BaseRequest, client: str) -> bytes | bytearray:
        """The body within its limits; its bytes are counted until the request is gone."""
        front, length = self.app.config.front, self._announced(request, client)
        taken = length or 0
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            if request.content.is_eof() and request.content.total_bytes <= front.body_limit:
                body = request.content.read_nowait()  # it came with its head
                if length is None:
                    self._take(client, len(body), 0, front.body_limit)
                return body
            async with asyncio.timeout(front.body_timeout):
                whole = bytearray()  # grows as it comes; to join 32 MiB at the end would take 30 ms
                async for part in request.content.iter_any():
                    if length is None:
                        taken += self._take(client, len(part), taken, front.body_limit)
                    whole += part
        except TimeoutError:
            self.app.body_bytes.give_back(client, taken)
            raise RefusedError(
                408, "slow", f"the body did not come within {front.body_timeout:g} s"
            ) from None
        except BaseException:
            self.app.body_bytes.give_back(client, taken)
            raise
        return whole if len(whole) > TURN else bytes(whole)

    def _announced(self, request: web.BaseRequest, client: str) -> int | None:
        """The length of the body where its head says it; it is taken at once, before any byte has come."""
        front = self.app.config.front
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RefusedError(415, "encoding", "compressed request bodies are not accepted")
        length = request.content_length
        if length is not None and length > front.body_limit:
            raise RefusedError(413, "body", f"the body is larger than {front.body_limit} bytes")
        if length is not None and not self.app.body_bytes.take(client, length):
            raise self._no_room(length)
        return length

    def _take(self, client: str, more: int, taken: int, limit: int) -> int:
        if taken + more > limit:
            raise RefusedError(413, "body", f"the body is larger than {limit} bytes")
        if not self.app.body_bytes.take(client, more):
            raise self._no_room(more)
        return more

    def _no_room(self, many: int) -> RefusedError:
        held = self.app.body_bytes
        if held.held + many > held.most:
            return RefusedError(429, "memory", "the router holds too many bytes", 1)
        return RefusedError(429, "client", "the router holds too many bytes of this client", 1)

    def _refuse(self, refused: RefusedError) -> web.StreamResponse:
        self.app.metrics.refused.labels(refused.reason).inc()
        made = answer(refused)
        response = web.Response(status=made.status, body=made.body, headers=made.headers)
        if refused.status in (408, 413, 415) or self.refusing:
            response.force_close()
            response.headers["Connection"] = "close"
        return response


def _client(request: web.BaseRequest, key: Key | None) -> str:
    """Whose share a request takes: that of its key, without keys that of its address."""
    if key is not None:
        return f"key {key.name}"
    return client_at(request.transport.get_extra_info("peername")) if request.transport is not None else ""
