"""Which part of a run is measured: the rule that leaves out warm-up and cool-down."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headgate.core.errors import unknown
from headgate.record.tables import Flags, Floats, Integers, Run
from headgate.stats.figures import BATCHES, batches

TRIM = 0.1  # share of the requests left out at each end
FEWEST = 20  # with fewer finished requests nothing is left out

MIDDLE = (
    "Latencies: without the first 10 % and the last 10 % of the requests in the order they were sent. "
    "Rates, steps and KV: between the moments when 10 % and 90 % of the finishes had happened."
)
FIRST_ROUND = " Of a closed loop the first request of every client is left out too: {} that came at once."
ALL = "Everything: all requests, and rates from the first arrival to the last finish."
AT_ONCE = " Here rates are over everything, because too many requests finished at the same moment."
TOO_FEW = f"Everything, because fewer than {FEWEST} requests were served to their end."


@dataclass(frozen=True)
class Window:
    """The part of a run that is measured, by request for latencies and by time for rates."""

    rule: str  # the rule in words, to be shown with the figures
    keep: Flags  # requests that latencies are taken from
    batch: Integers  # their batch, -1 outside
    low: float  # rates are taken from here
    high: float  # to here
    counted: Integers  # the requests whose finishes lie between
    share: Integers  # which of 20 equal shares of the finishes each request belongs to, -1 outside
    edges: Floats  # when each share began, and the end of the last

    @property
    def seconds(self) -> float:
        """Length of the time that rates are taken over."""
        return self.high - self.low


def choose(run: Run, window: str = "middle") -> Window:
    """The window called "middle" (the default: see `MIDDLE`) or "all"."""
    if window not in ("middle", "all"):
        raise unknown("window", window, ("middle", "all"))
    done = np.flatnonzero(run.completed())
    order = done[np.argsort(run.requests["finished"][done], kind="stable")]
    trim = TRIM if window == "middle" and len(done) >= FEWEST else 0.0
    rule = ALL if window == "all" else MIDDLE if trim else TOO_FEW
    total = len(run.requests["id"])
    keep = np.zeros(total, bool)
    warm_up, tail = int(total * trim), int(total * trim)
    opening = _first_round(run) if trim else 0
    if opening > warm_up:
        warm_up, rule = opening, rule + FIRST_ROUND.format(opening)
    keep[warm_up : total - tail] = True
    times = run.requests["finished"][order]
    early, late = (len(order) * part // total if total else 0 for part in (warm_up, tail))
    if early and late and times[early - 1] == times[-late - 1]:
        early, late, rule = 0, 0, rule + AT_ONCE
    begin, end = run.span()
    low = float(times[early - 1]) if early else begin
    high = float(times[len(times) - late - 1]) if len(times) else end
    counted = order[early : len(order) - late]
    share, edges = _shares(total, counted, run.requests["finished"][counted], low)
    return Window(rule, keep, batches(keep), low, high, counted, share, edges)


def _first_round(run: Run) -> int:
    """How many requests a closed loop sent at its start; 0 when leaving them out would leave too little."""
    arrival = run.requests["arrival"]
    if run.sending != "closed" or not len(arrival):
        return 0
    opening = int(np.count_nonzero(arrival == arrival[0]))
    return opening if opening <= len(arrival) // 2 else 0


def _shares(total: int, counted: Integers, times: Floats, low: float) -> tuple[Integers, Floats]:
    """Equal shares of the finishes in the order they happened, and the moments between them."""
    share = np.full(total, -1, np.int64)
    number = batches(np.ones(len(counted), bool))
    share[counted] = number
    if not len(number) or number[0] < 0:
        return share, np.empty(0)
    last = np.searchsorted(number, np.arange(BATCHES), side="right") - 1
    return share, np.concatenate(([low], times[last]))
