"""What a plan is made for: step costs, lengths, limits and load, from the settings of a run or numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.advisor.settings import CostSettings
from headgate.core.durations import duration, price
from headgate.core.errors import InputError
from headgate.cost.card import Card, load_card
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.cost.likeness import error_bar, throughput_error
from headgate.cost.model import Shape, StepCost
from headgate.estimators.hazard import LinearHazard, Survival, fit_hazard, guarded, sample_survival
from headgate.experiment import build
from headgate.experiment.settings import Experiment, flag, without_clients
from headgate.methods.eb.costs import IterationCost, Lengths
from headgate.sim.engine.engine import Engine, Speculation
from headgate.workloads.sessions import ENDLESS, found_again
from headgate.workloads.workload import Workload

DRAWN = 100_000  # lengths drawn for a plan, so that it is for their law and not for one sample of it
USUAL_BLOCK = 16
CACHED = (
    "prefix caching is on: hits are those of a cache of this size when requests come one after the other; "
    "steps are priced by the prompt tokens that are left, memory by whole prompts"
)
RECORDED = "prefix caching is on: hits as recorded; steps are priced by the prompt tokens that are left"
BURSTS = "speculation: a decode step delivers {:.3g} tokens on average, each of which takes its share of it"
NEEDED = ("prefill_fixed", "prefill_per_token", "decode_fixed", "decode_per_request", "mixed_by_share")
FIXED = ("prefill_fixed", "decode_fixed", "mixed_fixed")  # whole durations; the others are prices of a piece


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
    hazard: LinearHazard
    held: Held
    slots: int  # the most slots
    budget: int  # the most tokens in one step
    load: OfferedLoad = SATURATED
    kv_tokens: float = inf  # infinite: memory was not given, and does not bound anything
    block: int = USUAL_BLOCK
    notes: tuple[str, ...] = ()
    error: float = 0.0  # of the card's throughput, relative; 0: it was measured, or given
    lost: build.Unservable = build.ALL_FIT
    step_cost: StepCost | None = None  # of a step, where `cost` is of an iteration: with speculation

    def step_seconds(self, shape: Shape) -> float:
        return (self.step_cost or self.cost).seconds(shape)


def situation(settings: Experiment, texts: CostSettings | None = None) -> Situation:
    if texts is None or not texts.model_fields_set:
        card = load_card(settings.card)
        return _on_card(settings, build.make_engine(settings, card), card)
    if "card" in settings.model_fields_set:
        raise InputError("--card and step costs as numbers; the numbers replace a card, drop one of the two")
    slots = settings.slots or build.DEFAULT_SLOTS
    engine = Engine(
        cost=plain_cost(texts),
        kv_tokens=settings.kv_tokens or 10**12,
        max_model_len=settings.model_len or 10**9,
        batch_tokens=settings.budget or max(slots, build.DEFAULT_BUDGET),
        running=slots,
        block=settings.block or USUAL_BLOCK,
    ).checked()
    return gathered(settings, engine, "step costs as given", settings.kv_tokens or inf)


def card_situation(settings: Experiment) -> tuple[Situation, Card]:
    """The same for advice on a card's engine: its own limits hold unless the settings set smaller ones."""
    card = load_card(settings.card)
    most = {"slots": settings.slots or card.max_running, "budget": settings.budget or card.max_batch_tokens}
    return _on_card(settings, build.make_engine(settings.model_copy(update=most), card), card), card


def _on_card(settings: Experiment, engine: Engine, card: Card) -> Situation:
    """With what is known of a derived card's error."""
    about = gathered(settings, engine, f"card {card.name}", engine.kv_tokens)
    return replace(about, notes=(*error_bar(card), *about.notes), error=throughput_error(card))


def plain_cost(texts: CostSettings) -> LinearCost:
    """A step cost without context and knees: the six numbers of the paper."""
    for name in NEEDED:
        if getattr(texts, name) is None:
            *most, last = map(flag, NEEDED)
            raise InputError(
                f"{flag(name)} is missing; step costs as numbers need {', '.join(most)} and {last}"
            )
    shares = str(texts.mixed_by_share).split(",")
    if len(shares) != 3:
        raise InputError(
            f"--mixed-by-share {texts.mixed_by_share!r}: need three prices a,b,c in seconds per token, for "
            "a + b*r + c*r*r at decode share r; write 4.2e-5,0,0 for one price"
        )
    plain = [name for name in CostSettings.model_fields if name != "mixed_by_share"]
    fixed, per_token, decode, each, mixed = (_seconds(name, getattr(texts, name) or "0") for name in plain)
    a, b, c = (_seconds("mixed_by_share", text) for text in shares)
    if not decode > 0:
        raise InputError("--decode-fixed 0; it must be above 0: thresholds compare fixed costs with it")
    try:
        together = MixedTerms(constant=mixed, by_share=(a, b, c))
    except ValueError as error:
        raise InputError(f"--mixed-by-share: {error}; fix it") from None
    return LinearCost(DecodeTerms(decode, each), PrefillTerms(fixed, per_token), together)


def gathered(settings: Experiment, engine: Engine, source: str, kv_tokens: float) -> Situation:
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
    running = decodes[decodes > 0]
    lengths = Lengths(
        prompt=float(prompts.mean()),
        output=float(decodes.mean()),
        prompt_sd=float(prompts.std()),
        output_sd=float(decodes.std()),
    )
    if engine.prefix_cache and (hits := prefix_hits(workload, engine, kv_tokens)).any():
        computed = prompts - hits
        lengths = lengths._replace(uncached=(float(computed.mean()), float(computed.std())))
        notes.append(CACHED if workload.contents is not None else RECORDED)
    return Situation(
        source=source,
        workload=named_after(settings, workload),
        cost=cost,
        lengths=lengths,
        survival=sample_survival(running),
        hazard=_hazard(running),
        held=held(prompts, decodes),
        slots=engine.running,
        budget=engine.batch_tokens,
        load=_load(settings, workload),
        kv_tokens=kv_tokens,
        block=engine.block,
        notes=tuple(notes),
        lost=lost,
        step_cost=engine.cost if engine.speculation else None,
    )


def _burst(workload: Workload, speculation: Speculation) -> float:
    outputs = np.minimum(workload.output, workload.limit).astype(np.float64)
    bursts = np.array([speculation.of(kind.name).tokens(speculation.drafts) for kind in workload.kinds])
    return float(outputs.sum() / (outputs / bursts[workload.kind]).sum())


def prefix_hits(workload: Workload, engine: Engine, kv_tokens: float) -> NDArray[np.int64]:
    blocks = int(kv_tokens // engine.block) if isfinite(kv_tokens) else ENDLESS
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


def _hazard(running: NDArray[np.float64]) -> LinearHazard:
    """The paper's fit with its guards; a level hazard where all outputs end at once and no line exists."""
    mean = float(running.mean())
    if running.max() < 2:
        return LinearHazard(min(1 / mean, 0.5), 0.0)
    fit = guarded(fit_hazard(running), mean)
    return fit._replace(base=min(fit.base, 0.999))


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
    spoken = settings.clients or settings.rate or settings.all_at_once or settings.arrivals or settings.stages
    if settings.trace is None and not spoken:
        return SATURATED
    if workload.closed:
        return OfferedLoad(clients=int(workload.clients.max()))
    span = float(workload.arrival[-1] - workload.arrival[0])
    return OfferedLoad(rate=(len(workload) - 1) / span) if span > 0 else SATURATED


def _seconds(name: str, text: str) -> float:
    """A price as a duration; those of a polynomial may be negative."""
    written = text.strip()
    negative = name == "mixed_by_share" and written.startswith("-")
    try:
        read = duration if name in FIXED else price
        value = read(written.removeprefix("-") if negative else written)
    except InputError as error:
        raise InputError(f"{flag(name)}: {error}") from None
    if not isfinite(value) or value > 1e6:
        raise InputError(f"{flag(name)} {text}: no step takes that long; give such as 5ms or 30us")
    return -value if negative else value
