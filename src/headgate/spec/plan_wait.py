"""WAIT and Nested WAIT planned from the words of a run: thresholds, and the memory they need."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, isfinite
from typing import Any

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.drivers.engine import Engine
from headgate.planners.inventory import (
    Equilibrium,
    Pace,
    Thresholds,
    along_the_ray,
    check_thresholds,
    equilibrium,
    least_thresholds,
    most_rate,
    pace_within,
    printed_rule,
    work_share,
)
from headgate.planners.iteration import Lines, Part, lines_of, offered
from headgate.planners.nested import (
    Bound,
    Choice,
    best_choice,
    busiest,
    chance_of_overflow,
    check_nested,
    choices,
    least_nested,
)
from headgate.planners.segments import Segments
from headgate.planners.waiting import best_pace, mean_latency
from headgate.policies.sorting import read_thresholds
from headgate.spec.build import make_engine, make_workload, too_long
from headgate.spec.planning import enough
from headgate.spec.wait_mix import Mix, Wishes, candidates, check_wishes, gathered_mix, scaled, windows
from headgate.spec.words import Experiment


@dataclass(frozen=True)
class Nested:
    """Nested WAIT's half of the plan."""

    segments: Segments
    thresholds: Thresholds
    whole: Thresholds | None
    bound: Bound
    miss: float
    overflow: float  # δ that the card's memory gives
    tried: list[Choice]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ends": list(self.segments.ends),
            "reach": list(self.segments.reach),
            "thresholds": list(self.thresholds.sizes),
            "iteration": self.thresholds.seconds,
            "whole": _sizes(self.whole),
            "bound": {
                **self.bound._asdict(),
                "tail": _finite(self.bound.tail),
                "total": _finite(self.bound.total),
            },
            "miss": self.miss,
            "overflow": self.overflow,
            "tried": {len(each.segments.ends): _total(each) for each in self.tried},
        }


@dataclass(frozen=True)
class WaitPlan:
    """The answer of `headgate plan wait`."""

    source: str
    workload: str
    capacity: int
    wishes: Wishes
    mix: Mix
    lines: Lines
    most: float  # requests/s that the card can carry
    fluid: Equilibrium
    pace: Pace
    thresholds: Thresholds
    latency: float
    whole: Thresholds | None
    why_not: str  # there are no whole ones
    nested: Nested | None
    why_not_nested: str
    notes: tuple[str, ...]

    @property
    def need(self) -> float:
        """KV tokens that fractional thresholds do not exceed: M^π and one request more of each type."""
        return self.thresholds.kv + sum(part.peak for part in self.mix.parts)

    @property
    def rules(self) -> dict[str, tuple[float, ...]]:
        """The paper's rule for a batch limit, and its correction."""
        if self.wishes.batch is None:
            return {}
        return {
            "printed rule": printed_rule(self.mix.parts, self.wishes.batch),
            "work share": work_share(self.mix.parts, self.wishes.batch),
        }

    def policies(self) -> dict[str, dict[str, str]]:
        """The two policies with these thresholds, as words."""
        sizes = zip(self.mix.names, self.thresholds.sizes, strict=True)
        named = "+".join(f"{name}={size:.4g}" if name else f"{size:.4g}" for name, size in sizes)
        split = {} if self.mix.split == "kind" else {"split": self.mix.split}
        found = {"wait": {**split, "thresholds": named}}
        if self.nested is not None:
            ends = "/".join(map(str, self.nested.segments.ends))
            inner = "/".join(f"{size:.4g}" for size in self.nested.thresholds.sizes)
            found["nested-wait"] = {"ends": ends, "thresholds": inner}
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain numbers, None where there is none."""
        return {
            "costs_from": self.source,
            "workload": self.workload,
            "kv_tokens": self.capacity,
            "rate": self.mix.rate,
            "most_rate": self.most,
            "load": self.mix.rate / self.most,
            "fluid": {**self.fluid._asdict(), "work": offered(self.mix.parts)},
            "pace": {"shortest": self.pace.shortest, "longest": self.pace.longest},
            "wait": {
                "types": [
                    {"name": name, **part._asdict(), "threshold": size}
                    for name, part, size in zip(
                        self.mix.names, self.mix.parts, self.thresholds.sizes, strict=True
                    )
                ],
                "iteration": self.thresholds.seconds,
                "kv": self.thresholds.kv,
                "need": self.need,
                "latency": _finite(self.latency),
                "whole": _sizes(self.whole),
                "rules": {name: list(sizes) for name, sizes in self.rules.items()},
            },
            "nested": None if self.nested is None else self.nested.as_dict(),
            "policies": self.policies(),
            "notes": list(self.notes),
        }


def plan_wait(words: Experiment, wishes: Wishes) -> WaitPlan:
    """All of it; an InputError where the load is unstable or given thresholds violate a condition."""
    check_wishes(wishes)
    card = load_card(words.card)
    engine = make_engine(words, card)
    workload, bad = make_workload(enough(words))
    refused = too_long(workload, engine)
    notes = [f"left out {bad.count} bad rows"] if bad.count else []
    if refused:
        notes.append(f"left out {refused} of {len(workload)} requests: too long for the engine")
    mix = gathered_mix(words, wishes, workload, engine)
    lines = lines_of(engine.cost, mix.parts, engine.kv_tokens)
    most = mix.rate * most_rate(lines, mix.parts, engine.kv_tokens, engine.running)
    if wishes.load is not None:
        mix = scaled(mix, wishes.load * most / mix.rate)
    pace = pace_within(lines, mix.parts, engine.kv_tokens)
    chosen = _chosen(lines, mix.parts, engine, pace, words.tpot)
    thresholds = along_the_ray(lines, mix.parts, chosen)
    whole, why_not = _whole(lines, mix.parts, engine.kv_tokens, wishes.slack)
    nested, why_not_nested = _nested_or_why(lines, mix, wishes, engine)
    plan = WaitPlan(
        source=f"card {card.name}",
        workload=f"trace {words.trace}" if words.trace else f"{workload.name} lengths",
        capacity=engine.kv_tokens,
        wishes=wishes,
        mix=mix,
        lines=lines,
        most=most,
        fluid=equilibrium(lines, mix.parts),
        pace=pace,
        thresholds=thresholds,
        latency=mean_latency(lines, mix.parts, thresholds.sizes),
        whole=whole,
        why_not=why_not,
        nested=nested,
        why_not_nested=why_not_nested,
        notes=tuple(notes),
    )
    _check_given(plan)
    return plan


def _chosen(lines: Lines, parts: list[Part], engine: Engine, pace: Pace, tpot: float | None) -> float:
    """The pace with the least latency that memory, seats and the promised TPOT allow."""
    room = engine.kv_tokens - sum(part.peak for part in parts)
    seats = engine.running / sum(part.rate * part.stages for part in parts)
    longest = min(pace.longest, max(room, 0.0) / offered(parts), seats)
    if longest < pace.shortest:
        slots = ceil(pace.shortest / seats * engine.running)
        kv = ceil(pace.shortest * offered(parts) + engine.kv_tokens - room)
        raise InputError(
            f"t >= DT*: fractional thresholds need iterations of {pace.shortest:.4g} s, but with one request "
            f"more of each type only {longest:.4g} s fit; need --slots {slots} and --kv-tokens {kv} at least"
        )
    if tpot is not None and tpot < pace.shortest:
        raise InputError(
            f"--tpot {tpot:g} s is below DT* = {pace.shortest:.4g} s, the shortest iteration that keeps up; "
            "promise more or serve less"
        )
    return best_pace(lines, parts, Pace(pace.shortest, longest), tpot or inf)


def _whole(lines: Lines, parts: list[Part], capacity: float, slack: float) -> tuple[Thresholds | None, str]:
    try:
        return least_thresholds(lines, parts, capacity, slack), ""
    except InputError as error:
        return None, str(error)


def _nested_or_why(lines: Lines, mix: Mix, wishes: Wishes, engine: Engine) -> tuple[Nested | None, str]:
    """Nested WAIT needs more memory than WAIT; where that is too much the other half of the plan stands."""
    try:
        return _nested(lines, mix, wishes, engine), ""
    except InputError as error:
        return None, str(error)


def _nested(lines: Lines, mix: Mix, wishes: Wishes, engine: Engine) -> Nested:
    cuts = candidates(mix, wishes)
    tried = choices(lines, cuts, wishes.slack, wishes.miss, wishes.horizon, engine.kv_tokens)
    best = best_choice(tried)
    assert best.thresholds and best.bound
    come = None
    if wishes.every is not None:
        come = busiest([(wishes.every, rate) for rate in windows(mix, wishes.every)])
    try:
        whole = least_nested(lines, best.segments, engine.kv_tokens, wishes.slack, come)
    except InputError:
        whole = None
    overflow = chance_of_overflow(best.bound, wishes.miss, engine.kv_tokens)
    return Nested(best.segments, best.thresholds, whole, best.bound, wishes.miss, overflow, tried)


def _check_given(plan: WaitPlan) -> None:
    """Thresholds that the user gave: the first violated inequality ends the plan."""
    given = read_thresholds("plan wait", plan.wishes.thresholds)
    if not given:
        return
    everyone = given.get("")
    if everyone and len(everyone) > 1:
        if plan.nested is None:
            raise InputError(plan.why_not_nested)
        nested = plan.nested.segments
        if len(everyone) != len(nested.ends):
            raise InputError(
                f"--thresholds: {len(everyone)} for {len(nested.ends)} segments; give --ends too"
            )
        faults = check_nested(plan.lines, nested, everyone, plan.capacity)
    else:
        sizes = [given.get(name, everyone or (0.0,))[0] for name in plan.mix.names]
        if 0.0 in sizes:
            raise InputError(
                f"--thresholds: none for type {plan.mix.names[sizes.index(0.0)]!r}; give one each"
            )
        faults = check_thresholds(plan.lines, plan.mix.parts, sizes, plan.capacity)
    if faults:
        raise InputError(f"--thresholds violate {faults[0]}")


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _sizes(thresholds: Thresholds | None) -> list[float] | None:
    return None if thresholds is None else list(thresholds.sizes)


def _total(choice: Choice) -> float | None:
    return None if choice.bound is None else _finite(choice.bound.total)
