"""What every search starts from: card, engine, traffic, seeds, and what is to be said of them."""

from __future__ import annotations

from dataclasses import dataclass

from headgate.advisor.capacity.slo import Level
from headgate.advisor.capacity.traffic import Traffic, make_traffic, own_rate
from headgate.advisor.settings import SearchSettings
from headgate.core.errors import InputError
from headgate.cost.card import Card, load_card
from headgate.cost.error_bar import error_bar
from headgate.experiment.asynchrony import composes_ahead, partly
from headgate.experiment.build import make_engine
from headgate.experiment.settings import Experiment
from headgate.methods.bounds.capacity import Bound, engine_bound, ideal_bound
from headgate.sim.engine.engine import Engine

INSTANT = 1e9  # requests per second that no engine serves
AS_RECORDED = "a trace as recorded is one sample of traffic: no interval"


@dataclass(frozen=True)
class SetUp:
    """One engine of a card, and the requests it is to serve."""

    settings: Experiment
    card: Card
    engine: Engine
    traffic: Traffic
    options: SearchSettings

    @property
    def workload(self) -> str:
        """What the requests are called in the first line."""
        drawn = "mix" if self.settings.classes else self.settings.workload
        return f"trace {self.settings.trace}" if self.settings.trace else f"{drawn} lengths"

    @property
    def asynchronous(self) -> bool:
        return composes_ahead(self.settings.asynchronous, self.card.host)

    @property
    def seeds(self) -> range:
        """One where nothing is drawn."""
        first = self.settings.seed
        return range(first, first + (self.options.seeds if self.traffic.drawn else 1))

    def notes(self, fleet: bool) -> list[str]:
        """What the runs have less of than an engine and its traffic."""
        alone = [] if self.traffic.drawn else [AS_RECORDED]
        sharing = self.traffic.sharing_said(self.engine)
        shared = [sharing] if sharing else []
        read = self.traffic.trace.remarks if self.traffic.trace else []
        return [*error_bar(self.card), *partly(self.settings, self.card, fleet), *read, *shared, *alone]

    def bounds(self) -> tuple[Bound, Bound]:
        """λ*, and the same with the engine's limits."""
        engine, lengths = self.engine, self.traffic.lengths(self.engine)
        ideal, limited = (
            bound(engine.cost, lengths, engine.running, engine.batch_tokens, engine.kv_tokens)
            for bound in (ideal_bound, engine_bound)
        )
        if not limited.rate < INSTANT:
            raise InputError(
                f"card {self.card.name}: its steps take no time, so there is no capacity to find; fix it"
            )
        return ideal, limited


def set_up(settings: Experiment, levels: tuple[Level, ...], options: SearchSettings, requests: int) -> SetUp:
    """Checked; `requests` are those of a run unless the settings say otherwise."""
    card = load_card(settings.card)
    engine = make_engine(settings, card)
    traffic = make_traffic(settings, levels, options.classes, requests, options.as_recorded, engine)
    return SetUp(settings=settings, card=card, engine=engine, traffic=traffic, options=options)


def without_load(settings: Experiment) -> Experiment:
    """The same requests at a rate that is yet to be found."""
    if settings.rate and settings.scale_rate:
        raise InputError("--rate and --scale-rate both set the load; drop one of the two")
    return settings.model_copy(update={"rate": None, "scale_rate": None})


def offered_rate(settings: Experiment, traffic: Traffic) -> float | None:
    """Requests per second that the settings ask for: --rate, or the trace's own times --scale-rate."""
    if settings.rate:
        return settings.rate
    if traffic.trace is None or not settings.trace:
        return None
    return own_rate(traffic.trace, "give --rate") * (settings.scale_rate or 1.0)
