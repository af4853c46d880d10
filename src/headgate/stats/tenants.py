"""What tenants got of the engines, and how far one got ahead of another that waited."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from headgate.core.request import OUTPUT_SERVICE
from headgate.record.tables import Flags, Floats, Run
from headgate.stats.flow import Window
from headgate.stats.measured import Promises, promised

MOST = 12  # tenants listed one by one; the rest are one row
MOMENTS = 20_000  # at which service is compared, at most


@dataclass(frozen=True)
class TenantShare:
    """One tenant over the whole run; `service` are the prompt tokens and twice the output tokens it got."""

    name: str
    requests: int
    service: float
    service_share: float
    kept: float  # share of its promised requests, of those that are measured; NaN without any


@dataclass(frozen=True)
class TenantFigures:
    """Every tenant by service, the largest first, and the two that were furthest apart while both waited.

    `apart` is the most tokens of service by which one gained on the other in any stretch of time in which
    both had a request that waited for admission: what fair queueing bounds.
    """

    tenants: tuple[TenantShare, ...]
    rest: TenantShare | None  # those beyond `MOST`, summed
    apart: float  # NaN: no two ever waited at the same time
    ahead: str  # which gained
    behind: str


def compute_tenants(run: Run, window: Window, promises: Promises | None) -> TenantFigures | None:
    """None where the run does not say whose its requests are, or all are of one."""
    if "tenant" not in run.requests:
        return None
    known, places = np.unique(run.requests["tenant"], return_inverse=True)
    numbers = known.tolist()
    if len(numbers) < 2:
        return None
    service_of = _service(run)
    served = np.bincount(places, weights=service_of)
    order = [numbers[place] for place in np.argsort(-served, kind="stable")]
    names, total = run.tenants, float(served.sum()) or math.nan

    def share(name: str, mine: Flags) -> TenantShare:
        service = float(service_of[mine].sum())
        kept = _kept(run, window, promises, mine)
        return TenantShare(name, int(mine.sum()), service, service / total, kept)

    def named(number: int) -> str:
        return (names[number] or "-") if number < len(names) else str(number)

    shown, others = order[:MOST], order[MOST:]
    rows = {number: run.requests["tenant"] == number for number in shown}
    apart, ahead, behind = _furthest(run, rows)
    return TenantFigures(
        tenants=tuple(share(named(number), rows[number]) for number in shown),
        rest=share(f"{len(others)} others", np.isin(run.requests["tenant"], others)) if others else None,
        apart=apart,
        ahead="" if math.isnan(apart) else named(ahead),
        behind="" if math.isnan(apart) else named(behind),
    )


def _service(run: Run) -> Floats:
    """Of each request, once it has its first token."""
    rows = run.requests
    started = np.isfinite(rows["first_token"])
    return np.where(started, rows["prompt"] + OUTPUT_SERVICE * rows["output"], 0).astype(np.float64)


def _kept(run: Run, window: Window, promises: Promises | None, mine: Flags) -> float:
    if promises is None:
        return math.nan
    classes = np.array([promised(kind) for kind in run.kinds])[run.requests["kind"].astype(np.int64)]
    judged = mine & classes & window.keep & promises.judged
    return float(promises.met[judged].mean()) if judged.any() else math.nan


def _furthest(run: Run, rows: dict[int, Flags]) -> tuple[float, int, int]:
    """The most that one tenant gained on another while both waited, which gained, and on which."""
    requests, end = run.requests, run.span()[1]
    times = np.unique(np.concatenate([requests[name] for name in ("arrival", "admitted", "first_token")]))
    times = np.unique(np.append(times[~np.isnan(times)], end))
    if len(times) > MOMENTS:
        times = times[np.linspace(0, len(times) - 1, MOMENTS).astype(np.int64)]
    served = {number: served_by(run, mine, times) for number, mine in rows.items()}
    waits = {number: _waits(run, mine, times) for number, mine in rows.items()}
    furthest, ahead, behind = math.nan, -1, -1
    for one, other in combinations(rows, 2):
        both = waits[one] & waits[other]
        lead = served[one] - served[other]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], both, [False])).astype(np.int8)))
        for begin, stop in zip(edges[::2], edges[1::2], strict=True):
            # what the stretch up to its end brought counts too: the moment after the last is its end
            stretch = lead[begin : min(stop + 1, len(lead))]
            gain = float((stretch - np.minimum.accumulate(stretch)).max())
            loss = float((np.maximum.accumulate(stretch) - stretch).max())
            for most, first, second in ((gain, one, other), (loss, other, one)):
                if not most <= furthest:
                    furthest, ahead, behind = most, first, second
    return furthest, ahead, behind


def served_by(run: Run, mine: Flags, times: Floats, output: float = OUTPUT_SERVICE) -> Floats:
    """Service by then: a prompt with its first token, outputs evenly from there to the last."""
    rows, end = run.requests, run.span()[1]
    got = mine & np.isfinite(rows["first_token"])
    first = rows["first_token"][got]
    last = np.where(np.isnan(rows["finished"][got]), end, rows["finished"][got])
    pace = output * rows["output"][got] / np.maximum(last - first, 1e-9)
    prompts = _summed(first, rows["prompt"][got].astype(np.float64), times)
    # a ramp is its pace times (time - first) less the same from its last token on
    begun = _summed(first, pace, times) * times - _summed(first, pace * first, times)
    ended = _summed(last, pace, times) * times - _summed(last, pace * last, times)
    return np.asarray(prompts + begun - ended)


def _summed(moments: Floats, values: Floats, times: Floats) -> Floats:
    """The values whose moment has come by each time."""
    order = np.argsort(moments, kind="stable")
    sums = np.concatenate(([0.0], np.cumsum(values[order])))
    return np.asarray(sums[np.searchsorted(moments[order], times, side="right")])


def _waits(run: Run, mine: Flags, times: Floats) -> Flags:
    """Whether some request has arrived and was not admitted, from each time to the next."""
    rows, end = run.requests, run.span()[1]
    left = np.where(np.isnan(rows["admitted"]), rows["finished"], rows["admitted"])[mine]
    came = _summed(rows["arrival"][mine], np.ones(int(mine.sum())), times)
    gone = _summed(np.where(np.isnan(left), np.inf, left), np.ones(int(mine.sum())), times)
    return np.asarray((came - gone > 0) & (times < end))
