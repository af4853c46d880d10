"""The price of a token in a mixed batch as a polynomial in the share of decodes, and how it bends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headgate.core.errors import InputError

Polynomial = tuple[float, float, float]  # c0 + c1 r + c2 r^2


def fit_by_share(shares: Sequence[float], per_token: Sequence[float]) -> Polynomial:
    """The least-squares quadratic through prices per token at several shares of decodes, section 1.3.

    From iteration times, with the fixed cost taken off, it is beta_MB(r). From 1 / throughput it holds the
    fixed cost as well; use it with mixed_fixed = 0 (erratum E5).
    """
    if len(set(shares)) < 3 or len(shares) != len(per_token):
        raise InputError(f"{len(set(shares))} different shares; need >= 3 and a price for each, measure more")
    c2, c1, c0 = np.polyfit(np.asarray(shares), np.asarray(per_token), 2).tolist()
    return c0, c1, c2


def by_share_from_curvature(prefill: float, decode: float, curvature: float, tokens: int) -> Polynomial:
    """The same from the seconds of a pure prefill batch, of a pure decode batch and kappa, at `tokens` each.

    The paper names c2 only; c1 follows from the two ends.
    """
    if tokens < 1 or not (prefill > 0 and decode > 0):
        raise InputError(f"tokens={tokens}, batches of {prefill} s and {decode} s; need >= 1, > 0 and > 0")
    c2 = curvature * decode / (2 * tokens)
    return prefill / tokens, (decode - prefill) / tokens - c2, c2


def curvature(by_share: Polynomial) -> float:
    """The bend, kappa of (11): negative if a mixed batch costs more than its parts, most at half and half."""
    c0, c1, c2 = by_share
    if not c0 + c1 + c2 > 0:
        raise InputError(f"by_share={list(by_share)}; need a price > 0 at r = 1, measure pure decodes")
    return 2 * c2 / (c0 + c1 + c2)
