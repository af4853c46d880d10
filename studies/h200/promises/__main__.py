"""Promises kept through the real HTTP server: `python -m studies.h200.promises --help`.

Arms take turns in one `vllm serve`, load by load. `plain` is vLLM's own scheduling (the plug-in only
watches); any other arm is a policy as on the command line. results.jsonl has a line for the server, then one
for each run as it ends; requests.jsonl what each request saw.
`python -m studies.h200.promises.table FILE...` makes the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from headgate.core.durations import duration
from headgate.core.errors import InputError
from studies.h200.promises import figures
from studies.h200.promises.client import AHEAD, serve
from studies.h200.promises.load import BATCH, CHAT, FREE, GOLD, SEED, Load, draw_all, parse
from studies.h200.promises.server import SHAPES, Server, attach, start

PLAIN, AUTO = "plain", "auto"  # auto: no card, step times are learned
ARMS = (PLAIN, "mixed:budget=2560", "slai", "keep")
LOADS = ("azure-conv:19",)
SHRINK = 16  # of lengths, with --tiny
RAMP_RATE, RAMP_OUTPUT = 50.0, 200  # requests a second, tokens each
BURST_PROMPT, BURST_OUTPUT = 1500, 40
START_RAMP = 448
STAIR_END = 6.0  # seconds of a stair whose requests do not count: much of their answers comes on the next one
Line = dict[str, Any]


def options(argv: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.h200.promises", description=__doc__)
    add = parser.add_argument
    add(
        "--loads",
        nargs="+",
        default=list(LOADS),
        help="WORKLOAD:RATE[@CLASS], or RATE/RATE/... for rates one after the other without a pause; "
        "azure-conv, azure-code, sharegpt-8k, each with -bursts, mooncake; "
        "+batch:RATE or +batch:CLIENTSc beside it; classes chat, batch, gold, free; even:CLIENTSc alone: "
        "saturated, without a promise",
    )
    add("--arms", nargs="+", default=list(ARMS), help="plain, or a policy like mixed:budget=2560")
    add("--rounds", type=int, default=1)
    add("--ttft", default="500ms")
    add("--tbt", default="100ms")
    add("--delivery", default="20ms", help="of each gap, left to the way from engine to client")
    add("--measure", type=float, default=60.0, help="seconds of each run that count")
    add("--warm", type=float, default=10.0, help="seconds before them")
    add("--drain", type=float, default=20.0, help="seconds to wait for the last requests")
    add("--seconds", type=float, default=560.0, help="begin no run that could end after this")
    add("--clients", type=int, default=4, help="processes that send")
    add("--card", default="cal-h200-qwen3-8b")
    add(
        "--home",
        type=Path,
        default=Path("/tmp/headgate-promises"),
        help="model, log and settings of the server",
    )
    add("--out", type=Path, default=Path(os.environ.get("OUT", "h200-promises")))
    add("--attach", action="store_true", help="use the server that an earlier call left")
    add("--leave", action="store_true", help="leave the server running for the next call")
    add("--budget", type=int, default=0, help="--max-num-batched-tokens (0: vLLM's default)")
    add("--slots", type=int, default=0, help="--max-num-seqs (0: vLLM's default)")
    add("--graph", type=int, default=0, help="max_cudagraph_capture_size (0: vLLM's default)")
    add("--api-servers", type=int, default=4)
    add("--model-len", type=int, default=17_408)
    add(
        "--ramp",
        type=int,
        help="requests of a ramp before the first run, ever more at once, then as many in a burst "
        "(default 448, with --attach none)",
    )
    add("--model", default="qwen3-8b", choices=sorted(SHAPES))
    add("--watch", action="store_true", help="note long launches and the memory they ask for (watch.jsonl)")
    add("--steps", action="store_true", help="trace steps and add their median times by size")
    add("--seed", type=int, default=SEED)
    add("--gold", type=float, default=10.0, help="weight of class gold; free has 1")
    add(
        "--drafts",
        type=int,
        default=0,
        help="speculate: guesses of a drafter of one layer in a step",
    )
    add("--accept", type=float, default=0.7, help="share of them that is accepted, whatever they are")
    add("--no-plugin", action="store_true", help="leave headgate out altogether; plain only")
    add("--tiny", action="store_true", help="a tiny model without a GPU, to try this script")
    add("--flags", nargs=argparse.REMAINDER, default=[], help="the rest goes to vllm serve")
    asked = parser.parse_args(argv)
    if asked.no_plugin:
        asked.arms = [PLAIN]
    if asked.ramp is None:
        asked.ramp = 0 if asked.attach else START_RAMP
    if asked.tiny:
        asked.slots, asked.budget, asked.model_len, asked.api_servers = 16, 512, 2048, 1
        asked.ramp = min(asked.ramp, 16)
    return asked


def settings(asked: argparse.Namespace, arm: str, promise: bool = True) -> Line:
    """What the plug-in is told."""
    found = {
        "policy": "vllm" if arm == PLAIN else arm,
        "card": asked.card,
        "watchdog": "1h",
        "any_card": True,
    }
    promised: Line = {"ttft": asked.ttft, "tbt": asked.tbt} if promise else {}
    if any("+" in load for load in asked.loads):
        free = {"ttft": "5s", "tbt": asked.tbt}
        gold = {"ttft": "1s", "tbt": asked.tbt, "weight": asked.gold}
        classes = {CHAT: promised, BATCH: {"background": True}, GOLD: gold, FREE: free}
        promised = {"classes": classes}
    if arm == AUTO:
        found |= {"policy": "auto", "card": None}
    return {**found, **promised, "delivery": asked.delivery, "log_every": "1h"}


class Results:
    """JSON lines, written as runs end."""

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.place = place

    def add(self, line: Line, requests: Line | None = None) -> None:
        """Append and print."""
        text = json.dumps(line)
        with (self.place / "results.jsonl").open("a") as file:
            file.write(text + "\n")
        if requests is not None:
            with (self.place / "requests.jsonl").open("a") as file:
                file.write(json.dumps(requests, separators=(",", ":")) + "\n")
        print(text, flush=True)


def measure(asked: argparse.Namespace, server: Server, results: Results, deadline: float) -> None:
    """Round by round, load by load, arm by arm, as long as there is time."""
    offset = server.trace.stat().st_size if asked.steps and server.trace.exists() else 0
    for number in range(asked.rounds):
        for text in asked.loads:
            for arm in asked.arms:
                each = length(asked, text) + asked.drain + AHEAD + 5.0
                if time.monotonic() + each > deadline:
                    print(f"no time left for {arm} at {text}, round {number}", flush=True)
                    return
                lines, requests = one(asked, server, arm, text, number)
                if asked.steps and server.trace.exists():
                    lines[-1]["steps"], offset = figures.steps(server.trace, offset)
                for line in lines[:-1]:
                    results.add(line)
                results.add(lines[-1], requests)


def length(asked: argparse.Namespace, text: str) -> float:
    """Seconds in which a load's requests arrive."""
    stairs = parse(text)[0].stairs
    once = float(asked.warm + asked.measure)
    return len(stairs) * (once + STAIR_END) if stairs else once


def ramp(asked: argparse.Namespace, server: Server) -> None:
    """Ever more requests at once, then all of them in a burst of full steps, under vLLM's own scheduling.

    The first step with prompts that holds a number of requests not seen before (in groups of 16) stalls this
    engine for as long as a step takes, whoever schedules.
    """
    server.switch(settings(asked, PLAIN))
    number, shrink = np.arange(asked.ramp), SHRINK if asked.tiny else 1
    prompt = np.where(number % 2, 300, 900) // shrink
    classless = np.full(asked.ramp, "")
    growing = Load("ramp", RAMP_RATE, number / RAMP_RATE, prompt, np.full(asked.ramp, RAMP_OUTPUT), classless)
    full = np.full(asked.ramp, BURST_PROMPT // shrink)
    burst = Load("burst", RAMP_RATE, number * 0.0, full, np.full(asked.ramp, BURST_OUTPUT), classless)
    for load in (growing, burst):
        serve(load, server.target, asked.clients, asked.drain, asked.seed)


def one(
    asked: argparse.Namespace, server: Server, arm: str, text: str, number: int
) -> tuple[list[Line], Line]:
    """One arm, one load, one time; a line for each stair."""
    parts = parse(text)
    server.switch(settings(asked, arm, promise=not parts[0].clients))
    seconds, seed = length(asked, text), asked.seed + number
    load = draw_all(parts, seconds, seed, SHRINK if asked.tiny else 1)
    began = time.monotonic()
    answers = serve(load, server.target, asked.clients, asked.drain, seed)
    took = {"wall": round(time.monotonic() - began, 1), "fallen": server.fallen()}
    about = {"arm": arm, "workload": load.name, "round": number, "seed": seed, "seconds": seconds}
    lines = []
    for place, rate in enumerate(load.stairs or (load.rate,)):
        start = place * seconds / max(1, len(load.stairs)) + asked.warm
        where = {"stairs": load.stairs, "from": start} if load.stairs else {}
        promised = duration(asked.ttft), duration(asked.tbt)
        found = figures.summary(answers, *promised, start, start + asked.measure)
        lines.append({**about, "rate": rate, **where, **found, **took})
    if any(part.kind in (GOLD, FREE) for part in parts):
        gap = duration(asked.tbt)
        lines[0]["classes"] = figures.by_class(answers, {GOLD: (1.0, gap), FREE: (5.0, gap)}, asked.warm)
    return lines, {**about, "rate": load.rate, "stairs": load.stairs, **figures.raw(answers)}


def setup(asked: argparse.Namespace, server: Server, began: float) -> Line:
    """What must be known to read the lines that follow."""
    said = {key: value for key, value in vars(asked).items() if key not in ("out", "home")}
    found: Line = {"setup": said, "start_seconds": round(time.monotonic() - began, 1), "log": server.told()}
    try:
        import torch
        import vllm

        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        found |= {"gpu": name, "gpu_used_gib": round((total - free) / 2**30, 2)}
        found["versions"] = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        }
    except ImportError:
        pass
    return found


def main(argv: list[str]) -> None:
    """The whole comparison."""
    began = time.monotonic()
    asked = options(argv)
    try:
        for text in asked.loads:
            parse(text)
        server = attach(asked) if asked.attach else start(asked, settings(asked, asked.arms[0]))
    except InputError as error:
        sys.exit(f"error: {error}")
    try:
        results = Results(asked.out)
        results.add(setup(asked, server, began))
        for _ in range(3):
            server.ask(16)  # kernels are compiled at their first use
        if asked.ramp:
            ramp(asked, server)
        measure(asked, server, results, began + asked.seconds)
    finally:
        if not asked.leave:
            server.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
