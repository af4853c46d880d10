"""Runs to make reports of: simulated ones, and long ones made up at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headgate import card_engine, generate, simulate
from headgate.methods.names import BATCH
from headgate.record.tables import Run
from headgate.workloads.arrivals import Poisson
from headgate.workloads.lengths import Uniform

ENGINE = card_engine("linear-h200-qwen3-8b", slots=32, budget=2048)


@cache
def served(policy: str = "mixed", requests: int = 120, seed: int = 0, **load: Any) -> Run:
    """A small simulated run with the record the command line would give it."""
    about: dict[str, Any] = {"clients": 48} if not load else {}
    if "rate" in load:
        about = {"arrivals": Poisson(load["rate"])}
    elif load:
        about = load
    work = generate(requests, seed=seed, prompt=Uniform(200), output=Uniform(60), **about)
    made = {"eb": {"refill": 8}}.get(policy, {})
    own = {"budget": 2048} if policy in ("mixed", "eb+") else {}
    cost = {"cost": ENGINE.cost} if policy == "eb+" else {}
    run = simulate(ENGINE, BATCH[policy](slots=32, **own, **made, **cost), work)
    limits = {name: value for name, value in ENGINE._asdict().items() if name != "cost"}
    more = {
        "label": policy,
        "policy": policy,
        "parameters": made,
        "seed": seed,
        "card": "linear-h200-qwen3-8b",
    }
    more |= {"engine": limits, "rate": load.get("rate"), "command": ["simulate", "--policy", policy]}
    return Run({**run.meta, **more}, run.requests, run.steps, run.stays, run.plans)


def long_run(total: int, replicas: int = 1, **meta: Any) -> Run:
    """So many requests one after the other on each engine, made without simulating."""
    rng = np.random.default_rng(0)
    number = np.arange(total)
    seconds = rng.uniform(0.05, 0.15, total)
    replica = number % replicas
    start = np.empty(total)
    for engine in range(replicas):
        mine = replica == engine
        start[mine] = np.concatenate(([0.0], np.cumsum(seconds[mine])[:-1]))
    third = seconds / 3
    zeros = np.zeros(total, np.int64)
    requests = {
        "id": number,
        "kind": number % 2 if "kinds" in meta else zeros,
        "arrival": start,
        "admitted": start,
    }
    requests |= {
        "first_token": start + third,
        "finished": start + seconds,
        "prompt": zeros + 10,
        "output": zeros + 3,
    }
    requests |= {"cached": zeros, "evictions": zeros, "wasted": zeros, "replica": replica, "how": zeros}
    two = np.repeat(number, 2)
    second = np.tile([False, True], total)
    steps = {"start": np.where(second, (start + third)[two], start[two]), "count": np.where(second, 2, 1)}
    steps |= {"first": third[two], "seconds": np.where(second, 2 * third[two], third[two])}
    steps |= {"decodes": second * 1, "context": second * 10, "prefill": ~second * 10, "behind": zeros[two]}
    steps |= {"kv": np.where(second, 12, 10), "replica": replica[two]}
    order = np.argsort(steps["start"], kind="stable")
    steps = {name: column[order] for name, column in steps.items()}
    ticks = np.array([2 * (place // replicas) for place in range(total)])
    stays = {"request": number, "opened": start + third, "gap": np.full(total, np.nan), "first_tick": ticks}
    stays |= {"ticks": zeros + 2}
    plans = {"time": start, "step": number, "decode": zeros - 1, "prompts": zeros, "evict": zeros}
    plans |= {"gauge.refill": (number // 1000).astype(float)}
    return Run({"label": "made up", "load": "open", **meta}, requests, steps, stays, plans)


def empty_run(**meta: Any) -> Run:
    """Nobody came."""
    run = long_run(1)
    tables = (
        {name: column[:0] for name, column in table.items()}
        for table in (run.requests, run.steps, run.stays, run.plans)
    )
    return Run({"label": "empty", **meta}, *tables)
