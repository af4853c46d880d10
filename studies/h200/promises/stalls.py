"""Single moments at which many clients saw a late gap: `python -m studies.h200.promises.stalls STEM...`.

STEM names two files of results/promises, `h200-d` for instance. Requests with about the same worst gap saw
the same stall, after the last of their first tokens. How many requests decoded then, and at most until a
second before, comes from the simulator with the same requests. Only arms that keep gaps are looked at.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headgate.core.durations import duration
from headgate.record.tables import Run
from studies.h200.promises.load import draw
from studies.h200.promises.table import Line, read, replay

RESULTS = Path(__file__).parents[1] / "results" / "promises"
ENDING = ".requests.jsonl.gz"
ARMS = ("keep", "slai")
ALIKE = 0.0012  # seconds between the worst gaps of two requests that saw the same stall
SAME = 0.5  # seconds between two stalls that are told apart
HEAD = ("file", "workload", "arm", "at (s)", "requests", "gap (ms)", "inside (simulated)", "most before")


class Stall(NamedTuple):
    """One moment, the requests whose worst gap it was, and that gap."""

    at: float
    requests: int
    least: float
    most: float


def stalls(requests: Line, promise: float) -> list[Stall]:
    """In the order of time."""
    worst = np.array(requests["worst_gap"])
    first = np.array(requests["arrival"]) + np.array(requests["first"], float)
    late = np.sort(worst[worst > promise])
    groups = np.split(late, np.flatnonzero(np.diff(late) > ALIKE) + 1) if len(late) else []
    found: list[Stall] = []
    moments = [(float(np.nanmax(first[(worst >= g[0]) & (worst <= g[-1])])), g) for g in groups]
    for at, group in sorted(moments, key=lambda moment: moment[0]):
        here = Stall(at, len(group), group[0], group[-1])
        if found and at - found[-1].at < SAME:
            last = found.pop()
            low, high = min(last.least, here.least), max(last.most, here.most)
            here = Stall(at, last.requests + here.requests, low, high)
        found.append(here)
    return found


def inside(run: Run, at: float) -> tuple[int, int]:
    """Requests that decode at a moment, and the most there were up to a second before it."""
    first, end = run.requests["first_token"], run.requests["finished"]
    times = np.sort(first[first <= at - 1.0])
    before = [int(((first <= time) & (end > time)).sum()) for time in times]
    return int(((first <= at) & (end > at)).sum()), max(before, default=0)


def rows(stem: str) -> Iterator[tuple[str, ...]]:
    """Of one session on the GPU."""
    measured = read([str(RESULTS / f"{stem}.jsonl")])
    setups = {(line["arm"], line["workload"], line["rate"]): setup for line, setup in measured}
    with gzip.open(RESULTS / f"{stem}{ENDING}", "rt", encoding="utf-8") as file:
        for text in file:
            line = json.loads(text)
            if line["arm"] not in ARMS:
                continue
            setup = setups[line["arm"], line["workload"], line["rate"]]
            found = stalls(line, duration(setup["tbt"]))
            load = draw(line["workload"], line["rate"], line["seconds"], line["seed"])
            run = replay(load, line["arm"], setup)
            for stall in found:
                now, before = inside(run, stall.at)
                gap = f"{1000 * stall.least:.0f} to {1000 * stall.most:.0f}"
                what = f"{line['workload']}, {line['rate']:g}/s", f"`{line['arm']}`"
                yield (stem, *what, f"{stall.at:.1f}", str(stall.requests), gap, str(now), str(before))


def show(
    stems: list[str], ending: str, head: tuple[str, ...], rows: Callable[[str], Iterable[tuple[str, ...]]]
) -> None:
    """One table of all files `STEM` + `ending`."""
    known = sorted(path.name.removesuffix(ending) for path in RESULTS.glob(f"*{ending}"))
    for stem in stems:
        if stem not in known:
            sys.exit(f"error: no {stem}{ending} in {RESULTS}; there are {', '.join(known)}")
    for row in (head, ("---",) * len(head), *(row for stem in stems for row in rows(stem))):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    show(sys.argv[1:], ENDING, HEAD, rows)
