"""The end of a step as the host sees it: late, while it launches a next step with prompts."""

from __future__ import annotations

import numpy as np

from benchmarks.fidelity.measures import Tokens
from headgate.results.tables import Run

NEAR = 1e-7  # seconds by which a token's time may differ from the end of its step, by rounding


def seen_late(run: Run, tokens: Tokens, launch: float) -> Tokens:
    """Tokens of the step before one with prompts, seen when that one has been launched.

    The host launches step n + 1 as soon as it has seen the end of step n - 1, and looks for the end of step n
    afterwards. A launch takes `launch` seconds where there are prompts and next to nothing elsewhere (a
    CUDA graph); it never takes longer than until its own step ends.
    """
    count = run.steps["count"]
    place = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count) + 1
    each = np.repeat(run.steps["seconds"] / count, count)
    ends = np.repeat(run.steps["start"], count) + place * each
    prompts = np.repeat(run.steps["prefill"] > 0, count)
    seen = ends.copy()
    for step in np.flatnonzero(prompts[1:]).tolist():
        looked = seen[step - 1] if step else 0.0
        seen[step] = max(ends[step], min(looked + launch, ends[step + 1]))
    of = np.clip(np.searchsorted(ends, tokens.time - NEAR), 0, len(ends) - 1)
    return Tokens(seen[of], tokens.of, tokens.arrival)
