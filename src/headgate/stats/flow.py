"""Requests over time: how many wait or are inside, whether that still grows, and which part is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headgate.core.errors import unknown
from headgate.record.tables import Flags, Floats, Integers, Run
from headgate.stats.figures import BATCHES, batches, widening

POINTS = 200  # moments at which the queue is looked at
STRETCHES = 20  # of the window (or of half of it), whose means a line is drawn through
SURE = 3.0  # standard errors of a slope that are no chance
LEAST_DRIFT = 10.0  # requests; a change below this does not matter
ROUNDS = 5  # requests per client that a closed loop must finish before its start is forgotten
STAYS = 4  # a window of fewer mean stays sees an engine that still fills up
FILLS = "{:.3g} s were measured and a request stays {:.3g} s, so engines still fill up; take more requests"
OVERLOADED = "Overloaded: the backlog grows"
STAGED = ("rate", "clients", "prompt", "output")  # what stages of a workload may change


def offered(run: Run) -> float:
    arrival = run.requests["arrival"]
    span = float(np.ptp(arrival)) if len(arrival) > 1 else 0.0
    return float(run.meta.get("rate") or ((len(arrival) - 1) / span if span > 0 else math.nan))


def waiting(run: Run, times: Floats) -> Integers:
    admitted, finished = run.requests["admitted"], run.requests["finished"]
    return _present(run, times, np.where(np.isnan(admitted), finished, admitted))


def _present(run: Run, times: Floats, left: Floats) -> Integers:
    came = np.searchsorted(np.sort(run.requests["arrival"]), times, side="right")
    return came - np.searchsorted(np.sort(left[~np.isnan(left)]), times, side="right")


class Stationarity(NamedTuple):
    stationary: bool
    reason: str
    said: str
    growing: bool = False  # the backlog, in an overload


def judge(run: Run) -> Stationarity:
    """Whether figures of this run say something about the long run, and why.

    Stages that differ: not stationary by design. All at once: never, such a run only drains. Closed loop:
    the queue cannot grow, but each client must have had five requests on average, else the common start
    still shows. Open loop: from when 10 % to when 90 % of the requests had arrived, neither the number in
    the system nor the number waiting may have a trend beyond three standard errors of its slope and
    beyond ten requests; see `_verdict`.
    """
    drawn = run.meta.get("workload")
    drawn = drawn.get("drawn") if isinstance(drawn, dict) else None
    stages = drawn.get("stages") if isinstance(drawn, dict) else None
    if isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages):
        changed = [name for name in STAGED if any(one.get(name) != stages[0].get(name) for one in stages)]
        if changed:
            design = f"stationary by design: {len(stages)} stages that differ in {' and '.join(changed)}"
            return Stationarity(False, f"not {design}", f"Not {design}")
    if run.sending == "all-at-once":
        return _judged(False, "all requests were there at the start: the run only drains")
    if run.sending == "closed":
        done, clients = int(np.sum(run.completed())), int(run.meta.get("clients") or peak(run))
        if done < ROUNDS * clients:
            each = done / max(clients, 1)
            return _judged(False, f"closed loop, but only {each:.1f} requests per client finished")
        return _judged(True, f"closed loop of {clients} clients: the queue cannot grow")
    arrival = np.sort(run.requests["arrival"])
    drop = int(len(arrival) * TRIM)
    middle = arrival[drop : len(arrival) - drop]
    if len(middle) < 2 or middle[0] == middle[-1]:
        return _judged(False, "too few requests to tell")
    return _verdict(run, np.linspace(middle[0], middle[-1], POINTS))


def _judged(stationary: bool, reason: str) -> Stationarity:
    return Stationarity(stationary, reason, f"{'Stationary' if stationary else 'Not stationary'}: {reason}")


def _verdict(run: Run, times: Floats) -> Stationarity:
    """Judge the number in the system and the queue at these moments, over the window and over its halves.

    The halves show what a straight line through the whole blurs: a backlog that drains and is gone. One
    case is let through: a run that fills up at first and is level from then on (a queue that patience
    bounds) has settled. Its second half has no trend, and less than a third of the slope of its first,
    while a queue in overload has the same slope in both.
    """
    settled, seconds = False, float(times[-1] - times[0])
    inside = _present(run, times, run.requests["finished"])
    for name, number in (("number in the system", inside), ("queue", waiting(run, times))):
        first, second = (Trend.of(part) for part in np.split(number, 2))
        trend = next((one for one in (Trend.of(number), first, second) if one.seen), None)
        if trend is None:
            continue
        if trend.change > 0 and not second.seen and second.change < first.change / 3:
            settled = True
            continue
        span = seconds / (1 if trend not in (first, second) else 2)
        part = {first: "first half of the window", second: "second half of the window"}.get(trend, "window")
        rise = f"{_two(trend.change / span, '+')} requests/s (standard error {_two(trend.error / span)})"
        word = "growing" if trend.change > 0 else "shrinking"
        reason = f"{name} still {word}: {rise} over the {part}"
        stays = run.requests["finished"] - run.requests["arrival"]
        left = stays[~np.isnan(stays)]
        stay = float(left.mean()) if len(left) else 0.0
        if trend.change > 0 and seconds < STAYS * stay and not Trend.of(waiting(run, times)).seen:
            return Stationarity(False, reason, f"Too short to be steady: {FILLS.format(seconds, stay)}")
        grows = trend.change > 0
        said = OVERLOADED if grows else "Not stationary: the backlog shrinks"
        where = "" if part == "window" else f" in the {part}"
        return Stationarity(False, reason, f"{said}{where}", grows)
    level = "neither the queue nor the number in the system grows or shrinks over the window"
    later = "filled up at first, and neither grows nor shrinks in the second half of the window"
    return _judged(True, later if settled else level)


class Trend(NamedTuple):
    """How much a straight line through a series changes from its start to its end, and the error of that."""

    change: float
    error: float

    @property
    def seen(self) -> bool:
        return abs(self.change) > max(LEAST_DRIFT, SURE * self.error)

    @classmethod
    def of(cls, number: Integers) -> Trend:
        """The line through the means of 20 stretches, and the smaller of two errors.

        A stable queue wanders around its level: neighbouring residuals are alike, which widens the error of
        the slope by the same AR(1) factor as that of a mean. A queue in overload is a random walk with a
        drift: there the steps between stretches give the error (their variance is 2/3 of the walk's, the
        slope's 6/5 of it). Either is far too large where the other is right.
        """
        size = len(number) // STRETCHES
        level = number[: size * STRETCHES].reshape(STRETCHES, size).mean(axis=1)
        place = (np.arange(STRETCHES) - (STRETCHES - 1) / 2) / STRETCHES
        slope = float(place @ level) / float(place @ place)
        rest = level - level.mean() - slope * place
        around = math.sqrt(float(rest @ rest) / (STRETCHES - 2) / float(place @ place)) * widening(rest)
        walking = math.sqrt(6 / 5 * 3 / 2 * STRETCHES * float(np.var(np.diff(level), ddof=1)))
        return cls(slope, min(around, walking))


def _two(value: float, sign: str = "") -> str:
    """Two digits that matter, 12 and not 1.2e+01."""
    return f"{float(f'{value:.2g}'):{sign}g}"


def peak(run: Run) -> int:
    came, left = run.requests["arrival"], run.requests["finished"]
    times = np.concatenate((came, left[~np.isnan(left)]))
    change = np.where(np.arange(len(times)) < len(came), 1, -1)
    order = np.lexsort((change, times))  # one that leaves makes room before one that comes
    return int(np.cumsum(change[order]).max(initial=0))


# -- which part of a run is measured

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
        return self.high - self.low


def choose(run: Run, window: str = "middle") -> Window:
    if window not in ("middle", "all"):
        raise unknown("window", window, ("middle", "all"))
    done = np.flatnonzero(run.completed())
    order = done[np.argsort(run.requests["finished"][done], kind="stable")]
    trim = TRIM if window == "middle" and len(done) >= FEWEST else 0.0
    rule = ALL if window == "all" else MIDDLE if trim else TOO_FEW
    keep = np.zeros(len(run.requests["id"]), bool)
    # a client whose request is refused sends the next at once: these are no part of the run
    sent = np.flatnonzero(~unservable_rows(run)) if run.meta.get("clients_beside") else np.arange(len(keep))
    total, arrival = len(sent), run.requests["arrival"][sent]
    warm_up = tail = int(total * trim)
    if trim and total and (run.sending == "closed" or run.meta.get("clients_beside")):
        opening = int(np.count_nonzero(arrival == arrival[0]))
        if warm_up < opening <= total // 2:
            warm_up, rule = opening, rule + FIRST_ROUND.format(opening)
    keep[sent[warm_up : total - tail]] = True
    times = run.requests["finished"][order]
    early, late = (len(order) * part // total if total else 0 for part in (warm_up, tail))
    if early and late and times[early - 1] == times[-late - 1]:
        early, late, rule = 0, 0, rule + AT_ONCE
    begin, end = run.span()
    low = float(times[early - 1]) if early else begin
    high = float(times[len(times) - late - 1]) if len(times) else end
    counted = order[early : len(order) - late]
    share, number = np.full(len(keep), -1, np.int64), batches(np.ones(len(counted), bool))
    share[counted], edges = number, np.empty(0)
    if len(number) and number[0] >= 0:
        last = np.searchsorted(number, np.arange(BATCHES), side="right") - 1
        edges = np.concatenate(([low], run.requests["finished"][counted][last]))
    return Window(rule, keep, batches(keep), low, high, counted, share, edges)


def unservable_rows(run: Run) -> Flags:
    """Requests whose prompt alone is longer than model or KV allow: they were refused at the door."""
    longest = run.meta.get("longest")
    if not isinstance(longest, int):
        return np.zeros(len(run.requests["id"]), bool)
    return np.asarray(run.requests["prompt"] >= longest)
