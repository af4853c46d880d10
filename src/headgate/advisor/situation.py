"""What a plan is made for: step costs, lengths, limits and load, from the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import InputError
from headgate.cost.card import Card, load_card
from headgate.cost.likeness import error_bar, throughput_error
from headgate.cost.model import Shape, StepCost
from headgate.estimators.hazard import Survival, sample_survival
from headgate.experiment import build
from headgate.experiment.settings import Experiment, without_clients
from headgate.methods.eb.costs import IterationCost, Lengths
from headgate.sim.engine.engine import Engine, Speculation
from headgate.workloads.sessions import found_again
from headgate.workloads.workload import Workload

DRAWN = 100_000  # lengths drawn for a plan, so that it is for their law and not for one sample of it
CACHED = (
    "prefix caching is on: hits are those of a cache of this size when requests come one after the other; "
    "steps are priced by the prompt tokens that are left, memory by whole prompts"
)
RECORDED = "prefix caching is on: hits as recorded; steps are priced by the prompt tokens that are left"
BURSTS = "speculation: a decode step delivers {:.3g} tokens on average, each of which takes its share of it"


class OfferedLoad(NamedTuple):
    """How much is asked of the engine: clients, or requests per second, or (neither) all it can do."""

    clients: int | None = None
    rate: float | None = None


SATURATED = OfferedLoad()


class Held(NamedTuple):
    mean: float
    spread: float


@dataclass(frozen=True)
class Situation:
    """Everything a plan depends on. Outputs are decode iterations, one less than output tokens."""

    source: str  # where the step costs come from
    workload: str  # where the lengths come from
    cost: StepCost
    lengths: Lengths
    survival: Survival
    held: Held
    slots: int  # the most slots
    budget: int  # the most tokens in one step
    kv_tokens: int
    block: int
    load: OfferedLoad = SATURATED
    notes: tuple[str, ...] = ()
    error: float = 0.0  # of the card's throughput, relative; 0: it was measured
    lost: build.Unservable = build.ALL_FIT
    step_cost: StepCost | None = None  # of a step, where `cost` is of an iteration: with speculation

    def step_seconds(self, shape: Shape) -> float:
        return (self.step_cost or self.cost).seconds(shape)


def situation(settings: Experiment) -> Situation:
    card = load_card(settings.card)
    return _on_card(settings, build.make_engine(settings, card), card)


def card_situation(settings: Experiment) -> tuple[Situation, Card]:
    """The same for advice on a card's engine: its own limits hold unless the settings set smaller ones."""
    card = load_card(settings.card)
    most = {"slots": settings.slots or card.max_running, "budget": settings.budget or card.max_batch_tokens}
    return _on_card(settings, build.make_engine(settings.model_copy(update=most), card), card), card


def _on_card(settings: Experiment, engine: Engine, card: Card) -> Situation:
    workload, notes = drawn_workload(settings)
    lost = build.unservable(workload, engine)
    prompts, decodes = served_lengths(workload, engine)
    if decodes.mean() < 1:
        raise InputError(
            f"outputs of {decodes.mean() + 1:.2f} tokens on average; need at least 2, for prompts bring the "
            "first token and hardly anything would decode: choose longer outputs"
        )
    cost = engine.cost
    if engine.speculation:
        burst = _burst(workload, engine.speculation)
        cost = IterationCost(cost, burst)
        notes.append(BURSTS.format(burst))
    lengths = Lengths(
        prompt=float(prompts.mean()),
        output=float(decodes.mean()),
        prompt_sd=float(prompts.std()),
        output_sd=float(decodes.std()),
    )
    if engine.prefix_cache and (hits := prefix_hits(workload, engine)).any():
        computed = prompts - hits
        lengths = lengths._replace(uncached=(float(computed.mean()), float(computed.std())))
        notes.append(CACHED if workload.contents is not None else RECORDED)
    return Situation(
        source=f"card {card.name}",
        workload=named_after(settings, workload),
        cost=cost,
        lengths=lengths,
        survival=sample_survival(decodes[decodes > 0]),
        held=held(prompts, decodes),
        slots=engine.running,
        budget=engine.batch_tokens,
        load=_load(settings, workload),
        kv_tokens=engine.kv_tokens,
        block=engine.block,
        notes=(*error_bar(card), *notes),
        error=throughput_error(card),
        lost=lost,
        step_cost=engine.cost if engine.speculation else None,
    )


def _burst(workload: Workload, speculation: Speculation) -> float:
    outputs = np.minimum(workload.output, workload.limit).astype(np.float64)
    bursts = np.array([speculation.of(kind.name).tokens(speculation.drafts) for kind in workload.kinds])
    return float(outputs.sum() / (outputs / bursts[workload.kind]).sum())


def prefix_hits(workload: Workload, engine: Engine) -> NDArray[np.int64]:
    blocks = engine.kv_tokens // engine.block
    return found_again(workload, engine.block, blocks)[workload.prompt < engine.longest]


def held(prompts: NDArray[np.float64], decodes: NDArray[np.float64]) -> Held:
    """Mean and deviation of a running request's KV at a random moment, each counted as long as it runs.

    A request of prompt L and D iterations holds L+1, ..., L+D tokens in turn. Where long prompts bring
    short answers, as in Azure's conversations, the mean is well below that of independent lengths.
    """
    total = decodes.sum()
    first = decodes * prompts + decodes * (decodes + 1) / 2
    square = decodes * prompts**2 + prompts * decodes * (decodes + 1)
    square = square + decodes * (decodes + 1) * (2 * decodes + 1) / 6
    mean = float(first.sum() / total)
    return Held(mean, sqrt(max(float(square.sum() / total) - mean**2, 0.0)))


def served_lengths(workload: Workload, engine: Engine) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    fits = workload.prompt < engine.longest
    prompts = workload.prompt[fits]
    outputs = np.minimum(workload.output, workload.limit)[fits]
    outputs = np.minimum(outputs, engine.longest - prompts)
    return prompts.astype(np.float64), np.maximum(outputs - 1, 0).astype(np.float64)


def drawn_workload(settings: Experiment, drawn: int = DRAWN) -> tuple[Workload, list[str]]:
    """The requests of a plan, and what is to be said of them.

    Lengths are drawn in number: a plan wants their law, not one sample of a thousand.
    """
    if settings.trace is None and settings.requests is None and not settings.stages:
        settings = settings.model_copy(update={"requests": drawn})
    workload, bad = build.make_workload(without_clients(settings))
    clients = [share.name for share in settings.classes if share.clients]
    left_out = [f"classes with clients of their own are left out: {', '.join(clients)}"] if clients else []
    left_out += [f"left out {bad.count} bad rows"] if bad.count else []
    return workload, [*workload.remarks, *left_out]


def named_after(settings: Experiment, workload: Workload) -> str:
    return f"trace {settings.trace}" if settings.trace else f"{workload.name} lengths"


def _load(settings: Experiment, workload: Workload) -> OfferedLoad:
    spoken = settings.clients or settings.rate or settings.arrivals or settings.stages
    if settings.trace is None and not spoken:
        return SATURATED
    if workload.closed:
        return OfferedLoad(clients=int(workload.clients.max()))
    span = float(workload.arrival[-1] - workload.arrival[0])
    return OfferedLoad(rate=(len(workload) - 1) / span) if span > 0 else SATURATED
