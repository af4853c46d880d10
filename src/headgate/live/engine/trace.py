"""The step trace: everything observers hear, one JSON object a line, for `headgate trace` to read."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from io import TextIOWrapper
from operator import attrgetter
from pathlib import Path
from typing import Any

from headgate.core.errors import InputError
from headgate.core.plan import ALL, Decodes, Plan
from headgate.core.policy import End, Steps
from headgate.core.request import Request
from headgate.live.engine.background import Background
from headgate.live.engine.live import LiveObserver
from headgate.live.vllm.fields import LOG
from headgate.record.live_trace import TRACE
from headgate.record.trace_fields import FIELDS, KNOWN

ABOUT = attrgetter(*KNOWN)
FLUSH_EVERY = 1.0  # seconds
AT_A_TIME = 16  # events
MOST_UNWRITTEN = 500_000  # events; a disk that is so far behind will not catch up


class Trace(LiveObserver):
    """Writes a trace. Hooks only remember; a thread of its own writes, about once a second and at the end.

    Where that fails (a full disk) or falls too far behind, the trace ends with one line in the log and the
    engine goes on. A file that exists is kept: the trace then gets a number before its ending.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any], background: bool = True) -> None:
        self.path, self._file = _open(Path(path))
        self._events: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._open = True
        self._file.write(json.dumps({"trace": TRACE, **header}, default=_plain) + "\n")
        self._thread = Background(self.flush, FLUSH_EVERY, "the trace") if background else None

    def close(self) -> None:
        """Write what is left, and stop."""
        if self._thread is not None:
            self._thread.close()
        else:
            self.flush()
        self._stop()

    def flush(self) -> None:
        """Write what has happened since the last time."""
        events = self._events
        if not self._open:
            events.clear()
            return
        if len(events) > MOST_UNWRITTEN:
            self._stop("the disk is too slow")
            return
        try:
            for number in range(len(events)):
                event, values = events.popleft()
                self._file.write(_line(event, values))
                if number % AT_A_TIME == 0:
                    time.sleep(0)  # let the engine's thread go on; by itself Python would wait for 5 ms
            self._file.flush()
        except Exception as error:
            self._stop(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")

    def _stop(self, why: str | None = None) -> None:
        """The trace ends here."""
        self._open = False
        self._events.clear()
        if why is not None:
            LOG.warning("headgate: the trace %s ends here, serving goes on: %s", self.path, why)
        with suppress(OSError):  # what could not be written cannot be written now either
            self._file.close()

    def _note(self, event: str, *values: Any) -> None:
        if self._open:
            self._events.append((event, values))

    # -- what it hears ---------------------------------------------------------------------------------

    def arrived(self, request: Request, now: float) -> None:
        """With all that is known of it."""
        self._note("arrived", *ABOUT(request), now, *request.slo)

    def admitted(self, request: Request, now: float) -> None:
        """It got a seat."""
        self._note("admitted", request.id, now)

    def prefilled(self, request: Request, now: float) -> None:
        """Its prompt is done."""
        self._note("prefilled", request.id, now)

    def held(self, request: Request, now: float) -> None:
        """It gets nothing for a while."""
        self._note("held", request.id, now)

    def resumed(self, request: Request, now: float) -> None:
        """It runs again."""
        self._note("resumed", request.id, now, request.last_token)

    def evicted(self, request: Request, now: float) -> None:
        """Its KV is gone."""
        r = request
        self._note("evicted", r.id, now, r.last_token, r.generated, r.evictions, r.wasted)

    def finished(self, request: Request, now: float, how: End) -> None:
        """It left."""
        r = request
        self._note("finished", r.id, now, how.value, r.generated, r.evictions, r.wasted, r.cached)

    def stepped(self, steps: Steps) -> None:
        """The engine ran these."""
        self._note("steps", *steps)

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        """In numbers, as the recorder keeps it."""
        decode = plan.decode
        named = -1 if decode is ALL else 0 if isinstance(decode, Decodes) else len(decode)
        self._note("plan", now, named, len(plan.prefill), len(plan.evict), dict(gauges))

    def renewed(self, policy: str, parameters: Mapping[str, Any], now: float) -> None:
        """Another policy decides from now on."""
        self._note("policy", now, policy, dict(parameters))

    def fell_back(self, reason: str, now: float) -> None:
        """The policy was relieved."""
        self._note("fell_back", now, reason)

    def rescued(self, now: float) -> None:
        """Decodes ran in place of prompts the engine refused."""
        self._note("rescued", now)

    def wasted(self, tokens: int, now: float) -> None:
        """Tokens nobody will read."""
        self._note("wasted", now, tokens)


def _line(event: str, values: tuple[Any, ...]) -> str:
    named = {"event": event, **dict(zip(FIELDS[event], values, strict=True))}
    if event == "plan":  # JSON has no word for numbers that are none
        named["gauges"] = {
            name: value if math.isfinite(value) else None for name, value in values[-1].items()
        }
    return json.dumps(named, separators=(",", ":"), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """What JSON calls a numpy number or array; anything else by its own words."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _open(path: Path) -> tuple[Path, TextIOWrapper]:
    """A new file: this one, or the first free name-2, name-3, ... (engines side by side, or a restart)."""
    number, wanted = 1, path
    while True:
        try:
            return wanted, open(wanted, "x", encoding="utf-8")
        except FileExistsError:
            number += 1
            wanted = path.with_name(f"{path.stem}-{number}{path.suffix}")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"trace {path}: {reason}; name a file that can be written") from None
