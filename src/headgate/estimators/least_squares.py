"""Least squares, one observation at a time: coefficients that follow what is seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FORGET = 0.9995  # weight of the past with each observation: half after 1,400
NOISE = 0.1  # of an observation, as a share of it
OUTLIER = 3.0  # an observation of so many times what was expected counts as that much


class RelativeLeastSquares:
    """Recursive least squares of relative errors, with forgetting, from a prior.

    An observation below `least` counts by its absolute error over `least`, so that small ones, which are many
    and noisy, do not outweigh the large ones. Each coefficient starts at its prior, known to within 100
    percent. What has not been seen for long is never less certain than that: plain forgetting would forget it
    altogether.
    """

    def __init__(self, prior: Sequence[float], least: float = 0.0) -> None:
        self._least = least
        self.values: NDArray[np.float64] = np.array(prior, dtype=np.float64)
        self.seen = 0
        self._most = self.values**2  # variances never exceed these
        self._cov = np.diag(self._most)

    def update(self, features: Sequence[float], seen: float) -> None:
        """One observation: `seen`, above zero, was made of so much of each feature."""
        row = np.array(features, dtype=np.float64)
        expected = float(row @ self.values)
        if expected > 0:
            seen = min(seen, OUTLIER * expected)
        whole = max(seen, self._least)
        row /= whole
        spread = self._cov @ row
        gain = spread / (NOISE**2 + float(row @ spread))
        self.values = self.values + gain * (seen / whole - float(row @ self.values))
        self._cov = self._cov - np.outer(gain, spread)
        variance = np.maximum(np.diag(self._cov), 1e-30 * self._most)
        scale = np.minimum(FORGET**-0.5, np.sqrt(self._most / variance))
        self._cov = self._cov * np.outer(scale, scale)
        self.seen += 1
