"""The workloads, the engine and the promises of the comparison."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from headgate.advisor.capacity.traffic import Level, SearchTraffic, make_traffic, parse_levels
from headgate.cost.card import load_card
from headgate.experiment.build import make_engine
from headgate.experiment.settings import experiment
from headgate.methods.bounds import ideal_bound
from headgate.sim.engine.engine import Engine

CARD = "cal-h200-qwen3-8b"
SLOTS, BUDGET = 1024, 16_384
LEVELS = {
    "100ms": "ttft=500ms@p95,ttft=2s@p99,tbt=100ms@p99",
    "50ms": "ttft=300ms@p95,ttft=1200ms@p99,tbt=50ms@p99",
    "200ms": "ttft=1s@p95,ttft=4s@p99,tbt=200ms@p99",
}
WORKLOADS: dict[str, tuple[dict[str, Any], int]] = {  # words, and requests of a run
    "azure-conv": ({"trace": "azure-conv"}, 12_000),
    "sharegpt-8k": ({"trace": "sharegpt-8k"}, 12_000),
    "azure-code": ({"trace": "azure-code"}, 12_000),
    "1024/128": ({"prompt": 1024.0, "output": 128.0}, 12_000),
    "128/1024": ({"prompt": 128.0, "output": 1024.0}, 20_000),
}
POLICIES = ("mixed:budget=8192", "mixed:budget=3072", "mixed:budget=2560", "slai", "keep")
OTHER = 8_000  # requests of a run under the promises of 50 and 200 ms
QUICK = 1500  # the same with --quick


class World(NamedTuple):
    """One workload on the engine, with the rate that no policy exceeds."""

    engine: Engine
    known: Engine  # what policies are told of it
    traffic: SearchTraffic
    levels: tuple[Level, ...]
    bound: float


@cache
def world(name: str, promise: str, requests: int | None = None) -> World:
    """A workload by its name, under promises by theirs."""
    words, usual = WORKLOADS[name]
    usual = usual if promise == "100ms" else OTHER
    asked = experiment({"card": CARD, "slots": SLOTS, "budget": BUDGET, **words})
    engine = make_engine(asked, load_card(CARD))
    levels = parse_levels([LEVELS[promise]])
    traffic = make_traffic(asked, levels, None, requests or usual, False, engine)
    lengths = traffic.lengths(engine)
    bound = ideal_bound(engine.cost, lengths, engine.running, engine.batch_tokens, engine.kv_tokens)
    return World(engine, engine, traffic, levels, bound.rate)
