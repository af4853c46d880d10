"""A fluid plan as a value: shares of engines and slots by class, what they bring, and shadow prices."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, sqrt

from headgate.core.errors import InputError
from headgate.methods.fluid.flows import BUNDLED, Instance
from headgate.methods.fluid.levels import Levels, slot_tpot

NOTHING = 1e-9  # shares and rates below this are taken for 0
LOST = 1e-6  # of what comes: a smaller loss is the solver's rounding, and its class counts as served in full
NO_LEVELS = Levels()


@dataclass(frozen=True, slots=True)
class Shadows:
    """What a little more of each thing is worth per second and engine: the duals, section 2 and EC.1."""

    prefill: float  # π_p, of prefill capacity
    mixed: float  # π_m, of a decode slot beside a prompt
    solo: float  # π_s, of a decode slot alone
    arrival: tuple[float, ...]  # φ, of one more arrival per second; 0 for a class that is not served in full
    prefilled: tuple[float, ...]  # ψ, of a request whose prompt is done
    levels: dict[str, float]  # dR/d(level), by name; absent: not asked for


@dataclass(frozen=True, slots=True)
class FluidPlan:
    """Shares of one engine's time and slots by class (in the instance's order), and what they bring.

    Where many splits of decodes over slots are equally good, `mixed` and `solo` are the canonical one: solo
    slots first, each class its share. Separate plans are those with the largest bundled value.
    """

    instance: Instance
    levels: Levels
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
        """q_p*, waiting for prefill per engine; inf where they are turned away because none gives up."""
        pairs = zip(self.prefill_loss, self.instance.flows, strict=True)
        return tuple(_queue(loss, flow.impatience) for loss, flow in pairs)

    @property
    def decode_waiting(self) -> tuple[float, ...]:
        pairs = zip(self.decode_loss, self.instance.flows, strict=True)
        return tuple(_queue(loss, flow.impatience) for loss, flow in pairs)

    @property
    def throttled(self) -> tuple[bool, ...]:
        pairs = zip(self.prefill_loss, self.instance.flows, strict=True)
        return tuple(loss > LOST * flow.rate for loss, flow in pairs)

    @property
    def bundled(self) -> float:
        """Revenue when only finished requests pay (22)."""
        return sum(w * r for w, r in zip(self.instance.values(), self.served, strict=True))

    @property
    def separate(self) -> float:
        """Revenue when each finished stage pays (23)."""
        prices, revenue = self.instance.prices, 0.0
        for flow, prompts, served in zip(self.instance.flows, self.prompts, self.served, strict=True):
            revenue += prices.prompt * flow.prompt * prompts + prices.output * flow.output * served
        return revenue

    @property
    def revenue(self) -> float:
        """R*, by the instance's way of charging."""
        return self.bundled if self.instance.charging == BUNDLED else self.separate

    @property
    def tpot(self) -> float:
        """Mean step time over slots, (47)."""
        return slot_tpot(self.instance.pace, self.prefilling)

    @property
    def token_tpot(self) -> float:
        """Mean step time over tokens, which is what users see; (47)'s where no request decodes."""
        pace, mixed, solo = self.instance.pace, sum(self.mixed), sum(self.solo)
        tokens = mixed / pace.mixed_step + solo * pace.solo_speed
        return (mixed + solo) / tokens if tokens > 0 else self.tpot


def _queue(loss: float, impatience: float) -> float:
    if loss == 0:
        return 0.0
    return loss / impatience if impatience > 0 else inf


@dataclass(frozen=True, slots=True)
class Staffing:
    """A static plan for so many engines: the first `mixed` take prompts, the others only decode."""

    engines: int
    mixed: int

    @property
    def solo(self) -> int:
        return self.engines - self.mixed

    @property
    def roles(self) -> tuple[str, ...]:
        return ("mixed",) * self.mixed + ("solo",) * self.solo


def staff(plan: FluidPlan, engines: int, slack: bool = False) -> Staffing:
    """M = ceil(nX*), section 4.1; with slack the square root of nX* more.

    A spare mixed engine loses one slot in B, because it decodes at solo speed while it has no prompt; a
    missing one makes prompts queue that should never wait. Ours; use it with a gate that can withhold.
    """
    needed = engines * plan.prefilling
    if plan.prefilling <= 0:
        return Staffing(engines, 0)
    mixed = max(1, ceil(needed - NOTHING))
    if slack:
        mixed += ceil(sqrt(needed))
    return Staffing(engines, min(engines, mixed))


def fixed_staff(engines: int, mixed: int, solo: int) -> Staffing:
    if mixed < 0 or solo < 0:
        raise InputError(f"{mixed} mixed and {solo} solo engines; give at least 0 of each")
    if mixed + solo > engines:
        raise InputError(
            f"{mixed} mixed and {solo} solo engines are more roles than the {engines} engines; give fewer "
            "roles or more engines"
        )
    if mixed + solo < engines:
        raise InputError(
            f"{mixed} mixed and {solo} solo engines leave {engines - mixed - solo} of {engines} without a "
            "role; give one of the two numbers only, or two that add up"
        )
    return Staffing(engines, mixed)
