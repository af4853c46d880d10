"""The same requests and policy in SGLang's scheduler and in the simulator, step by step."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bench import Bench, Step

import headgate
from headgate.cost.model import Shape, StepCost
from headgate.live.sglang.scheduler import HeadgateScheduler
from headgate.sim.engine.engine import SHORTEST

QUIET = {"policy": "mixed", "watchdog": "1000000000s", "metrics": False}


class Line(StepCost):
    """Binary fractions: sums of times are exact, so that equal means equal."""

    def seconds(self, shape: Shape) -> float:
        fixed, per = self.decode_line(shape.decodes)
        return fixed + per * shape.context + shape.prefill / (1 << 14)

    def decode_line(self, decodes: int) -> tuple[float, float]:
        return 1 / 128 + decodes / (1 << 14), 2.0**-24


class Steps(headgate.Observer):
    """Steps of a run, one by one, and what was evicted."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.ends: list[float] = []
        self.evicted_at: list[int] = []

    def stepped(self, steps: Any) -> None:
        self.steps += [(steps.prefill, steps.decodes)] * len(steps.ends)
        self.ends += [float(end) for end in steps.ends]

    def evicted(self, request: Any, now: float) -> None:
        self.evicted_at.append(len(self.steps))


def configured(**settings: Any) -> str:
    """A settings file that HEADGATE_CONFIG names from now on."""
    file = Path(tempfile.mkdtemp(prefix="headgate-config-"), "headgate.json")
    file.write_text(json.dumps({**QUIET, **settings}))
    os.environ["HEADGATE_CONFIG"] = str(file)
    return str(file)


def planned(policy: Any, mixed: bool = True, observers: tuple[Any, ...] = (), **size: Any) -> Bench:
    """SGLang under this policy, in virtual time."""
    configured()
    bench = Bench(HeadgateScheduler, Line(), enable_mixed_chunk=mixed, **size)
    live = bench.scheduler._headgate
    live.clock, live.origin = (lambda: bench.now), 0.0
    bench.scheduler._headgate_books.on_the_way = lambda request: bench.now - bench.sent[request.rid]
    for observer in observers:
        live.news.listen(observer, True)
    live.take_over(policy)
    return bench


def engine(slots: int = 16, kv: int = 65536, page: int = 1, budget: int = 512) -> headgate.Engine:
    """One that retracts as SGLang does."""
    return headgate.Engine(Line(), kv, 16384, budget, slots, page, False, retraction=SHORTEST)


def workload(
    count: int = 60, seed: int = 1, rate: float | None = None, longest: int = 900, outputs: int = 60
):
    draw = np.random.default_rng(seed)
    arrival = (
        np.zeros(count)
        if rate is None
        else np.round(np.cumsum(draw.exponential(1 / rate, count)) * 4096) / 4096
    )
    prompt, output = draw.integers(20, longest, count), draw.integers(2, outputs, count)
    return headgate.Workload.of(prompt, output, arrival=arrival, limit=output)


def requests(bench: Bench, load: Any, prefix: list[int] | None = None) -> list[tuple[float, Any]]:
    rows = zip(load.arrival.tolist(), load.prompt.tolist(), load.output.tolist(), strict=True)
    if prefix is None:
        return [(t, bench.request(f"r{i}x", p, o)) for i, (t, p, o) in enumerate(rows)]
    own = [
        [*prefix, *[500 + (i * 37 + j * j) % 450 for j in range(p)]]
        for i, p in enumerate(load.prompt.tolist())
    ]
    return [(t, bench.request(f"r{i}x", own[i], o)) for i, (t, _, o) in enumerate(rows)]


def totals(steps: list[Step]) -> list[tuple[int, int]]:
    return [(sum(n for _, n in step.prompts), step.decodes) for step in steps]


def simulated(policy: Any, load: Any, size: headgate.Engine, asynchronous: bool = False) -> Steps:
    seen = Steps()
    headgate.simulate(size, policy, load, observers=(seen,), asynchronous=asynchronous)
    return seen


def in_sglang(policy: Any, load: Any, size: headgate.Engine, overlap: bool = False, **more: Any):
    seen = Steps()
    bench = planned(
        policy,
        observers=(seen,),
        slots=size.running,
        kv=size.kv_tokens,
        page=size.block,
        chunked_prefill_size=size.batch_tokens,
        overlap=overlap,
        **more,
    )
    bench.serve(requests(bench, load))
    bench.check_whole()
    assert bench.scheduler._headgate.fallen is None
    assert not bench.scheduler._headgate_guard.broken
    assert not bench.scheduler._headgate.occupied
    return bench, seen
