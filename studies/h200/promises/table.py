"""The results with the simulator's prediction: `python -m studies.h200.promises.table FILE...`.

With `--classes` before the files: loads of several classes, without a prediction. With `--drafts CARD`: runs
with speculation, throughput and TPOT beside those the simulator has by that card.

The simulator serves the same arrivals and lengths on the calibrated card, asynchronously; its first tokens
come without HTTP.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from headgate.core.durations import duration
from headgate.core.request import Slo
from headgate.cost.model import StepCost
from headgate.experiment.library import card_engine, simulate
from headgate.live.engine.settings import Settings
from headgate.methods.make import make_policy, split_name
from headgate.record.tables import Run
from headgate.stats.gaps import Gaps
from headgate.workloads.workload import Kind, Workload
from studies.h200.promises.load import Load, draw

Line = dict[str, Any]
PLAIN_BUDGET, PLAIN_SLOTS, PLAIN_GRAPH = 8192, 1024, 512  # vLLM's defaults for a server on this GPU
HEAD = (
    "workload",
    "requests/s",
    "arm",
    "kept",
    "predicted",
    "TTFT in time",
    "gaps in time",
    "TTFT p50, p95, p99 (ms)",
    "gap p99, worst (ms)",
    "served/s",
    "runs",
)
CHAT_HEAD: tuple[str, ...] = ("chat/s", "arm", "chat kept, %", "cut off", "TTFT p99 (ms)")
CHAT_HEAD += ("worst gap (ms)", "batch, thousand tokens/s", "all")
GOLD_HEAD = ("requests/s", "arm", "gold kept, %", "free kept, %", "cut off", "thousand tokens/s")
FIRST, GAP = {"chat": 0.5, "gold": 1.0, "free": 5.0}, 0.1  # seconds promised


def predict(line: Line, setup: Line) -> float:
    """Share of requests whose promises the simulator keeps, over the same requests; NaN where unknown."""
    if line["arm"] == "auto" or "+" in line["workload"]:  # learns on the engine; has batch beside it
        return nan
    stairs = tuple(line.get("stairs", ()))
    rate = float(np.mean(stairs or line["rate"]))
    load = draw(line["workload"], rate, line["seconds"], line["seed"], stairs=stairs)
    return kept(replay(load, line["arm"], setup), setup, line["from"] if stairs else setup["warm"])


def replay(load: Load, arm: str, setup: Line, truth: StepCost | None = None) -> Run:
    """The requests on the simulated engine; `truth` is what steps take if it is not what the card says."""
    budget, slots = setup["budget"] or PLAIN_BUDGET, setup["slots"] or PLAIN_SLOTS
    if setup.get("drafts"):
        budget -= slots  # vLLM keeps a token of each slot for a drafter of its own weights
    speculate = f"{setup['drafts']}:accept={setup['accept']}" if setup.get("drafts") else None
    engine = card_engine(setup["card"], slots=slots, budget=budget, speculate=speculate)
    engine = engine._replace(cost=engine.cost.graphed(setup["graph"] or PLAIN_GRAPH))
    ttft, tbt = duration(setup["ttft"]), duration(setup["tbt"])
    left = Settings(delivery=setup.get("delivery", 0)).within(tbt)  # what the plug-in told its policy
    kinds = (Kind("", Slo(ttft, left)),)
    workload = Workload.of(load.prompt, load.output, arrival=load.arrival, limit=load.output, kinds=kinds)
    policy, _ = make_policy(*split_name("mixed" if arm == "plain" else arm), engine)
    engine = engine._replace(cost=truth or engine.cost)
    return simulate(engine, policy, workload, asynchronous=setup.get("asynchronous", True))


def kept(run: Run, setup: Line, begin: float) -> float:
    """Share of requests whose promises are kept, of those in the time that counts."""
    ttft, tbt = duration(setup["ttft"]), duration(setup["tbt"])
    first = run.requests["first_token"] - run.requests["arrival"]
    worst = np.array([max(gaps, default=0.0) for gaps in Gaps(run).lists()])
    counts = (run.requests["arrival"] >= begin) & (run.requests["arrival"] <= begin + setup["measure"])
    return float(np.mean((first[counts] <= ttft) & (worst[counts] <= tbt)))


def read(files: Iterable[str]) -> list[tuple[Line, Line]]:
    """Every run with the server it ran on."""
    found: list[tuple[Line, Line]] = []
    for file in files:
        setup: Line = {}
        for row in Path(file).read_text(encoding="utf-8").splitlines():
            line = json.loads(row)
            if "setup" in line:
                synchronous = any(", synchronous scheduling" in row for row in line["log"])
                setup = {**line["setup"], "asynchronous": not synchronous}
            else:
                found.append((line, setup))
    return found


def table(files: Iterable[str]) -> str:
    """Markdown; runs of the same arm at the same load are averaged."""
    groups: dict[tuple[str, float, str], list[tuple[Line, Line]]] = defaultdict(list)
    for line, setup in read(files):
        arm = line["arm"] + (" (no plug-in)" if setup.get("no_plugin") else "")
        groups[line["workload"], line["rate"], arm].append((line, setup))
    rows = [HEAD, ("---",) * len(HEAD)]
    for (workload, rate, arm), runs in sorted(groups.items(), key=lambda item: item[0][:2]):
        lines = [line for line, _ in runs]
        predicted = np.mean([predict(line, setup) for line, setup in runs])
        fallen = " (fell back)" if any(line["fallen"] for line in lines) else ""
        ttft = ", ".join(_ms([line["ttft"][name] for line in lines]) for name in ("p50", "p95", "p99"))
        gap = ", ".join(_ms([line["gap"][name] for line in lines]) for name in ("p99", "worst"))
        served = np.mean([line["served_per_second"] for line in lines])
        shares = [_share(lines, name) for name in ("kept", "first_in_time", "gaps_in_time")]
        cells = [
            workload,
            f"{rate:g}",
            f"`{arm}`{fallen}",
            shares[0],
            "" if isnan(predicted) else f"{100 * predicted:.0f} %",
            *shares[1:],
        ]
        rows.append((*cells, ttft, gap, f"{served:.1f}", str(len(runs))))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def drafted(card: str, files: Iterable[str]) -> str:
    """Runs with speculation beside the simulator's by that card: tokens a second in the window, and TPOT."""
    head = ("workload", "requests/s", "arm", "k, accept", "thousand tokens/s", "predicted", "TPOT p50 (ms)")
    rows: list[tuple[str, ...]] = [(*head, "predicted"), ("---",) * 8]
    for line, setup in read(files):
        load = draw(line["workload"], line["rate"], line["seconds"], line["seed"])
        run = replay(load, line["arm"], setup, true_cost(card, setup))
        rate, tpot = simulated(run, setup["warm"], line["seconds"])
        real = sum(line["tokens_per_second"].values()), line["tpot"]["p50"]
        rows.append(
            (
                line["workload"],
                f"{line['rate']:g}",
                f"`{line['arm']}`",
                f"{setup['drafts']}, {setup['accept']}",
                f"{real[0] / 1000:.2f}",
                f"{rate / 1000:.2f} ({100 * (rate / real[0] - 1):+.1f} %)",
                f"{1000 * real[1]:.2f}",
                f"{1000 * tpot:.2f} ({100 * (tpot / real[1] - 1):+.1f} %)",
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def true_cost(card: str, setup: Line) -> StepCost:
    """What steps with drafts take by that card; policies went by the card that the server was given."""
    speculate = f"{setup['drafts']}:accept={setup['accept']}"
    return card_engine(card, speculate=speculate).cost.graphed(setup["graph"] or PLAIN_GRAPH)


def simulated(run: Run, warm: float, seconds: float) -> tuple[float, float]:
    """Tokens a second in the window and the median TPOT of requests after the warm-up, as `figures` has them.

    A request's tokens are spread evenly from its first to its last.
    """
    requests = run.requests
    first, last, output = requests["first_token"], requests["finished"], requests["output"]
    inside = (np.clip(last, warm, seconds) - np.clip(first, warm, seconds)) / np.maximum(last - first, 1e-9)
    tokens = (output - 1) * inside + (1 + requests["prompt"]) * ((first >= warm) & (first <= seconds))
    counts = (requests["arrival"] >= warm) & (output > 1)
    tpot = (last - first)[counts] / (output[counts] - 1)
    return float(tokens.sum() / (seconds - warm)), float(np.quantile(tpot, 0.5, method="higher"))


def beside(files: Iterable[str]) -> str:
    """Chat beside clients that send batch, and gold beside free: means, and the runs one by one.

    From what each request saw (FILE.requests.jsonl.gz): one that the end of its run cut off counts by what
    had come until then.
    """
    groups: dict[tuple[str, float, str], list[tuple[Line, Line]]] = defaultdict(list)
    for file in files:
        with gzip.open(file.replace(".jsonl", ".requests.jsonl.gz"), "rt", encoding="utf-8") as raw:
            seen = [json.loads(row) for row in raw]
        for (line, setup), requests in zip(read([file]), seen, strict=True):
            if "tokens_per_second" in line and "+" in line["workload"]:
                requests["warm"] = setup["warm"]
                groups[line["workload"], line["rate"], line["arm"]].append((line, requests))
    tables: dict[bool, list[tuple[str, ...]]] = {False: [CHAT_HEAD], True: [GOLD_HEAD]}
    for (_, rate, arm), runs in groups.items():
        lines = [line for line, _ in runs]
        tokens = [line["tokens_per_second"] for line in lines]
        all_tokens = _each([sum(each.values()) for each in tokens], 1e-3, 1)
        gold = "classes" in lines[0]
        kinds = ("gold", "free") if gold else ("chat",)
        kept = [_each([unbroken(seen, kind)[0] for _, seen in runs], 100, 1) for kind in kinds]
        cut = _each([sum(unbroken(seen, kind)[1] for kind in kinds) for _, seen in runs], 1, 0)
        times: list[str] = []
        if not gold:
            times = [
                _ms([line["ttft"]["p99"] for line in lines]),
                _ms([max(x["gap"]["worst"] for x in lines)]),
            ]
            times.append(_each([each["batch"] for each in tokens], 1e-3, 1))
        tables[gold].append((f"{rate:g}", f"`{arm}`", *kept, cut, *times, all_tokens))
    made = [[rows[0], ("---",) * len(rows[0]), *rows[1:]] for rows in tables.values() if len(rows) > 1]
    return "\n\n".join("\n".join("| " + " | ".join(row) + " |" for row in rows) for rows in made)


def unbroken(seen: Line, kind: str) -> tuple[float, int]:
    """Share of a class's requests whose promise was not broken, and how many were cut off."""
    first = np.array([inf if each is None else each for each in seen["first"]])
    mine = (np.array(seen["class"]) == kind) & (np.array(seen["arrival"]) >= seen["warm"])
    kept = (first <= FIRST[kind]) & (np.array(seen["worst_gap"]) <= GAP)
    return float(np.mean(kept[mine])), int(np.sum(mine & (np.array(seen["whole"]) == 0)))


def _each(values: list[float], scale: float, digits: int) -> str:
    each = ", ".join(f"{scale * value:.{digits}f}" for value in values)
    return f"{scale * np.mean(values):.{digits}f}" + (f" ({each})" if len(values) > 1 else "")


def _share(lines: list[Line], name: str) -> str:
    digits = 2 if name == "gaps_in_time" else 0
    return f"{100 * np.mean([line[name] for line in lines]):.{digits}f} %"


def _ms(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{1000 * np.mean(known):.0f}" if len(known) == len(values) else "never"


if __name__ == "__main__":
    files = sys.argv[1:]
    if files[0] == "--drafts":
        print(drafted(files[1], files[2:]))
    else:
        print(beside(files[1:]) if files[0] == "--classes" else table(files))
