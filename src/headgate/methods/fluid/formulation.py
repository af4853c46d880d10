"""The linear programs (40) and (42) as arrays: variables, capacity rows, flow balance, service levels."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from headgate.methods.fluid.flows import BUNDLED, SEPARATE, Instance
from headgate.methods.fluid.levels import WORDS, Levels, add_rows, add_tangents, slot_tpot
from headgate.methods.fluid.program import Answer, Builder, Floats
from headgate.methods.fluid.solver import Infeasible, Solver

BLOCKS = ("x", "mixed", "solo", "prefill_loss", "decode_loss")


class Form:
    """One program, and where its columns and rows stand.

    Queues are written as the rates at which they lose people (q = loss / θ), so that a class that never
    gives up still has a feasible plan under overload: its loss is what the gate has to turn away.
    """

    def __init__(
        self,
        instance: Instance,
        levels: Levels,
        decodes_wait: bool,
        tangents: list[float],
        prefilling: float | None = None,
        free: str = "",
    ) -> None:
        self.instance = instance
        count, pace = len(instance.flows), instance.pace
        ones, none = np.ones(count), np.zeros(count)
        build = Builder()
        gives_up = np.array([flow.gives_up for flow in instance.flows])
        lost = np.where((gives_up > 0) & decodes_wait, inf, 0.0)
        for name, gain in zip(BLOCKS, gains(instance, instance.charging), strict=True):
            build.columns(name, none if free else gain, lost if name == "decode_loss" else inf)
        if free:
            build.columns("free", np.array([1.0 if free == "served" else -1.0]))
        if tangents:
            add_tangents(build, pace, levels.tpot_penalty, count, tangents)
        self.capacity = (
            build.row({"x": ones}, high=1.0),
            build.row({"x": ones * (1 - pace.seats), "mixed": ones}, high=0.0),
            build.row({"x": ones * pace.seats, "solo": ones}, high=float(pace.seats)),
        )
        self.arrivals, self.prefilled = self._balance(build)
        if prefilling is not None:
            build.row({"x": ones}, prefilling, prefilling)
        self.levels = add_rows(build, instance, levels, free)
        self.program = build.program()
        self.x, self.mixed, self.solo, self.prefill_loss, self.decode_loss = map(build.block, BLOCKS)
        self.t = build.block("t") if tangents else slice(0, 0)

    def _balance(self, build: Builder) -> tuple[list[int], list[int]]:
        """Rows φ and ψ: arrivals are prefilled or lost, prefilled requests are decoded or lost."""
        instance, arrivals, prefilled = self.instance, [], []
        step, speed = instance.pace.mixed_step, instance.pace.solo_speed
        for number, (flow, seconds) in enumerate(zip(instance.flows, instance.seconds(), strict=True)):
            one = np.zeros(len(instance.flows))
            one[number] = 1.0
            enters = {"x": one / seconds}
            leaves = {"mixed": -one / (flow.output * step), "solo": -one * speed / flow.output}
            arrivals.append(build.row(enters | {"prefill_loss": one}, flow.rate, flow.rate))
            prefilled.append(build.row(enters | leaves | {"decode_loss": -one}, 0.0, 0.0))
        return arrivals, prefilled

    def level_prices(self, answer: Answer) -> dict[str, float]:
        """dR/d(level) of each cap; TPOT's row moves by B - X (or by the tokens) for each second of it."""
        found = {name: float(answer.duals[row]) for name, row in self.levels.items()}
        if "tpot" in found:
            row = self.program.rows[self.levels["tpot"]]
            pace, values = self.instance.pace, answer.values
            if row[self.x].any() or not row.any():
                found["tpot"] *= pace.seats - float(values[self.x].sum())
            else:
                mixed, solo = float(values[self.mixed].sum()), float(values[self.solo].sum())
                found["tpot"] *= mixed / pace.mixed_step + solo * pace.solo_speed
        return found


def gains(instance: Instance, charging: str) -> list[Floats]:
    """What a unit of each variable brings per second, by block."""
    pace, prices = instance.pace, instance.prices
    count = len(instance.flows)
    none = np.zeros(count)
    if charging == SEPARATE:
        seconds = np.array(instance.seconds())
        prompts = np.array([flow.prompt for flow in instance.flows])
        token = np.full(count, prices.output)
        return [
            prices.prompt * prompts / seconds,
            token / pace.mixed_step,
            token * pace.solo_speed,
            none,
            none,
        ]
    per_token = np.array(instance.values()) / np.array([flow.output for flow in instance.flows])
    return [none, per_token / pace.mixed_step, per_token * pace.solo_speed, none, none]


def bundled_gain(form: Form) -> Floats:
    """The bundled objective for a program of another one."""
    gain = np.zeros(len(form.program.gain))
    gain[: 5 * len(form.instance.flows)] = np.concatenate(gains(form.instance, BUNDLED))
    return gain


def nearest(instance: Instance, levels: Levels) -> str:
    """Which service level cannot be kept beside the others, and the nearest value that could."""
    waits = levels.decode_queue
    bare = replace(levels, tpot_penalty=0.0, prefill_penalty=0.0, decode_penalty=0.0)
    for name in WORDS:
        asked = getattr(levels, name)
        if asked is None or asked == {} or (name == "prefilling" and asked == 1):
            continue
        dropped: dict[str, Any] = {} if name in ("served", "prefilling") else {name: None}
        other = replace(bare, **dropped)
        form = Form(instance, other, waits, [], free="" if name == "tpot" else name)
        try:
            answer = Solver().solve(form.program)
        except Infeasible:
            continue
        return _verdict(instance, levels, name, answer, other)
    return "these service levels cannot be kept together; drop one of them"


def _verdict(instance: Instance, levels: Levels, name: str, answer: Answer, other: Levels) -> str:
    """One line about the level that has to give."""
    asked, said = getattr(levels, name), WORDS[name]
    if name == "tpot":
        least = slot_tpot(instance.pace, _fewest_prefilling(instance, other))
        return f"{said} of {asked:g} s cannot be kept beside the rest; the least possible is {least:.6g} s"
    value = abs(answer.objective)
    if name == "served":
        shares = ", ".join(f"{kind} {share * value:.4g}" for kind, share in asked.items())
        return f"{said} cannot be kept; lower all of them to {100 * value:.1f} %: {shares}"
    return f"{said} of {asked:g} cannot be kept beside the rest; the nearest possible is {value:.6g}"


def _fewest_prefilling(instance: Instance, levels: Levels) -> float:
    """The X with the least TPOT that the other levels allow: the smallest, or the largest when κ < 1."""
    form = Form(instance, levels, levels.decode_queue, [])
    gain = np.zeros(len(form.program.gain))
    gain[form.x] = -1.0 if instance.pace.ratio >= 1 else 1.0
    return float(Solver().solve(form.program._replace(gain=gain)).values[form.x].sum())
