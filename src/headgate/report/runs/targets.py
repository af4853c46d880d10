"""What the fluid program would have each class hold: the targets a fleet's occupancies are read against."""

from __future__ import annotations

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.sim.engine.engine import Engine
from headgate.methods.fluid.flows import Prices
from headgate.record.tables import Run
from headgate.experiment.fleet_plan import fleet_plan
from headgate.workloads.workload import Kind, Workload


def decode_targets(run: Run) -> dict[str, float]:
    """Requests of each class that decode at once in the whole fleet, by the linear program; {} without one.

    Planned from the requests as they came, so for a closed loop, or where the card is gone, there is no plan.
    """
    engines, limits = run.meta.get("engines"), run.meta.get("engine")
    if not isinstance(engines, int) or engines < 2 or not isinstance(limits, dict) or len(run.kinds) < 2:
        return {}
    requests = run.requests
    order = np.argsort(requests["arrival"], kind="stable")
    kept = order[requests["output"][order] >= 1]
    try:
        engine = Engine(load_card(run.meta["card"]).cost, **limits)
        kinds = [Kind(str(kind.get("name", ""))) for kind in run.kinds]
        come, kind = requests["arrival"][kept], requests["kind"][kept]
        offered = Workload.of(
            requests["prompt"][kept], requests["output"][kept], kinds=kinds, arrival=come, kind=kind
        )
        prices = run.meta.get("prices") or {}
        plan = fleet_plan(
            engine, engines, offered, Prices(prices.get("prompt", 1.0), prices.get("output", 2.0))
        )
    except (InputError, KeyError, TypeError):
        return {}
    held = zip(plan.instance.flows, plan.mixed, plan.solo, strict=True)
    return {flow.name: engines * (mixed + solo) for flow, mixed, solo in held}
