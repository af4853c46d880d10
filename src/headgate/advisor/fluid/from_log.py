"""Classes of requests for a fluid plan from what a router has seen: the trace of `headgate route`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headgate.advisor.fluid.demand import Demand
from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.estimators.traffic import MOST_CACHED
from headgate.methods.fluid.flows import Flow
from headgate.record.route_trace import read_route_trace
from headgate.record.tables import ENDS, Run

LONGEST_PATIENCE = 3600.0  # seconds; more patient classes count as never giving up
FEW = 30  # finished requests, or exits from the queue, below which an estimate is called rough


def logged_demand(path: str) -> Demand:
    """Rates, lengths and patience by class, over the whole file.

    Lengths and patience are estimated as the running router does: ends over exposure. Requests that broke
    off count with the tokens they had, requests that were refused or served with the time they waited; a
    mean over finished requests alone would be too short. The class names are those of the router.
    """
    run = read_route_trace(path)
    arrival = run.requests["arrival"]
    span = float(arrival.max() - arrival.min())
    if span <= 0:
        raise InputError(
            f"trace {path}: all requests came at one moment, so no rate is known; take a longer one"
        )
    notes: list[str] = []
    flows = tuple(_flows(run, span, notes))
    done = run.completed()
    outputs = run.requests["output"][done].astype(np.float64)
    reads = outputs * (run.requests["prompt"][done] + outputs / 2)
    return Demand(f"router trace {path}", flows, float(reads.sum() / max(outputs.sum(), 1.0)), tuple(notes))


def _flows(run: Run, span: float, notes: list[str]) -> Iterator[Flow]:
    requests, done = run.requests, run.completed()
    if not done.any():
        raise InputError("no request of the trace finished, so no output length is known; take another one")
    overall = float(requests["output"].sum() / done.sum())
    for number, kind in enumerate(run.kinds):
        name, mine = str(kind["name"]), requests["kind"] == number
        ended = int((mine & done).sum())
        output = float(requests["output"][mine].sum() / ended) if ended else overall
        if not ended:
            notes.append(f"no request of class {name} finished: its output is the mean of all classes")
        elif ended < FEW:
            notes.append(f"{ended} requests of class {name} finished: its output length is rough")
        rate = float(mine.sum()) / span
        prompt = float(requests["prompt"][mine].mean())
        found = float(requests["cached"][mine & done].sum() / max(requests["prompt"][mine & done].sum(), 1.0))
        cached = max(0.0, min(found, MOST_CACHED)) * prompt  # what engines told at the end of their answers
        yield Flow(name, prompt, max(output, 1.0), rate, _impatience(run, mine, name, notes), cached=cached)


def _impatience(run: Run, mine: NDArray[np.bool_], name: str, notes: list[str]) -> float:
    """Clients that left the queue over the seconds that all of the class waited; 0: nobody gives up."""
    requests = run.requests
    queued = np.isnan(requests["admitted"])
    gone = requests["how"] == ENDS.index(End.ABORTED)
    exits = int((mine & queued & gone).sum())
    until = np.where(queued, requests["finished"], requests["admitted"])
    waited = float((until - requests["arrival"])[mine].sum())
    if exits == 0 or waited <= 0 or exits / waited < 1 / LONGEST_PATIENCE:
        return 0.0
    if exits < FEW:
        notes.append(f"{exits} clients of class {name} left the queue: its patience is rough")
    return exits / waited
