"""Which headers pass the router, and in which direction."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from multidict import CIMultiDict, MultiMapping

HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
     "trailer", "trailers", "transfer-encoding", "upgrade")
)  # fmt: skip
FROM_CLIENT = HOP_BY_HOP | frozenset(
    ("host", "content-length", "content-encoding", "accept-encoding", "expect", "authorization", "x-api-key",
     "x-request-id", "via", "x-vllm-priority", "x-data-parallel-rank", "x-prefiller-host-port", "cookie")
)  # fmt: skip
FROM_CLIENT_PREFIX = ("x-headgate-", "x-emulate-", "x-gateway-")
FROM_ENGINE = HOP_BY_HOP | frozenset(("server", "date", "content-length", "via", "set-cookie", "alt-svc"))
VIA = "1.1 headgate-route"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def connection_names(headers: MultiMapping[str]) -> frozenset[str]:
    """Further hop-by-hop headers, named by `Connection`."""
    named = ",".join(headers.getall("Connection", ()))
    return frozenset(each.strip().lower() for each in named.split(",")) if named else frozenset()


def to_engine(
    headers: MultiMapping[str], request_id: str, authorization: str | None, priority: int, passes_key: bool
) -> CIMultiDict[str]:
    """The headers of an upstream call: the client's end-to-end ones, ours instead of what it may not say."""
    also = connection_names(headers)
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        low = name.lower()
        if low not in FROM_CLIENT and low not in also and not low.startswith(FROM_CLIENT_PREFIX):
            kept.add(name, value)
    kept["Accept-Encoding"] = "identity"  # compressed events could not be read
    kept["X-Request-Id"] = request_id
    kept["Via"] = ", ".join((*headers.getall("Via", ()), VIA))
    if authorization is not None:
        kept["Authorization"] = authorization
    elif passes_key and "Authorization" in headers:
        kept["Authorization"] = headers["Authorization"]
    if priority:
        kept["X-Vllm-Priority"] = str(priority)
    return kept


def to_client(headers: Iterable[tuple[str, str]], named: frozenset[str]) -> CIMultiDict[str]:
    """An engine's end-to-end headers."""
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers:
        low = name.lower()
        if low not in FROM_ENGINE and low not in named and not low.startswith("x-headgate-"):
            kept.add(name, value)
    return kept


def request_id(shown: str | None) -> str:
    """The client's own id if it is harmless, else a new one."""
    return shown if shown is not None and REQUEST_ID.fullmatch(shown) else "hg-" + secrets.token_hex(12)


def loops(headers: MultiMapping[str]) -> bool:
    """Whether the request has been through a router of ours already."""
    return any("headgate-route" in each for each in headers.getall("Via", ()))
