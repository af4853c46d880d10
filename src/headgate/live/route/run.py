"""Runs a router: SIGTERM and SIGINT drain, a second one exits, SIGHUP and a changed file reload."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from headgate.core.errors import InputError
from headgate.live.open_files import more_files
from headgate.live.route.app import RouterApp
from headgate.live.route.config import Config
from headgate.live.route.policy import rests_on

LOOK_EVERY = 2.0  # seconds, for a changed file
M_MMAP_THRESHOLD = -3  # glibc's name for the setting; once set, glibc no longer raises it by itself
MAPPED = 1 << 17  # bytes from which on an allocation is mapped: less than the standard loop reads at once


def serve(config: Config, read: Callable[[], Config], path: str | None, say: Callable[[str], None]) -> None:
    """Serve with uvloop where it is installed."""
    more_files()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(config, read, path, say))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """That of uvloop where it is installed. The standard loop needs another way to allocate what it reads."""
    try:
        import uvloop
    except ImportError:
        _map_reads()
        return None
    return uvloop.new_event_loop


def _map_reads() -> None:
    """Let glibc map every read of the standard loop by itself instead of cutting it from the heap.

    Each read takes 256 KiB and gives back all but the bytes that came. What is kept of them (the body of a
    request) then fences off a piece of the heap too small for the next read, and the heap grows by up to
    256 KiB for each request inside. Other C libraries have no such setting.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED)


async def _serve(
    config: Config, read: Callable[[], Config], path: str | None, say: Callable[[str], None]
) -> None:
    app = RouterApp(config, read)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # until there is something to reload
    tasks: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = asyncio.create_task(_reload(app))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    try:
        await app.start()
        loop.add_signal_handler(signal.SIGHUP, reload)
        up = sum(each.up(app.now()) for each in app.upstreams.values())
        seats = [each.spec.seats for each in app.upstreams.values()]
        say(f"{up} of {len(app.upstreams)} engines are up, {rests_on(config, seats)}")
        scheme = "https" if config.front.tls_cert else "http"
        say(f"listening on {scheme}://{config.front.host}:{app.port}, admin on port {app.admin_port}")
        gc.collect()
        gc.freeze()  # what is there now stays; collections look at the rest only
        watch = asyncio.create_task(_follow_file(path, reload))
        await stop.wait()
        say("draining; a second signal exits at once")
        stop.clear()
        watch.cancel()
        await _first(app.drain(), stop.wait())
    finally:
        await app.stop()


async def _reload(app: RouterApp) -> None:
    with suppress(InputError):  # it was logged
        await app.reload()


async def _follow_file(path: str | None, reload: Callable[[], None]) -> None:
    """Reload when the configuration file changes."""
    seen = _stamp(path)
    while path is not None:
        await asyncio.sleep(LOOK_EVERY)
        now = _stamp(path)
        if now != seen and now is not None:
            seen = now
            reload()


def _stamp(path: str | None) -> tuple[int, int] | None:
    try:
        found = Path(path).stat() if path is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size)


async def _first(*works: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    _, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
