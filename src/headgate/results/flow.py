"""Requests over time: the queue, whether it still grows, Little's law."""

from __future__ import annotations

import numpy as np

from headgate.core.errors import InputError
from headgate.results.tables import Floats, Integers, Run
from headgate.results.windows import TRIM

POINTS = 200  # moments at which the queue is looked at
DRIFT = 0.02  # a queue that gains or loses this share of the arrivals in the window is not stationary
LEAST_DRIFT = 10.0  # requests; below this it is chance
ROUNDS = 5  # requests per client that a closed loop must finish before its start is forgotten


def queue_length(run: Run, points: int = POINTS) -> tuple[Floats, Integers]:
    """How many requests waited for their first admission, at moments evenly over the run.

    Requests sent back to the queue by an eviction are not counted.
    """
    begin, end = run.span()
    times = np.linspace(begin, end, points)
    return times, _waiting(run, times)


def _waiting(run: Run, times: Floats) -> Integers:
    """Arrived by then, and neither admitted nor gone."""
    requests = run.requests
    left = np.where(np.isnan(requests["admitted"]), requests["finished"], requests["admitted"])
    came = np.searchsorted(np.sort(requests["arrival"]), times, side="right")
    went = np.searchsorted(np.sort(left[~np.isnan(left)]), times, side="right")
    return came - went


def stationary(run: Run) -> tuple[bool, str]:
    """Whether figures of this run say something about the long run, and why.

    Open loop: a straight line through the queue length, from when 10 % to when 90 % of the requests had
    arrived, must change by less than 2 % of the arrivals in that time (or 10 requests). Closed loop: the
    queue cannot grow, but each client must have had five requests on average, else the common start
    still shows. All at once: never, such a run only drains.
    """
    done = int(np.sum(run.completed()))
    if run.sending == "all-at-once":
        return False, "all requests were there at the start: the run only drains"
    if run.sending == "closed":
        clients = int(run.meta.get("clients") or peak(run))
        if done < ROUNDS * clients:
            return False, f"closed loop, but only {done / max(clients, 1):.1f} requests per client finished"
        return True, f"closed loop of {clients} clients: the queue cannot grow"
    arrival = np.sort(run.requests["arrival"])
    drop = int(len(arrival) * TRIM)
    middle = arrival[drop : len(arrival) - drop]
    if len(middle) < 2 or middle[0] == middle[-1]:
        return False, "too few requests to tell"
    times = np.linspace(middle[0], middle[-1], POINTS)
    # By share of the window: its seconds may be too many or too few for a fit.
    drift = float(np.polyfit(np.linspace(0.0, 1.0, POINTS), _waiting(run, times), 1)[0])
    if abs(drift) < max(LEAST_DRIFT, DRIFT * len(middle)):
        return True, "the queue neither grows nor shrinks over the window"
    trend, slope = "growing" if drift > 0 else "shrinking", drift / float(middle[-1] - middle[0])
    return False, f"queue still {trend}: {slope:+.2g} requests/s over the window"


def _changes(run: Run) -> tuple[Floats, Integers]:
    """The moments at which the number in the system changes, and the number from then on."""
    requests = run.requests
    left = requests["finished"][~np.isnan(requests["finished"])]
    times = np.concatenate((requests["arrival"], left))
    change = np.concatenate((np.ones(len(requests["arrival"]), np.int64), -np.ones(len(left), np.int64)))
    order = np.lexsort((change, times))  # who leaves makes room before who comes
    return times[order], np.cumsum(change[order])


def peak(run: Run) -> int:
    """Most requests in the system at one moment."""
    return int(_changes(run)[1].max(initial=0))


def little(run: Run) -> tuple[float, float]:
    """The time-average number in the system, and arrival rate times mean time in the system.

    An identity on every sample path that begins and ends empty, so a difference beyond rounding means
    that the tables are wrong. Refuses a run that was cut off, where it does not hold.
    """
    requests = run.requests
    if not len(requests["id"]) or np.any(np.isnan(requests["finished"])):
        raise InputError("Little's law needs a run in which every request left; this one was cut off")
    times, number = _changes(run)
    span = float(times[-1] - times[0])
    if span == 0:
        raise InputError("Little's law needs a run that takes time; this one began and ended at once")
    average = float(np.sum(number[:-1] * np.diff(times))) / span
    stay = requests["finished"] - requests["arrival"]
    return average, (len(stay) / span) * float(np.mean(stay))
