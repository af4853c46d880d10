"""Faults on demand, for people who test what stands before an engine."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, InstanceOf

from headgate.core.errors import InputError, unknown
from headgate.settings_base import SettingsModel, Share, Switch, checked

HEADER = "x-emulate-fault"
# What a fault may be, and what its number means.
KINDS = {
    "reset-before-head": "the connection is reset before anything is answered",
    "slow-head": "nothing is answered for so many seconds (1), then all is well",
    "error": "this status (500) with vLLM's error body; 500, 503 and 429 may be given by themselves",
    "error-event": "an error event after so many tokens (1), then [DONE]; without a stream a 500",
    "abort": "200, no text, finish_reason abort, as a draining vLLM answers",
    "drop": "the connection is reset between two events after so many tokens (1)",
    "reset-mid-event": "the same in the middle of an event",
    "stall": "after so many tokens (1) nothing more comes, and the connection stays open",
    "wrong-length": "Content-Length says so many bytes (64) more than there are, then the connection closes",
}
STATUSES = ("429", "500", "502", "503", "504")
DEFAULTS = {"wrong-length": 64.0, "error": 500.0}
IN_STREAM = ("error-event", "drop", "reset-mid-event", "stall")


class EmulatedFault(NamedTuple):
    kind: str
    at: float = 1.0  # tokens, seconds, bytes or a status, by its kind


def read_fault(text: str) -> EmulatedFault:
    kind, equals, number = text.strip().partition("=")
    if kind in STATUSES and not equals:
        return EmulatedFault("error", float(kind))
    if kind not in KINDS:
        raise unknown("fault", kind[:40], (*KINDS, *STATUSES))
    if not equals:
        return EmulatedFault(kind, DEFAULTS.get(kind, 1.0))
    try:
        at = float(number)
    except ValueError:
        at = -1.0
    if not 0 <= at <= 1e9 or (kind == "error" and not 400 <= at <= 599):
        raise InputError(f"fault {kind}={number[:20]!r} is not allowed; {KINDS[kind]}")
    return EmulatedFault(kind, at)


def _read(value: object) -> object:
    return value if isinstance(value, EmulatedFault) else read_fault(str(value)[:40])


Fault = Annotated[InstanceOf[EmulatedFault], BeforeValidator(_read)]


class FaultSettings(SettingsModel):
    rate: Share = 0.0
    kind: Fault = EmulatedFault("error", 500.0)
    always: Fault | None = None
    by_header: Switch = True


class Faults:
    """A request that names its own fault gets it. Otherwise all get `always`, if there is one, and a share
    `rate` gets `kind`: spread evenly, without chance, so that a rerun fails the same ones.
    """

    def __init__(self, **words: Any) -> None:
        self.seen = self.failed = 0
        self.settings = checked(FaultSettings, words)

    def set(self, words: dict[str, Any]) -> None:
        self.settings = checked(FaultSettings, {**dict(self.settings), **words})

    def of(self, header: str | None) -> EmulatedFault | None:
        now = self.settings
        if header is not None and now.by_header:
            return read_fault(header)
        if now.always is not None:
            return now.always
        if not now.rate:
            return None
        self.seen += 1
        if int(self.seen * now.rate) > self.failed:
            self.failed += 1
            return now.kind
        return None

    def shown(self) -> dict[str, Any]:
        return {name: f"{it[0]}={it[1]:g}" if isinstance(it, tuple) else it for name, it in self.settings}
