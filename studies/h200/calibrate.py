"""Calibrate without the command line's dependencies: `python -m studies.h200.calibrate --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.fit.fit import fit
from headgate.live.calibrate.campaign import Campaign, StepLog, WantedEngine, about, start
from headgate.live.calibrate.probe import Ground
from studies.h200 import models

ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled, and needs nvcc
    "HF_HUB_OFFLINE": "1",
}
SHAPES = {
    "qwen3-8b": models.QWEN3_8B,
    "qwen3-4b": models.QWEN3_4B,
    "qwen3-14b": models.QWEN3_14B,
    "llama-3.1-8b": models.LLAMA_8B,
    "qwen3-30b-a3b": models.QWEN3_30B_A3B,
    "tiny": models.TINY,
    "tiny-moe": models.TINY_MOE,
}
SAY_EVERY = 5.0  # seconds


def step_times(log: StepLog) -> dict[str, Any]:
    """When each step that counts was composed and ended, beside its shape."""
    rows = [row for row in log.rows if row.kept]
    times = {name: [getattr(row, name) for row in rows] for name in ("composed", "start", "end")}
    times |= {name: [getattr(row.held, name) for row in rows] for name in ("decodes", "prefill")}
    return {name: np.array(column) for name, column in times.items()}


def options(argv: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.h200.calibrate", description=__doc__)
    add = parser.add_argument
    add("--model", choices=SHAPES, default="qwen3-8b")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "h200-cards")))
    add("--name", help="of the card (default: GPU and model)")
    add("--seconds", type=float, default=150.0, help="of measuring; starting the engine comes before")
    add("--slots", type=int, default=1024, help="largest batch of decodes")
    add("--budget", type=int, default=16384)
    add("--longest", type=int, default=17408, help="tokens of one request")
    add("--passes", type=int, default=3)
    add("--quick", action="store_true", help="a smaller grid")
    add("--seed", type=int, default=0)
    add("--memory", type=float, default=0.92, help="share of the GPU's memory to use")
    add("--graphs", type=int, default=0, help="largest CUDA graph in tokens (0: as many as slots)")
    add("--drafts", type=int, default=0, help="of a drafter of one layer in a step; none is accepted")
    return parser.parse_args(argv)


def shrunk(asked: argparse.Namespace) -> dict[str, object]:
    """More words for the engine; tiny models run without a GPU and in little time."""
    if not asked.model.startswith("tiny"):
        return {"gpu_memory_utilization": asked.memory, "dtype": "bfloat16"}
    asked.slots, asked.budget, asked.longest = min(asked.slots, 16), 512, 1024
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
    return {"enforce_eager": True, "dtype": "float32", "num_gpu_blocks_override": 800, "block_size": 32}


class Says:
    """A line now and then."""

    def __init__(self) -> None:
        self._began = self._next = perf_counter()

    def __call__(self, done: int, total: int, doing: str) -> None:
        """Called often."""
        now = perf_counter()
        if now >= self._next:
            self._next = now + SAY_EVERY
            print(f"{now - self._began:6.1f} s  cell {done} of {total}: {doing}", flush=True)


def speculation(asked: argparse.Namespace, folder: Path) -> dict[str, object]:
    """All drafts are rejected, so that a decode gets one token a step and the probe's walk stays the same."""
    drafter = str(replace(SHAPES[asked.model], layers=1).write(folder))
    found = {"method": "draft_model", "model": drafter, "num_speculative_tokens": asked.drafts}
    if asked.model.startswith("tiny"):  # vLLM has no synthetic acceptance without a GPU
        return found
    return {
        **found,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.0] * asked.drafts,
    }


def main(argv: list[str]) -> None:
    """Start, measure, fit; with drafts the steps are measured only."""
    began = perf_counter()
    asked = options(argv)
    written = f"{asked.model}.k{asked.drafts}" if asked.drafts else asked.model
    more = shrunk(asked)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    asked.out.mkdir(parents=True, exist_ok=True)
    visits, width = min(asked.passes, 2), 1 + asked.drafts
    ground = Ground(asked.slots, asked.budget, 1 << 24, asked.longest, visits, asked.quick, width)
    with tempfile.TemporaryDirectory() as place:
        model = SHAPES[asked.model].write(Path(place) / asked.model)
        graphs = None if asked.model.startswith("tiny") else asked.graphs or asked.slots
        wanted = WantedEngine(str(model), ground.slots, asked.budget, asked.longest, True, graphs, more)
        if asked.drafts:
            more["speculative_config"] = speculation(asked, Path(place) / "drafter")
        llm = start(wanted)
        print(f"engine ready after {perf_counter() - began:.0f} s", flush=True)
        said = about(llm, wanted, asked.name or f"h200-{asked.model}", asked.slots)
        ground = replace(ground, kv_tokens=said.kv_tokens)
        file = asked.out / f"{written}.steps.npz"
        heat = 1.0 if isinstance(SHAPES[asked.model], models.MoeShape) else 0.0
        campaign = Campaign(llm, ground, file, asked.seconds, asked.passes, asked.seed, heat, Says())
        print(f"{said}\npools: {campaign.walk.pools}; {campaign.each} cells a pass", flush=True)
        table = campaign.run(said)
    print(f"{len(table)} steps in {campaign.steps_file}: {campaign.outcome}", flush=True)
    np.savez_compressed(asked.out / f"{written}.times.npz", **step_times(campaign.log))
    (asked.out / f"{written}.about.json").write_text(json.dumps(asdict(said), indent=2) + "\n")
    if asked.drafts:
        print("a card needs steps without drafts, too: headgate calibrate --from-steps A --from-steps B ...")
        return
    try:
        fitted = fit(table, said)
    except InputError as error:
        sys.exit(f"no card: {error}")
    fitted.card().save(asked.out / f"{asked.model}.json")
    print("\n".join(fitted.lines()), flush=True)
    print(f"card in {asked.out / asked.model}.json after {perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
