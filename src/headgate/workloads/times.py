"""Arrival times in an unknown unit: which one it is, told by their size and spacing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headgate.core.errors import unknown
from headgate.workloads.text import BadFieldError, nanoseconds, seconds

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # in a second
WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
SINCE_1970 = {"ns": 1e17, "us": 1e14, "ms": 1e11, "s": 1e9}  # the least number of each unit from 1973 on
# Mean distance of whole numbers from which on they are read as a smaller unit: no trace is that slow
LEAST_GAP = {"ns": 1e9, "us": 1e6, "ms": 10.0}


class Unit(NamedTuple):
    """The unit of a column of times, whether it is a calendar's, and why we think so ("": nothing to say)."""

    name: str
    calendar: bool = False
    said: str = ""

    @property
    def ticks(self) -> float:
        """Units in a second."""
        return UNITS[self.name]


def as_written(value: object, what: str) -> float:
    """A number as it stands; a date, such as 2023-11-16T18:15:46Z, in nanoseconds since 1970."""
    try:
        return seconds(value, what)
    except BadFieldError:
        if not isinstance(value, str) or not value.strip()[:4].isdigit():
            raise
    return nanoseconds(value.strip().replace("Z", "+00:00"), what)


def unit_of(times: Sequence[float], wanted: str = "") -> Unit:
    """The unit the user names, or the one that these times tell."""
    least, most = min(times), max(times)
    since = next((name for name, start in SINCE_1970.items() if least >= start), None)
    if wanted:
        if wanted not in UNITS:
            raise unknown("unit of time", wanted, UNITS)
        return Unit(wanted, since is not None)
    if since is not None:
        unit = "" if since == "ns" else f", {WORDS[since]} since 1970"
        return Unit(since, True, f"arrivals are read as dates{unit}")
    gap = (most - least) / max(len(times) - 1, 1)
    name = next((name for name, least in LEAST_GAP.items() if gap >= least), "s")
    if name == "s" or any(time != int(time) for time in times):
        return Unit("s")
    rate = f"as seconds they would be {1 / gap:.2g} requests/s"
    return Unit(name, False, f"arrivals are read as {WORDS[name]}: {rate}; --times s says otherwise")
