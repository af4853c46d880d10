"""The settings file is read again when it changes, by a thread of its own; the engine only takes over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy
from headgate.live.engine.process import LOG, Background
from headgate.live.engine.settings import Settings, where_is

LOOK_EVERY = 1.0  # seconds between two looks at the file
Stamp = tuple[int, int, int] | None
Build = Callable[[Settings], tuple[BatchPolicy | None, dict[str, Any]]]


class Reload:
    """A file has changed when two looks in a row saw it the same: an editor may be in the middle of it."""

    def __init__(
        self, path: str, read: Callable[[str], Settings], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path, self._read, self._clock = path, read, clock
        self._used = self._before = stamp(path)
        self._next = clock() + LOOK_EVERY

    def changed(self) -> Settings | None:
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + LOOK_EVERY
        before, self._before = self._before, stamp(self.path)
        if self._before == self._used or self._before != before:
            return None
        self._used = before
        try:
            return self._read(self.path)
        except InputError as error:
            LOG.warning("headgate: %s; the settings in force stay", error)
            return None


class Renewed(NamedTuple):
    settings: Settings
    policy: BatchPolicy | None
    parameters: dict[str, Any]


class Renewals:
    """`take` hands over what is ready. A file that says what is in force changes nothing, as a new policy
    would learn anew, but brings a fallen one back. A `mark` is handed over by itself.
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
        if (settings := self._reload.changed()) is None:
            return
        identity = _identity(settings)
        if identity == self._in_force and not self._fallen():
            LOG.info("headgate: %s says what is in force already", self._reload.path)
            self._mark = settings.mark
            return
        try:
            policy, parameters = self._make(settings)
        except InputError as error:
            LOG.warning("headgate: %s%s; the settings in force stay", where_is(self._reload.path), error)
            return
        self._in_force = identity
        self._ready = Renewed(settings, policy, parameters)
        self._mark = settings.mark

    @property
    def waiting(self) -> bool:
        return self._ready is not None or self._mark is not None

    def take(self) -> Renewed | None:
        ready, self._ready = self._ready, None
        return ready

    def take_mark(self) -> str | None:
        if self._mark is None or self._ready is not None:
            return None
        mark, self._mark = self._mark, None
        return mark

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()


def _identity(settings: Settings) -> tuple[Settings, tuple[Stamp, ...]]:
    files = [settings.card or "", settings.named()[0].partition(".py:")[0] + ".py"]
    return settings.model_copy(update={"mark": None}), tuple(stamp(file) for file in files)


def stamp(path: str) -> Stamp:
    try:
        about = os.stat(path)
    except (OSError, ValueError):
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino
