"""From a fluid plan to a fleet: how many engines take prompts, and what the gate aims at."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from headgate.core.errors import InputError
from headgate.methods.fluid.plan import NOTHING, FluidPlan


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
        """The role of each engine."""
        return ("mixed",) * self.mixed + ("solo",) * self.solo


def staff(plan: FluidPlan, engines: int, slack: bool = False) -> Staffing:
    """M = ceil(nX*), section 4.1; with slack the square root of nX* more.

    A spare mixed engine loses one seat in B, because it decodes at solo speed while it has no prompt; a
    missing one makes prompts queue that should never wait. Ours; use it with a gate that can withhold.
    """
    if engines < 1:
        raise InputError(f"{engines} engines; give at least 1")
    needed = engines * plan.prefilling
    if plan.prefilling <= 0:
        return Staffing(engines, 0)
    mixed = max(1, ceil(needed - NOTHING))
    if slack:
        mixed += ceil(sqrt(needed))
    return Staffing(engines, min(engines, mixed))


def fixed_staff(engines: int, mixed: int, solo: int) -> Staffing:
    """The roles a user asks for; they must add up to the engines."""
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
