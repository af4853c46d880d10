"""The user's own traffic: figures from the step trace that the plug-in writes, read as it grows."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from headgate.core.errors import InputError
from headgate.live.trial.book import Block, Book, Listener
from headgate.record.live_trace import WRONG, ClockError, Replay, is_live_trace
from headgate.record.trace_fields import fault, parse_line

AT_A_TIME = 1 << 22  # bytes read at once
LONGEST_LINE = 1 << 20


class FollowedTrace:
    """Reads from the end of the newest trace of this name on; requests that were under way are left out."""

    def __init__(self, path: str, own: bool = False) -> None:
        """`own`: the server will begin it for the trial."""
        self.book = Book()
        self.model = ""
        self.path, self.own = Path(path) if own else newest(path), own
        self.begun: dict[str, Block] = {}  # by the mark that began it
        self._expected: dict[str, Callable[[float], Block]] = {}
        self.renewals = 0  # policies that took over
        self.fell_back = ""
        self._replay = Replay([], Listener(self.book))
        self._rest = b""
        self._file: BinaryIO | None = None
        self._first = True  # no line was read yet

    def now(self) -> float:
        """The newest moment that the trace tells of."""
        return self.book.newest

    async def start(self) -> None:
        if not self.own:
            self._file = open(self.path, "rb")  # noqa: SIM115
            self._file.seek(0, os.SEEK_END)

    async def stop(self, drain: float) -> None:
        with suppress(InputError):  # it was told by `trouble`, or comes too late to matter
            self.poll()
        self.own = False  # none is waited for any more
        if self._file is not None:
            self._file.close()
            self._file = None

    def trouble(self) -> str | None:
        self.poll()
        return f"the policy fell back: {self.fell_back}" if self.fell_back else None

    def expect(self, mark: str, begin: Callable[[float], Block]) -> None:
        """A block begins with this mark: lines after it, which may be read with it, belong to that block."""
        self._expected = {mark: begin}

    def too_slow(self) -> str:
        return ""

    def notes(self) -> list[str]:
        return []

    def poll(self) -> None:
        """Read what has been written since."""
        if self._file is None and self.own and self.path.exists():
            self._file = open(self.path, "rb")  # noqa: SIM115
        while self._file is not None and (piece := self._file.read(AT_A_TIME)):
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > LONGEST_LINE:
                raise self._damaged("a line has no end")
            for line in lines:
                if not (self._first and _no_event(line)):
                    self._tell(line)
                self._first = False

    def _tell(self, text: bytes) -> None:
        line = parse_line(text.decode(errors="replace"))
        wrong = "not a JSON object" if line is None else fault(line)
        if line is None or wrong:
            raise self._damaged(wrong or "")
        try:
            self._replay.tell(line)
        except ClockError as error:
            raise self._damaged(f"the clock goes back ({error})") from None
        except WRONG as error:
            raise self._damaged(f"{line.get('event')!r} makes no sense here ({error})") from None
        while self._replay.asides:
            self._aside(self._replay.asides.pop())

    def _aside(self, line: dict[str, Any]) -> None:
        if line["event"] == "mark":
            begin = self._expected.pop(line["mark"], None)
            if begin is not None:
                self.begun[line["mark"]] = begin(line["at"])
        elif line["event"] == "policy":
            self.renewals += 1
        elif line["event"] == "fell_back":
            self.fell_back = line["reason"]

    def _damaged(self, why: str) -> InputError:
        return InputError(f"trace {self.path}: {why}; give the trace of one running server")


def _no_event(line: bytes) -> bool:
    """The first line that is read may lack its beginning; that of a whole trace is about the server."""
    parsed = parse_line(line.decode(errors="replace"))
    return parsed is None or "trace" in parsed


def newest(path: str) -> Path:
    """A server that is started again writes NAME-2, NAME-3: the one that was written to last."""
    named = Path(path)
    found = [named, *named.parent.glob(f"{named.stem}-*{named.suffix}")]
    found = [each for each in found if is_live_trace(each)]
    if not found:
        raise InputError(
            f"trace {path}: no trace of a live engine; start the server with `trace` in its settings, or let "
            "the trial send its own load, such as --rate 10"
        )
    return max(found, key=lambda each: each.stat().st_mtime)
