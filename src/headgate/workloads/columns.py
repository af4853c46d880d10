"""Columns of a workload: what each must satisfy, what holds between them, and their size in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.core.errors import InputError

Whole = npt.NDArray[np.int64]
Real = npt.NDArray[np.float64]

# Longest length of anything: far beyond any context window, and sums of millions of them still fit 64 bits.
LONGEST = 2**31 - 1
NO_GUESS = -1
OPEN_LOOP = 0


class Rule(NamedTuple):
    whole: bool
    least: int
    most: float
    remedy: str
    default: float | None = None


# Latest arrival: three centuries. Beyond, a float is too coarse for the steps of an engine.
LATEST = 1e10
FOUND = "cached tokens are whole numbers from 0 to one less than the prompt has"
TIME = Rule(False, 0, np.inf, "times are seconds of at least 0, fix or drop the row", np.inf)
LENGTHS = Rule(True, 1, LONGEST, f"lengths are whole numbers from 1 to {LONGEST}, fix or drop the row")
ARRIVAL = f"times are seconds of at least 0 and at most {LATEST:.0f}, fix or drop the row"
RULES = {  # the columns of a workload, in their order
    "arrival": Rule(False, 0, LATEST, ARRIVAL, 0),
    "prompt": LENGTHS,
    "output": LENGTHS,
    "kind": Rule(True, 0, LONGEST, "a kind is an index into kinds", 0),
    "limit": LENGTHS._replace(default=LONGEST),
    "priority": Rule(True, -LONGEST, LONGEST, "priorities are whole numbers, smaller is more urgent"),
    "patience": TIME,
    "abort": TIME,
    "guess": Rule(True, NO_GUESS, LONGEST, "a guess is a length, or -1 for none", NO_GUESS),
    "clients": Rule(True, OPEN_LOOP, LONGEST, f"clients are whole numbers up to {LONGEST}", OPEN_LOOP),
    "cached": Rule(True, 0, LONGEST, FOUND, 0),
    "tenant": Rule(True, 0, LONGEST, "a tenant is an index into tenants", 0),
}


def column(rule: Rule, values: npt.ArrayLike, called: str) -> Whole | Real:
    """A checked, read-only copy of one column in its own type; the error names it and the first wrong row."""
    try:
        given = np.array(values)
        numbers = given.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{called} holds something that is not a number; {rule.remedy}") from None
    if numbers.ndim != 1:
        raise InputError(f"{called} has {numbers.ndim} dimensions; give one value per request")
    wrong = ~((numbers >= rule.least) & (numbers <= rule.most))
    if rule.whole:
        wrong |= numbers != np.floor(numbers)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputError(f"{called} at row {row} is {given[row]}; {rule.remedy}")
    # Every whole column is bounded far below 2**53, so the way through float64 loses nothing.
    checked = numbers.astype(np.int64) if rule.whole else numbers
    checked.setflags(write=False)
    return checked


def check_together(columns: Mapping[str, Whole | Real], kinds: int, tenants: int) -> None:
    sizes = {name: len(values) for name, values in columns.items()}
    requests = sizes["prompt"]
    for name, size in sizes.items():
        if size != requests:
            raise InputError(f"{name} has {size} rows, prompt has {requests}; give one value per request")
    if requests == 0:
        raise InputError("a workload has no requests; give at least one")
    _check_arrivals(columns["arrival"], columns["clients"], columns["kind"])
    whole = columns["cached"] >= columns["prompt"]
    if whole.any():
        row = int(np.argmax(whole))
        raise InputError(f"cached at row {row} is {columns['cached'][row]}; {FOUND}")
    for name, known in (("kind", kinds), ("tenant", tenants)):
        beyond = columns[name] >= known
        if beyond.any():
            row = int(np.argmax(beyond))
            raise InputError(f"{name} at row {row} is {columns[name][row]}; there are only {known} {name}s")


def _check_arrivals(arrival: Whole | Real, clients: Whole | Real, kind: Whole | Real) -> None:
    """Sorted in an open loop; all zero in a closed one, where the clients decide when a request is sent."""
    back = np.diff(arrival) < 0
    if back.any():
        row = int(np.argmax(back)) + 1
        raise InputError(
            f"arrival at row {row} is {arrival[row]}, before the row above it; sort the requests by arrival"
        )
    closed = clients > OPEN_LOOP
    both = np.isin(kind, np.intersect1d(kind[closed], kind[~closed]))
    if both.any():
        first = int(np.argmax(both))
        row = int(np.argmax(both & (kind == kind[first]) & (closed != closed[first])))
        raise InputError(
            f"clients at row {row} is {clients[row]}, at row {first} {clients[first]}: open and closed loop "
            "in one class; give the clients a class of their own"
        )
    if arrival[closed].any():
        row = int(np.argmax(closed & (arrival > 0)))
        raise InputError(
            f"arrival at row {row} is {arrival[row]} in a closed loop; drop the arrivals or the clients"
        )


# -- the size of a workload in a few numbers


class LengthFigures(NamedTuple):
    mean: float
    p50: float
    p90: float
    p99: float


class Summary(NamedTuple):
    """A workload in numbers; rate and burstiness are None in a closed loop."""

    requests: int
    span: float
    rate: float | None
    burstiness: float | None
    prompt: LengthFigures
    output: LengthFigures


def summarise(arrival: Real, prompt: Whole, output: Whole) -> Summary:
    span = float(arrival[-1] - arrival[0])
    return Summary(
        requests=len(arrival),
        span=span,
        rate=len(arrival) / span if span > 0 else None,
        burstiness=_dispersion(arrival) if span > 0 else None,
        prompt=_lengths(prompt),
        output=_lengths(output),
    )


def _lengths(values: Whole) -> LengthFigures:
    return LengthFigures(float(values.mean()), *np.percentile(values, (50, 90, 99)).tolist())


def _dispersion(arrival: Real) -> float:
    """Index of dispersion: variance over mean of the arrivals per second; 1 is Poisson.

    Only occupied seconds are counted one by one, so a workload of years costs no more memory than its rows.
    """
    seconds, counts = np.unique(np.floor(arrival - arrival[0]), return_counts=True)
    bins = seconds[-1] + 1
    mean = len(arrival) / bins
    return float((np.square(counts).sum() / bins - mean**2) / mean)
