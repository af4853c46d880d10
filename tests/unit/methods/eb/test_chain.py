"""The exact chain against equation (3): known answers."""

from __future__ import annotations

from math import log1p

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.methods.eb.thresholds import base_share
from headgate_papers.eb.exact_phases import exact_phases, exact_refill


@pytest.mark.parametrize(
    ("slots", "ending", "refill", "iterations", "refilled"),
    [
        (128, 1 / 64, 1, 1.153689, 2.307378),
        (128, 1 / 64, 8, 4.581607, 8.939936),
        (128, 1 / 64, 24, 13.627753, 24.814633),
        (128, 1 / 64, 39, 23.466688, 39.697137),
        (128, 1 / 64, 64, 44.266863, 64.501312),
        (128, 1 / 64, 128, 345.497710, 128),
        (256, 1 / 256, 14, 14.840399, 14.472965),
        (256, 1 / 256, 44, 48.581560, 44.414333),
    ],
)
def test_exact_phases(slots: int, ending: float, refill: int, iterations: float, refilled: float) -> None:
    phases = exact_phases(slots, ending)
    assert phases.iterations[refill - 1] == pytest.approx(iterations, abs=6e-7)
    assert phases.refilled[refill - 1] == pytest.approx(refilled, abs=6e-7)


def test_exact_phases_by_monte_carlo() -> None:
    slots, ending, refill, runs = 128, 1 / 64, 39, 2000
    generator = np.random.default_rng(6)
    ages = np.sort(generator.geometric(ending, (runs, slots)), axis=1)
    lengths = ages[:, refill - 1]  # the phase ends with the iteration in which the k-th leaves
    idle = (ages <= lengths[:, None]).sum(axis=1)
    phases = exact_phases(slots, ending)
    for seen, exact in ((lengths, phases.iterations[refill - 1]), (idle, phases.refilled[refill - 1])):
        assert abs(seen.mean() - exact) < 4 * seen.std() / np.sqrt(runs)


@pytest.mark.parametrize(
    ("slots", "floor", "best", "regret", "fluid"),
    [
        (64, 11, 11, 0, 1.0095),
        (128, 22, 22, 0, 1.0057),
        (256, 44, 44, 0, 1.0037),
        (512, 89, 89, 0, 1.0027),
        (1024, 178, 177, 0.0004, 1.0023),
        (2048, 356, 354, 0.0004, 1.0020),
    ],
)
def test_equation_3_against_the_chain(slots: int, floor: int, best: int, regret: float, fluid: float) -> None:
    overhead, ending = 5.0, 1 / 256
    share = base_share(overhead * ending)
    cost = exact_phases(slots, ending).cost(overhead)
    assert int(share * slots) == floor
    assert int(np.argmin(cost)) + 1 == best
    assert 100 * (cost[floor - 1] / cost[best - 1] - 1) == pytest.approx(regret, abs=6e-5)
    smooth = (-log1p(-share) / ending + overhead) / (share * slots)
    assert smooth / cost[best - 1] == pytest.approx(fluid, abs=1e-4)


@pytest.mark.parametrize(
    ("slots", "floor", "rounded", "apart"),
    [
        (64, 0.556, 0.047, 0.010),
        (128, 0.147, 0.010, 0.009),
        (256, 0.020, 0.019, 0.006),
        (512, 0.021, 0.038, 0.007),
    ],
)
def test_rounding_beats_the_floor(slots: int, floor: float, rounded: float, apart: float) -> None:
    """6.6: worst regret in per cent, over outputs and overheads (those of the 8B cards with all digits)."""
    worst = [0.0, 0.0, 0.0]
    for output in (64, 128, 256, 512, 1024):
        phases = exact_phases(slots, 1 / output)
        for overhead in (0.143321, 0.452117, 1, 2, 5, 10, 15, 30):
            share = base_share(overhead / output)
            cost = phases.cost(overhead)
            best = int(np.argmin(cost)) + 1
            tried = [max(1, int(share * slots)), max(1, round(share * slots))]
            seen = [100 * (cost[k - 1] / cost[best - 1] - 1) for k in tried] + [abs(share - best / slots)]
            worst = [max(pair) for pair in zip(worst, seen, strict=True)]
    assert worst == [
        pytest.approx(floor, abs=6e-4),
        pytest.approx(rounded, abs=6e-4),
        pytest.approx(apart, abs=1e-3),
    ]


def test_the_optimum_is_flat() -> None:
    """6.6: thresholds whose total cost is within 0.1 %, N = 512, mu_O = 256, prompts of 512, H200."""
    phases = exact_phases(512, 1 / 256)
    fixed, per_token = 8.921182e-3, 4.586468e-5 * 256 + 2.485255e-5 * 512
    for overhead, first, best, last in ((5, 70, 89, 111), (0.452, 18, 28, 44), (0.143, 9, 16, 29)):
        cost = fixed * phases.cost(overhead) + per_token
        near = np.flatnonzero(cost <= cost.min() * 1.001) + 1
        assert (near[0], exact_refill(512, 1 / 256, overhead), near[-1]) == (first, best, last)


def test_cost_of_refilling_at_every_slot() -> None:
    """6.6: the total cost of k = 1 at N = 512, mu_O = 256, in per cent over the best."""
    phases = exact_phases(512, 1 / 256)
    fixed, per_token = 8.921182e-3, 4.586468e-5 * 256 + 2.485255e-5 * 512
    for overhead, more in ((0.143, 1.4), (0.452, 5.1), (1, 12), (5, 62)):
        cost = fixed * phases.cost(overhead) + per_token
        assert 100 * (cost[0] / cost.min() - 1) == pytest.approx(more, abs=0.5 if more > 10 else 0.06)


@pytest.mark.parametrize(
    "call",
    [lambda: exact_phases(0, 0.1), lambda: exact_phases(5, 1.0), lambda: exact_refill(5, 0.1, -1)],
)
def test_bad_input(call) -> None:
    with pytest.raises(InputError, match="need "):
        call()
