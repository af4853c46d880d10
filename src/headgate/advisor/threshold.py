"""When to refill, what that brings, and whether exclusive or mixed batches serve more: a plan in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, log1p
from typing import Any, NamedTuple

import numpy as np

from headgate.advisor.situation import OfferedLoad, Situation
from headgate.cost.model import Shape
from headgate.methods.eb import prediction
from headgate.methods.eb import thresholds as refills
from headgate.methods.eb.costs import PhaseCosts, mean_prompts, phase_costs
from headgate.stats.metrics import without_nan

WITHIN_ERROR = 0.02  # predictions miss simulated rates by up to about this much
ALIKE = (
    "outputs are nearly equal, so batches end together; these predictions are for requests of all ages and "
    "may be off by a third"
)
MISS = 0.01  # accepted share of cycles that overflow memory
WHOLE = 0.99  # a refill of all slots has no fluid phase; this stands for it


class RefillThresholds(NamedTuple):
    stationary: refills.Threshold
    base: refills.Threshold  # equation (3), its share not clipped

    @property
    def chosen(self) -> refills.Threshold:
        """The stationary one, except where it is cut off at its highest.

        That happens when outputs are nearly equal: whole batches then end together whatever the threshold,
        and the base share serves as well without waiting for the last when they do not.
        """
        alike = self.stationary.share >= refills.HIGHEST and self.stationary.slots > 1
        return self.base if alike else self.stationary


class MemoryLimits(NamedTuple):
    safe: int  # ours, for exclusive batches
    mixed: int  # as many as fit on average under mixed batching


@dataclass(frozen=True)
class Predicted:
    """One mode at the load asked for. Seconds, and requests or tokens per second."""

    running: int  # requests in the engine at once
    rate: float
    tokens: float  # prompt and output tokens per second
    per_token: float  # TPOT
    longest_gap: float  # exclusive: one refill and a decode step; mixed: a step with a full budget
    first_token: float | None  # closed loop only


@dataclass(frozen=True)
class GapPlan:
    """The largest refill that keeps a bound on gaps; refill 0 if none does."""

    bound: float
    refill: int
    gap: float
    rate: float
    change: float  # of the rate, against no bound


@dataclass(frozen=True)
class Crossing:
    wins: tuple[int, int] | None
    clearly: tuple[int, int] | None  # by more than the model's error
    searched: int  # up to so many


class Saturated(NamedTuple):
    mixed: float
    exclusive: float

    @property
    def gain(self) -> float:
        return self.exclusive / self.mixed - 1


@dataclass(frozen=True)
class ThresholdPlan:
    situation: Situation
    costs: PhaseCosts
    thresholds: RefillThresholds
    memory: MemoryLimits
    concurrent: int  # requests at once that the load means
    mixed: Predicted
    exclusive: Predicted
    crossing: Crossing
    saturated: Saturated
    gap: GapPlan | None = None

    @property
    def keeps_up(self) -> bool:
        offered = self.situation.load.rate
        return offered is not None and offered <= min(self.saturated)

    @property
    def gain(self) -> float:
        """What exclusive batches serve more than mixed ones at this load, as a share; never unasked for."""
        offered = self.situation.load.rate
        if offered is None:
            return self.exclusive.rate / self.mixed.rate - 1
        return min(offered, self.saturated.exclusive) / min(offered, self.saturated.mixed) - 1

    @property
    def notes(self) -> tuple[str, ...]:
        alike = self.thresholds.chosen is not self.thresholds.stationary
        return (*self.situation.notes, *((ALIKE,) if alike else ()))

    @property
    def winner(self) -> str:
        """The mode that serves more; "either" within the error of the model or of a derived card."""
        if abs(self.gain) < max(WITHIN_ERROR, self.situation.error):
            return "either"
        return "exclusive" if self.gain > 0 else "mixed"

    def as_dict(self) -> dict[str, Any]:
        about, lengths = self.situation, self.situation.lengths
        document = {
            "costs_from": about.source,
            "workload": about.workload,
            "lengths": {**lengths.as_dict(), "output_tokens": lengths.output + 1, "context": lengths.context},
            "engine": {"slots": about.slots, "budget": about.budget, "kv_tokens": about.kv_tokens},
            "load": {**about.load._asdict(), "concurrent": self.concurrent},
            "costs": self.costs._asdict(),
            "thresholds": {name: each._asdict() for name, each in self.thresholds._asdict().items()},
            "chosen": self.thresholds.chosen._asdict(),
            "memory": self.memory._asdict(),
            "mixed": asdict(self.mixed),
            "exclusive": asdict(self.exclusive),
            "crossover": asdict(self.crossing),
            "gain": self.gain,
            "saturated": {**self.saturated._asdict(), "gain": self.saturated.gain},
            "winner": self.winner,
            "within_error": WITHIN_ERROR,
            "max_gap": asdict(self.gap) if self.gap else None,
            "notes": self.notes,
        }
        return dict(without_nan(document))


def plan_threshold(about: Situation, max_gap: float | None = None) -> ThresholdPlan:
    thresholds, memory, costs = _thresholds(about)
    chosen = thresholds.chosen
    mixed_slots = min(about.slots, memory.mixed)
    concurrent = _concurrent(about, mixed_slots, max(mixed_slots, chosen.slots))
    clients = about.load.clients
    mixed = _mixed(about, min(concurrent, mixed_slots), clients)
    exclusive = _exclusive(about, min(concurrent, chosen.slots), chosen, clients)
    share = min(chosen.refill / chosen.slots, WHOLE)
    return ThresholdPlan(
        situation=about,
        costs=costs,
        thresholds=thresholds,
        memory=memory,
        concurrent=concurrent,
        mixed=mixed,
        exclusive=exclusive,
        crossing=_crossing(about, chosen, mixed_slots),
        saturated=Saturated(
            mixed=prediction.mixed_rate(about.cost, about.lengths, mixed_slots, about.budget),
            exclusive=_rate(about, chosen.slots, share),
        ),
        gap=_bounded(about, chosen, exclusive, max_gap) if max_gap is not None else None,
    )


def _thresholds(about: Situation) -> tuple[RefillThresholds, MemoryLimits, PhaseCosts]:
    slots = about.slots
    for _ in range(2):
        costs = phase_costs(about.cost, about.lengths, slots)
        share = refills.stationary_share(about.survival, costs.overhead).share
        memory = _memory(about, refills.settle(share, slots).share)
        slots = min(about.slots, memory.safe or about.slots)
    base = refills.base_share(costs.overhead / about.lengths.output)
    at_base = refills.Threshold(base, refills.settle(base, slots, lowest=0.0).refill, slots)
    return RefillThresholds(refills.settle(share, slots), at_base), memory, costs


def _memory(about: Situation, share: float) -> MemoryLimits:
    lengths, capacity = about.lengths, about.kv_tokens
    share, ending = min(share, WHOLE), min(1 / lengths.output, WHOLE)
    safe = refills.safe_slots(
        share, ending, lengths.prompt, lengths.prompt_sd, capacity, miss=MISS, block=about.block
    )
    return MemoryLimits(safe, max(1, int(capacity / (lengths.context + about.block / 2))))


def _concurrent(about: Situation, mixed_slots: int, most: int) -> int:
    """How many requests at once the load means; for a rate, what mixed batching needs to keep up with it."""
    load: OfferedLoad = about.load
    if load.clients is not None:
        return load.clients
    if load.rate is None:
        return most
    for running in range(1, mixed_slots + 1):
        if prediction.mixed_rate(about.cost, about.lengths, running, about.budget) >= load.rate:
            return running
    return most


def _mixed(about: Situation, running: int, clients: int | None) -> Predicted:
    lengths, cost, budget = about.lengths, about.cost, about.budget
    rate = prediction.mixed_rate(cost, lengths, running, budget)
    decodes = min(running, budget / (1 + lengths.computed / lengths.output))  # as the prediction has it
    context = round(decodes * lengths.context)
    room = max(1, budget - round(decodes))
    longest = about.step_seconds(Shape(round(decodes), context, room))
    chunks = ceil(lengths.computed / room)
    piece = Shape(round(decodes), context, max(1, round(lengths.computed / chunks)), round(lengths.cached))
    own = chunks * cost.seconds(piece)
    first = None if clients is None else max(0.0, clients - decodes) / rate + own
    tokens = rate * (lengths.prompt + lengths.output + 1)
    return Predicted(running, rate, tokens, decodes / lengths.output / rate, longest, first)


def _exclusive(about: Situation, running: int, chosen: refills.Threshold, clients: int | None) -> Predicted:
    lengths = about.lengths
    share = min(chosen.refill / chosen.slots, WHOLE)
    rate = _rate(about, running, share)
    refilled = max(1.0, share * running)
    phase = lengths.output  # iterations
    if running > 1:
        phase = (phase - 0.5) * -log1p(-min(refilled / running, WHOLE))
    per_token = refilled / rate / phase
    first = None if clients is None else max(0.0, clients / rate - lengths.output * per_token)
    tokens = rate * (lengths.prompt + lengths.output + 1)
    longest = refill_gap(about, running, refilled)
    return Predicted(running, rate, tokens, per_token, longest, first)


def _rate(about: Situation, running: int, share: float) -> float:
    """The prediction; one request alone has no fluid phase: it is prefilled and decodes to its end."""
    if running > 1:
        return prediction.exclusive_rate(about.cost, about.lengths, running, share, about.budget)
    decode = about.cost.seconds(Shape(1, round(about.lengths.context)))
    return 1 / (refill_gap(about, 1, 1) + (about.lengths.output - 1) * decode)


def refill_gap(about: Situation, running: int, refilled: float) -> float:
    """Seconds between two tokens of a request across a refill of mean prompts: the refill, then its step."""
    lengths = about.lengths
    tokens = refilled * lengths.computed
    steps = ceil(tokens / about.budget)
    prompts = mean_prompts(tokens / steps, lengths.computed, lengths.cached)
    decode = Shape(running, round(running * lengths.context))
    return steps * about.step_seconds(prompts) + about.step_seconds(decode)


def _crossing(about: Situation, chosen: refills.Threshold, mixed_slots: int) -> Crossing:
    top = max(chosen.slots, mixed_slots)
    share = min(chosen.refill / chosen.slots, WHOLE)
    gains = []
    for running in range(1, top + 1):
        mixed = prediction.mixed_rate(about.cost, about.lengths, min(running, mixed_slots), about.budget)
        gains.append(_rate(about, min(running, chosen.slots), share) / mixed - 1)
    found = np.array(gains)
    return Crossing(_longest(found > 0), _longest(found > WITHIN_ERROR), top)


def _longest(won: Any) -> tuple[int, int] | None:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], won, [False])).astype(np.int8)))
    if not len(edges):
        return None
    starts, ends = edges[::2], edges[1::2]
    widest = int(np.argmax(ends - starts))
    return int(starts[widest]) + 1, int(ends[widest])


def _bounded(about: Situation, chosen: refills.Threshold, free: Predicted, bound: float) -> GapPlan:
    running = free.running
    best = max(1, round(chosen.refill / chosen.slots * running))
    for refill in range(best, 0, -1):
        gap = refill_gap(about, running, refill)
        if gap <= bound:
            share = min(refill / running, WHOLE)
            rate = _rate(about, running, share)
            return GapPlan(bound, refill, gap, rate, rate / free.rate - 1 if refill < best else 0.0)
    return GapPlan(bound, 0, refill_gap(about, running, 1), 0.0, -1.0)
