"""The requests of real H200 runs, sent to the emulator over HTTP: `python -m studies.fidelity.emulated`.

Only scenes with arrivals of their own (Poisson, the trace): in a closed loop the next arrival is the
client's doing. The emulator runs on a virtual clock with `--asynchronous`; each request is sent with its
prompt as token ids and the time at which the real engine got it. Figures are those of
`studies.fidelity.compare`: the first 30 % left out, cut at the end of the scene on both sides. Prints how
far the emulator is from the H200, and from the simulator on the same requests, which should be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.experiment.library import simulate
from headgate.live.emulate import emulated
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from studies.fidelity.compare import (
    COLUMNS,
    SETTLE,
    cell,
    policy,
    read,
    real_tokens,
    workload,
)
from studies.fidelity.measures import compared, figures, simulated
from studies.h200.arms import PLAIN

RESULTS = Path(__file__).parent / "results"
AT_ONCE = 256  # connections being opened


async def served(words: dict[str, Any], saved: dict[str, Any]) -> None:
    """All requests of a scene, through HTTP."""
    timeout = aiohttp.ClientTimeout(total=3600)
    connector = aiohttp.TCPConnector(limit=0)
    opening = asyncio.Semaphore(AT_ONCE)
    rows = list(zip(saved["times"], saved["prompt"].tolist(), saved["output"].tolist(), strict=True))
    async with (
        emulated(**words, virtual=True, hold=len(rows), max_requests=len(rows) + 1) as urls,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as client,
    ):

        async def one(number: int, arrival: float, prompt: int, output: int) -> None:
            ids = [number + 1, *[7] * (prompt - 1)]
            body = {"prompt": ids, "max_tokens": output, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            headers = {"x-emulate-arrival": repr(float(arrival))}
            async with opening:
                answer = await client.post(urls[0] + "/v1/completions", json=body, headers=headers)
            async with answer:
                *_, usage, done = (await answer.read()).decode().strip().split("\n\n")
                made = json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"]
                if done != "data: [DONE]" or made != output:
                    raise InputError(f"request {number}: {made} tokens in place of {output}")

        await asyncio.gather(*(one(number, *row) for number, row in enumerate(rows)))


def one(folder: Path, card: str, line: dict[str, Any], about: dict[str, Any]) -> list[list[str]]:
    """Two rows: the emulator against the H200, and against the simulator."""
    scene = line["scene"]
    with np.load(folder / line["file"], allow_pickle=False) as stored:
        saved = {name: stored[name] for name in stored.files}
    arm = "mixed" if line["arm"] == PLAIN else line["arm"]
    words = {
        "card": card, "policy": arm, "asynchronous": True, "slots": about["max_running"],
        "budget": about["max_batch_tokens"], "kv_tokens": scene["kv"] or about["kv_tokens"],
        "model_len": about["max_model_len"], "block": about["block"],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(served({**words, "out": str(Path(place, "served"))}, saved))
        emulation = Run.load(Path(place, "served", "engine-0.jsonl"))
    window = SETTLE * scene["seconds"], scene["seconds"]
    ours = figures(simulated(emulation), *window)
    engine = Engine(
        load_card(card).cost, words["kv_tokens"], words["model_len"], words["budget"], words["slots"],
        words["block"],
    ).checked()  # fmt: skip
    again = simulate(engine, policy(line["arm"], engine), workload(scene, saved), asynchronous=True)
    against = {
        "the H200": figures(real_tokens(saved), *window),
        "simulate": figures(simulated(again), *window),
    }
    rows = []
    for name, theirs in against.items():
        found = compared(theirs, ours)
        cells = [cell(column, found[column]["error"]) for column in COLUMNS]
        rows.append([scene["name"], f"`{line['arm']}`", name, *cells])
    return rows


def main(argv: list[str]) -> None:
    """The table."""
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.emulated", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--card", default="cal-h200-qwen3-8b")
    asked = parser.parse_args(argv)
    try:
        about, lines = read(asked.folder)
        head = ["scene", "arm", "emulator against", *COLUMNS]
        print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        for line in lines:
            if not line["scene"]["clients"]:
                for row in one(asked.folder, asked.card, line, about):
                    print("| " + " | ".join(row) + " |", flush=True)
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
