"""The step trace: everything observers hear, one JSON object a line, for `headgate trace` to read."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Any

from headgate.core.errors import InputError
from headgate.core.plan import ALL, Decodes, Plan
from headgate.core.policy import End, Steps
from headgate.core.request import GAP, Request
from headgate.live.engine.events import RAISED, LiveObserver
from headgate.live.engine.process import LOG, Background
from headgate.live.engine.tally import numbers
from headgate.record.trace_fields import FIELDS, KNOWN, TRACE

ABOUT = attrgetter(*KNOWN)
FLUSH_EVERY = 1.0  # seconds
AT_A_TIME = 16  # events
CHUNK = 1 << 16  # characters written at once
MOST_UNWRITTEN = 200_000  # events, about 50 MB; a disk that is so far behind will not catch up


class Trace(LiveObserver):
    """Hooks only remember; a thread of its own writes, about once a second. Where a disk fails, or hangs for
    `MOST_UNWRITTEN` events, the trace ends with one line in the log. A file that exists is kept: the trace
    gets a number before its ending.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any], background: bool = True) -> None:
        self.path, self._file = _open(Path(path))
        self._events: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._open = True
        self._write(json.dumps({"trace": TRACE, **header}, default=_plain) + "\n")
        self._thread = Background(self.flush, FLUSH_EVERY, "the trace") if background else None

    def close(self) -> None:
        if self._thread is None:
            self.flush()
        else:
            self._thread.close()
            if self._thread.busy:
                self._end("the disk hangs")
                return
        self._end()
        self._shut()

    def flush(self) -> None:
        if not self._open:
            self._events.clear()
            self._shut()
            return
        try:
            self._write_events()
        except Exception as error:
            self._end(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")

    def _write_events(self) -> None:
        events, lines, size = self._events, [], 0
        for number in range(len(events)):
            if not events:  # the engine's thread has ended the trace meanwhile
                break
            line = _line(*events.popleft())
            lines.append(line)
            size += len(line)
            if size > CHUNK:
                self._write("".join(lines))
                lines, size = [], 0
            if number % AT_A_TIME == 0:
                time.sleep(0)  # let the engine's thread go on; by itself Python would wait for 5 ms
        if self._open:
            self._write("".join(lines))

    def _write(self, text: str) -> None:
        """Straight to the disk: a buffer would have a lock, on which the end of the process could wait."""
        rest = memoryview(text.encode())
        while rest:
            rest = rest[self._file.write(rest) :]

    def _end(self, why: str | None = None) -> None:
        was_open, self._open = self._open, False
        self._events.clear()
        if why is not None and was_open:
            LOG.warning("headgate: the trace %s ends here, serving goes on: %s", self.path, why)

    def _shut(self) -> None:
        with suppress(OSError):  # what could not be written cannot be written now either
            self._file.close()

    def _note(self, event: str, *values: Any) -> None:
        if self._open:
            self._events.append((event, values))
            if len(self._events) > MOST_UNWRITTEN:
                self._end("the disk is too slow")

    def arrived(self, request: Request, now: float) -> None:
        self._note("arrived", *ABOUT(request), now, *request.slo)

    def admitted(self, request: Request, now: float) -> None:
        self._note("admitted", request.id, now)

    def prefilled(self, request: Request, now: float) -> None:
        self._note("prefilled", request.id, now)

    def held(self, request: Request, now: float) -> None:
        self._note("held", request.id, now)

    def resumed(self, request: Request, now: float) -> None:
        self._note("resumed", request.id, now, request.last_token)

    def evicted(self, request: Request, now: float) -> None:
        r = request
        self._note("evicted", r.id, now, r.last_token, r.generated, r.evictions, r.wasted)

    def finished(self, request: Request, now: float, how: End) -> None:
        r = request
        self._note("finished", r.id, now, how.value, r.generated, r.evictions, r.wasted, r.cached)

    def stepped(self, steps: Steps) -> None:
        self._note("steps", *steps)

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        decode = plan.decode
        named = -1 if decode is ALL else 0 if isinstance(decode, Decodes) else len(decode)
        shown = dict(gauges) if isinstance(gauges, Mapping) else {}
        self._note("plan", now, named, len(plan.prefill), len(plan.evict), shown)

    def renewed(self, policy: str, parameters: Mapping[str, Any], now: float) -> None:
        self._note("policy", now, policy, dict(parameters))

    def marked(self, mark: str, now: float) -> None:
        """The settings file with this word has been read; the date ties this clock to others."""
        self._note("mark", now, time.time(), mark)

    def fell_back(self, reason: str, now: float, cause: str = RAISED) -> None:
        self._note("fell_back", now, reason)

    def rescued(self, now: float) -> None:
        self._note("rescued", now)

    def wasted(self, tokens: int, now: float) -> None:
        self._note("wasted", now, tokens)


def _line(event: str, values: tuple[Any, ...]) -> str:
    named = {"event": event, **dict(zip(FIELDS[event], values, strict=True))}
    if event == "steps" and not named["queries"]:
        del named["queries"]
    if event == "arrived" and named["between_kind"] == GAP:
        del named["between_kind"]
    if event == "plan":  # JSON has no word for numbers that are none
        gauges = numbers(values[-1]).items()
        named["gauges"] = {name: value if math.isfinite(value) else None for name, value in gauges}
    return json.dumps(named, separators=(",", ":"), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _open(path: Path) -> tuple[Path, FileIO]:
    """A new file: this one, or the first free name-2, name-3, ... (engines side by side, or a restart)."""
    number, wanted = 1, path
    while True:
        try:
            return wanted, open(wanted, "xb", buffering=0)
        except FileExistsError:
            number += 1
            wanted = path.with_name(f"{path.stem}-{number}{path.suffix}")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"trace {path}: {reason}; name a file that can be written") from None
