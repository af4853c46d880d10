"""Serves a live view: the page, and server-sent events, one snapshot a second for all viewers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from headgate.live.route.config import address

log = logging.getLogger("headgate.route")
EVERY = 1.0  # seconds between two snapshots
MOST_VIEWERS = 32
STALL = 10.0  # seconds without a read until a viewer is dropped
SEND_BUFFER = 1 << 16  # bytes the kernel holds for one viewer
PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
SITES = ("none", "same-origin")


class Feed:
    """Nothing is computed while no viewer is there."""

    def __init__(self, history: Callable[[], Any], snapshot: Callable[[], Any]) -> None:
        self._history, self._snapshot = history, snapshot
        self.viewers = 0
        self._newest = b""
        self._tick = asyncio.Event()  # set when there is a newer snapshot, then replaced
        self._maker: asyncio.Task[None] | None = None
        self._closed = False

    async def page(self, request: web.Request) -> web.Response:
        body, policy = page()
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """`history` once, then `snapshot` every second. A slow viewer misses some, one that stops is cut."""
        if self.viewers >= MOST_VIEWERS or self._closed:
            error = f"{MOST_VIEWERS} viewers are there already; close one"
            return web.json_response({"error": error}, status=503, headers={"Retry-After": "10"})
        response = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        self.viewers += 1
        try:
            if request.transport is not None:
                request.transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER
                )
            await response.prepare(request)
            await _write(response, _event("history", self._history()))
            await _write(response, _event("snapshot", self._snapshot()))
            if self._maker is None:
                self._maker = asyncio.create_task(self._make())
            while not self._closed:
                await self._tick.wait()
                await _write(response, self._newest)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass
        finally:
            self.viewers -= 1
        return response

    async def close(self, application: web.Application | None = None) -> None:
        self._closed = True
        self._tick.set()
        if self._maker is not None:
            self._maker.cancel()

    async def _make(self) -> None:
        try:
            while self.viewers:
                await asyncio.sleep(EVERY)
                try:
                    self._newest = _event("snapshot", self._snapshot())
                except Exception:
                    log.exception("the live view could not be made")
                tick, self._tick = self._tick, asyncio.Event()
                tick.set()
        finally:
            self._maker = None


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode()


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(STALL):
        await response.write(data)


@cache
def page() -> tuple[bytes, str]:
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    hashes = {
        kind: f"'sha256-{b64encode(sha256(part.encode()).digest()).decode()}'"
        for kind, part in PARTS.findall(text)
    }
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


# -- an address without a key, and the operator's browser


def only_own_page(own: str) -> Middleware:
    """Of web pages only ours is served, on an address (`own`, HOST:PORT) that asks for no key.

    Another page must not reach it: neither by a request across sites, which names its origin, nor under a
    host name of that page's own that leads here. An address that others reach may have any name, but a page
    under a name changes nothing there: whose name it is cannot be known.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host, origin = request.headers.get("Host", "localhost"), request.headers.get("Origin")
        (named, is_address), here = _host_of(host), address(own)[0]
        if not named or not (named == here or not is_loopback(here) or is_loopback(named)):
            error = "this host name is not served; use the address itself, such as 127.0.0.1"
            return web.json_response({"error": error}, status=403)
        site = request.headers.get("Sec-Fetch-Site", "none")
        is_link = request.path == "/" and request.headers.get("Sec-Fetch-Dest") == "document"
        is_ours = origin is None or (origin == f"http://{host}" and is_address)
        if not is_ours or (site not in SITES and not is_link):
            error = "requests of web pages are not served; use curl, or open this address itself"
            return web.json_response({"error": error}, status=403)
        return await handler(request)

    return check


def _host_of(host: str) -> tuple[str, bool]:
    """The name in a Host header, "" for nonsense; and whether it is an address, which no page can own."""
    try:
        named = address(host if host.rpartition(":")[2].isdigit() else f"{host}:80")[0]
    except ValueError:
        return "", False
    try:
        return named, named == "localhost" or bool(ip_address(named))
    except ValueError:
        return named, False


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
