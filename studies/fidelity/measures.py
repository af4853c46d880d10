"""The same figures from the tokens of a real and of a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headgate.record.tables import Run
from headgate.stats.gaps import Gaps

Numbers = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tokens:
    """When each token came, in order of time, and whose it was; times from the beginning of the scene."""

    time: Numbers
    of: Whole
    arrival: Numbers  # of each request

    def __post_init__(self) -> None:
        order = np.argsort(self.time, kind="stable")
        object.__setattr__(self, "time", self.time[order])
        object.__setattr__(self, "of", self.of[order])


def simulated(run: Run) -> Tokens:
    """The tokens of a run of the simulator."""
    first = run.requests["first_token"]
    lists = Gaps(run).lists()
    served = [place for place in range(len(lists)) if not np.isnan(first[place])]
    times = [first[place] + np.cumsum([0.0, *lists[place]]) for place in served]
    owner = np.repeat(served, [len(each) for each in times]).astype(np.int64)
    return Tokens(np.concatenate(times), owner, run.requests["arrival"])


@dataclass(frozen=True)
class Figures:
    """Of the stretch of time that is looked at."""

    tokens_per_s: float
    requests_per_s: float  # first tokens
    ttft: Numbers
    tpot: Numbers
    gaps: Numbers


def figures(tokens: Tokens, begin: float, end: float) -> Figures:
    """First tokens, gaps, and the mean gap of each request (of at least two), of tokens in (begin, end]."""
    order = np.lexsort((tokens.time, tokens.of))
    of, time = tokens.of[order], tokens.time[order]
    opens = np.concatenate(([True], of[1:] != of[:-1])) if len(of) else np.zeros(0, bool)
    inside = (time > begin) & (time <= end)
    gap = np.diff(time, prepend=0.0)
    later = inside & ~opens
    count = np.bincount(of[later], minlength=1)
    total = np.bincount(of[later], gap[later], minlength=1)
    first = inside & opens
    span = end - begin
    return Figures(
        float(inside.sum() / span),
        float(first.sum() / span),
        time[first] - tokens.arrival[of[first]],
        total[count > 1] / count[count > 1],
        gap[later],
    )


def compared(real: Figures, simulated: Figures) -> dict[str, dict[str, float]]:
    """Each figure of both, and the relative error of the simulated one."""
    pairs = {
        "tokens/s": (real.tokens_per_s, simulated.tokens_per_s),
        "requests/s": (real.requests_per_s, simulated.requests_per_s),
    }
    for name in ("ttft", "tpot"):
        ours, theirs = getattr(simulated, name), getattr(real, name)
        pairs[f"{name} mean"] = _mean(theirs), _mean(ours)
        pairs[f"{name} p99"] = _quantile(theirs, 0.99), _quantile(ours, 0.99)
    for share, word in ((0.5, "p50"), (0.99, "p99")):
        pairs[f"itl {word}"] = _quantile(real.gaps, share), _quantile(simulated.gaps, share)
    found = {
        name: {"real": a, "simulated": b, "error": b / a - 1 if a else float("nan")}
        for name, (a, b) in pairs.items()
    }
    distance = kolmogorov(real.gaps, simulated.gaps)
    return found | {"itl KS": {"real": 0.0, "simulated": 0.0, "error": distance}}


def kolmogorov(one: Numbers, other: Numbers) -> float:
    """The largest difference between two distribution functions."""
    if not len(one) or not len(other):
        return float("nan")
    one, other = np.sort(one), np.sort(other)
    values = np.concatenate((one, other))
    low = np.searchsorted(one, values, side="right") / len(one)
    high = np.searchsorted(other, values, side="right") / len(other)
    return float(np.abs(low - high).max())


def _mean(values: Numbers) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _quantile(values: Numbers, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else float("nan")
