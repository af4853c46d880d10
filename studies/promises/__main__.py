"""Highest rate at which each policy keeps its promises: `python -m studies.promises --help`.

Simulated on a calibrated H200 card, asynchronous. Each search appends a line to results/capacity.jsonl
when it ends; lines that are there are not made again. `--table` prints the table of what is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from headgate.advisor.capacity.search import Search
from headgate.advisor.capacity.traffic import measure
from headgate.core.errors import InputError
from headgate.core.request import Slo
from headgate.experiment.library import simulate
from headgate.methods.make import make_policy, split_name
from headgate.stats.gaps import Gaps
from headgate.workloads.workload import Kind, Workload
from studies.promises.table import markdown, overload_table, table
from studies.promises.worlds import LEVELS, POLICIES, QUICK, WORKLOADS, World, world

RESULTS = Path(__file__).parent / "results"
NEAR = (0.98, 1.015)  # of a rate near the answer: tried first
LOADS = (0.91, 1.06, 1.24)  # of the bound, for --overload
CHAT, BATCH, SECONDS = 12.0, (21.0, 24.0), 115.0  # requests/s with promises and without, for --beside
CELL = ("workload", "policy", "promise", "synchronous")  # of a line, its seed apart
Line = dict[str, Any]


def options(argv: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.promises", description=__doc__)
    add = parser.add_argument
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    add("--policies", nargs="+", default=list(POLICIES), help="as on the command line")
    add("--promise", default="100ms", choices=LEVELS)
    add("--seeds", type=int, default=4)
    add("--first-seed", type=int, default=0)
    add("--precision", type=float, default=0.02, help="of the bracket of a search, as a share of the rate")
    add("--quick", action="store_true", help=f"one seed, {QUICK} requests, nothing is written")
    add("--overload", action="store_true", help="shares in time at fixed rates, not a search")
    add("--beside", action="store_true", help="chat with promises beside prompts without; nothing is written")
    add("--synchronous", action="store_true", help="an engine that composes no step ahead")
    add("--table", action="store_true", help="print the table of the results that are there")
    add("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def tasks(asked: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Workload, policy and seed; all policies of a seed one after the other."""
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        for name in asked.workloads:
            for policy in asked.policies:
                yield name, policy, seed


def run(where: World, policy: str, rate: float, seed: int, synchronous: bool) -> Line:
    """One run at one rate: every level, and how far the worst is from its limit."""
    made, _ = make_policy(*split_name(policy), where.known)
    found = simulate(where.engine, made, where.traffic.at(rate, seed), asynchronous=not synchronous)
    kept = measure(found, where.levels)
    return {"rate": rate, "ratio": kept.ratio, "values": kept.values, "shares": kept.shares}


def capacity(asked: argparse.Namespace, where: World, policy: str, seed: int, around: float | None) -> Line:
    """The highest rate at which all levels are kept; what was found before, `around`, is tried first."""
    search, tried = Search(where.bound, asked.precision), []
    near = [around * share for share in NEAR] if around else []
    while (rate := near.pop(0) if near else search.next()) is not None:
        tried.append(run(where, policy, rate, seed, asked.synchronous))
        search.tell(rate, tried[-1]["ratio"])
    return {"kept": search.answer, "tried": tried}


def overload(asked: argparse.Namespace, where: World, policy: str, seed: int, _: float | None) -> Line:
    """Shares in time at fixed loads."""
    loads = [run(where, policy, load * where.bound, seed, asked.synchronous) for load in LOADS]
    return {"loads": LOADS, "tried": loads}


def beside(asked: argparse.Namespace) -> str:
    """Conversations with promises beside prompts of 400 to 1,200 tokens without; all hang up at the end."""
    rows = [
        ["batch/s", "policy", "chat kept", "longest TTFT of chat", "no token", "longest of batch", "no token"]
    ]
    for rate in BATCH:
        for policy in asked.policies:
            found = [_beside(policy, rate, seed, asked.synchronous) for seed in range(asked.seeds)]
            chat, batch = (list(zip(*part, strict=True)) for part in zip(*found, strict=True))
            shares = " / ".join(f"{100 * share:.1f} %" for share in chat[0])
            chat_said, batch_said = (
                [f"{max(longest):.1f} s", f"{sum(never)} of {sum(count)}"]
                for _, longest, never, count in (chat, batch)
            )
            rows.append([f"{rate:g}", f"`{policy}`", shares, *chat_said, *batch_said])
    return markdown(rows)


def _beside(policy: str, rate: float, seed: int, synchronous: bool) -> list[tuple[float, float, int, int]]:
    """Of chat and of batch: share kept, longest TTFT, how many had no token, and of how many."""
    where = world("azure-conv", "100ms")
    engine = where.engine._replace(running=512, batch_tokens=8192)
    conversations = where.traffic.at(CHAT, seed)
    chat = int(np.searchsorted(conversations.arrival, SECONDS))
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, int(2 * rate * SECONDS)))
    times = times[times < SECONDS]
    arrival = np.concatenate((conversations.arrival[:chat], times))
    order = np.argsort(arrival, kind="stable")
    prompt = np.concatenate((conversations.prompt[:chat], rng.integers(400, 1201, len(times))))
    output = np.concatenate((conversations.output[:chat], rng.integers(50, 151, len(times))))
    workload = Workload.of(
        prompt[order],
        output[order],
        arrival=arrival[order],
        kind=(order >= chat).astype(int),
        kinds=(Kind("chat", Slo(0.5, 0.1)), Kind("batch", priority=1)),
        abort=SECONDS - arrival[order] + 1e-6,
    )
    made, _ = make_policy(*split_name(policy), engine)
    found = simulate(engine, made, workload, asynchronous=not synchronous)
    waits = found.requests["first_token"] - found.requests["arrival"]
    gaps = np.nan_to_num(Gaps(found).longest())
    parts = []
    for kind in (0, 1):
        mine = found.requests["kind"] == kind
        kept = (waits[mine] <= 0.5) & (gaps[mine] <= 0.1)
        never = np.isnan(waits[mine])
        parts.append((float(kept.mean()), float(np.nanmax(waits[mine])), int(never.sum()), int(mine.sum())))
    return parts


def main(argv: list[str]) -> None:
    """Run what is missing, or print the table."""
    asked = options(argv)
    if asked.beside:
        print(beside(asked))
        return
    file = asked.out / ("overload.jsonl" if asked.overload else "capacity.jsonl")
    lines = [json.loads(row) for row in file.read_text().splitlines()] if file.exists() else []
    if not asked.table:
        if asked.quick:
            asked.seeds, lines = 1, []
        try:
            _fill(asked, file, lines)
        except InputError as error:
            sys.exit(f"error: {error}")
    print((overload_table if asked.overload else table)(lines, asked.promise, asked.synchronous))


def _fill(asked: argparse.Namespace, file: Path, lines: list[Line]) -> None:
    """Every task that has no line yet."""
    worlds: dict[str, World] = {}
    for name, policy, seed in tasks(asked):
        cell = (name, policy, asked.promise, asked.synchronous)
        others = [line for line in lines if tuple(line[key] for key in CELL) == cell]
        if any(line["seed"] == seed for line in others):
            continue
        if name not in worlds:
            worlds[name] = world(name, asked.promise, QUICK if asked.quick else None)
        began, where = perf_counter(), worlds[name]
        rates = [line["kept"] for line in others if "kept" in line]
        around = float(np.mean(rates)) if rates else None
        found = (overload if asked.overload else capacity)(asked, where, policy, seed, around)
        line = {
            "workload": name,
            "policy": policy,
            "seed": seed,
            "promise": asked.promise,
            "synchronous": asked.synchronous,
            "requests": where.traffic.requests,
            "bound": where.bound,
            **found,
        }
        lines.append(line)
        if not asked.quick:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as out:
                out.write(json.dumps(line) + "\n")
        answer = f"{line['kept']:.2f}/s" if "kept" in line else ""
        print(
            f"{name} {policy} seed {seed}: {answer} ({perf_counter() - began:.0f} s)",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
