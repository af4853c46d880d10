"""Compare arms in one vLLM engine: `python -m studies.h200.run --help`; results are JSON lines."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.sim.engine.engine import Engine
from studies.h200 import arms, models, tokens
from studies.h200.loads import SEED, WORKLOADS, Load, load
from studies.h200.record import Row
from studies.h200.scenes import Busy, Line, Session, whole

ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled, and needs nvcc
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler must be within reach
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
SHRINK = 16  # of lengths, with --tiny
RAMP = 0.03  # seconds for each slot to fill the engine before the first round, a guess
WHOLE_RUN = 90.0  # seconds to serve one queue whole, a guess


def options(argv: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.h200.run", description=__doc__)
    add = parser.add_argument
    add(
        "--mode",
        choices=("busy", "whole"),
        default="busy",
        help="change policies live, or serve queues whole",
    )
    add("--arms", nargs="+", default=list(arms.SPEED), help="plain, or a policy like eb:refill=48")
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    add("--rounds", type=int, default=2)
    add("--slots", type=int, default=512)
    add("--budget", type=int, default=16384)
    add("--blocks", type=int, default=50760, help="KV blocks")
    add("--clients", type=float, default=1.25, help="busy: requests in the engine, times the slots")
    add("--settle", type=float, default=6.0, help="busy: seconds after a change that do not count")
    add("--learn", type=float, default=8.0, help="busy: seconds more for policies that learn")
    add("--measure", type=float, default=14.0, help="busy: seconds that do")
    add("--scale", type=float, default=1.0, help="whole: times the usual number of requests")
    add("--seconds", type=float, default=540.0, help="begin no round that could end after this")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "h200-results")))
    add("--card", default="linear-h200-qwen3-8b")
    add("--tokens", action="store_true", help="compare greedy tokens instead of speed")
    add("--requests", type=int, default=300, help="tokens: how many")
    add("--tiny", action="store_true", help="a tiny model without a GPU, to try this script")
    add("--no-plugin", action="store_true", help="plain vLLM only")
    return parser.parse_args(argv)


def folder(asked: argparse.Namespace, home: Path) -> tuple[models.Shape, Path]:
    """The model to serve; weights only where tokens are compared."""
    if asked.tokens:
        shape = models.TINY if asked.tiny else models.CHECKED
        return shape, models.write_weights(shape, home / "model")
    shape = models.TINY if asked.tiny else models.QWEN3_8B
    return shape, shape.write(home / "model")


def start(asked: argparse.Namespace, shape: models.Shape, model: Path, home: Path) -> Any:
    """One vLLM engine in this process."""
    from vllm import LLM

    words: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "load_format": "auto" if asked.tokens else "dummy",
        "dtype": shape.dtype,
        "max_model_len": asked.model_len,
        "max_num_seqs": asked.slots,
        "max_num_batched_tokens": asked.budget,
        "num_gpu_blocks_override": asked.blocks,
        "block_size": asked.block,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }
    if asked.tiny:
        words["enforce_eager"] = True
    else:
        words["compilation_config"] = {"max_cudagraph_capture_size": asked.slots}
    if not asked.no_plugin:
        (home / "headgate.json").write_text(
            json.dumps({"policy": "mixed", "watchdog": "1h", "card": asked.card})
        )
        os.environ["HEADGATE_CONFIG"] = str(home / "headgate.json")
        words["scheduler_cls"] = arms.SCHEDULER
    return LLM(**words)


def shrunk(asked: argparse.Namespace) -> argparse.Namespace:
    """What --tiny changes."""
    asked.block, asked.model_len = 16, 12288
    if asked.tiny:
        asked.slots, asked.budget, asked.blocks = min(asked.slots, 16), 512, 400
        asked.block, asked.model_len = 32, 1024
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return asked


def setup_line(asked: argparse.Namespace, session: Session) -> Line:
    """What must be known to read the lines that follow."""
    import torch
    import vllm

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    scheduler = session.core.scheduler
    config = session.llm.llm_engine.vllm_config
    return {
        "setup": {key: value for key, value in vars(asked).items() if key != "out"},
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "gpu": gpu,
        "scheduler": [each.__name__ for each in type(scheduler).__mro__[:3]],
        "async": bool(config.scheduler_config.async_scheduling),
        "v2_runner": bool(getattr(config, "use_v2_model_runner", False)),
        "blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "graphs": str(config.compilation_config.max_cudagraph_capture_size),
    }


class Results:
    """One JSON line per run, as it ends; the steps of each run beside it."""

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.place = place

    def add(self, line: Line) -> None:
        """Append and print."""
        text = json.dumps(line)
        with (self.place / "results.jsonl").open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)

    def steps(self, session: Session, line: Line) -> None:
        """Rows of the run, for later fits."""
        name = "_".join(str(line[part]) for part in ("slots", "workload", "arm", "round"))
        name = name.replace("/", "-").replace(":", "-")
        table = np.array(session.record.rows, dtype=float).reshape(-1, len(Row._fields))
        np.savez_compressed(self.place / f"{name}.npz", log=table, columns=np.array(Row._fields))


def speed(asked: argparse.Namespace, session: Session, results: Results, deadline: float) -> None:
    """Workload by workload, round by round, as long as there is time for a whole round."""
    warm_up(session)
    for name in asked.workloads:
        met = load(name, SEED, SHRINK if asked.tiny else 1)
        busy = Busy(session, met, round(asked.clients * session.engine.running))
        round_time = guess(asked)
        for number in range(asked.rounds):
            if perf_counter() + round_time > deadline:
                print(f"no time left for round {number} of {name}", flush=True)
                break
            began = perf_counter()
            if asked.mode == "busy" and number == 0:
                busy.fill()
            for arm in asked.arms:
                line = one(asked, session, busy, met, arm)
                line = {"slots": asked.slots, "mode": asked.mode, "round": number, **line}
                results.add(line)
                results.steps(session, line)
            round_time = 1.05 * (perf_counter() - began)
    session.empty()


def guess(asked: argparse.Namespace) -> float:
    """Seconds the first round of a workload takes, rather too many."""
    if asked.mode == "whole":
        return float(len(asked.arms) * asked.scale * WHOLE_RUN)
    learning = asked.learn * sum(map(arms.learns, asked.arms))
    ramp = RAMP * asked.slots
    return float(ramp + len(asked.arms) * (asked.settle + asked.measure) + learning)


def one(asked: argparse.Namespace, session: Session, busy: Busy, met: Load, arm: str) -> Line:
    """One arm, one time."""
    if asked.mode == "busy":
        return busy.segment(arm, asked.settle + asked.learn * arms.learns(arm), asked.measure)
    return whole(session, met, arm, round(asked.scale * met.whole))


def warm_up(session: Session) -> None:
    """Kernels are compiled at their first use; nothing of this is kept."""
    for _ in range(min(64, session.engine.running)):
        session.queue(64, 16)
    while session.alive:
        session.step()
    session.empty()
    gc.collect()
    gc.freeze()


def main(argv: list[str]) -> None:
    """The whole comparison."""
    began = perf_counter()
    asked = shrunk(options(argv))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    capacity = (asked.blocks - 1) * asked.block  # vLLM keeps one block to itself
    try:
        engine: Engine = arms.limits(
            asked.card, asked.slots, asked.budget, capacity, asked.model_len, asked.block
        )
        if asked.tokens and asked.arms == list(arms.SPEED):
            asked.arms = [arms.PLAIN, *arms.every_policy(asked.slots)]
        asked.arms = [arms.checked(arm, engine) for arm in asked.arms]
    except InputError as error:
        sys.exit(f"error: {error}")
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        shape, model = folder(asked, home)
        session = Session(start(asked, shape, model, home), engine, shape.vocabulary)
        results = Results(asked.out)
        results.add({**setup_line(asked, session), "start_seconds": perf_counter() - began})
        if asked.tokens:
            for line in tokens.compare(session, asked.arms, asked.requests, asked.tiny):
                results.add({"slots": asked.slots, "mode": "tokens", **line})
        else:
            speed(asked, session, results, began + asked.seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
