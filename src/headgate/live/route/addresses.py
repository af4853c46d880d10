"""URLs of engines, addresses to listen on, names: checked before anything is built from them."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:\s/]*):(?P<port>[0-9]{1,5})")


def _url(text: str) -> str:
    """An engine's address: scheme, host, port and perhaps a path, nothing else."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(f"{text!r} is not a URL; write http://HOST:PORT") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"{text!r} is not a URL of an engine; write http://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a URL of an engine has no user, query or fragment; use key_env for its key")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{text!r} ends in /v1, which the router adds; write http://HOST:PORT")
    if not text.isascii() or any(c <= " " or c == "\x7f" for c in text):
        raise ValueError("a URL of an engine is plain ASCII without spaces")
    return text.rstrip("/")


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError(f"{text!r} is not a name; use letters, digits, . _ and -, at most 64")
    return text


def address(text: str) -> tuple[str, int]:
    """Host and port of a text such as 127.0.0.1:9300 or [::1]:9300."""
    found = ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{text!r} is not an address; write HOST:PORT, such as 127.0.0.1:9300")
    return found["host"].strip("[]") or "127.0.0.1", int(found["port"])


def client_at(peer: object) -> str:
    """Whose connection it is: its address, of IPv6 the network that one client may have, 48 bits."""
    host = peer[0] if isinstance(peer, tuple) and peer else ""
    if ":" not in host:
        return str(host)
    found = ip_address(host.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(IPv6Address(int(found) >> 80 << 80))
    return str(getattr(found, "ipv4_mapped", found))


def _address(text: str) -> str:
    address(text)
    return text


Url = Annotated[str, AfterValidator(_url)]
Name = Annotated[str, AfterValidator(_name)]
Address = Annotated[str, AfterValidator(_address)]
