"""Faults on demand, for people who test what stands before an engine."""

from __future__ import annotations

from typing import Any, NamedTuple

from headgate.core.errors import InputError, unknown

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


class Faults:
    """A request that names its own fault gets it. Otherwise all get `always`, if there is one, and a share
    `rate` gets `kind`: spread evenly, without chance, so that a rerun fails the same ones.
    """

    def __init__(self, rate: float = 0.0, kind: str = "500") -> None:
        self.by_header, self.seen, self.failed = True, 0, 0
        self.rate, self.kind = 0.0, read_fault(kind)
        self.always: EmulatedFault | None = None
        self.set({"rate": rate})

    def set(self, words: dict[str, Any]) -> None:
        known = {"rate", "kind", "always", "by_header"}
        for word in words:
            if word not in known:
                raise unknown("fault setting", word, known)
        rate = words.get("rate", self.rate)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise InputError(f"fault rate {str(rate)[:20]} is not allowed; give a share from 0 to 1")
        kind = read_fault(str(words["kind"])) if "kind" in words else self.kind
        always = words.get("always", self.always)
        if isinstance(always, str):
            always = read_fault(always)
        elif always is not None and not isinstance(always, EmulatedFault):
            raise InputError("fault always is not a text; give a fault such as drop=5, or null")
        by_header = words.get("by_header", self.by_header)
        if not isinstance(by_header, bool):
            raise InputError("fault by_header is not true or false")
        self.rate, self.kind, self.always, self.by_header = float(rate), kind, always, by_header

    def of(self, header: str | None) -> EmulatedFault | None:
        if header is not None and self.by_header:
            return read_fault(header)
        if self.always is not None:
            return self.always
        if not self.rate:
            return None
        self.seen += 1
        if int(self.seen * self.rate) > self.failed:
            self.failed += 1
            return self.kind
        return None

    def shown(self) -> dict[str, Any]:
        text = None if self.always is None else f"{self.always.kind}={self.always.at:g}"
        kind = f"{self.kind.kind}={self.kind.at:g}"
        return {"rate": self.rate, "kind": kind, "always": text, "by_header": self.by_header}
