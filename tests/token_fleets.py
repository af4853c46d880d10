"""Small fleets at token level that tests share: random engines, policies, routers, requests and transfers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from fleet_worlds import Watched, draws, make_router
from headgate.core.fleet import RoutePolicy
from headgate.core.policy import BatchPolicy
from headgate.experiment.build import described
from headgate.methods.fluid.flows import EnginePace, Flow, Instance, TokenPrices
from headgate.methods.fluid.planner import FluidPlan, plan_fluid
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.fleet.fleet import FleetSimulator
from headgate.sim.fleet.kv_handover import Transfer
from headgate.workloads.workload import Kind, Workload
from worlds import POLICIES, TESTING, engines, workloads

MAKE = POLICIES | TESTING


class TokenWorld(NamedTuple):
    """Engines with a policy, the requests they meet, and a plan for routers that want one."""

    engine: Engine
    engines: int
    policy: BatchPolicy
    workload: Workload
    transfer: Transfer
    plan: FluidPlan

    def run(
        self, name: str, seed: int = 0, leases: bool = True, **more: Any
    ) -> tuple[FleetSimulator, Watched]:
        router = Watched(make_router(name, self.plan, self.engines, draws(seed), **more))
        fleet = self.fleet(router, leases)
        fleet.run()
        return fleet, router

    def fleet(self, router: RoutePolicy, leases: bool = True, **more: Any) -> FleetSimulator:
        return FleetSimulator(
            self.engine,
            self.engines,
            lambda role: copy.deepcopy(self.policy),
            router,
            self.workload,
            transfer=self.transfer,
            leases=leases,
            **more,
        )

    def tables(self, fleet: FleetSimulator) -> Run:
        return Run({"engines": self.engines, **described(self.workload)}, **fleet.recorder.tables())


@st.composite
def token_worlds(draw: st.DrawFn, policies: tuple[str, ...] = tuple(MAKE)) -> TokenWorld:
    """Up to four engines, often short of KV, up to three kinds, some of which the plan does not serve."""
    engine = draw(engines())
    running = max(2, engine.running)  # a prompt beside a decode
    engine = engine._replace(running=running, batch_tokens=max(running, engine.batch_tokens))
    requests = draw(workloads(impatient=draw(st.booleans(), label="impatient")))
    kinds = draw(st.integers(1, 3), label="kinds")
    names = tuple(Kind(f"kind{number}") for number in range(kinds))
    requests = replace(requests, kinds=names, kind=np.arange(len(requests)) % kinds)
    flows = tuple(
        Flow(kind.name, 30.0, draw(st.sampled_from([5.0, 60.0])), draw(st.sampled_from([0.02, 1.0])))
        for kind in names
    )
    pace = EnginePace(running, 16, 0.8, 0.02, 1.0)
    plan = plan_fluid(Instance(flows, pace, TokenPrices(0.1, 0.2)))
    name = draw(st.sampled_from(policies), label="policy")
    transfer = draw(st.sampled_from([Transfer(), Transfer(0.4, 0.01), Transfer(30.0, 0.0)]))
    return TokenWorld(
        engine, draw(st.integers(1, 4), label="engines"), MAKE[name](draw, engine), requests, transfer, plan
    )
