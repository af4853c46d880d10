"""Ways to serve with a fleet: routers times policies, and what carries one of them out at token level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headgate.advisor.capacity.memory import Kept, file_of
from headgate.advisor.capacity.plan import ALL
from headgate.advisor.engines.trials import FleetCase, Outcome, Trial, Way
from headgate.core.errors import InputError, RunError
from headgate.cost.card import load_card
from headgate.experiment.asynchrony import composes_ahead
from headgate.experiment.build import make_engine
from headgate.experiment.fleet import FleetSetup, prices_of, transfer_time
from headgate.experiment.library import simulate
from headgate.experiment.settings import Experiment
from headgate.kv.transfer import Transfer
from headgate.methods.fluid.flows import Prices
from headgate.methods.make import (
    make_policy,
    policy_parameters,
    router_parameters,
    router_settings,
    split_name,
)
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload

SPREADS = ("round-robin", "least-loaded")


@dataclass(frozen=True)
class Serving:
    """Runs any way to serve on any number of engines; it can be sent to another process."""

    engine: Engine
    transfer: Transfer
    prices: Prices
    watchdog: float
    asynchronous: bool = False

    @classmethod
    def of(cls, settings: Experiment) -> Serving:
        card = load_card(settings.card)
        engine = make_engine(settings, card)
        return cls(
            engine=engine,
            transfer=transfer_time(settings, card.send),
            prices=prices_of(settings),
            watchdog=settings.watchdog,
            asynchronous=composes_ahead(settings.asynchronous, engine.cost.host),
        )

    def __call__(self, way: Way, engines: int, seed: int, requests: Workload) -> Run:
        """One run; one that could not go on is an error, and so is a fleet too small for its router.

        A router that only spreads requests has nothing to do with one engine, which is then simulated as
        `plan capacity` does, for that has all of asynchronous scheduling.
        """
        if engines == 1 and way.router in SPREADS:
            alone, _ = make_policy(way.policy, way.settings, self.engine)
            return simulate(
                self.engine, alone, requests, asynchronous=self.asynchronous, watchdog=self.watchdog
            )
        setup = FleetSetup(
            self.engine,
            engines,
            transfer=self.transfer,
            prices=self.prices,
            watchdog=self.watchdog,
            asynchronous=self.asynchronous,
        )
        try:
            router, _ = setup.router(way.router, way.router_settings, requests, seed)
        except InputError as error:
            raise RunError(str(error)) from None
        run = setup.run(lambda role: make_policy(way.policy, way.settings, self.engine)[0], router, requests)
        outcome = str(run.meta["outcome"])
        if outcome == "interrupted":
            raise KeyboardInterrupt
        if outcome != "finished":
            raise RunError(outcome.removeprefix("failed: "))
        return run


def remembered(folder: Path | None, serving: Serving, case: FleetCase) -> Kept[Trial, Outcome] | None:
    """What the folder knows of such fleets under this load; None without a folder."""
    if folder is None:
        return None
    shared = case.rate, serving.transfer, serving.prices, serving.watchdog, serving.asynchronous
    return Kept(file_of(folder, serving.engine, case.traffic, shared), Outcome, _known_as)


def _known_as(trial: Trial) -> tuple[list[str], object]:
    way = trial.way
    settings = sorted(way.router_settings.items()), sorted(way.settings.items())
    return [way.router, way.policy], (settings, trial.engines, trial.seed)


def make_ways(routers: Sequence[str], policies: Sequence[str], settings: Experiment) -> dict[str, Way]:
    """Every router with every policy, by what the user called them; mistakes show before the work."""
    if ALL in policies:
        raise InputError("--policy all is too much for a search over fleets; name the policies to try")
    engine = make_engine(settings, load_card(settings.card))
    found: dict[str, Way] = {}
    for router_text in routers:
        router, router_own = split_name(router_text, "router")
        shared = {
            key: value for key, value in settings.set_router.items() if key in router_parameters(router)
        }
        asked = router_settings(router, shared | router_own)
        for text in policies:
            policy, own = split_name(text)
            mine = policy_parameters(policy)
            values = {key: value for key, value in settings.set.items() if key in mine} | own
            make_policy(policy, values, engine)
            name = f"{router_text} + {text}"
            if name in found:
                raise InputError(f"{name!r} is there twice; drop one")
            found[name] = Way(router, policy, asked, values)
    return found
