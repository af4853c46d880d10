"""Gate-and-route: fluid plans from the steady-state linear programs of arXiv 2602.02987."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from headgate.core.errors import InputError
from headgate.methods.fluid.flows import BUNDLED, SEPARATE, Instance
from headgate.methods.fluid.formulation import Form, bundled_gain, nearest
from headgate.methods.fluid.levels import FIRST_TANGENTS, Levels, slot_tpot
from headgate.methods.fluid.plan import LOST, NO_LEVELS, NOTHING, FluidPlan, Shadows
from headgate.methods.fluid.program import Answer, Floats
from headgate.methods.fluid.solver import Infeasible, Solver

__all__ = ["NOTHING", "NO_LEVELS", "FluidPlan", "FluidPlanner", "Shadows", "plan_fluid", "pro_rata"]

SAME = 1e-6  # relative: two optima that must agree
ON_FACE = 1e-9  # relative slack by which an alternative optimum may miss the best
TANGENT = 1e-12  # seconds by which a tangent may lie below T(X)


class FluidPlanner:
    """Plans again and again; each program starts from the solution of the last, so it takes a few pivots."""

    def __init__(self, levels: Levels = NO_LEVELS) -> None:
        self.levels = levels
        self._main, self._face = Solver(), Solver()

    def plan(self, instance: Instance) -> FluidPlan:
        """The best plan, or an error that says which level cannot be kept and what could."""
        levels = self.levels.checked(instance.checked())
        try:
            if levels.tpot_penalty and instance.pace.ratio < 1:
                return self._search(instance, levels)
            return self._solve(instance, levels)
        except Infeasible:
            raise InputError(nearest(instance, levels)) from None

    def _solve(self, instance: Instance, levels: Levels, prefilling: float | None = None) -> FluidPlan:
        waits = levels.decode_queue
        tangents = [*FIRST_TANGENTS] if levels.tpot_penalty else []
        while True:
            form = Form(instance, levels, waits, tangents, prefilling)
            answer = self._main.solve(form.program)
            share = float(answer.values[form.x].sum())
            if not tangents or slot_tpot(instance.pace, share) - float(answer.values[form.t][0]) < TANGENT:
                break
            tangents.append(share)
        no_queue = instance.charging == BUNDLED and instance.pace.keeps_up
        if waits and no_queue and answer.values[form.decode_loss].sum() > NOTHING:
            free = answer.objective
            form = Form(instance, levels, False, tangents, prefilling)
            answer = self._main.solve(form.program)
            assert answer.objective >= free - SAME * max(1.0, abs(free)), "Proposition 1"
        values = self._best_bundled(form, answer) if instance.charging == SEPARATE else answer.values
        return _plan(levels, form, answer, values)

    def _best_bundled(self, form: Form, answer: Answer) -> Floats:
        """Of all separate-optimal plans the one with the largest bundled value."""
        program = form.program
        scale = max(abs(answer.objective), NOTHING)
        rows = np.vstack([program.rows, program.gain / scale])
        low = np.append(program.low, answer.objective / scale - ON_FACE)
        high = np.append(program.high, inf)
        face = program._replace(gain=bundled_gain(form), rows=rows, low=low, high=high)
        return self._face.solve(face).values

    def _search(self, instance: Instance, levels: Levels) -> FluidPlan:
        """A TPOT penalty when mixed steps are the shorter ones: -T(X) is convex, so look along X."""
        plain = replace(levels, tpot_penalty=0.0, decodes_may_wait=levels.decode_queue)

        def at(share: float) -> FluidPlan | None:
            try:
                found = self._solve(instance, plain, share)
            except Infeasible:
                return None
            cost = levels.tpot_penalty * slot_tpot(instance.pace, found.prefilling)
            return replace(found, levels=levels, objective=found.objective - cost)

        shares, step, best = [number / 64 for number in range(65)], 1 / 64, None
        while step > NOTHING:
            found = [plan for plan in (best, *map(at, shares)) if plan]
            if not found:
                raise Infeasible
            best = max(found, key=lambda plan: plan.objective)
            step /= 8
            shares = [min(1.0, max(0.0, best.prefilling + step * number)) for number in range(-8, 9)]
        assert best is not None
        return best


def plan_fluid(instance: Instance, levels: Levels = NO_LEVELS) -> FluidPlan:
    """One plan, from scratch."""
    return FluidPlanner(levels).plan(instance)


def _plan(levels: Levels, form: Form, answer: Answer, values: Floats) -> FluidPlan:
    instance, duals = form.instance, answer.duals

    def block(place: slice) -> tuple[float, ...]:
        return tuple(0.0 if value < NOTHING else float(value) for value in values[place])

    prefill, mixed, solo = map(block, (form.x, form.mixed, form.solo))
    if not levels.by_class:
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
        objective=answer.objective,
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
    """The same tokens per second and class, solo seats first, each class its share of both kinds of seat."""
    pace = instance.pace
    tokens = [m / pace.mixed_step + s * pace.solo_speed for m, s in zip(mixed, solo, strict=True)]
    total = sum(tokens)
    if total <= 0:
        return mixed, solo
    alone = min(pace.seats * (1 - prefilling), total / pace.solo_speed)
    alone = 0.0 if alone < NOTHING else alone  # 1 - X of a full fleet is rounding, not a seat
    beside = (total - alone * pace.solo_speed) * pace.mixed_step
    return tuple(beside * t / total for t in tokens), tuple(alone * t / total for t in tokens)
