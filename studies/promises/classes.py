"""Classes, background work and tenants under each policy: `python -m studies.promises.classes --help`.

Simulated on the calibrated H200 card, asynchronous, 512 slots, 8,192 tokens a step, Azure conversations.
Each run appends a line to results/classes.jsonl; runs that are there are not made again. `--table` prints
what is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from headgate.advisor.capacity.beside import most_beside
from headgate.core.request import Slo
from headgate.experiment.library import simulate
from headgate.methods.make import make_policy, split_name
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.stats.gaps import Gaps
from headgate.workloads.workload import Kind, Workload
from studies.promises.table import markdown
from studies.promises.worlds import world

FILE = Path(__file__).parent / "results" / "classes.jsonl"
CHAT = Slo(0.5, 0.1)
SLOTS, BUDGET = 512, 8192
SEEN, END = 60.0, 75.0  # chat that came from 15 s to here counts; all hang up at the end
Line = dict[str, Any]
Row = dict[str, Any]
SCENES: dict[str, list[Row]] = {
    "colocate": [{"rate": rate, "clients": 192, "batch": "2000/256"} for rate in (8, 12, 16)],
    "more-clients": [{"rate": 16, "clients": 1000, "batch": "2000/256"}],
    "long-batch": [{"rate": rate, "clients": 64, "batch": "12000/256"} for rate in (12, 16)],
    "rare-chat": [{"rate": 0.7, "clients": 192, "batch": "2000/256"}],
    "few-slots": [{"rate": 8, "clients": 400, "batch": "500/1500", "slots": 128, "quiet": 30}],
    "gold": [{"load": load, "weight": weight} for load in (1.06, 1.24) for weight in (1, 3, 10)],
    "tenants": [{"good": good} for good in (0.3, 0.7)],
    "single": [{"load": load} for load in (0.91, 1.06, 1.24)],
}
POLICIES = {
    "gold": ["sarathi:order=priority,budget=2560", "slai:order=priority", "keep"],
    "tenants": ["sarathi:budget=2560", "sarathi:order=fair,budget=2560", "slai:order=fair", "keep"],
    "single": ["keep"],
}
BESIDE = ["sarathi:order=priority,budget=2560", "slai:order=priority", "keep"]


# -- the scenes


def colocate(known: Row, engine: Engine, policy: str, seed: int) -> Line:
    """Chat with promises beside clients of a batch class that each send their next request at once."""
    rng = np.random.default_rng(seed)
    conversations = world("azure-conv", "100ms").traffic.at(known["rate"], seed)
    times = conversations.arrival
    chosen = (times < END) & (times >= known.get("quiet", 0))
    batch = known["clients"] + int(25 * END)
    prompt, output = map(int, known["batch"].split("/"))
    chat = Workload.of(
        conversations.prompt[chosen],
        conversations.output[chosen],
        arrival=times[chosen],
        abort=END - times[chosen] + 1e-6,
        kinds=(Kind("chat", CHAT),),
    )
    others = Workload.of(
        rng.integers(prompt // 2, 3 * prompt // 2 + 1, batch),
        rng.integers(output // 2, 3 * output // 2 + 1, batch),
        kinds=(Kind("batch", Slo(background=True), priority=1),),
    )
    run = serve(engine, policy, chat.merge(others.as_closed(known["clients"])))
    rows = run.requests
    ended = run.completed() & (rows["kind"] == 1) & (rows["finished"] >= 15) & (rows["finished"] < END)
    return {
        "chat": kept(run, 0, 15, SEEN),
        "batch_tokens_s": float((rows["prompt"] + rows["output"])[ended].sum() / (END - 15)),
        "evictions": [int(rows["evictions"][rows["kind"] == kind].sum()) for kind in (0, 1)],
    }


def gold(known: Row, engine: Engine, policy: str, seed: int) -> Line:
    """Half gold (1 s), half free (5 s, and behind for policies that order by priority), 3,000 requests."""
    kinds = (
        Kind("gold", Slo(1.0, 0.1, weight=float(known["weight"]))),
        Kind("free", Slo(5.0, 0.1, weight=1.0), priority=1),
    )
    requests = open_loop(known["load"], seed)
    kind = np.random.default_rng(seed).integers(0, 2, len(requests))
    return in_the_middle(serve(engine, policy, classed(requests, kind, kinds)))


def single(known: Row, engine: Engine, policy: str, seed: int) -> Line:
    """One class (500 ms) without a weight: what `keep` was for."""
    requests = open_loop(known["load"], seed)
    return in_the_middle(
        serve(engine, policy, classed(requests, np.zeros(len(requests), int), (Kind("chat", CHAT),)))
    )


def tenants(known: Row, engine: Engine, policy: str, seed: int) -> Line:
    """Two tenants promised 1 s: good sends some of the bound; flood 0.3, and from 20 to 60 s 1.2 of it."""
    where = world("azure-conv", "100ms")
    rng = np.random.default_rng(seed)

    def times(load: float, low: float, high: float) -> np.ndarray[Any, Any]:
        found = low + np.cumsum(
            rng.exponential(1 / (load * where.bound), int(2 * load * where.bound * 80) + 50)
        )
        return found[found < high]

    flood = np.concatenate((times(0.3, 0, 20), times(1.2, 20, 60), times(0.3, 60, 80)))
    good = times(known["good"], 0, 80)
    arrival, tenant = np.concatenate((good, flood)), np.repeat([0, 1], [len(good), len(flood)])
    order = np.argsort(arrival, kind="stable")
    lengths = where.traffic.at(where.bound, seed)
    count = len(order)
    workload = Workload.of(
        lengths.prompt[:count],
        lengths.output[:count],
        arrival=arrival[order],
        kind=tenant[order],
        kinds=(Kind("good", Slo(1.0, 0.1)), Kind("flood", Slo(1.0, 0.1))),
        tenant=tenant[order],
        tenants=("good", "flood"),
    )
    run = serve(engine, policy, workload)
    rows = run.requests
    got = (rows["first_token"] >= 25) & (rows["first_token"] < 60)
    served = np.where(rows["kind"] == 1, 1, -1) * (rows["prompt"] + 2 * rows["output"])
    ahead = np.cumsum(served[got][np.argsort(rows["first_token"][got])])
    return {
        "good_kept": kept(run, 0, 20, 60),
        "flood_kept": kept(run, 1, 20, 60),
        "ahead_most": int(np.abs(ahead).max()),
        "ahead_last": int(ahead[-1]),
    }


RUNS = {"gold": gold, "tenants": tenants, "single": single}


# -- how they are served


def serve(engine: Engine, policy: str, workload: Workload) -> Run:
    made, _ = make_policy(*split_name(policy), engine)
    return simulate(engine, made, workload, asynchronous=True)


def open_loop(load: float, seed: int) -> Workload:
    where = world("azure-conv", "100ms", 3000)
    return where.traffic.at(load * where.bound, seed)


def classed(requests: Workload, kind: np.ndarray[Any, Any], kinds: tuple[Kind, ...]) -> Workload:
    return Workload.of(requests.prompt, requests.output, arrival=requests.arrival, kind=kind, kinds=kinds)


def in_the_middle(run: Run) -> Line:
    """What was kept of each class, without the first and the last tenth."""
    arrival = np.sort(run.requests["arrival"])
    low, high = arrival[len(arrival) // 10], arrival[-(len(arrival) // 10)]
    return {kind["name"]: kept(run, place, low, high) for place, kind in enumerate(run.meta["kinds"])}


def kept(run: Run, kind: int, low: float, high: float) -> Row:
    """Of the requests of a class that came in the window: shares kept, and how many had no token."""
    rows, slo = run.requests, run.meta["kinds"][kind]
    mine = (rows["kind"] == kind) & (rows["arrival"] >= low) & (rows["arrival"] < high)
    waits = np.nan_to_num((rows["first_token"] - rows["arrival"])[mine], nan=inf)
    gaps = np.nan_to_num(Gaps(run).longest()[mine])
    first, between = waits <= slo["first_token"], gaps <= slo["between_tokens"]
    return {
        "requests": int(mine.sum()),
        "kept": float((first & between).mean()),
        "ttft": float(first.mean()),
        "gaps": float(between.mean()),
        "never": int(np.isinf(waits).sum()),
    }


def bound(rate: float) -> float:
    """The most batch tokens a second beside so much chat that no policy exceeds, promises not counted."""
    where = world("azure-conv", "100ms")
    chat = where.traffic.at(where.bound, 0)
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(1000, 3001, 2000), rng.integers(128, 385, 2000)
    engine = where.engine._replace(running=SLOTS, batch_tokens=BUDGET)
    return most_beside(engine, (chat.prompt, chat.output - 1), prompts, outputs, rate)[0]


# -- tables


def table(lines: list[Line], scene: str) -> str:
    """One row a setting and policy; seeds beside each other."""
    cells: dict[tuple[str, str], list[Line]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        if line["scene"] == scene:
            setting = ", ".join(f"{name} {value}" for name, value in line["known"].items())
            cells.setdefault((setting, line["policy"]), []).append(line)
    rows = [["setting", "policy", *HEADS.get(scene, BESIDE_HEAD)]]
    for (setting, policy), mine in cells.items():
        rows.append([setting, f"`{policy}`", *(columns(mine, scene))])
    return markdown(rows)


BESIDE_HEAD = ["chat kept, %", "no token", "batch tokens/s, thousands", "evictions of chat, batch"]
HEADS = {
    "gold": ["gold kept, %", "free kept, %"],
    "single": ["kept, %"],
    "tenants": ["good kept, %", "flood kept, %", "flood ahead, most, thousand tokens", "at the end"],
}


def columns(mine: list[Line], scene: str) -> list[str]:
    def share(name: str) -> str:
        return " / ".join(f"{100 * line[name]['kept']:.1f}" for line in mine)

    def thousands(name: str, digits: int = 0) -> str:
        return " / ".join(f"{line[name] / 1000:.{digits}f}" for line in mine)

    if scene == "gold":
        return [share("gold"), share("free")]
    if scene == "single":
        return [share("chat")]
    if scene == "tenants":
        return [share("good_kept"), share("flood_kept"), thousands("ahead_most"), thousands("ahead_last")]
    never = " / ".join(str(line["chat"]["never"]) for line in mine)
    evictions = " / ".join(",".join(map(str, line["evictions"])) for line in mine)
    return [share("chat"), never, thousands("batch_tokens_s", 1), evictions]


def main(argv: list[str]) -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(prog="python -m studies.promises.classes", description=__doc__)
    add = parser.add_argument
    add("scene", choices=SCENES)
    add("--policies", nargs="+", help="as on the command line")
    add("--only", type=json.loads, default={}, help='settings that must be so, as JSON: {"rate": 12}')
    add("--seeds", type=int, default=2)
    add("--label", default="", help="written after the policy's name, for an earlier version of it")
    add("--bound", action="store_true", help="colocate: the batch tokens/s that no policy exceeds")
    add("--table", action="store_true", help="print the table of the results that are there")
    add("--out", type=Path, default=FILE)
    asked = parser.parse_args(argv)
    if asked.bound:
        print(markdown([["chat/s", "batch tokens/s"], *([str(r), f"{bound(r):.0f}"] for r in (8, 12, 16))]))
        return
    lines = [json.loads(row) for row in asked.out.read_text().splitlines()] if asked.out.exists() else []
    if not asked.table:
        fill(asked, lines)
    print(table(lines, asked.scene))


def fill(asked: argparse.Namespace, lines: list[Line]) -> None:
    """Every run that has no line yet."""
    run = RUNS.get(asked.scene, colocate)
    for known in SCENES[asked.scene]:
        if any(known.get(name) != value for name, value in asked.only.items()):
            continue
        engine = world("azure-conv", "100ms").engine
        engine = engine._replace(running=known.get("slots", SLOTS), batch_tokens=BUDGET)
        for seed in range(asked.seeds):
            for policy in asked.policies or POLICIES.get(asked.scene, BESIDE):
                name = f"{policy} {asked.label}".strip()
                line = {"scene": asked.scene, "known": known, "policy": name, "seed": seed}
                if any(all(other[key] == line[key] for key in line) for other in lines):
                    continue
                line |= run(known, engine, policy, seed)
                lines.append(line)
                with asked.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")
                print(json.dumps(line), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
