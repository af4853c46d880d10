"""An emulator as a process: it announces itself, warns when it cannot keep up, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from headgate.cost.card import load_card
from headgate.cost.error_bar import error_bar
from headgate.live.emulate.options import Options
from headgate.live.emulate.server import Emulators, start
from headgate.live.emulate.tally import LATE, Histogram
from headgate.live.open_files import more_files

LOG = logging.getLogger("headgate.emulate")
LOOK = 10.0  # seconds between two looks at the lateness
TOO_LATE = 0.005  # seconds at the 99th percentile
FEW = 20  # steps: too few for a percentile
KILLED = 1  # exit code of an emulated crash


def run(options: Options, say: Callable[[str], None]) -> None:
    """Serve until a signal; returns when everything is closed."""
    more_files()
    _run(_serve(options, say))


async def _serve(options: Options, say: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    again: list[int] = []

    def signalled() -> None:
        again.append(1)
        stop.set()
        if len(again) > 1:
            os._exit(KILLED)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    if options.slow_start:
        say(f"starts in {options.slow_start:g} s")
    running = await start(options)
    if len(running.ports) == 1:
        for engine in running.engines:
            engine.on_crash = lambda: os._exit(KILLED)
    for line in (*running.describe(), *error_bar(load_card(options.card))):
        say(line)
    gc.collect()
    gc.freeze()  # what is there now stays; collections look at the rest only
    watch = asyncio.create_task(warn_when_late(running, say))
    try:
        await stop.wait()
        say(f"drains, {options.shutdown_timeout:g} s at most; a second signal ends at once")
        if not await running.drain(options.shutdown_timeout):
            say("requests were still running; they are cut off")
    finally:
        watch.cancel()
        await running.stop()


async def warn_when_late(running: Emulators, say: Callable[[str], None], every: float = LOOK) -> None:
    """One line whenever the steps of the last seconds ended too late to be believed."""
    before = [list(engine.tally.late.counts) for engine in running.engines]
    while True:
        await asyncio.sleep(every)
        for number, engine in enumerate(running.engines):
            counts = list(engine.tally.late.counts)
            recent = Histogram(LATE)
            recent.counts = [new - old for new, old in zip(counts, before[number], strict=True)]
            before[number] = counts
            late = recent.quantile(0.99)
            if sum(recent.counts) >= FEW and late > TOO_LATE:
                say(
                    f"cannot keep up: engine {number} ended 1 % of its steps more than {TOO_LATE * 1e3:g} ms "
                    "late; do not trust its times (fewer streams, a free core, a lower --speed)"
                )


def _run(main: Coroutine[Any, Any, None]) -> None:
    """On uvloop where it is installed."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
