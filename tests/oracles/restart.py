"""The restart model solved exactly: all requests of a phase begin at age zero, their hazard is a line."""

from __future__ import annotations

from math import expm1, log1p, pi, sqrt
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate_papers.eb.theory import LinearHazard

FLAT = 1e-20  # slopes below this many p0 squared change no digit, and their roots overflow


class RestartPhase(NamedTuple):
    """A decode phase of the restart model: its iterations T, and tokens decoded per slot J."""

    iterations: float
    decoded: float


def restart_phase(share: float, hazard: LinearHazard) -> RestartPhase:
    """How long until that share of a fresh batch has ended, and what was decoded: T and J.

    Ours, not the paper's, which has the first-order (5) only. Scaled error functions for rising hazards and
    Dawson's integral for falling ones; the textbook forms overflow.
    """
    from scipy.special import dawsn, erfcx  # type: ignore[import-untyped]

    theta, p0, eta = share, hazard.base, hazard.slope
    if not 0 <= theta < 1:
        raise InputError(f"share={theta}; need 0 <= share < 1, a whole batch never ends in the fluid model")
    if p0 < 0 or (p0 == 0 and eta <= 0):
        raise InputError(f"p0={p0}, eta={eta}; need p0 > 0, or p0 = 0 with eta > 0; guard the fit")
    zeta = -log1p(-theta)
    square = p0**2 + 2 * eta * zeta
    if square < 0:
        raise InputError(
            f"share={theta} is never reached with p0={p0}, eta={eta}; need share <= {highest_share(hazard)}"
        )
    end = sqrt(square)
    iterations = 2 * zeta / (p0 + end) if zeta else 0.0
    if abs(eta) < FLAT * p0**2:
        return RestartPhase(iterations, theta / p0)
    scale = sqrt(2 * abs(eta))
    if eta > 0:
        decoded = sqrt(pi / (2 * eta)) * (erfcx(p0 / scale) - (1 - theta) * erfcx(end / scale))
    else:
        decoded = sqrt(2 / -eta) * (dawsn(p0 / scale) - (1 - theta) * dawsn(end / scale))
    return RestartPhase(iterations, float(decoded))


def highest_share(hazard: LinearHazard) -> float:
    """The share a fresh batch ever reaches: below one when the hazard falls to zero."""
    if hazard.slope >= 0:
        return 1.0
    return -expm1(hazard.base**2 / (2 * hazard.slope))


def restart_share(overhead: float, hazard: LinearHazard, load: float) -> float:
    """The best share of the restart model, exactly; `overhead` is g, `load` rho. To judge equation (5).

    The root of g + T - theta / ((1 - theta) H) + rho (J - theta / H), which is the derivative of the cycle's
    cost per refilled slot.
    """
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    if not (overhead > 0 and load >= 0):
        raise InputError(f"overhead={overhead}, load={load}; need > 0 and >= 0, check the costs")
    top = highest_share(hazard)

    def derivative(theta: float) -> float:
        phase = restart_phase(theta, hazard)
        end = hazard.base + hazard.slope * phase.iterations
        sweep = phase.iterations - theta / ((1 - theta) * end)
        return overhead + sweep + load * (phase.decoded - theta / end)

    return float(brentq(derivative, 1e-12 * top, top * (1 - 1e-13), xtol=1e-15, rtol=1e-14))
