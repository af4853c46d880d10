"""WAIT and Nested WAIT planned from the settings of a run: thresholds, and the memory they need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.advisor.situation import drawn_workload, named_after, prefix_hits, served_lengths
from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.cost.likeness import error_bar
from headgate.experiment.build import ALL_FIT, Unservable, make_engine, refuse_speculation, unservable
from headgate.experiment.settings import Experiment
from headgate.methods.wait import inventory
from headgate.methods.wait.traffic import best_pace, mean_latency
from headgate.settings_base import Count, Seconds, SettingsModel, declared
from headgate.sim.engine.engine import Engine
from headgate.stats.metrics import without_nan
from headgate.workloads.workload import Workload
from headgate_papers.wait import balance
from headgate_papers.wait import segments as nesting

WHOLE_PROMPTS = (
    "The prefix cache is not counted: it would find {:.0f} % of the prompt tokens, but every prompt is "
    "planned as computed and held whole. The card carries more than this plan says, with less memory; check "
    "the thresholds with headgate simulate."
)
Floats = NDArray[np.float64]
PLAN = "Plan"


class WaitSettings(SettingsModel):
    """What `plan wait` can be told. In the paper's letters: slack is ε, miss δ and horizon T."""

    load: float | None = declared(PLAN, "the rate as a share of what the card can carry", gt=0, lt=1)
    types: int | None = declared(PLAN, "split requests by output length into so many types", ge=2)
    segments: Count | None = declared(PLAN, "so many segments (default: as need least memory)")
    slack: float = declared(PLAN, "by how much each segment's threshold exceeds what reaches it", 0.05, ge=0)
    miss: float = declared(PLAN, "accepted chance that memory is not enough", 0.01, gt=0, lt=1)
    horizon: Seconds = declared(PLAN, "over which time (default: 1h)", 3600.0)


@dataclass(frozen=True)
class Nested:
    segments: nesting.Segments
    thresholds: balance.FilledSizes
    bound: nesting.MemoryBound
    miss: float
    overflow: float  # δ that the card's memory gives
    slots: int

    @property
    def active(self) -> float:
        """Requests in full segments: cohorts that have not shrunk yet, so more than there usually are."""
        parts = self.segments.parts()
        return sum(size * part.stages for size, part in zip(self.thresholds.sizes, parts, strict=True))

    def as_dict(self) -> dict[str, Any]:
        return {
            "ends": self.segments.ends,
            "reach": self.segments.reach,
            "thresholds": self.thresholds.sizes,
            "iteration": self.thresholds.seconds,
            "active": self.active,
            "bound": {**self.bound._asdict(), "total": self.bound.total},
            "miss": self.miss,
            "overflow": self.overflow,
        }


@dataclass(frozen=True)
class Mix:
    names: tuple[str, ...]
    parts: list[inventory.MixPart]
    split: str  # how `wait` tells the types apart
    prompt: float
    decodes: Floats
    rate: float


@dataclass(frozen=True)
class WaitPlan:
    source: str
    workload: str
    capacity: int
    wishes: WaitSettings
    mix: Mix
    lines: inventory.Lines
    most: float  # requests/s that the card can carry
    fluid: balance.Equilibrium
    pace: inventory.PaceRange
    thresholds: balance.FilledSizes
    latency: float
    nested: Nested | None
    why_not_nested: str
    notes: tuple[str, ...]
    cached: float = 0.0  # share of the prompt tokens that a prefix cache finds, which the plan ignores
    lost: Unservable = ALL_FIT

    @property
    def alarm(self) -> str:
        return WHOLE_PROMPTS.format(100 * self.cached) if self.cached else ""

    @property
    def need(self) -> float:
        """KV tokens that fractional thresholds do not exceed: M^π and one request more of each type."""
        return self.thresholds.kv + sum(part.peak for part in self.mix.parts)

    def policies(self) -> dict[str, dict[str, str]]:
        sizes = zip(self.mix.names, self.thresholds.sizes, strict=True)
        named = "+".join(f"{name}={size:.4g}" if name else f"{size:.4g}" for name, size in sizes)
        split = {} if self.mix.split == "kind" else {"split": self.mix.split}
        policies = {"wait": {**split, "thresholds": named}}
        if self.nested is not None:
            ends = "/".join(map(str, self.nested.segments.ends))
            inner = "/".join(f"{size:.4g}" for size in self.nested.thresholds.sizes)
            policies["nested-wait"] = {"ends": ends, "thresholds": inner}
        return policies

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Plans are for whole prompts, so none is cached."""
        types = []
        for name, part, size in zip(self.mix.names, self.mix.parts, self.thresholds.sizes, strict=True):
            types.append({"name": name, **part._asdict(), "threshold": size})
            del types[-1]["cached"]
        document = {
            "costs_from": self.source,
            "workload": self.workload,
            "kv_tokens": self.capacity,
            "rate": self.mix.rate,
            "most_rate": self.most,
            "load": self.mix.rate / self.most,
            "ignored_prefix_hits": self.cached,
            "fluid": {**self.fluid._asdict(), "work": inventory.offered(self.mix.parts)},
            "pace": {"shortest": self.pace.shortest, "longest": self.pace.longest},
            "wait": {
                "types": types,
                "iteration": self.thresholds.seconds,
                "kv": self.thresholds.kv,
                "need": self.need,
                "latency": self.latency,
            },
            "nested": self.nested and self.nested.as_dict(),
            "policies": self.policies(),
            "notes": self.notes,
        }
        return dict(without_nan(document))


def plan_wait(settings: Experiment, wishes: WaitSettings) -> WaitPlan:
    card = load_card(settings.card)
    engine = make_engine(settings, card)
    refuse_speculation(settings, "plan wait")
    workload, remarks = drawn_workload(settings)
    mix = gathered_mix(settings, wishes, workload, engine)
    lines = inventory.lines_of(engine.cost, mix.parts, engine.kv_tokens)
    most = mix.rate * balance.most_rate(lines, mix.parts, engine.kv_tokens, engine.running)
    if wishes.load is not None:
        mix = scaled(mix, wishes.load * most / mix.rate)
    try:
        pace = _pace(lines, mix, engine)
    except InputError:
        if engine.longest < engine.max_model_len:  # what is missing is said for whole requests
            roomy = engine._replace(kv_tokens=engine.max_model_len + engine.block)
            uncut = gathered_mix(settings, wishes, workload, roomy)
            uncut = scaled(uncut, mix.rate / uncut.rate)
            _pace(inventory.lines_of(engine.cost, uncut.parts, engine.kv_tokens), uncut, engine)
        raise
    chosen = _chosen(lines, mix.parts, pace, settings.tpot)
    thresholds = balance.along_the_ray(lines, mix.parts, chosen)
    nested, why_not = None, ""
    cuts = candidates(mix, wishes)
    try:
        nested = _nested(lines, wishes, engine, cuts)
    except InputError as error:  # it may need too much memory; the other half then stands
        why_not = str(error)
    return WaitPlan(
        source=f"card {card.name}",
        workload=named_after(settings, workload),
        capacity=engine.kv_tokens,
        wishes=wishes,
        mix=mix,
        lines=lines,
        most=most,
        fluid=balance.equilibrium(lines, mix.parts),
        pace=pace,
        thresholds=thresholds,
        latency=mean_latency(lines, mix.parts, thresholds.sizes),
        nested=nested,
        why_not_nested=why_not,
        notes=(*error_bar(card), *remarks),
        cached=_cached(workload, engine),
        lost=unservable(workload, engine),
    )


def _cached(workload: Workload, engine: Engine) -> float:
    """Share of the prompt tokens that a cache of this size finds when requests come one after the other."""
    if not engine.prefix_cache:
        return 0.0
    hits, (prompts, _) = prefix_hits(workload, engine), served_lengths(workload, engine)
    return float(hits.sum() / prompts.sum())


def _pace(lines: inventory.Lines, mix: Mix, engine: Engine) -> inventory.PaceRange:
    spare = sum(part.peak for part in mix.parts)
    return balance.pace_within(lines, mix.parts, engine.kv_tokens, engine.running, spare)


def _chosen(
    lines: inventory.Lines, parts: list[inventory.MixPart], pace: inventory.PaceRange, tpot: float | None
) -> float:
    if tpot is not None and tpot < pace.shortest:
        raise InputError(
            f"--tpot {tpot:g}s: need t >= DT*, the shortest iteration that keeps up; promise "
            f"{balance.rounded(pace.shortest, up=True):g}s or more, or serve less"
        )
    return best_pace(lines, parts, pace, tpot or inf)


def _nested(
    lines: inventory.Lines, wishes: WaitSettings, engine: Engine, cuts: list[nesting.Segments]
) -> Nested:
    tried = nesting.choices(lines, cuts, wishes.slack, wishes.miss, wishes.horizon, engine.kv_tokens)
    best = nesting.best_choice(tried)
    assert best.thresholds and best.bound
    overflow = nesting.chance_of_overflow(best.bound, wishes.miss, engine.kv_tokens)
    return Nested(best.segments, best.thresholds, best.bound, wishes.miss, overflow, engine.running)


# -- the traffic, as WAIT's planners want it

COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20)  # numbers of segments to try


def gathered_mix(settings: Experiment, wishes: WaitSettings, workload: Workload, engine: Engine) -> Mix:
    """Types are the kinds of the workload, or groups by output length where the wishes say so."""
    prompts, decodes = (lengths.astype(np.int64) for lengths in served_lengths(workload, engine))
    fits = workload.prompt < engine.longest
    kind = workload.kind[fits]
    rate = _rate(settings, wishes, workload)
    names = [each.name for each in workload.kinds]
    split = "kind"
    if wishes.types is not None:
        bounds = nesting.equal_shares(decodes + 1, wishes.types)[:-1]
        kind = np.searchsorted(bounds, decodes + 1, side="left")
        names, split = [*map(str, bounds), "more"], "output:" + "/".join(map(str, bounds))
        if not bounds:
            raise InputError(f"--types {wishes.types}: outputs are too alike to be split; leave it out")
    present = [number for number in range(len(names)) if np.any(kind == number)]
    parts = []
    for number in present:
        theirs = kind == number
        own = rate * float(np.mean(theirs))
        parts.append(balance.seen_kind(own, prompts[theirs], decodes[theirs], engine.block))
    prompt = float(prompts.mean()) + (engine.block - 1) / 2
    shown = tuple(names[number] for number in present)
    return Mix(shown, parts, split, prompt, decodes.astype(np.float64), rate)


def _rate(settings: Experiment, wishes: WaitSettings, workload: Workload) -> float:
    """Requests per second; any, where the load is to be a share of what the card can carry."""
    span = float(np.ptp(workload.arrival))
    if wishes.load is not None:
        if settings.rate or settings.clients or settings.trace:
            raise InputError("--load scales the rate, but another load is given; drop one of the two")
        return 1.0
    if workload.closed or span <= 0:
        raise InputError(
            "thresholds of WAIT are for a rate; give --rate, a trace with its own times, or --load 0.9 for a "
            "share of what the card can carry"
        )
    return settings.rate or (len(workload) - 1) / span


def scaled(mix: Mix, factor: float) -> Mix:
    parts = [part._replace(rate=part.rate * factor) for part in mix.parts]
    return replace(mix, parts=parts, rate=mix.rate * factor)


def candidates(mix: Mix, wishes: WaitSettings) -> list[nesting.Segments]:
    longest = int(mix.decodes.max())
    counts = [wishes.segments] if wishes.segments else [n for n in COUNTS if n <= max(1, longest)]
    cuts = [nesting.even_ends(longest, count) for count in counts]
    cuts += [nesting.equal_shares(mix.decodes, count) for count in counts]
    return [nesting.segments_from(mix.prompt, mix.decodes, mix.rate, ends) for ends in dict.fromkeys(cuts)]
