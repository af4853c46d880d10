"""The best refill threshold in a steady state, for any law of outputs: our default for EB."""

from __future__ import annotations

from math import floor, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import InputError
from headgate.estimators.survival import Survival

TERMS = 8  # cohorts counted in the quick bound that rules most phase lengths out


class StationaryShare(NamedTuple):
    """The best share, the iterations of its phase, its fixed cost per seat in iterations."""

    share: float
    phase: int
    cost: float


def stationary_share(survival: Survival, overhead: float) -> StationaryShare:
    """Minimises (T + g) M(T) over whole T >= 1, where g is `overhead`; the share is 1 / M(T). Section 3.4.

    When a phase of T iterations begins, those admitted m refills ago are alive with probability S(mT). All
    seats are full then, so each refill is 1 / M(T) of them, M(T) = S(0) + S(T) + S(2T) + ...; a request costs
    (alpha_d T + alpha_p) M(T) / N plus what no threshold changes. Ages carry over from phase to phase; the
    paper's equation (5) begins each at zero, which in a steady state asks for twice the refill or more and
    costs up to 12 % (erratum E1). For geometric outputs this is (3) in whole iterations.

    Phase lengths that cannot win are ruled out first, by M(T) >= max(mean / T, its first terms).
    """
    if not overhead >= 0:
        raise InputError(f"overhead={overhead} decode iterations; need >= 0, check the costs")
    mean = survival.mean
    guess = max(1, round(sqrt(2 * overhead * mean)))
    best = (guess + overhead) * survival.renewals(guess)
    phases = np.arange(1, max(1, floor(best - overhead)) + 1)
    first_terms = sum(_at(survival, m * phases) for m in range(TERMS))
    bound = (phases + overhead) * np.maximum(mean / phases, first_terms)
    chosen = guess
    for phase in phases[bound <= best * (1 + 1e-12)].tolist():
        cost = (phase + overhead) * survival.renewals(phase)
        if cost < best or (cost == best and phase < chosen):
            best, chosen = cost, phase
    return StationaryShare(1 / survival.renewals(chosen), chosen, best)


def phase_share(survival: Survival, phase: int) -> float:
    """The share of seats that end in a phase of that many iterations, in a steady state: 1 / M(T)."""
    if phase < 1:
        raise InputError(f"phase={phase}; need >= 1, a phase is at least one iteration")
    return 1 / survival.renewals(phase)


def _at(survival: Survival, ages: NDArray[np.int64]) -> NDArray[np.float64]:
    """S(t) for many t, the tail beyond the curve too."""
    last = len(survival.curve) - 1
    beyond = np.maximum(ages - last, 0)
    return survival.curve[np.minimum(ages, last)] * (1 - survival.ending) ** beyond
