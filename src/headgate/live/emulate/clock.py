"""Two clocks for the same engine: one waits until a moment has come, the other jumps to it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from math import inf
from time import perf_counter, time

from headgate.core.errors import InputError

MONOTONIC, NONBLOCKING, CLOSE_ON_EXEC = 1, os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)  # of Linux's timerfd
LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
NOTHING_LEFT = 1e-6  # seconds: shorter waits are not worth a system call


class _Spec(ctypes.Structure):
    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


class Alarm:
    """Linux's timer descriptors are right to some tens of microseconds, event loops to a millisecond."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._fd: int | None = None
        if LIBRARY is not None and hasattr(LIBRARY, "timerfd_create"):
            made = int(LIBRARY.timerfd_create(MONOTONIC, NONBLOCKING | CLOSE_ON_EXEC))
            self._fd = made if made >= 0 else None
        self._when = _Spec()
        if self._fd is not None:
            self._loop.add_reader(self._fd, self._expired)

    def ring(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def sleep(self, seconds: float) -> None:
        if seconds <= NOTHING_LEFT:
            await asyncio.sleep(0)
            return
        self._waiter = self._loop.create_future()
        handle: asyncio.TimerHandle | None = None
        if seconds < inf:
            if self._fd is not None:
                assert LIBRARY is not None
                value, whole = self._when.value, int(seconds)
                value[0], value[1] = whole, max(1, int((seconds - whole) * 1e9))
                LIBRARY.timerfd_settime(self._fd, 0, ctypes.byref(self._when), None)
            else:
                handle = self._loop.call_later(seconds, self.ring)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if handle is not None:
                handle.cancel()

    def close(self) -> None:
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _expired(self) -> None:
        assert self._fd is not None
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # it was set again meanwhile
            return
        self.ring()


class WallClock:
    """Emulated seconds, `speed` times as fast as real ones; `late` and `until` say how late it really is."""

    virtual = False

    def __init__(self, speed: float = 1.0) -> None:
        if not 0 < speed < inf:
            raise InputError(f"speed={speed}; give a number above 0, such as 2.0")
        self.speed = speed
        self._origin, self._date = perf_counter(), time()

    def now(self) -> float:
        return (perf_counter() - self._origin) * self.speed

    def wall(self, when: float) -> float:
        return self._date + when / self.speed

    async def until(self, when: float, alarm: Alarm) -> float:
        """Wait; an alarm that rings early is no reason to leave. Others run once even when it is late."""
        due = self._origin + when / self.speed
        if due - perf_counter() <= NOTHING_LEFT:
            await asyncio.sleep(0)
        while (left := due - perf_counter()) > NOTHING_LEFT:
            await alarm.sleep(left)
        return perf_counter() - due

    def late(self, when: float) -> float:
        return perf_counter() - self._origin - when / self.speed


class VirtualClock:
    virtual = True
    speed = inf

    def __init__(self) -> None:
        self._date = time()
        self.reached = 0.0

    def now(self) -> float:
        return self.reached

    def wall(self, when: float) -> float:
        return self._date + when

    async def until(self, when: float, alarm: Alarm) -> float:
        self.reached = max(self.reached, when)
        await asyncio.sleep(0)
        return 0.0

    def late(self, when: float) -> float:
        return 0.0


Clock = WallClock | VirtualClock
