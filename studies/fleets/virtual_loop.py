"""An event loop whose time jumps to the next timer when no socket has anything to read.

Engines, router and clients of one process then run as fast as they can, and nobody is ever late: what is left
of a difference between live and simulated is what the code does, not what the machine does.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any
from unittest import mock

TURN = 1e-7  # seconds that a turn of the loop takes: code that waits for the next moment must get there


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: a timeout with silent sockets moves the clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += TURN
        ready = super().select(0)
        if not ready and timeout is None:
            return super().select(None)
        if not ready and timeout:
            ready = super().select(0)  # loopback has delivered what was written by now
            self.now += 0.0 if ready else max(0.0, timeout)
        return ready


def run_virtual(work: Coroutine[Any, Any, Any]) -> Any:
    """What the coroutine returns; clocks of router and emulator are the loop's."""
    selector = _Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    clock = lambda: selector.now  # noqa: E731
    emulator = "headgate.live.emulate.clock"
    try:
        with (
            mock.patch.object(loop, "time", clock),
            mock.patch.object(time, "monotonic", clock),
            mock.patch(f"{emulator}.perf_counter", clock),
            mock.patch(f"{emulator}.LIBRARY", None),
        ):
            return loop.run_until_complete(work)
    finally:
        loop.close()
