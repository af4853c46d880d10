"""Outages of a fleet's engines, as `--outages` says them."""

from __future__ import annotations

from headgate.core.durations import duration
from headgate.core.errors import InputError
from headgate.sim.fleet.outage import Outage, check_outages

FORM = "write ENGINE:START:END, with :drain if requests there may end, such as 0:30s:60s,2:40s:50s:drain"


def parse_outages(text: str | None, engines: int) -> tuple[Outage, ...]:
    """From ENGINE:START:END[:drain], separated by commas."""
    found = tuple(_outage(part.strip()) for part in text.split(",")) if text else ()
    check_outages(found, engines)
    return found


def _outage(text: str) -> Outage:
    parts = text.split(":")
    if len(parts) not in (3, 4) or (len(parts) == 4 and parts[3] != "drain"):
        raise InputError(f"outages: {text!r} is not an outage; {FORM}")
    try:
        return Outage(int(parts[0]), duration(parts[1]), duration(parts[2]), len(parts) == 4)
    except ValueError:
        raise InputError(f"outages: {text!r} is not an outage; {FORM}") from None
