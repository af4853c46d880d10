"""An experiment is carried out: one policy, one seed, one run."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np

from headgate.core.errors import RunError
from headgate.core.policy import BatchPolicy
from headgate.core.version import VERSION
from headgate.cost.card import Card, load_card, renamed
from headgate.cost.error_bar import error_bar
from headgate.experiment.assumed import arrivals_said
from headgate.experiment.asynchrony import composes_ahead, partly
from headgate.experiment.build import make_engine, make_workload, too_long
from headgate.experiment.conflicts import renamed_promise
from headgate.experiment.coverage import outside
from headgate.experiment.described import cache_record, described
from headgate.experiment.fleet import FleetSetup, prices_of, transfer_time
from headgate.experiment.outages import parse_outages
from headgate.experiment.settings import Experiment
from headgate.methods.make import make_policy
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Workload

DEFAULT_ROUTER = "least-loaded"
Routed = tuple[str, dict[str, Any]]  # a router's name and its settings


class Maker:
    """Fresh policies of one name with the same settings.

    The first is made at once, so that a mistake in the settings costs no run, and handed out first.
    """

    def __init__(self, name: str, settings: dict[str, Any], engine: Engine) -> None:
        self.name, self.settings, self.engine = name, settings, engine
        first, self.parameters = make_policy(name, settings, engine)
        self._ready = [first]

    def __call__(self) -> BatchPolicy:
        """A policy that no run has used."""
        return self._ready.pop() if self._ready else make_policy(self.name, self.settings, self.engine)[0]


class Prepared:
    """All that several policies share: the card, the engine and, seed by seed, the requests."""

    def __init__(self, words: Experiment) -> None:
        self.words = words
        self.card: Card = load_card(words.card)
        self.engine: Engine = make_engine(words, self.card)
        self.asynchronous = composes_ahead(words.asynchronous, self.card.host)
        self.workload, self.bad_rows = make_workload(words)
        self.too_long = too_long(self.workload, self.engine)
        self._seeds: dict[int, Workload] = {words.seed: self.workload}

    def notes(self) -> list[str]:
        """What was left out of the input, will be refused, or is simulated in part."""
        notes = error_bar(self.card)
        notes += [renaming] if (renaming := renamed(self.words.card)) else []
        notes += renamed_promise(self.words)
        notes += partly(self.words, self.card, self.words.engines is not None)
        notes += self.workload.remarks
        if self.bad_rows.count:
            line, reason = self.bad_rows.first[0]
            notes.append(f"left out {self.bad_rows.count} bad rows; the first, line {line}: {reason}")
        for away in parse_outages(self.words.outages, self.words.engines or 1):
            what = "drains" if away.drain else "fails"
            notes.append(f"engine {away.engine} {what} at {away.start:g} s and is back at {away.end:g} s")
        if self.too_long:
            notes.append(
                f"{self.too_long:,} of {len(self.workload):,} requests cannot be served: their prompts reach "
                f"the {self.engine.longest:,} tokens that model length and KV allow; --cap-prompt cuts them"
            )
        return notes

    def keep_first(self, requests: int) -> None:
        """Leave out all later requests."""
        self.workload = self.workload.head(min(requests, len(self.workload)))
        self._seeds = {self.words.seed: self.workload}

    def fleet(self) -> FleetSetup | None:
        """The engines and what lies between them; None: one engine without a router."""
        words = self.words
        if words.engines is None:
            return None
        return FleetSetup(
            self.engine,
            words.engines,
            transfer=transfer_time(words, self.card.send),
            prices=prices_of(words),
            watchdog=words.watchdog,
            asynchronous=self.asynchronous,
            outages=parse_outages(words.outages, words.engines),
        )

    def maker(self, name: str, settings: dict[str, Any]) -> Maker:
        return Maker(name, settings, self.engine)

    def requests(self, seed: int) -> Workload:
        """The requests of one seed; every policy meets the same."""
        if seed not in self._seeds:
            self._seeds[seed], _ = make_workload(self.words, seed)
        return self._seeds[seed]


def carry_out(
    prepared: Prepared,
    policy: str,
    settings: dict[str, Any],
    seed: int | None = None,
    label: str = "",
    progress: Callable[[int], None] | None = None,
    router: Routed | None = None,
    make: Maker | None = None,
) -> Run:
    """Serve the requests under the policy. An interrupted or failed run comes back too, marked as such.

    `make` makes the policy, where the caller has tried name and settings before.
    """
    seed = prepared.words.seed if seed is None else seed
    workload = prepared.requests(seed)
    make = make or prepared.maker(policy, settings)
    about = _meta(prepared, workload, policy, make.parameters, seed) | {"label": label or policy}
    setup = prepared.fleet()
    if setup is None:
        run = _one_engine(prepared, make, workload, about, progress)
    else:
        run = _fleet(setup, router or (DEFAULT_ROUTER, {}), make, workload, about, progress)
    run.meta["outside_card"] = outside(run, prepared.card)
    return run


def _one_engine(
    prepared: Prepared,
    make: Callable[[], BatchPolicy],
    workload: Workload,
    about: dict[str, Any],
    progress: Callable[[int], None] | None,
) -> Run:
    recorder = Recorder(len(workload), [kind.name for kind in workload.kinds])
    simulator = Simulator(
        prepared.engine,
        make(),
        workload,
        (recorder,),
        asynchronous=prepared.asynchronous,
        watchdog=prepared.words.watchdog,
        progress=progress,
    )
    outcome = "finished"
    try:
        simulator.run()
    except KeyboardInterrupt:
        outcome = "interrupted"
    except RunError as error:
        outcome = f"failed: {error}"
    about |= cache_record([simulator.replica])
    return Run({**about, "outcome": outcome}, **recorder.tables())


def _fleet(
    setup: FleetSetup,
    router: Routed,
    make: Callable[[], BatchPolicy],
    workload: Workload,
    about: dict[str, Any],
    progress: Callable[[int], None] | None,
) -> Run:
    name, wanted = router
    made, values = setup.router(name, wanted, workload, about["seed"])
    about |= {"driver": "fleet", "router": name, "router_parameters": values}
    return setup.run(lambda role: make(), made, workload, progress, about)


def _meta(
    prepared: Prepared, workload: Workload, policy: str, parameters: dict[str, Any], seed: int
) -> dict[str, Any]:
    engine, card, words = prepared.engine, prepared.card, prepared.words
    about = described(workload)
    return {
        "headgate": VERSION,
        "driver": "simulator",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "policy": policy,
        "parameters": parameters,
        "seed": seed,
        "card": card.name,
        "model": card.model,
        "gpu": card.gpu,
        "provenance": card.provenance.source,
        **({"expected_error": card.expected_error.model_dump()} if card.expected_error else {}),
        "engine": engine.limits,
        "asynchronous": prepared.asynchronous,
        "arrivals": arrivals_said(words),
        "kv_tokens": engine.kv_tokens,
        "longest": engine.longest,
        "rate": words.rate if about["load"] == "open" else None,
        "burstiness": words.burstiness or 1.0,
        **about,
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }
