"""The simulated half, and how far it is from the real one: `python -m studies.fidelity.compare --help`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy, Observer
from headgate.core.request import Request
from headgate.cost.card import load_card
from headgate.cost.laws.work import WorkCost
from headgate.experiment.library import simulate
from headgate.methods.make import make_policy, split_name
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload
from studies.fidelity.measures import Tokens, compared, figures, simulated
from studies.h200.arms import PLAIN

SETTLE = 0.3  # of the scene is left out at its beginning
GOALS = {
    "tokens/s": 0.03, "tpot mean": 0.03, "ttft mean": 0.10, "itl p99": 0.10,
}  # fmt: skip
COLUMNS = (
    "tokens/s", "ttft mean", "ttft p99", "tpot mean", "tpot p99", "itl p50", "itl p99", "itl KS",
)  # fmt: skip
NOTES = """\
Errors are simulated / real - 1; `itl KS` is the largest difference between the two distribution functions.
Bold: beyond the goal (throughput and mean TPOT 3 %, mean TTFT and p99 ITL 10 %). The first 30 % of each
scene are left out on both sides, and requests are cut at its end on both sides. *Lag*: the simulator as it
is composes a step when the one before it has ended; an asynchronous engine has composed it by then, so
whoever comes during a step enters one step later, and while the host launches a step it does not see the
one before it end. `yes` is `headgate simulate --asynchronous`. Not simulated: that host times scatter; the
time a request takes from `add_request` to the queue; detokenisation and HTTP, which these runs do not have
either."""


class Evictions(Observer):
    """How many there were until the scene ended; a simulated one is served to its end."""

    def __init__(self, end: float) -> None:
        self.number, self._end = 0, end

    def evicted(self, request: Request, now: float) -> None:
        """One more."""
        self.number += now <= self._end


def options(argv: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.compare", description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="what studies.fidelity.run wrote")
    add("--card", required=True, help="fitted on other runs: a name or a file")
    add("--json", type=Path, help="every figure of both, to a file")
    add("--lag", choices=("yes", "no", "both"), default="both")
    add("--no-host", action="store_true", help="leave out what the card says of the host")
    return parser.parse_args(argv)


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the engine was, and the scenes that were played; the last time of each counts."""
    try:
        lines = [json.loads(line) for line in (folder / "scenes.jsonl").read_text().splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{folder}/scenes.jsonl: {error}; give a folder of studies.fidelity.run") from None
    about = [line["about"] for line in lines if "about" in line]
    scenes = {line["file"]: line for line in lines if "scene" in line}
    if not about or not scenes:
        raise InputError(f"{folder}/scenes.jsonl holds no scene; run studies.fidelity.run again")
    return about[-1], list(scenes.values())


def real_tokens(saved: dict[str, Any]) -> Tokens:
    """What the engine put out."""
    times = np.repeat(saved["token_time"], saved["token_count"])
    return Tokens(times, saved["token_of"].astype(np.int64), saved["arrival"])


def workload(scene: dict[str, Any], saved: dict[str, Any]) -> Workload:
    """The same requests for the simulator; outputs were as long as their limit, which the engine knew."""
    load = {"clients": scene["clients"]} if scene["clients"] else {"arrival": saved["times"]}
    return Workload.of(saved["prompt"], saved["output"], limit=saved["output"], **load)


def policy(arm: str, engine: Engine) -> BatchPolicy:
    """Plain vLLM is `mixed`."""
    return make_policy(*split_name("mixed" if arm == PLAIN else arm), engine)[0]


def one(asked: argparse.Namespace, line: dict[str, Any], about: dict[str, Any], lag: bool) -> dict[str, Any]:
    """One scene, one arm."""
    scene = line["scene"]
    with np.load(asked.folder / line["file"], allow_pickle=False) as stored:
        saved = {name: stored[name] for name in stored.files}
    kv = scene["kv"] or about["kv_tokens"]
    card = load_card(asked.card)
    cost = WorkCost(card.work) if asked.no_host and card.work else card.cost
    engine = Engine(
        cost, kv, about["max_model_len"], about["max_batch_tokens"], about["max_running"], about["block"],
    ).checked()  # fmt: skip
    end = scene["seconds"]
    lost = Evictions(end)
    run = simulate(
        engine, policy(line["arm"], engine), workload(scene, saved), asynchronous=lag, observers=(lost,)
    )
    window = SETTLE * end, end
    found = compared(figures(real_tokens(saved), *window), figures(simulated(run), *window))
    return {
        "scene": scene["name"],
        "arm": line["arm"],
        "lag": lag,
        "preempted": {"real": line["preempted"], "simulated": lost.number},
        "figures": found,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """In markdown."""
    head = ["scene", "arm", "lag", *COLUMNS, "preemptions, real / simulated"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row["scene"], f"`{row['arm']}`", "yes" if row["lag"] else "no"]
        cells += [cell(name, row["figures"][name]["error"]) for name in COLUMNS]
        cells.append(f"{row['preempted']['real']} / {row['preempted']['simulated']}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(name: str, error: float) -> str:
    if np.isnan(error):
        return "-"
    shown = f"{error:.3f}" if name == "itl KS" else f"{100 * error:+.1f} %"
    return f"**{shown}**" if abs(error) > GOALS.get(name, np.inf) else shown


def main(argv: list[str]) -> None:
    """The table, and every figure."""
    asked = options(argv)
    try:
        about, lines = read(asked.folder)
        lags = {"yes": [True], "no": [False], "both": [False, True]}[asked.lag]
        rows = []
        for line in lines:
            for lag in lags:
                rows.append(one(asked, line, about, lag))
                print(f"{line['file']} done", file=sys.stderr, flush=True)
    except InputError as error:
        sys.exit(f"error: {error}")
    if asked.json:
        asked.json.write_text(json.dumps({"about": about, "card": asked.card, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    print(f"\n{NOTES}")


if __name__ == "__main__":
    main(sys.argv[1:])
