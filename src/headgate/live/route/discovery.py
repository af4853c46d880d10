"""Engines from a file or from DNS, beside those of the configuration."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from headgate.core.errors import InputError
from headgate.live.route.addresses import address
from headgate.live.route.config import Config, Discovery, EngineAt, checked, parsed, read_text

log = logging.getLogger("headgate.route")
MOST = 1000  # engines


async def discover(config: Config) -> tuple[EngineAt, ...]:
    """All engines there are now: the file's own, then discovered ones; the first of equal URLs counts."""
    found = list(config.engines)
    if config.discovery.file is not None:
        found += from_file(config.discovery)
    if config.discovery.dns is not None:
        found += await from_dns(config.discovery)
    return tuple({each.url: each for each in reversed(found)}.values())[::-1][:MOST]


def from_file(discovery: Discovery) -> list[EngineAt]:
    """The engines of a list of URLs, or of the [[engines]] tables of a TOML file."""
    path = discovery.file or ""
    if path.endswith(".toml"):
        given: Any = parsed(path).get("engines", [])
    else:
        given = [{"url": line} for line in _lines(path)]
    if not isinstance(given, list):
        raise InputError(f"{path}: engines is not a list of tables; write [[engines]]")
    tables = [{**_defaults(discovery), **each} if isinstance(each, dict) else each for each in given[:MOST]]
    return list(checked({"engines": tables}, f"{path}: ").engines) if tables else []


async def from_dns(discovery: Discovery) -> list[EngineAt]:
    """One engine per address of a name. A name that has none gives none."""
    host, port = address(discovery.dns or "")
    try:
        answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InputError(f"DNS name {host}: {error}; check discovery.dns") from None
    hosts = sorted({str(answer[4][0]) for answer in answers})
    shown = [f"[{each}]" if ":" in each else each for each in hosts]
    return [EngineAt(url=f"http://{each}:{port}", **_defaults(discovery)) for each in shown]


def _defaults(discovery: Discovery) -> dict[str, Any]:
    return {"seats": discovery.seats, "kv_group": discovery.kv_group}


def _lines(path: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in read_text(path).splitlines())
    return [line for line in lines if line]
