"""Gate-and-route: the steady-state linear programs, and plans as values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from headgate.core.errors import InputError
from headgate.planners.flows import BUNDLED, SEPARATE, Instance
from headgate.planners.formulation import Form, bundled_gain, nearest
from headgate.planners.levels import FIRST_TANGENTS, Levels, slot_tpot
from headgate.planners.program import Answer, Floats, Infeasible, Solver

NOTHING = 1e-9  # shares and rates below this are taken for 0
SAME = 1e-6  # relative: two optima that must agree
ON_FACE = 1e-9  # relative slack by which an alternative optimum may miss the best
TANGENT = 1e-12  # seconds by which a tangent may lie below T(X)
NO_LEVELS = Levels()


@dataclass(frozen=True, slots=True)
class Shadows:
    """What a little more of each thing is worth per second and engine: the duals, section 2 and EC.1."""

    prefill: float  # π_p, of prefill capacity
    mixed: float  # π_m, of a decode seat beside a prompt
    solo: float  # π_s, of a decode seat alone
    arrival: tuple[float, ...]  # φ, of one more arrival per second; 0 for a class that is not served in full
    prefilled: tuple[float, ...]  # ψ, of a request whose prompt is done
    levels: dict[str, float]  # dR/d(level), by name; absent: not asked for


@dataclass(frozen=True, slots=True)
class FluidPlan:
    """Shares of one engine's time and seats by class (in the instance's order), and what they bring.

    Where many splits of decodes over seats are equally good, `mixed` and `solo` are the canonical one: solo
    seats first, each class its share. Separate plans are those with the largest bundled value.
    """

    instance: Instance
    levels: Levels
    objective: float  # revenue less penalties
    prefill: tuple[float, ...]  # x*
    mixed: tuple[float, ...]  # y_m*
    solo: tuple[float, ...]  # y_s*
    prefill_loss: tuple[float, ...]  # arrivals per second that leave before prefill
    decode_loss: tuple[float, ...]  # of those prefilled, that leave before decode
    shadows: Shadows

    @property
    def prefilling(self) -> float:
        """X*, the share of engines that prefill."""
        return sum(self.prefill)

    @property
    def served(self) -> tuple[float, ...]:
        """r, requests of each class served to the end, per second and engine."""
        pace = self.instance.pace
        pairs = zip(self.mixed, self.solo, self.instance.flows, strict=True)
        return tuple((m / pace.mixed_step + s * pace.solo_speed) / flow.output for m, s, flow in pairs)

    @property
    def prompts(self) -> tuple[float, ...]:
        """Prompts of each class prefilled per second and engine, μ_p x*."""
        return tuple(x / s for x, s in zip(self.prefill, self.instance.seconds(), strict=True))

    @property
    def waiting(self) -> tuple[float, ...]:
        """q_p*, waiting for prefill per engine; inf where they are turned away because nobody gives up."""
        pairs = zip(self.prefill_loss, self.instance.flows, strict=True)
        return tuple(_queue(loss, flow.impatience) for loss, flow in pairs)

    @property
    def decode_waiting(self) -> tuple[float, ...]:
        """q_d*, waiting for a decode seat per engine."""
        pairs = zip(self.decode_loss, self.instance.flows, strict=True)
        return tuple(_queue(loss, flow.gives_up) for loss, flow in pairs)

    @property
    def throttled(self) -> tuple[bool, ...]:
        """Classes of which the plan serves fewer than come."""
        return tuple(loss > NOTHING for loss in self.prefill_loss)

    @property
    def bundled(self) -> float:
        """Revenue when only finished requests pay (22)."""
        return sum(w * r for w, r in zip(self.instance.values(), self.served, strict=True))

    @property
    def separate(self) -> float:
        """Revenue when each finished stage pays (23)."""
        prices, found = self.instance.prices, 0.0
        for flow, prompts, served in zip(self.instance.flows, self.prompts, self.served, strict=True):
            found += prices.prompt * flow.prompt * prompts + prices.output * flow.output * served
        return found

    @property
    def revenue(self) -> float:
        """R*, by the instance's way of charging."""
        return self.bundled if self.instance.charging == BUNDLED else self.separate

    @property
    def tpot(self) -> float:
        """Mean step time over seats, (47)."""
        return slot_tpot(self.instance.pace, self.prefilling)

    @property
    def token_tpot(self) -> float:
        """Mean step time over tokens, which is what users see; (47)'s where nobody decodes."""
        pace, mixed, solo = self.instance.pace, sum(self.mixed), sum(self.solo)
        tokens = mixed / pace.mixed_step + solo * pace.solo_speed
        return (mixed + solo) / tokens if tokens > 0 else self.tpot

    @property
    def next_engine(self) -> float:
        """Revenue per second that one more engine adds when the arrivals stay the same."""
        worth = zip(self.instance.flows, self.shadows.arrival, strict=True)
        return self.objective - sum(flow.rate * price for flow, price in worth)


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
    losses = block(form.prefill_loss), block(form.decode_loss)
    return FluidPlan(instance, levels, answer.objective, prefill, mixed, solo, *losses, shadows)


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
    beside = (total - alone * pace.solo_speed) * pace.mixed_step
    return tuple(beside * t / total for t in tokens), tuple(alone * t / total for t in tokens)


def _queue(loss: float, impatience: float) -> float:
    """How many wait when that many give up per second."""
    if loss == 0:
        return 0.0
    return loss / impatience if impatience > 0 else inf
