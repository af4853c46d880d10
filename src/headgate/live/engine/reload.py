"""The settings file is read again when it changes, by a thread of its own; the engine only takes over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy
from headgate.live.engine.process import LOG, Background
from headgate.live.engine.settings import Settings

LOOK_EVERY = 1.0  # seconds between two looks at the file
Stamp = tuple[int, int, int] | None
Build = Callable[[Settings], tuple[BatchPolicy | None, dict[str, Any]]]


class Reload:
    """Notices that the settings file has changed. Looks at most once a second.

    A file counts as changed when two looks in a row saw it the same: an editor may be in the middle of it.
    A file with an error is logged once, and the settings in force stay.
    """

    def __init__(
        self, path: str, read: Callable[[str], Settings], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self._read = read
        self._clock = clock
        self._used = self._before = _stamp(path)
        self._next = clock() + LOOK_EVERY

    def changed(self) -> Settings | None:
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + LOOK_EVERY
        before, self._before = self._before, _stamp(self.path)
        if self._before == self._used or self._before != before:
            return None
        self._used = before
        try:
            return self._read(self.path)
        except InputError as error:
            LOG.warning("headgate: %s; the settings in force stay", error)
            return None


class Renewed(NamedTuple):
    """Settings that were read again, and the policy made from them."""

    settings: Settings
    policy: BatchPolicy | None
    parameters: dict[str, Any]


class Renewals:
    """Reads and checks the file and makes the policy beside the engine; `take` hands over what is ready.

    A file that says what is in force already changes nothing: a new policy would begin to learn anew, and the
    watchdog to wait anew. Only a policy that has fallen is brought back by it. A `mark` is handed over by
    itself, and alone changes nothing.
    """

    def __init__(
        self,
        reload: Reload,
        settings: Settings,
        make: Build,
        fallen: Callable[[], bool],
        background: bool = True,
    ) -> None:
        self._reload, self._make, self._fallen = reload, make, fallen
        self._in_force = _identity(settings)
        self._ready: Renewed | None = None
        self._mark: str | None = None
        self._thread = Background(self.look, LOOK_EVERY / 2, "reading the settings") if background else None

    def look(self) -> None:
        settings = self._reload.changed()
        if settings is None:
            return
        identity = _identity(settings)
        if identity == self._in_force and not self._fallen():
            LOG.info("headgate: %s says what is in force already", self._reload.path)
            self._mark = settings.mark
            return
        try:
            policy, parameters = self._make(settings)
        except InputError as error:
            LOG.warning("headgate: %s; the settings in force stay", error)
            return
        self._in_force = identity
        self._ready = Renewed(settings, policy, parameters)
        self._mark = settings.mark

    @property
    def waiting(self) -> bool:
        """Whether something was read that has not been taken."""
        return self._ready is not None or self._mark is not None

    def take(self) -> Renewed | None:
        """Called by the engine's thread between two plans: nothing is read here."""
        if self._ready is None:
            return None
        ready, self._ready = self._ready, None
        return ready

    def take_mark(self) -> str | None:
        """Asked after `take`: the word in a file that has been read, once."""
        if self._mark is None or self._ready is not None:
            return None
        mark, self._mark = self._mark, None
        return mark

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()


def _identity(settings: Settings) -> tuple[Settings, tuple[Stamp, ...]]:
    """What makes two readings the same: the settings, and the files they name."""
    files = [settings.card or "", settings.named()[0].partition(".py:")[0] + ".py"]
    return settings.model_copy(update={"mark": None}), tuple(_stamp(file) for file in files)


def _stamp(path: str) -> Stamp:
    try:
        about = os.stat(path)
    except (OSError, ValueError):
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino
