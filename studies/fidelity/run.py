"""The real half, every scene through one vLLM engine: `python -m studies.fidelity.run --help`."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.live.calibrate.campaign import StepLog, WantedEngine, about, start
from headgate.sim.engine.engine import Engine
from studies.fidelity.scenes import MIDDLE, SCENES, Demand, Scene, demand
from studies.h200.arms import PLAIN, checked, fallen
from studies.h200.calibrate import ENVIRONMENT, SHAPES, step_times
from studies.h200.scenes import Session

BETWEEN = 2.0  # seconds to empty the engine and to write, for each scene
MORE = 1.5  # requests kept, times those sent: the simulated engine may be faster
SHRINK = 16  # of lengths, clients and times, with a tiny model
NAP = 0.0005  # seconds


def options(argv: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.run", description=__doc__)
    add = parser.add_argument
    names = [scene.name for scene in SCENES]
    add("--model", choices=SHAPES, default="qwen3-8b")
    add("--arms", nargs="+", default=[PLAIN, "eb:refill=64"], help="plain, or a policy like eb:refill=64")
    add("--scenes", nargs="+", choices=names, default=names)
    add("--slots", type=int, default=1024)
    add("--budget", type=int, default=16384)
    add("--longest", type=int, default=17408, help="tokens of one request")
    add("--memory", type=float, default=0.92, help="share of the GPU's memory to use")
    add("--capacity", type=float, help="requests per second; default: measured by " + MIDDLE)
    add("--seconds", type=float, default=560.0, help="begin no scene that could end after this")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "fidelity-results")))
    return parser.parse_args(argv)


def engine_words(asked: argparse.Namespace) -> dict[str, Any]:
    """More words for vLLM; a tiny model runs without a GPU."""
    if not asked.model.startswith("tiny"):
        return {"gpu_memory_utilization": asked.memory, "dtype": "bfloat16"}
    asked.slots, asked.budget, asked.longest = min(asked.slots, 64), 512, 1024
    asked.arms = [arm.replace("refill=64", "refill=4") for arm in asked.arms]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
    return {"enforce_eager": True, "dtype": "float32", "num_gpu_blocks_override": 800, "block_size": 32}


class Stage:
    """One engine with all that watches it."""

    def __init__(self, asked: argparse.Namespace, llm: Any, engine: Engine, vocabulary: int) -> None:
        self.asked = asked
        self.tiny = asked.model.startswith("tiny")
        self.session = Session(llm, engine, vocabulary)
        self.log = StepLog(self.session.core.scheduler)
        self.capacity: float | None = asked.capacity

    def play(self, scene: Scene, arm: str) -> dict[str, Any]:
        """One scene under one arm: serve, save, and say what was seen."""
        session, record = self.session, self.session.record
        wanted = self._scaled(scene)
        asks = demand(wanted, session.engine.running, self.capacity or 0.0, SHRINK if self.tiny else 1)
        session.empty()
        ballast = self._ballast(wanted.kv)
        try:
            session.switch(arm)
            record.forget()
            self.log.rows.clear()
            first = session.next
            begin = self._closed(wanted, asks) if wanted.clients else self._open(wanted, asks)
            preempted = sum(row.preempted for row in record.rows)
            line = self._save(wanted, arm, asks, first, begin)
        finally:
            session.empty()
            if ballast:
                session.core.scheduler.kv_cache_manager.block_pool.free_blocks(ballast)
        if scene.name == MIDDLE and arm == PLAIN and self.capacity is None:
            self.capacity = line["output_tokens_per_s"] / float(asks.output[wanted.clients :].mean())
        return {**line, "preempted": preempted, "capacity": self.capacity, "fallen": self._fallen()}

    def _scaled(self, scene: Scene) -> Scene:
        """A tiny model gets a fraction of everything."""
        if not self.tiny:
            return scene
        words = asdict(scene) | {"seconds": max(4.0, scene.seconds / 5), "kv": 1200 if scene.kv else 0}
        words["clients"] = -(-scene.clients // SHRINK)
        return Scene(**words)

    def _fallen(self) -> str | None:
        return fallen(self.session.core.scheduler)

    def _ballast(self, kv: int) -> list[Any]:
        """Blocks nobody gets, so that the engine has that much KV only."""
        if not kv:
            return []
        scheduler = self.session.core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        surplus = pool.get_num_free_blocks() - kv // scheduler.block_size
        return list(pool.get_new_blocks(surplus)) if surplus > 0 else []

    def _closed(self, scene: Scene, asks: Demand) -> float:
        """Clients that send their next request when they have their answer; all begin at once."""
        session = self.session
        sent = session.next
        for place in range(scene.clients):
            session.queue(asks.prompt[place], asks.output[place])
        session.record.restart_clock(sent)
        place = scene.clients
        begin = perf_counter()
        while perf_counter() < begin + scene.seconds:
            for _ in range(session.step()):
                session.queue(asks.prompt[place], asks.output[place])
                place += 1
        return begin

    def _open(self, scene: Scene, asks: Demand) -> float:
        """Requests come when they come; the engine sees them between two of its steps."""
        session, place = self.session, 0
        times = asks.arrival.tolist()
        begin = perf_counter()
        while (now := perf_counter() - begin) < scene.seconds:
            while place < len(times) and times[place] <= now:
                number = session.next
                session.queue(asks.prompt[place], asks.output[place])
                session.record.arrival[number] = begin + times[place]
                place += 1
            if session.alive:
                session.step()
            else:
                sleep(NAP)
        return begin

    def _save(self, scene: Scene, arm: str, asks: Demand, first: int, begin: float) -> dict[str, Any]:
        """Requests, tokens and steps of one scene, times from its beginning."""
        record, sent = self.session.record, self.session.next - first
        kept = min(len(asks.prompt), int(MORE * sent) + scene.clients) if scene.clients else len(asks.prompt)
        tokens = record.tokens
        ids = np.concatenate([each.ids for each in tokens]) if tokens else np.zeros(0, np.int32)
        name = f"{scene.name}_{arm}".replace(":", "-").replace("=", "-")
        np.savez_compressed(
            self.asked.out / f"{name}.npz",
            sent=np.array(sent),
            arrival=np.where(np.isnan(record.arrival), np.nan, record.arrival - begin)[first : first + sent],
            times=asks.arrival[:kept],
            prompt=asks.prompt[:kept],
            output=asks.output[:kept],
            token_time=np.array([each.time - begin for each in tokens]),
            token_count=np.array([len(each.ids) for each in tokens], np.int32),
            token_of=(ids - first).astype(np.int32),
        )
        self.log.table().save(self.asked.out / f"{name}.steps.npz")
        np.savez_compressed(self.asked.out / f"{name}.times.npz", **step_times(self.log))
        served = sum(len(each.ids) for each in tokens if each.time - begin > scene.seconds / 2)
        line = {
            "scene": asdict(scene),
            "arm": arm,
            "file": f"{name}.npz",
            "sent": sent,
            "steps": len(self.log.rows),
        }
        return line | {"output_tokens_per_s": served / (scene.seconds / 2)}


def main(argv: list[str]) -> None:
    """All scenes under all arms, as long as there is time."""
    began = perf_counter()
    asked = options(argv)
    more = engine_words(asked)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    asked.out.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[asked.model]
    with tempfile.TemporaryDirectory() as place:
        model = str(shape.write(Path(place) / asked.model))
        graphs = None if asked.model.startswith("tiny") else asked.slots
        wanted = WantedEngine(model, asked.slots, asked.budget, asked.longest, True, graphs, more)
        llm = start(wanted)
    said = about(llm, wanted, f"h200-{asked.model}", asked.slots)
    cost = load_card("linear-h200-qwen3-8b").cost  # policies are told of it; none here reads it
    engine = Engine(cost, said.kv_tokens, asked.longest, asked.budget, asked.slots, said.block)
    try:
        asked.arms = [checked(arm, engine) for arm in asked.arms]
    except InputError as error:
        sys.exit(f"error: {error}")
    say(asked.out, {"about": asdict(said), "start_seconds": perf_counter() - began})
    stage = Stage(asked, llm, engine, shape.vocabulary)
    warm_up(stage.session)
    for scene in SCENES:
        for arm in asked.arms if scene.name in asked.scenes else ():
            left = began + asked.seconds - perf_counter()
            if scene.seconds + BETWEEN > left or (scene.share and not stage.capacity):
                print(f"left out: {scene.name}, {arm} ({left:.0f} s left)", flush=True)
                continue
            say(asked.out, stage.play(scene, arm))


def warm_up(session: Session) -> None:
    """Kernels are compiled at their first use; nothing of this is kept."""
    for prompt, requests in ((512, 8), (64, 64)):
        for _ in range(min(requests, session.engine.running)):
            session.queue(min(prompt, session.engine.max_model_len // 2), 16)
    while session.alive:
        session.step()
    session.empty()
    gc.collect()
    gc.freeze()


def say(place: Path, line: dict[str, Any]) -> None:
    """Append and print."""
    text = json.dumps(line)
    with (place / "scenes.jsonl").open("a") as file:
        file.write(text + "\n")
    print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
