"""The whole thing as a library: an engine from a card, a run from a policy and a workload."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headgate.core.policy import BatchPolicy, Observer
from headgate.cost.card import load_card
from headgate.drivers.engine import Engine
from headgate.drivers.simulator import PATIENT_DOG, Simulator
from headgate.results.recorder import Recorder
from headgate.results.tables import Run
from headgate.spec.build import make_engine
from headgate.spec.words import experiment
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
    watchdog: float = PATIENT_DOG,
    observers: tuple[Observer, ...] = (),
) -> Run:
    """Serve the workload to its end and hand over the run's tables.

    Args:
        engine: what the steps cost and what fits.
        policy: a fresh policy; it is changed by the run.
        workload: the requests.
        leases: False asks the policy at every step; the schedule is the same, only slower.
        watchdog: seconds of the run without progress after which a starving request stops it.
        observers: more listeners beside the recorder.
    """
    recorder = Recorder(len(workload), [kind.name for kind in workload.kinds])
    Simulator(engine, policy, workload, (recorder, *observers), leases=leases, watchdog=watchdog).run()
    return Run(
        {
            "driver": "simulator",
            "policy": type(policy).__name__,
            "label": type(policy).__name__,
            "outcome": "finished",
            "kv_tokens": engine.kv_tokens,
            **described(workload),
        },
        **recorder.tables(),
    )


def described(workload: Workload) -> dict[str, object]:
    """What a run's record says of its requests."""
    load = "closed" if workload.closed else "open" if np.ptp(workload.arrival) else "all-at-once"
    return {
        "workload": {"name": workload.name, "requests": len(workload), **workload.origin},
        "load": load,
        "clients": int(workload.clients.max()) or None,
        "kinds": [{"name": kind.name, **kind.slo._asdict()} for kind in workload.kinds],
    }
