"""One run and what is worked out from its tables, each part once, when it is first asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from headgate.core.request import ENVELOPE, GAP, MEAN, MOST_URGENT
from headgate.record.tables import Flags, Floats, Run
from headgate.stats import flow
from headgate.stats.flow import Window, choose, unservable_rows
from headgate.stats.gaps import Gaps, Sample

if TYPE_CHECKING:
    from headgate.stats.metrics import FleetFigures, Metrics


class Measured:
    """A run with its window, latencies, gaps and figures. Terminal, JSON and HTML are given this object.

    Nothing is computed before it is asked for, and nothing twice. The tables must not change meanwhile.
    """

    def __init__(self, run: Run, window: str = "middle") -> None:
        self.run = run
        self.window_name = window

    @classmethod
    def of(cls, run: Run | Measured, window: str = "middle") -> Measured:
        if isinstance(run, Measured):
            return run if run.window_name == window else cls(run.run, window)
        return cls(run, window)

    @cached_property
    def window(self) -> Window:
        return choose(self.run, self.window_name)

    @cached_property
    def latencies(self) -> Latencies:
        return Latencies.of(self.run)

    @cached_property
    def gaps(self) -> Gaps:
        return Gaps(self.run)

    @cached_property
    def longest(self) -> Floats:
        return self.gaps.longest()

    @cached_property
    def between_tokens(self) -> Floats:
        kinds = np.array([between_kind(kind) for kind in self.run.kinds])[self.run.requests["kind"]]
        values = np.where(kinds == MEAN, self.latencies.tpot, self.longest)
        if ENVELOPE in kinds:
            pace = envelopes(self.run, self.gaps, _promised(self.run, "first_token"))
            values = np.where(kinds == ENVELOPE, pace, values)
        return values

    @cached_property
    def gap_sample(self) -> Sample:
        return self.gaps.sample(self.window.keep)

    @cached_property
    def promises(self) -> Promises | None:
        return Promises.of(self.run, self.latencies, self.between_tokens)

    @cached_property
    def trend(self) -> flow.Stationarity:
        return flow.judge(self.run)

    @cached_property
    def metrics(self) -> Metrics:
        from headgate.stats.metrics import compute_metrics

        return compute_metrics(self)

    @cached_property
    def fleet(self) -> FleetFigures | None:
        from headgate.stats.metrics import compute_fleet

        return compute_fleet(self)


@dataclass(frozen=True)
class Latencies:
    """Per request, in seconds; NaN where there is none (yet).

    `ttft` for every request that got a token; the others only for requests served to their end, because
    when the last token of an aborted request came is not known.
    """

    ttft: Floats
    e2e: Floats
    decode: Floats  # from the first token to the last
    gaps: Floats  # how many gaps that time holds: output tokens less one
    tpot: Floats  # the mean of those gaps; needs two tokens
    deliveries: Floats  # the same number where a step brings one token; with speculation fewer

    @classmethod
    def of(cls, run: Run) -> Latencies:
        requests, done = run.requests, run.completed()
        ttft = requests["first_token"] - requests["arrival"]
        e2e = np.where(done, requests["finished"] - requests["arrival"], np.nan)
        decode = np.where(done, requests["finished"] - requests["first_token"], np.nan)
        gaps = np.where(done, requests["output"] - 1.0, np.nan)
        tpot = np.where(gaps > 0, decode / np.maximum(gaps, 1.0), np.nan)
        return cls(ttft, e2e, decode, gaps, tpot, _deliveries(run, done) if speculates(run) else gaps)


def speculates(run: Run) -> bool:
    """Whether a step may have brought several tokens of a request: gaps are then between deliveries."""
    return bool(run.meta.get("speculation"))


def _deliveries(run: Run, done: Flags) -> Floats:
    """Steps that brought tokens of each request after its first, prompts computed again among them."""
    stays = run.stays
    steps = stays["ticks"] + ~np.isnan(stays["gap"])
    counted = np.bincount(run.rows_of(stays["request"]), steps, minlength=len(done))
    return np.where(done, counted, np.nan)


@dataclass(frozen=True)
class Promises:
    """Which requests can be judged, and which of them kept every promise to their user."""

    judged: Flags
    met: Flags

    @classmethod
    def of(cls, run: Run, latencies: Latencies, between_tokens: Floats) -> Promises | None:
        """None when nothing was promised; `between_tokens` is as `Measured` has it.

        A request is met when it was served to its end with its TTFT and every gap between its tokens (where
        the mean or the envelope was promised: its TPOT, its pace) within what its kind was promised. One
        that was aborted, abandoned or refused is not met; one that was promised nothing, or that no engine
        of this size can serve, is not judged. One still in the system counts only when it has already broken
        a promise: the rest is not known.
        """
        promised_kinds = np.array([promised(kind) for kind in run.kinds], bool)
        if not promised_kinds.any():
            return None
        requests, first = run.requests, _promised(run, "first_token")
        so_far = run.span()[1] - requests["arrival"]
        late = np.where(np.isnan(latencies.ttft), so_far, latencies.ttft) > first
        slow = np.nan_to_num(between_tokens, nan=0.0) > _promised(run, "between_tokens")
        theirs = promised_kinds[requests["kind"].astype(np.int64)]
        judged = theirs & ((requests["how"] >= 0) | late | slow) & ~unservable_rows(run)
        return cls(judged, theirs & run.completed() & ~late & ~slow)


def _promised(run: Run, name: str) -> Floats:
    limits = np.array([np.inf if kind.get(name) is None else kind[name] for kind in run.kinds])
    return limits[run.requests["kind"].astype(np.int64)]


def envelopes(run: Run, gaps: Gaps, first: Floats) -> Floats:
    """The least T for which token j of each request came by arrival + first + j x T, j from 0.

    Infinite where the first token came later, 0 where it is the only one, NaN where there is none yet.
    """
    requests = run.requests
    each = np.ones(gaps.requests)
    if speculates(run):
        deliveries = _deliveries(run, np.full(gaps.requests, True))
        each = np.where(deliveries > 0, (requests["output"] - 1) / np.maximum(deliveries, 1), 1.0)
    ttft = requests["first_token"] - requests["arrival"]
    pace = np.where(ttft > first, np.inf, gaps.envelope(requests["arrival"] + first, each))
    return np.where(np.isnan(ttft), np.nan, pace)


def between_kind(kind: dict[str, Any]) -> str:
    """What the promise between tokens of this kind is about: every gap, their mean or the envelope."""
    said = kind.get("between_kind")
    return said if said in (MEAN, ENVELOPE) else GAP


def weighed(run: Run) -> bool:
    """Whether classes differ in more than their promises: some has a weight or is background work."""
    return any(kind.get("weight") is not None or kind.get("background") for kind in run.kinds)


def weights(run: Run) -> Floats:
    """What a kept promise of each request is worth, as `weight_of` has it."""
    own = [np.nan if kind.get("weight") is None else float(kind["weight"]) for kind in run.kinds]
    mine = np.array(own)[run.requests["kind"].astype(np.int64)]
    priority = run.requests.get("priority", np.zeros(len(mine)))  # a table of others may lack it
    urgency = np.clip(-priority.astype(np.float64), -MOST_URGENT, MOST_URGENT)
    return np.where(np.isnan(mine), 10.0**urgency, mine)


def promised(kind: dict[str, Any]) -> bool:
    return kind.get("first_token") is not None or kind.get("between_tokens") is not None
