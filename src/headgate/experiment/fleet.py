"""A fleet at token level is carried out: engines from a card, a policy for each, a router before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import InputError, RunError
from headgate.core.fleet import RoutePolicy
from headgate.core.policy import BatchPolicy
from headgate.core.request import Request
from headgate.cost.model import Shape
from headgate.experiment.build import by_tenant, cache_record, described
from headgate.experiment.settings import ManyEngines
from headgate.methods import make
from headgate.methods.balance.prefix_index import Sharing
from headgate.methods.fluid.flows import Flow, Instance, TokenPrices, pace_of
from headgate.methods.fluid.plan import FluidPlan
from headgate.methods.fluid.planner import plan_fluid
from headgate.methods.make import router_settings
from headgate.methods.scaling import FIXED, Scaling, work_of
from headgate.methods.split.split import best_split
from headgate.record.tables import Flags, Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.replica import VirtualEngine
from headgate.sim.engine.simulator import PATIENT_DOG
from headgate.sim.fleet.autoscale import FleetScaler
from headgate.sim.fleet.fleet import NO_TIME, FleetSimulator, Outage
from headgate.sim.fleet.kv_handover import Transfer
from headgate.sim.fleet.lagged import Lagged
from headgate.sim.fleet.ranks import RankSimulator
from headgate.workloads.streams import stream, uniforms
from headgate.workloads.workload import Workload

DELAY = 0.002  # seconds before the first byte
KV_BYTES = 147_456.0  # of one token: 36 layers, K and V, 8 heads of 128, 2 bytes each, as Qwen3-8B has them
BANDWIDTH = 50.0  # GB/s: one 400 Gbit/s link
PRICES = TokenPrices(1.0, 2.0)  # of a prompt and of an output token, where no setting says
RANK, LOCK_STEP = "any", "lock-step ranks"  # the role of a rank, and what stands for a router
MakePolicy = Callable[[str], BatchPolicy]  # from the role of an engine


def transfer_time(settings: ManyEngines, send: float | None = None) -> Transfer:
    busy = (send or 0.0) if settings.send_time is None else settings.send_time
    delay = DELAY if settings.transfer_delay is None else settings.transfer_delay
    per_token = (settings.kv_bytes or KV_BYTES) / ((settings.bandwidth or BANDWIDTH) * 1e9)
    return Transfer(delay, per_token, busy)


def prices_of(settings: ManyEngines) -> TokenPrices:
    prompt = PRICES.prompt if settings.prompt_price is None else settings.prompt_price
    output = PRICES.output if settings.output_price is None else settings.output_price
    return TokenPrices(prompt, output)


@dataclass(frozen=True)
class FleetSetup:
    """Its engines do not compose ahead: `asynchronous` ones have policies that see the world a step late."""

    engine: Engine
    engines: int
    transfer: Transfer = NO_TIME
    prices: TokenPrices = PRICES
    watchdog: float = PATIENT_DOG
    asynchronous: bool = False
    outages: tuple[Outage, ...] = ()
    lock_step: bool = False  # the engines are ranks that step together, without a router
    scaling: Scaling | None = None  # engines start and stop; `engines` are the most there may be

    def router(
        self, name: str, settings: dict[str, Any], workload: Workload, seed: int = 0
    ) -> tuple[RoutePolicy, dict[str, Any]]:
        """A router by name and its settings. Routers with a fluid plan get one made from the requests' kinds;
        a split without a number is the one with the highest rate.
        """
        values = router_settings(name, settings)
        if name == "split" and "prefill" not in values:
            values["prefill"] = prefill_engines(self.engine, self.engines, workload)
        plan, shared = partial(self.plan, workload), partial(sharing, self.engine, workload)
        router = make_router(name, plan, self.engines, seed, values, shared)
        if self.engine.running < 2 and not router.sends_at_once:
            raise InputError(
                f"router {name} keeps a slot for a prompt beside a decode, the engine has one; raise "
                "--slots, or choose a router such as least-loaded"
            )
        if self.scaling is not None and not router.sends_at_once:
            raise InputError(
                f"router {name} plans for a fixed number of engines; drop --autoscale, or choose a router "
                "such as least-loaded"
            )
        return router, values

    def plan(self, workload: Workload) -> FluidPlan:
        return fleet_plan(self.engine, self.engines, workload, self.prices)

    def run(
        self,
        policy: MakePolicy,
        router: RoutePolicy,
        workload: Workload,
        progress: Callable[[int], None] | None = None,
        about: dict[str, Any] | None = None,
    ) -> Run:
        """Serve the workload. An interrupted or failed run comes back too, marked as such."""
        made: MakePolicy = (lambda role: Lagged(policy(role))) if self.asynchronous else policy
        if self.lock_step:
            return self._run_ranks(made, workload, progress, about)
        how: dict[str, Any] = {"transfer": self.transfer, "outages": self.outages}
        how |= {"watchdog": self.watchdog, "progress": progress}
        fleet = FleetSimulator(self.engine, self.engines, made, router, workload, **how)
        scaler = None if self.scaling is None else self._scaler(fleet, workload, self.scaling)
        outcome = outcome_of(fleet.run)
        meta = self._described([station.replica for station in fleet.stations], workload)
        meta |= {"router": type(router).__name__, "transfer": self.transfer._asdict()}
        meta["roles"] = [member.role for member in fleet.dispatch.roster.replicas]
        if self.outages:
            meta["outages"] = [outage._asdict() for outage in self.outages]
        if scaler is not None:
            meta["autoscale"] = scaler.about()
        meta |= {**(about or {}), "outcome": outcome}
        return Run(meta, **by_tenant(fleet.recorder.tables(), workload, fleet.arrivals.rows))

    def _scaler(self, fleet: FleetSimulator, workload: Workload, scaling: Scaling) -> FleetScaler:
        """Begins with the engines that the plan wants for the first requests, whatever the rule."""
        if workload.clients.any() or workload.closed:
            raise InputError("--autoscale needs arrivals per second; give --rate or a trace with times")
        engine = self.engine
        seconds = work_of(engine.cost, engine.running, engine.batch_tokens, engine.kv_tokens)
        first = workload.arrival - workload.arrival[0] < scaling.span
        outputs = np.minimum(workload.output, workload.limit)[first]
        each = seconds(float(workload.prompt[first].mean()), float(outputs.mean()))
        begin = ceil(float(first.sum()) / scaling.span * each / scaling.target)
        begin = scaling.ceiling if scaling.rule == FIXED else begin
        return FleetScaler(fleet, scaling, seconds, workload, begin)

    def _run_ranks(
        self,
        policy: MakePolicy,
        workload: Workload,
        progress: Callable[[int], None] | None,
        about: dict[str, Any] | None,
    ) -> Run:
        how: dict[str, Any] = {"watchdog": self.watchdog, "progress": progress}
        ranks = RankSimulator(self.engine, self.engines, lambda: policy(RANK), workload, **how)
        outcome = outcome_of(ranks.run)
        meta = self._described(ranks.ranks, workload) | {"roles": [RANK] * self.engines} | (about or {})
        meta |= {"router": LOCK_STEP, "router_parameters": {}, "outcome": outcome}
        return Run(meta, **by_tenant(ranks.recorder.tables(), workload, ranks.arrivals.rows))

    def _described(self, engines: Sequence[VirtualEngine], workload: Workload) -> dict[str, Any]:
        engine, prices = self.engine, {"prompt": self.prices.prompt, "output": self.prices.output}
        about = {"driver": "fleet", "kv_tokens": engine.kv_tokens, "engines": self.engines, "prices": prices}
        if engine.speculation:
            about["speculation"] = engine.speculation.said()
        return about | cache_record(engines) | described(workload)


def sharing(engine: Engine, workload: Workload) -> Sharing:
    """What routers that look at prefixes see of the requests."""
    pieces = workload.pieces() if engine.prefix_cache else None
    sizes = engine.cost, engine.kv_tokens, engine.block, engine.running
    if pieces is None:
        return Sharing(lambda request: None, *sizes)
    if workload.beside:
        raise InputError(
            "routers that look at prefixes must know which request comes; a class with clients "
            "of its own does not say: give it a share, or choose another router such as least-loaded"
        )

    def session(request: Request) -> int | None:
        """The conversation that goes on with its output; None where no other can ask for that."""
        key = pieces[request.id][-1][0]
        return key if key >= 0 else None

    return Sharing(lambda request: pieces[request.id], *sizes, session)


def outcome_of(run: Callable[[], None]) -> str:
    """Carry out a run; "finished", or why it ended early: what was recorded until then is kept."""
    try:
        run()
    except KeyboardInterrupt:
        return "interrupted"
    except RunError as error:
        return f"failed: {error}"
    return "finished"


def finished(run: Run) -> Run:
    outcome = str(run.meta["outcome"])
    if outcome == "interrupted":
        raise KeyboardInterrupt
    if outcome != "finished":
        raise RunError(outcome.removeprefix("failed: "))
    return run


Planned = FluidPlan | Callable[[], FluidPlan]  # a plan, or how to make one if the router wants it


def make_router(
    name: str,
    plan: Planned,
    engines: int,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    sharing: Callable[[], Sharing | None] = lambda: None,
) -> RoutePolicy:
    given: dict[str, Callable[[], Any]] = {
        "plan": plan if callable(plan) else lambda: plan,
        "engines": lambda: engines,
        "draw": lambda: uniforms(stream(seed, "router")),
        "sharing": sharing,
    }
    return make.make_router(name, given, settings or {})


# -- fluid plans


def fleet_plan(engine: Engine, engines: int, workload: Workload, prices: TokenPrices) -> FluidPlan:
    flows, (prompt, context) = _flows(workload, engines), mean_lengths(workload)
    if (speculation := engine.speculation) is not None:
        bursts = {speculation.of(flow.name).tokens(speculation.drafts) for flow in flows}
        if len(bursts) > 1:
            raise InputError(
                "routers that plan take one acceptance for all classes; drop accept from [[classes]] and "
                "give --speculate one, or choose another router such as least-loaded"
            )
        (burst,) = bursts  # what a step delivers
        flows = tuple(replace(flow, output=flow.output / burst) for flow in flows)
        prices = replace(prices, output=prices.output * burst)
    pace = pace_of(engine.cost, _slots(engine, context), engine.batch_tokens, prompt, context)
    return plan_fluid(Instance(flows, pace, prices).checked())


def _flows(workload: Workload, engines: int) -> tuple[Flow, ...]:
    span = float(workload.arrival[-1] - workload.arrival[0])
    if workload.clients.any() or span <= 0:
        raise InputError(
            "routers that plan need arrivals per second, of two requests or more, and these have none; "
            "give --rate, or choose another router such as least-loaded"
        )
    rate = (len(workload) - 1) / span / engines
    outputs = np.minimum(workload.output, workload.limit)
    masks = ((kind.name, workload.kind == number) for number, kind in enumerate(workload.kinds))
    return tuple(flow_of(workload, outputs, mine, name, rate) for name, mine in masks if mine.any())


def flow_of(workload: Workload, outputs: NDArray[Any], mine: Flags, name: str | None, rate: float) -> Flow:
    """Those requests as a class; `rate` is that of all. Without a name it is called by its mean lengths."""
    prompt, output = float(workload.prompt[mine].mean()), float(outputs[mine].mean())
    patience = float(workload.patience[mine].mean())
    impatience = 1 / patience if isfinite(patience) else 0.0
    called = f"{prompt:.0f}+{output:.0f}" if name is None else name
    return Flow(called, prompt, output, rate * float(mine.mean()), impatience)


def prefill_engines(engine: Engine, engines: int, workload: Workload) -> int:
    """How many engines should do prompts only: prompts in full steps against outputs in full batches."""
    prompt, context = mean_lengths(workload)
    output = float(np.minimum(workload.output, workload.limit).mean())
    budget, cost = engine.batch_tokens, engine.cost
    slots = _slots(engine, context)
    a_token = cost.seconds(Shape(prefill=budget)) / budget
    a_step = cost.seconds(Shape(slots, round(slots * context)))
    steps = max(output - 1, 0.0) / engine.burst
    return best_split(engines, prompt * a_token, steps * a_step / slots)


def _slots(engine: Engine, context: float) -> int:
    return max(1, min(engine.running, int(engine.kv_tokens / max(context, 1.0))))


def mean_lengths(workload: Workload) -> tuple[float, float]:
    """The mean prompt, and the KV tokens a running decode reads at a random moment."""
    outputs = np.minimum(workload.output, workload.limit).astype(np.float64)
    prompts = workload.prompt.astype(np.float64)
    return float(prompts.mean()), float((outputs * (prompts + outputs / 2)).sum() / outputs.sum())
