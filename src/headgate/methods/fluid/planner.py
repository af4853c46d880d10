"""Gate-and-route: fluid plans from the steady-state linear programs of arXiv 2602.02987."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.methods.fluid.flows import BUNDLED, SEPARATE, Instance
from headgate.methods.fluid.levels import WORDS, Levels, add_rows, slot_tpot
from headgate.methods.fluid.plan import LOST, NO_LEVELS, NOTHING, FluidPlan, Shadows
from headgate.methods.fluid.program import Builder, Floats, Infeasible, Optimum, solve

__all__ = ["NOTHING", "NO_LEVELS", "FluidPlan", "Shadows", "plan_fluid", "pro_rata"]

SAME = 1e-6  # relative: two optima that must agree
ON_FACE = 1e-9  # relative slack by which an alternative optimum may miss the best


def plan_fluid(instance: Instance, levels: Levels = NO_LEVELS) -> FluidPlan:
    levels.checked(instance.checked())
    try:
        return _solved(instance, levels)
    except Infeasible:
        raise InputError(nearest(instance, levels)) from None


def _solved(instance: Instance, levels: Levels) -> FluidPlan:
    waits = levels.none
    form = Form(instance, levels, waits)
    answer = solve(form.program)
    no_queue = instance.charging == BUNDLED and instance.pace.keeps_up
    if waits and no_queue and answer.values[form.decode_loss].sum() > NOTHING:
        free = answer.objective
        form = Form(instance, levels, False)
        answer = solve(form.program)
        assert answer.objective >= free - SAME * max(1.0, abs(free)), "Proposition 1"
    values = _best_bundled(form, answer) if instance.charging == SEPARATE else answer.values
    return _plan(levels, form, answer, values)


def _best_bundled(form: Form, answer: Optimum) -> Floats:
    program = form.program
    scale = max(abs(answer.objective), NOTHING)
    rows = np.vstack([program.rows, program.gain / scale])
    low = np.append(program.low, answer.objective / scale - ON_FACE)
    high = np.append(program.high, inf)
    gain = np.zeros(len(program.gain))
    gain[: 5 * len(form.instance.flows)] = np.concatenate(gains(form.instance, BUNDLED))
    return solve(program._replace(gain=gain, rows=rows, low=low, high=high)).values


def _plan(levels: Levels, form: Form, answer: Optimum, values: Floats) -> FluidPlan:
    instance, duals = form.instance, answer.duals

    def block(place: slice) -> tuple[float, ...]:
        return tuple(0.0 if value < NOTHING else float(value) for value in values[place])

    prefill, mixed, solo = map(block, (form.x, form.mixed, form.solo))
    if levels.decode_fairness is None:  # else the split by class is not ours to change
        mixed, solo = pro_rata(instance, sum(prefill), mixed, solo)
    prefill_price, mixed_price, solo_price = (float(duals[row]) for row in form.capacity)
    shadows = Shadows(
        prefill_price,
        mixed_price,
        solo_price,
        tuple(float(duals[row]) for row in form.arrivals),
        tuple(-float(duals[row]) for row in form.prefilled),
        form.level_prices(answer),
    )

    def lost(place: slice) -> tuple[float, ...]:
        pairs = zip(values[place], instance.flows, strict=True)
        return tuple(0.0 if value < LOST * flow.rate else float(value) for value, flow in pairs)

    return FluidPlan(
        instance=instance,
        levels=levels,
        prefill=prefill,
        mixed=mixed,
        solo=solo,
        prefill_loss=lost(form.prefill_loss),
        decode_loss=lost(form.decode_loss),
        shadows=shadows,
    )


def pro_rata(
    instance: Instance, prefilling: float, mixed: tuple[float, ...], solo: tuple[float, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The same tokens per second and class, solo slots first, each class its share of both kinds of slot."""
    pace = instance.pace
    tokens = [m / pace.mixed_step + s * pace.solo_speed for m, s in zip(mixed, solo, strict=True)]
    total = sum(tokens)
    if total <= 0:
        return mixed, solo
    alone = min(pace.slots * (1 - prefilling), total / pace.solo_speed)
    alone = 0.0 if alone < NOTHING else alone  # 1 - X of a full fleet is rounding, not a slot
    beside = (total - alone * pace.solo_speed) * pace.mixed_step
    return tuple(beside * t / total for t in tokens), tuple(alone * t / total for t in tokens)


# -- the linear programs (40) and (42) as arrays

BLOCKS = ("x", "mixed", "solo", "prefill_loss", "decode_loss")


class Form:
    """One program, and where its columns and rows stand.

    Queues are written as the rates at which they lose requests (q = loss / θ), so that a class that never
    gives up still has a feasible plan under overload: its loss is what the gate has to turn away.
    """

    def __init__(self, instance: Instance, levels: Levels, decodes_wait: bool, free: str = "") -> None:
        self.instance = instance
        count, pace = len(instance.flows), instance.pace
        ones, none = np.ones(count), np.zeros(count)
        build = Builder()
        gives_up = np.array([flow.impatience for flow in instance.flows])
        lost = np.where((gives_up > 0) & decodes_wait, inf, 0.0)
        for name, gain in zip(BLOCKS, gains(instance, instance.charging), strict=True):
            build.columns(name, none if free else gain, lost if name == "decode_loss" else inf)
        if free:
            build.columns("free", np.array([1.0 if free == "served" else -1.0]))
        self.capacity = (
            build.row({"x": ones}, high=1.0),
            build.row({"x": ones * (1 - pace.slots), "mixed": ones}, high=0.0),
            build.row({"x": ones * pace.slots, "solo": ones}, high=float(pace.slots)),
        )
        self.arrivals, self.prefilled = self._balance(build)
        self.levels = add_rows(build, instance, levels, free)
        self.program = build.program()
        columns = [build.blocks[name] for name in BLOCKS]
        self.x, self.mixed, self.solo, self.prefill_loss, self.decode_loss = columns

    def _balance(self, build: Builder) -> tuple[list[int], list[int]]:
        """Rows φ and ψ: arrivals are prefilled or lost, prefilled requests are decoded or lost."""
        instance, arrivals, prefilled = self.instance, [], []
        step, speed = instance.pace.mixed_step, instance.pace.solo_speed
        unit = np.eye(len(instance.flows))
        for one, flow, seconds in zip(unit, instance.flows, instance.seconds(), strict=True):
            enters = {"x": one / seconds}
            leaves = {"mixed": -one / (flow.output * step), "solo": -one * speed / flow.output}
            arrivals.append(build.row(enters | {"prefill_loss": one}, flow.rate, flow.rate))
            prefilled.append(build.row(enters | leaves | {"decode_loss": -one}, 0.0, 0.0))
        return arrivals, prefilled

    def level_prices(self, answer: Optimum) -> dict[str, float]:
        """dR/d(level) of each cap; TPOT's row moves by B - X (or by the tokens) for each second of it."""
        found = {name: float(answer.duals[row]) for name, row in self.levels.items()}
        if "tpot" in found:
            row = self.program.rows[self.levels["tpot"]]
            pace, values = self.instance.pace, answer.values
            if row[self.x].any() or not row.any():
                found["tpot"] *= pace.slots - float(values[self.x].sum())
            else:
                mixed, solo = float(values[self.mixed].sum()), float(values[self.solo].sum())
                found["tpot"] *= mixed / pace.mixed_step + solo * pace.solo_speed
        return found


def gains(instance: Instance, charging: str) -> list[Floats]:
    pace, prices = instance.pace, instance.prices
    count = len(instance.flows)
    none = np.zeros(count)
    if charging == SEPARATE:
        seconds = np.array(instance.seconds())
        prompts = np.array([flow.prompt for flow in instance.flows])
        token = np.full(count, prices.output)
        paid = prices.prompt * prompts / seconds
        return [paid, token / pace.mixed_step, token * pace.solo_speed, none, none]
    per_token = np.array(instance.values()) / np.array([flow.output for flow in instance.flows])
    return [none, per_token / pace.mixed_step, per_token * pace.solo_speed, none, none]


def nearest(instance: Instance, levels: Levels) -> str:
    waits = levels.none
    for name in WORDS:
        asked = getattr(levels, name)
        if asked is None or asked == {} or (name == "prefilling" and asked == 1):
            continue
        dropped: dict[str, Any] = {} if name in ("served", "prefilling") else {name: None}
        other = replace(levels, **dropped)
        form = Form(instance, other, waits, free="" if name == "tpot" else name)
        try:
            answer = solve(form.program)
        except Infeasible:
            continue
        return _verdict(instance, levels, name, answer, other)
    return "these service levels cannot be kept together; drop one of them"


def _verdict(instance: Instance, levels: Levels, name: str, answer: Optimum, other: Levels) -> str:
    asked, said = getattr(levels, name), WORDS[name]
    if name == "tpot":
        form = Form(instance, other, other.none)
        # The X with the least TPOT that the other levels allow: the smallest, or the largest when κ < 1.
        gain = np.zeros(len(form.program.gain))
        gain[form.x] = -1.0 if instance.pace.ratio >= 1 else 1.0
        share = float(solve(form.program._replace(gain=gain)).values[form.x].sum())
        least = slot_tpot(instance.pace, share)
        return f"{said} of {asked:g} s cannot be kept beside the rest; the least possible is {least:.6g} s"
    value = abs(answer.objective)
    if name == "served":
        shares = ", ".join(f"{kind} {share * value:.4g}" for kind, share in asked.items())
        return f"{said} cannot be kept; lower all of them to {100 * value:.1f} %: {shares}"
    return f"{said} of {asked:g} cannot be kept beside the rest; the nearest possible is {value:.6g}"
