"""The whole thing as a library: an engine from a card, a run from a policy and a workload."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy, Observer
from headgate.cost.card import load_card
from headgate.experiment.build import make_engine
from headgate.experiment.settings import experiment
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import PATIENT_DOG, Simulator
from headgate.workloads.workload import Workload


def card_engine(
    card: str | Path, slots: int | None = None, budget: int | None = None, kv_tokens: int | None = None
) -> Engine:
    """An engine with a card's step times; what is left out is as on the command line."""
    words = experiment({"slots": slots, "budget": budget, "kv_tokens": kv_tokens})
    return make_engine(words, load_card(card))


def simulate(
    engine: Engine,
    policy: BatchPolicy,
    workload: Workload,
    *,
    leases: bool = True,
    asynchronous: bool = False,
    watchdog: float = PATIENT_DOG,
    observers: tuple[Observer, ...] = (),
    lost: int = 0,
) -> Run:
    """Serve the workload to its end and hand over the run's tables.

    Args:
        engine: what the steps cost and what fits.
        policy: a fresh policy; it is changed by the run.
        workload: the requests.
        leases: False asks the policy at every step; the schedule is the same, only slower.
        asynchronous: compose each step while the one before it runs, as vLLM does. The engine knows limits,
            not lengths: where the output is shorter than `limit`, its request is in one step more.
        watchdog: seconds of the run without progress after which a starving request stops it.
        observers: more listeners beside the recorder.
        lost: output tokens that an evicted request loses and must bring again; engines lose none.
    """
    if lost < 0:
        raise InputError(f"lost={lost} output tokens; expect 0 or more")
    if lost and asynchronous:
        raise InputError("an asynchronous engine loses no output at evictions; give one of the two")
    recorder = Recorder(len(workload), [kind.name for kind in workload.kinds])
    made = Simulator(
        engine,
        policy,
        workload,
        (recorder, *observers),
        leases=leases,
        asynchronous=asynchronous,
        lost=lost,
        watchdog=watchdog,
    )
    made.run()
    return Run(_record(engine, policy, workload), **recorder.tables())


def _record(engine: Engine, policy: BatchPolicy, workload: Workload) -> dict[str, object]:
    """What the run says of itself."""
    name = type(policy).__name__
    return {
        "driver": "simulator",
        "policy": name,
        "label": name,
        "outcome": "finished",
        "kv_tokens": engine.kv_tokens,
        **described(workload),
    }


def described(workload: Workload) -> dict[str, object]:
    """What a run's record says of its requests."""
    load = "closed" if workload.closed else "open" if np.ptp(workload.arrival) else "all-at-once"
    return {
        "workload": {"name": workload.name, "requests": len(workload), **workload.origin},
        "load": load,
        "clients": int(workload.clients.max()) or None,
        "kinds": [{"name": kind.name, **kind.slo._asdict()} for kind in workload.kinds],
    }
