"""Small made-up runs with every token written down, to check what is computed from the tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from headgate.record.tables import COLUMNS, ENDS, Run

FLOATS = {"arrival", "admitted", "first_token", "finished", "start", "first", "seconds", "opened", "gap"}
FLOATS |= {"time"}


def table(name: str, rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """A table with all its columns; what a row does not say is zero."""
    return {
        column: np.array([row.get(column, 0) for row in rows], float if column in FLOATS else np.int64)
        for column in COLUMNS[name]
    }


def make_run(requests=(), steps=(), stays=(), plans=(), **meta: Any) -> Run:
    """A run from lists of rows."""
    rows = {"requests": list(requests), "steps": list(steps), "stays": list(stays), "plans": list(plans)}
    return Run(meta, **{name: table(name, found) for name, found in rows.items()})


def request(id: int, arrival: float, admitted: float, first: float, finished: float, prompt: int, output: int,
            how: str = "stopped", **more: Any) -> dict[str, Any]:  # fmt: skip
    """A row of the request table; `how` by its name, "" when unfinished."""
    code = [end.value for end in ENDS].index(how) if how else -1
    row = {"id": id, "arrival": arrival, "admitted": admitted, "first_token": first, "finished": finished}
    return row | {"prompt": prompt, "output": output, "how": code} | more


@dataclass
class Naive:
    """One replica that works without any sense, but writes down when each token came."""

    rng: Random
    replica: int
    ids: range
    merge: bool  # join rows of equal steps although other requests run in them
    now: float = 0.0
    tick: int = 0
    tokens: dict[int, list[float]] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    steps: list[dict[str, Any]] = field(default_factory=list)
    stays: list[dict[str, Any]] = field(default_factory=list)
    open: dict[int, dict[str, Any]] = field(default_factory=dict)

    def go(self, rows: int) -> None:
        self.tokens = {id: [] for id in self.ids}
        for _ in range(rows):
            self.shuffle()
            self.step()
        for id in list(self.open):
            self.close(id)

    def some(self, ids: list[int], share: float) -> list[int]:
        return [id for id in ids if self.rng.random() < share]

    def shuffle(self) -> None:
        """Hold, resume, evict and finish at random."""
        for id in self.some(self.running, 0.15):
            self.running.remove(id)
            self.held.append(id)
            self.close(id)
        for id in self.some(self.held, 0.3):
            self.held.remove(id)
            self.running.append(id)
            self.enter(id, self.tokens[id][-1], math.nan)
        for id in self.some(self.running, 0.1):
            self.running.remove(id)
            self.close(id)
            if self.rng.random() < 0.5:
                self.done.add(id)  # the others were evicted and need their prompt again

    def step(self) -> None:
        """One row: some steps of the running decodes, perhaps with prompts that end in the last of them."""
        rng = self.rng
        outside = [id for id in self.ids if id not in (*self.running, *self.held, *self.done)]
        prompts = self.some(outside, 0.4)
        count = 1 if prompts else rng.choice([1, 1, 2, 3, 7])
        first = rng.choice([8, 8, 9, 20]) / 1024
        slope = rng.choice([0, 0, 1, -1]) / 1024 if count > 1 else 0.0
        if rng.random() < 0.2:
            self.now += rng.randrange(1, 40) / 1024
        start, lasts = self.now, [first + slope * number for number in range(count)]
        for last in lasts:
            self.now += last
            for id in self.running:
                self.tokens[id].append(self.now)
        decodes = len(self.running)
        self.write(start, count, first, self.now - start, decodes, len(prompts) or not decodes)
        self.tick += count if decodes else 0
        for id in prompts:
            gap = self.now - self.tokens[id][-1] if self.tokens[id] else math.nan
            self.tokens[id].append(self.now)
            self.running.append(id)
            self.enter(id, self.now, gap)

    def write(self, start, count, first, seconds, decodes, prefill) -> None:
        last = self.steps[-1] if self.steps else None
        row = {"start": start, "count": count, "first": first, "seconds": seconds, "decodes": decodes}
        row |= {"prefill": int(prefill), "replica": self.replica}
        flat = seconds == count * first
        if self.merge and last and flat and last["seconds"] == last["count"] * first:
            same = all(last[name] == row[name] for name in ("first", "decodes", "prefill"))
            if same and last["start"] + last["seconds"] == start:
                last["count"] += count
                last["seconds"] += seconds
                return
        self.steps.append(row)

    def enter(self, id: int, opened: float, gap: float) -> None:
        self.open[id] = {"request": id, "opened": opened, "gap": gap, "first_tick": self.tick}
        self.stays.append(self.open[id])

    def close(self, id: int) -> None:
        stay = self.open.pop(id)
        stay["ticks"] = self.tick - stay["first_tick"]


def naive_run(seed: int, rows: int = 25, replicas: int = 1, requests: int = 5, merge: bool = False):
    """A run and, for each request, the times of its tokens."""
    engines = [
        Naive(Random(f"{seed}/{number}"), number, range(number * requests, (number + 1) * requests), merge)
        for number in range(replicas)
    ]
    for engine in engines:
        engine.go(rows)
    tokens = {id: times for engine in engines for id, times in engine.tokens.items()}
    rows_of_requests = []
    for engine in engines:
        for id, times in engine.tokens.items():
            ended = id in engine.done
            first, last = (times[0], times[-1]) if times else (math.nan, math.nan)
            rows_of_requests.append(
                request(id, 0.0, 0.0, first, last if ended else math.nan, 4, len(times),
                        "stopped" if ended else "", replica=engine.replica)
            )  # fmt: skip
    steps = sorted((row for engine in engines for row in engine.steps), key=lambda row: row["start"])
    stays = [row for engine in engines for row in engine.stays]
    return make_run(rows_of_requests, steps, stays), tokens


def open_run(total: int = 400, rate: float = 4.0, service: float = 0.2, seed: int = 0, **meta: Any) -> Run:
    """One request at a time, first come first served: M/G/1 with prompts of 10 and outputs of 3 tokens.

    Each request takes three steps: its prompt with the first token, then two decodes.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, total))
    times = service * rng.uniform(0.5, 1.5, total)
    requests, steps, stays, free = [], [], [], 0.0
    for id, (arrival, time) in enumerate(zip(arrivals.tolist(), times.tolist(), strict=True)):
        start = max(arrival, free)
        part = time / 3
        free = start + time
        requests.append(request(id, arrival, start, start + part, start + 3 * part, 10, 3))
        begun, row = start + part, {"first": part}
        steps.append(row | {"start": start, "count": 1, "seconds": part, "prefill": 10, "kv": 10})
        steps.append(row | {"start": begun, "count": 2, "seconds": 2 * part, "decodes": 1, "kv": 12})
        stays.append({"request": id, "opened": begun, "gap": math.nan, "first_tick": 2 * id, "ticks": 2})
    return make_run(requests, steps, stays, **meta)


def little(run: Run) -> tuple[float, float]:
    """The time-average number in the system, and arrival rate times mean time in the system.

    Both come from the columns `arrival` and `finished`, so their agreement says nothing of whether those
    are right: to check a driver, compare either with a count that does not come from the request table.
    """
    arrival, finished = run.requests["arrival"], run.requests["finished"]
    times = np.concatenate((arrival, finished))
    order = np.argsort(times, kind="stable")
    number = np.cumsum(np.repeat((1, -1), len(arrival))[order])
    span = float(np.ptp(times))
    average = float(np.sum(number[:-1] * np.diff(times[order]))) / span
    return average, (len(arrival) / span) * float(np.mean(finished - arrival))
