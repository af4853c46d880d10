"""A fleet at token level is carried out: engines from a card, a policy for each, a router before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headgate.core.errors import InputError, RunError
from headgate.core.fleet import RoutePolicy
from headgate.core.policy import BatchPolicy
from headgate.experiment.described import cache_record, described
from headgate.experiment.routers import make_router
from headgate.experiment.settings import ManyEngines
from headgate.kv.prefix import Pieces
from headgate.kv.transfer import Transfer
from headgate.methods.balance.prefix_index import Sharing
from headgate.methods.fluid.flows import Prices
from headgate.methods.fluid.plan import FluidPlan
from headgate.methods.make import router_settings
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import PATIENT_DOG
from headgate.sim.fleet.fleet import NO_TIME, FleetSimulator
from headgate.sim.fleet.lagged import Lagged
from headgate.sim.fleet.outage import Outage
from headgate.workloads.workload import Workload

DELAY = 0.002  # seconds before the first byte
KV_BYTES = 147_456.0  # of one token: 36 layers, K and V, 8 heads of 128, 2 bytes each, as Qwen3-8B has them
BANDWIDTH = 50.0  # GB/s: one 400 Gbit/s link
PRICES = Prices(1.0, 2.0)  # of a prompt and of an output token, where nobody says
MakePolicy = Callable[[str], BatchPolicy]  # from the role of an engine


def transfer_time(settings: ManyEngines, send: float | None = None) -> Transfer:
    """What it costs to hand KV over, as the settings say; `send` is the card's price of a send."""
    busy = (send or 0.0) if settings.send_time is None else settings.send_time
    delay = DELAY if settings.transfer_delay is None else settings.transfer_delay
    per_token = (settings.kv_bytes or KV_BYTES) / ((settings.bandwidth or BANDWIDTH) * 1e9)
    return Transfer(delay, per_token, busy)


def prices_of(settings: ManyEngines) -> Prices:
    """Of a prompt and of an output token, as the settings say."""
    prompt = PRICES.prompt if settings.prompt_price is None else settings.prompt_price
    output = PRICES.output if settings.output_price is None else settings.output_price
    return Prices(prompt, output)


def session(pieces: Pieces) -> int | None:
    """The conversation that goes on with a request's output; None where nobody can ask for that."""
    key = pieces[-1][0]
    return key if key >= 0 else None


@dataclass(frozen=True)
class FleetSetup:
    """Engines and what lies between them. With one workload and one seed it makes routers and runs.

    Engines of a fleet do not compose ahead: `asynchronous` ones have policies that see the world a step late.
    """

    engine: Engine
    engines: int
    transfer: Transfer = NO_TIME
    prices: Prices = PRICES
    watchdog: float = PATIENT_DOG
    asynchronous: bool = False
    outages: tuple[Outage, ...] = ()

    def router(
        self, name: str, settings: dict[str, Any], workload: Workload, seed: int = 0
    ) -> tuple[RoutePolicy, dict[str, Any]]:
        """A router by name and its settings. Routers with a fluid plan get one made from the requests' kinds;
        a split without a number is the one with the highest rate.
        """
        values = router_settings(name, settings)
        if name == "split" and "prefill" not in values:
            from headgate.experiment.fleet_plan import prefill_engines

            values["prefill"] = prefill_engines(self.engine, self.engines, workload)
        made = make_router(
            name, lambda: self.plan(workload), self.engines, seed, values, lambda: self.sharing(workload)
        )
        if self.engine.running < 2 and not made.sends_at_once:
            raise InputError(
                f"router {name} keeps a seat for a prompt beside a decode, the engine has one; raise "
                "--slots, or choose a router such as least-loaded"
            )
        return made, values

    def sharing(self, workload: Workload) -> Sharing:
        """What a router knows of prefixes: contents of the requests, and the size of an engine's cache."""
        engine, pieces = self.engine, workload.pieces() if self.engine.prefix_cache else None
        return Sharing(
            (lambda request: None) if pieces is None else (lambda request: pieces[request.id]),
            engine.cost,
            engine.kv_tokens,
            engine.block,
            engine.running,
            (lambda request: None) if pieces is None else (lambda request: session(pieces[request.id])),
        )

    def plan(self, workload: Workload) -> FluidPlan:
        """The fluid plan for these requests: a class per kind, at the rate they come."""
        from headgate.experiment.fleet_plan import fleet_plan  # the solver takes a while to import

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
        fleet = FleetSimulator(
            self.engine,
            self.engines,
            (lambda role: Lagged(policy(role))) if self.asynchronous else policy,
            router,
            workload,
            transfer=self.transfer,
            outages=self.outages,
            watchdog=self.watchdog,
            progress=progress,
        )
        outcome = "finished"
        try:
            fleet.run()
        except KeyboardInterrupt:
            outcome = "interrupted"
        except RunError as error:
            outcome = f"failed: {error}"
        meta: dict[str, Any] = {
            "driver": "fleet",
            "kv_tokens": self.engine.kv_tokens,
            "engines": self.engines,
            "router": type(router).__name__,
            "roles": [seat.role for seat in fleet.dispatch.roster.replicas],
            "transfer": self.transfer._asdict(),
            **({"outages": [outage._asdict() for outage in self.outages]} if self.outages else {}),
            "prices": {"prompt": self.prices.prompt, "output": self.prices.output},
            **cache_record([station.replica for station in fleet.stations]),
            **described(workload),
            **(about or {}),
            "outcome": outcome,
        }
        return Run(meta, **fleet.recorder.tables())
