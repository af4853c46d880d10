"""Laws of operators become a card's law of work, which simulations can sum over many steps at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

from headgate.cost.derive.grid import table
from headgate.cost.fit.family import LEAST_TOKENS, PER_EXPERT, Law, gpu_columns
from headgate.cost.fit.steps import Floats
from headgate.cost.laws.work import WorkTerms
from headgate.cost.model import Shape

EXTRAS = ("per_context", "per_attention", "prompt_constant", "mixed_constant", "mixed_per_context")
TILES = (1, 16, 64, 128)


def distil(
    steps: Sequence[Shape], seconds: Sequence[float], experts: tuple[int, int] = (0, 0)
) -> tuple[WorkTerms, Floats]:
    """The law of the family nearest to these times, and its relative errors.

    The family's terms are given instead of chosen: times from laws have no noise, so there is nothing to
    overfit. Sizes of tile and least batch are the best of those tried.
    """
    timed = table(steps, seconds)
    real = timed.seconds
    extras = (*EXTRAS, PER_EXPERT) if experts[0] else EXTRAS
    best: tuple[float, Law, Floats, Floats] | None = None
    for tile in TILES:
        for least in (0, *LEAST_TOKENS):
            law = Law(extras, least, tile, experts=experts)
            relative = gpu_columns(timed, law) / real[:, None]
            scale = np.linalg.norm(relative, axis=0)
            scale[scale == 0] = 1.0
            found, left = nnls(relative / scale, np.ones(len(real)))
            if best is None or left < best[0]:
                best = left, law, found / scale, relative @ (found / scale) - 1
    assert best is not None
    _, law, found, errors = best
    terms = law.terms(found)
    return (terms if terms.per_expert else replace(terms, experts=0, experts_per_token=0)), errors
