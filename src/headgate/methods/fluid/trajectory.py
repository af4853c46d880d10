"""The fluid path of a fleet from its start, (24) to (32): the balance equations (15) to (19) over time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.methods.fluid.plan import FluidPlan

Floats = NDArray[np.float64]
STEP = 0.01  # seconds


class Path(NamedTuple):
    """Per engine and class (columns), at the ends of steps (rows); seconds from an empty fleet."""

    time: Floats
    waiting: Floats  # for prefill
    prefilling: Floats
    handoff: Floats  # waiting for a decode seat
    decoding: Floats  # on mixed and solo engines

    def mean(self, name: str, start: float, end: float) -> Floats:
        """Of one of them over a stretch of time, by class."""
        inside = (self.time >= start) & (self.time < end)
        return np.asarray(getattr(self, name)[inside].mean(axis=0))


def fluid_path(plan: FluidPlan, seconds: float, step: float = STEP) -> Path:
    """The path under the plan's gates: class i prefills on at most x_i* engines, as soon as it has requests;
    decodes take solo seats first, then mixed ones, all classes alike.

    The paper's fluid limit has the same terms in integral form. Steps are explicit: those at which requests
    give up and decodes finish must be well below 1 per `step`; prompts may be shorter.
    """
    instance, pace = plan.instance, plan.instance.pace
    rate = np.array([flow.rate for flow in instance.flows])
    gives_up = np.array([flow.impatience for flow in instance.flows])
    leaves = np.array([flow.gives_up for flow in instance.flows])
    output = np.array([flow.output for flow in instance.flows])
    prefill = 1 / np.array(instance.seconds())
    share = np.array(plan.prefill)
    turns = step * prefill  # prompts that one engine completes in a step
    solo = pace.seats * (1 - share.sum())
    seats = solo + (pace.seats - 1) * share.sum()
    q, x, d, y = (np.zeros(len(rate)) for _ in range(4))
    rows: list[tuple[Floats, Floats, Floats, Floats]] = []
    count = max(1, round(seconds / step))
    for _ in range(count):
        q = q + step * (rate - gives_up * q)
        enters = np.minimum(q, np.maximum(share * np.maximum(turns, 1.0) - x, 0.0))
        q, x = q - enters, x + enters
        done = x * np.minimum(turns, 1.0)
        runs = done / turns
        x, d = x - done, d + done
        d = d - step * leaves * d
        room = max(0.0, seats - float(y.sum()))
        starts = d if d.sum() <= room else d * (room / float(d.sum()))
        d, y = d - starts, y + starts
        total = float(y.sum())
        on_solo = min(1.0, solo / total) if total else 1.0
        speed = on_solo * pace.solo_speed + (1 - on_solo) / pace.mixed_step
        y = y - step * speed / output * y
        rows.append((q, runs, d, y))
    time = step * np.arange(1, count + 1, dtype=np.float64)
    return Path(time, *(np.array([row[place] for row in rows]) for place in range(4)))
