"""Small random worlds to try a policy in: engines short of KV, and clients who give up."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload

COST = LinearCost(
    DecodeTerms(constant=1.0, per_decode=0.05, per_context=0.001),
    PrefillTerms(constant=0.4, per_token=0.01),
    MixedTerms(constant=1.2, per_prefill=0.012, per_decode=0.06, per_context=0.001),
)
MOST_REQUESTS, MOST_SEATS, MOST_TOKENS = 25, 8, 64
LONGEST_PROMPT = 60
NEVER = np.inf


class World(NamedTuple):
    """An engine and who comes to it; the same for the same number."""

    number: int
    engine: Engine
    workload: Workload

    def __str__(self) -> str:
        engine = self.engine
        return (
            f"world {self.number}: {len(self.workload)} requests, {engine.running} seats, "
            f"{engine.batch_tokens} tokens a step, {engine.kv_tokens} KV tokens"
        )


def world(number: int) -> World:
    """The world of that number."""
    draw = np.random.default_rng(number)
    seats = int(draw.integers(1, MOST_SEATS + 1))
    engine = Engine(
        cost=COST,
        kv_tokens=int(draw.integers(20, 120) if draw.random() < 0.5 else draw.integers(64, 600)),
        max_model_len=int(draw.choice([50, 100, 10_000])),
        batch_tokens=int(draw.integers(seats, MOST_TOKENS + 1)),
        running=seats,
        block=int(draw.choice([1, 4, 16])),
    )
    return World(number, engine, _workload(draw))


def _workload(draw: np.random.Generator) -> Workload:
    """A few requests, open or closed loop, with ties in time; in every second world some give up."""
    count = int(draw.integers(1, MOST_REQUESTS + 1))
    columns: dict[str, Any] = {"limit": draw.choice([2**31 - 1, 1, 7], count)}
    if draw.random() < 0.5:
        columns["clients"] = draw.integers(1, 9, count)
    else:
        columns["arrival"] = np.cumsum(draw.choice([0.0, 0.0, 0.3, 1.7, 12.25, 60.5], count))
    if draw.random() < 0.5:
        columns["patience"] = draw.choice([NEVER, 0.1, 0.5, 2.5, 20.0], count)
        columns["abort"] = draw.choice([NEVER, NEVER, 0.1, 3.5, 30.0], count)
    prompts = draw.integers(1, LONGEST_PROMPT + 1, count)
    return Workload.of(prompts, draw.choice([1, 2, 3, 9, 30, 140], count), **columns)
