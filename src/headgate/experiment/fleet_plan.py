"""What a router knows beforehand: a fluid plan by kind of request, or how many engines should prefill."""

from __future__ import annotations

from math import isfinite

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.card import recorded_card
from headgate.cost.model import Shape
from headgate.methods.fluid.engine_pace import pace_of
from headgate.methods.fluid.flows import Flow, Instance, Pace, Prices
from headgate.methods.fluid.plan import FluidPlan
from headgate.methods.fluid.planner import plan_fluid
from headgate.methods.fluid.trajectory import Path, fluid_path
from headgate.methods.split.staffing import best_split
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Kind, Workload

GATED = ("gate-and-route", "gate-and-route+")  # routers that follow the plan's fluid path
SETTLED = 10.0  # times the longest mean decode: then the path stands still
PATH_STEPS = 4000


def fleet_plan(engine: Engine, engines: int, workload: Workload, prices: Prices) -> FluidPlan:
    """The fluid plan for these requests: a class per kind, at the rate it comes, on engines of this cost."""
    return plan_fluid(Instance(flows_of(workload, engines), engine_pace(engine, workload), prices).checked())


def flows_of(workload: Workload, engines: int) -> tuple[Flow, ...]:
    """One class per kind that comes, with its means and its rate per engine."""
    span = float(workload.arrival[-1] - workload.arrival[0])
    if workload.closed or span <= 0:
        raise InputError(
            "routers that plan need arrivals per second, of two requests or more, and these have none; "
            "give --rate, or choose another router such as least-loaded"
        )
    rate = (len(workload) - 1) / span / engines
    outputs = np.minimum(workload.output, workload.limit)
    found: list[Flow] = []
    for number, kind in enumerate(workload.kinds):
        mine = workload.kind == number
        if mine.any():
            patience = float(workload.patience[mine].mean())
            found.append(
                Flow(
                    kind.name,
                    float(workload.prompt[mine].mean()),
                    float(outputs[mine].mean()),
                    rate * float(mine.mean()),
                    1 / patience if isfinite(patience) else 0.0,
                )
            )
    return tuple(found)


def engine_pace(engine: Engine, workload: Workload) -> Pace:
    """Speeds of one engine under these requests."""
    prompt, context = _means(workload)
    return pace_of(engine.cost, _seats(engine, context), engine.batch_tokens, prompt, context)


def prefill_engines(engine: Engine, engines: int, workload: Workload) -> int:
    """How many engines should do prompts only: prompts in full steps against outputs in full batches."""
    prompt, context = _means(workload)
    output = float(np.minimum(workload.output, workload.limit).mean())
    budget, cost = engine.batch_tokens, engine.cost
    seats = _seats(engine, context)
    a_token = cost.seconds(Shape(prefill=budget)) / budget
    a_step = cost.seconds(Shape(seats, round(seats * context)))
    return best_split(engines, prompt * a_token, max(output - 1, 0.0) * a_step / seats)


def _seats(engine: Engine, context: float) -> int:
    """Decodes that run at once, as memory allows."""
    return max(1, min(engine.running, int(engine.kv_tokens / max(context, 1.0))))


def _means(workload: Workload) -> tuple[float, float]:
    """The mean prompt, and the KV tokens a running decode reads at a random moment."""
    outputs = np.minimum(workload.output, workload.limit).astype(np.float64)
    prompts = workload.prompt.astype(np.float64)
    return float(prompts.mean()), float((outputs * (prompts + outputs / 2)).sum() / outputs.sum())


def recorded_plan(run: Run) -> FluidPlan | None:
    """The linear program's plan for the requests as they came; None for a closed loop, one engine, or where
    the card is gone.
    """
    engines, limits = run.meta.get("engines"), run.meta.get("engine")
    if not isinstance(engines, int) or engines < 2 or not isinstance(limits, dict):
        return None
    requests = run.requests
    order = np.argsort(requests["arrival"], kind="stable")
    kept = order[requests["output"][order] >= 1]
    try:
        engine = Engine(recorded_card(run.meta["card"]).cost, **limits)
        kinds = [Kind(str(kind.get("name", ""))) for kind in run.kinds]
        come, kind = requests["arrival"][kept], requests["kind"][kept]
        offered = Workload.of(
            requests["prompt"][kept], requests["output"][kept], kinds=kinds, arrival=come, kind=kind
        )
        prices = run.meta.get("prices") or {}
        return fleet_plan(
            engine, engines, offered, Prices(prices.get("prompt", 1.0), prices.get("output", 2.0))
        )
    except (InputError, KeyError, TypeError):
        return None


def decode_targets(run: Run) -> dict[str, float]:
    """Requests of each class that decode at once in the whole fleet, by the plan; {} with one class."""
    plan = recorded_plan(run) if len(run.kinds) > 1 else None
    if plan is None:
        return {}
    held = zip(plan.instance.flows, plan.mixed, plan.solo, strict=True)
    return {flow.name: run.meta["engines"] * (mixed + solo) for flow, mixed, solo in held}


def recorded_path(run: Run) -> Path | None:
    """The fluid path beside a run under `gate-and-route` or `gate-and-route+`, until it stands still."""
    plan = recorded_plan(run) if run.meta.get("router") in GATED else None
    if plan is None:
        return None
    pace, (begin, end) = plan.instance.pace, run.span()
    longest = max(flow.output for flow in plan.instance.flows) * max(pace.mixed_step, 1 / pace.solo_speed)
    seconds = min(end - begin, SETTLED * longest)
    return fluid_path(plan, seconds, seconds / PATH_STEPS)
