"""An end to code of the user's that does not end by itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from headgate.core.errors import RunError


class _TooLongError(BaseException):
    """No Exception, so that it passes whatever catches the errors of a policy."""


@contextmanager
def time_limit(seconds: float, what: str, remedy: str) -> Iterator[Callable[[], None]]:
    """A RunError with the place it was at when `seconds` pass; calling what it gives starts the time anew.

    Where there are no alarms (Windows, threads) there is no limit.
    """
    alarms = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()

    def again() -> None:
        if alarms:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def ring(number: int, frame: FrameType | None) -> None:
        at = f", last seen in {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
        raise _TooLongError(f"{what} takes longer than {seconds:g} s{at}; {remedy}")

    before = signal.signal(signal.SIGALRM, ring) if alarms else None
    again()
    try:
        yield again
    except _TooLongError as error:
        raise RunError(str(error)) from None
    finally:
        if alarms:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
