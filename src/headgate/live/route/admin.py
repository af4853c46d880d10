"""The operator's address: metrics, books, plan, engines, drain, reload. Loopback by default."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler

from headgate.core.errors import InputError
from headgate.live.route.addresses import address
from headgate.live.route.describe import described, measure, plan

if TYPE_CHECKING:
    from headgate.live.route.app import RouterApp


class Admin:
    """Handlers of that address.

    It asks for no key, so a page in the operator's browser must not reach it: neither by a request across
    sites, which names its origin, nor under a host name of the page's own that leads here.
    """

    def __init__(self, app: RouterApp) -> None:
        self.app = app

    def application(self) -> web.Application:
        made = web.Application(client_max_size=1 << 16, middlewares=[self._no_pages])
        made.router.add_get("/", self.paths)
        made.router.add_get("/metrics", self.metrics)
        made.router.add_get("/books", self.books)
        made.router.add_get("/plan", self.plan)
        made.router.add_get("/engines", self.engines)
        made.router.add_get("/health", self.health)
        made.router.add_post("/admin/engines/{id:[0-9]{1,6}}/drain", self.drain)
        made.router.add_post("/admin/engines/{id:[0-9]{1,6}}/undrain", self.undrain)
        made.router.add_post("/admin/reload", self.reload)
        return made

    @web.middleware
    async def _no_pages(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        site = request.headers.get("Sec-Fetch-Site", "none")
        if "Origin" in request.headers or site not in ("none", "same-origin"):
            return web.json_response({"error": "requests of web pages are not served; use curl"}, status=403)
        if not self._is_ours(request.headers.get("Host", "localhost")):
            said = "this host name is not served; use the address itself, such as 127.0.0.1"
            return web.json_response({"error": said}, status=403)
        return await handler(request)

    def _is_ours(self, host: str) -> bool:
        """Whether a request may name this host. An address that others reach may have any name."""
        own = address(self.app.config.front.admin)[0]
        try:
            named = address(host if host.rpartition(":")[2].isdigit() else f"{host}:80")[0]
        except ValueError:
            return False
        return not _is_loopback(own) or named == own or _is_loopback(named)

    async def paths(self, request: web.Request) -> web.Response:
        """What can be asked here."""
        found = [route for route in request.app.router.routes() if route.method != "HEAD"]
        lines = [f"{each.method} {each.resource.canonical}" for each in found if each.resource is not None]
        return web.Response(text="\n".join(lines) + "\n")

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus' format."""
        measure(self.app)
        return web.Response(body=self.app.metrics.text(), content_type="text/plain", charset="utf-8")

    async def books(self, request: web.Request) -> web.Response:
        """Who is where, and every invariant that does not hold."""
        return web.json_response({**self.app.gate.books(), "faults": self.app.gate.check()})

    async def plan(self, request: web.Request) -> web.Response:
        """The router, its gauges, and the newest plan."""
        return web.json_response(plan(self.app))

    async def engines(self, request: web.Request) -> web.Response:
        """All engines."""
        return web.json_response([described(each, self.app) for each in self.app.upstreams.values()])

    async def health(self, request: web.Request) -> web.Response:
        """Whether the process is alive."""
        return web.Response()

    async def drain(self, request: web.Request) -> web.Response:
        """Send nothing more to an engine; what runs there ends there."""
        return self._set_draining(request, True)

    async def undrain(self, request: web.Request) -> web.Response:
        """Send to it again."""
        return self._set_draining(request, False)

    async def reload(self, request: web.Request) -> web.Response:
        """Read the configuration again; a bad one changes nothing."""
        try:
            return web.json_response({"changes": await self.app.reload()})
        except InputError as error:
            return web.json_response({"error": str(error)}, status=400)

    def _set_draining(self, request: web.Request, draining: bool) -> web.Response:
        upstream = self.app.upstreams.get(int(request.match_info["id"]))
        if upstream is None:
            return web.json_response({"error": "there is no such engine"}, status=404)
        self.app.drain_engine(upstream, draining)
        return web.json_response(described(upstream, self.app))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
