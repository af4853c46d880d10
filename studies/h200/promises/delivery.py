"""From the engine to the client: `python -m studies.h200.promises.delivery`.

For each run of h200-k: by how much the longest gap of a request is longer at its client than in the engine,
and what `auto` would have priced the first long steps with prompts at, over what they took.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headgate.core.policy import Steps
from headgate.cost.model import Shape
from headgate.methods.keep.learned import LearnedCost

RESULTS = Path(__file__).parents[1] / "results" / "promises"
TRICKLE = 8  # output tokens of the requests between two runs
NEAR = 0.03  # seconds between an arrival at the client and in the engine, clocks aligned
LONG, FIRST = 1500, 100  # prompt tokens of a long step; so many of them are the first
Line = dict[str, Any]


def lines(name: str) -> Iterator[Line]:
    with gzip.open(RESULTS / name, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def runs() -> list[list[Line]]:
    """The trace, cut where another arm begins; the runs are the last ones."""
    parts: list[list[Line]] = [[]]
    for line in lines("h200-k.steps.jsonl.gz"):
        if line.get("event") == "policy":
            parts.append([])
        parts[-1].append(line)
    return parts


def worst_gaps(part: list[Line]) -> dict[float, float]:
    """By arrival: the longest gap of each request in the engine."""
    ticks = np.array(
        [end for line in part if line["event"] == "steps" and line["decodes"] for end in line["ends"]]
    )
    moments = {
        name: {e["id"]: e["at"] for e in part if e["event"] == name} for name in ("prefilled", "finished")
    }
    found = {}
    for line in part:
        if line["event"] != "arrived" or line["limit"] == TRICKLE:
            continue
        first, last = (moments[name].get(line["id"]) for name in ("prefilled", "finished"))
        if first is not None and last is not None:
            own = ticks[(ticks > first + 1e-6) & (ticks <= last + 1e-6)]
            if len(own) > 1:
                found[line["at"]] = float(np.diff([first, *own]).max())
    return found


def priced(part: list[Line]) -> list[float]:
    """Of the first long steps: what was learned until then says, over what each took."""
    cost, found = LearnedCost(), []
    for line in part:
        if line["event"] != "steps":
            continue
        steps = Steps(**{name: line[name] for name in Steps._fields if name in line})
        if steps.prefill >= LONG:
            shape = Shape(steps.decodes, steps.context, steps.prefill, steps.behind)
            found.append(cost.seconds(shape) / (steps.ends[0] - steps.start))
        cost.learn(steps)
    return found[:FIRST]


def main() -> None:
    """One line for each run."""
    clients = list(lines("h200-k.requests.jsonl.gz"))
    for part, client in zip(runs()[-len(clients) :], clients, strict=True):
        engine = worst_gaps(part)
        times, sent = np.array(sorted(engine)), np.array(client["arrival"])
        shift = np.median(times[: len(sent)] - sent[: len(times)])
        longer = []
        for at, worst in zip(sent, client["worst_gap"], strict=True):
            nearest = times[np.argmin(np.abs(times - shift - at))]
            if abs(nearest - shift - at) < NEAR:
                longer.append(1000 * (worst - engine[float(nearest)]))
        p99, most = np.percentile(longer, (99, 100))
        shares = priced(part)
        print(
            f"{client['arm']}, seed {client['seed']}: {len(longer)} requests, longer at the client p99 "
            f"{p99:.0f} ms, most {most:.0f} ms; long steps priced at {min(shares):.2f} to {max(shares):.2f}"
        )


if __name__ == "__main__":
    main()
