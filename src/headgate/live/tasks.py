"""What all our servers and clients do with tasks, signals and answers of others."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from aiohttp import ClientPayloadError, ClientSession, StreamReader, web

from headgate.core.errors import InputError

LOG = logging.getLogger("headgate")
BACKLOG = 1024  # connections that wait to be accepted
SHOWN = 160  # characters of a server's error
Tasks = set[asyncio.Task[None]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def keep(tasks: Tasks, work: Coroutine[Any, Any, None], name: str = "") -> None:
    task = asyncio.create_task(work, name=name or None)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(found, Exception):
            LOG.warning("a task had failed: %.300s", repr(found))


def on_stop(do: Callable[[], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, do)


async def until_stopped() -> None:
    stop = asyncio.Event()
    on_stop(stop.set)
    await stop.wait()


async def listen(runner: web.BaseRunner, host: str, port: int, open: socket.socket | None = None) -> int:
    """The port; `open` is a socket that listens there already."""
    await runner.setup()
    try:
        if open is None:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        else:
            await web.SockSite(runner, open, backlog=BACKLOG).start()
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {why(error)}; choose another port") from None
    return int(runner.addresses[0][1])


def why(error: BaseException) -> str:
    """What went wrong at a server, in a few words of the system."""
    number = getattr(error, "errno", None) or 0
    if number > 1:  # of SSL and of names there are others
        return os.strerror(number)
    return " ".join(str(error).split())[:SHOWN] or type(error).__name__


def says(about: Callable[[], Any], show: Callable[[Any], web.Response] = web.json_response) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return show(about())

    return answer


async def read_bounded(content: StreamReader, most: int) -> bytes:
    """All of it, or somewhat more than `most` bytes where it is longer."""
    body = bytearray()
    async for part in content.iter_any():
        body += part
        if len(body) > most:
            break
    return bytes(body)


async def fetched(session: ClientSession, url: str, most: int, **how: Any) -> bytes:
    async with session.get(url, **how) as answer:
        answer.raise_for_status()
        body = await read_bounded(answer.content, most)
    if len(body) > most:
        raise ClientPayloadError(f"its answer has more than {most:,} bytes")
    return body
