"""When each of a run of equal decode steps ends: the arithmetic that lets the simulator jump."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import inf

import numpy as np

from headgate.cost.model import StepCost

LONG = 64  # from this many steps on, numpy is faster than plain floats


def step_ends(
    cost: StepCost, decodes: int, context: int, most: int, start: float, stop: float
) -> list[float]:
    """The ends of up to `most` steps from `start`, the last at or after `stop` if it is reached.

    Durations are summed one after the other from `start` on, in plain Python or by numpy's running sum, so
    that jumping and stepping agree to the last bit.
    """
    fixed, slope = cost.decode_line(decodes)
    first = fixed + slope * context
    if stop < inf and first > 0:  # steps do not get shorter, so no more than this are needed
        most = min(most, max(1, int((stop - start) / first) + 1))
    if most < LONG:
        costs = [fixed + slope * read for read in range(context, context + most * decodes, decodes)]
        ends = list(accumulate(costs, initial=start))
        if ends[-1] > stop:
            del ends[bisect_left(ends, stop, 1) + 1 :]
    else:
        sums = np.cumsum(np.concatenate(([start], cost.span(decodes, context, most))))
        ends = sums[: int(np.searchsorted(sums, stop)) + 1].tolist()
    del ends[0]
    return ends
