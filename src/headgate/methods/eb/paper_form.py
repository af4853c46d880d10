"""Timed steps in the form of the EB paper: alpha and beta of each phase, beta_MB(r) and kappa, with R2.

Source: arXiv 2606.00516, section 5 and Tables 5 and 7. Its fits are least squares of the median time of each
batch size. We differ for mixed steps (erratum E5): their fixed cost is fitted beside the polynomial from the
times of iterations, because a polynomial through 1 / throughput already contains it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.cost.fit.steps import DECODE, MIXED, PREFILL, StepTable
from headgate.methods.eb.mixing import Polynomial, curvature

Floats = NDArray[np.float64]
FEWEST = 3  # sizes of a line; a polynomial with its constant needs two more


@dataclass(frozen=True)
class PhaseLine:
    """A step of one phase takes alpha + beta * size seconds; size is prompt tokens or decodes."""

    alpha: float
    beta: float
    r2: float
    sizes: int  # different ones


@dataclass(frozen=True)
class MixedForm:
    """A mixed step takes alpha + beta(r) * tokens seconds at a decode share r; by_share is c0, c1, c2."""

    alpha: float
    by_share: Polynomial
    kappa: float | None  # None where the price at r = 1 is not positive, and no bend is defined
    r2: float
    sizes: int


@dataclass(frozen=True)
class PaperForm:
    """All phases; None for one with too few sizes."""

    prefill: PhaseLine | None
    decode: PhaseLine | None
    mixed: MixedForm | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For a terminal of 80 columns."""
        found = ["in the form of the EB paper (least squares of median step times):"]
        for name, line, unit in (("prefill", self.prefill, "token"), ("decode", self.decode, "request")):
            if line is None:
                found.append(f"  {name}: fewer than {FEWEST} sizes measured")
                continue
            found.append(
                f"  {name}: alpha {1e3 * line.alpha:.4g} ms, beta {1e6 * line.beta:.4g} us per {unit}, "
                f"R2 {line.r2:.4f} ({line.sizes} sizes)"
            )
        return found + self._mixed_lines()

    def _mixed_lines(self) -> list[str]:
        mixed = self.mixed
        if mixed is None:
            return [f"  mixed: fewer than {FEWEST + 2} sizes measured"]
        c0, c1, c2 = (1e6 * price for price in mixed.by_share)
        kappa = "not defined" if mixed.kappa is None else f"{mixed.kappa:.3g}"
        return [
            f"  mixed: alpha {1e3 * mixed.alpha:.4g} ms, R2 {mixed.r2:.4f} ({mixed.sizes} sizes), at decode "
            "share r",
            f"    beta(r) {c0:.4g} {c1:+.4g} r {c2:+.4g} r^2 us per token, kappa {kappa}",
        ]


def paper_form(table: StepTable) -> PaperForm:
    """The fits of all three kinds of step."""
    kind = table.kind
    return PaperForm(
        _line(table.prefill[kind == PREFILL], table.seconds[kind == PREFILL]),
        _line(table.decodes[kind == DECODE], table.seconds[kind == DECODE]),
        _mixed(table.take(kind == MIXED)),
    )


def _line(sizes: Floats, seconds: Floats) -> PhaseLine | None:
    different, medians = _medians(sizes[:, None], seconds)
    if len(different) < FEWEST:
        return None
    found, r2 = _solved(np.column_stack((np.ones(len(different)), different[:, 0])), medians)
    return PhaseLine(found[0], found[1], r2, len(different))


def _mixed(table: StepTable) -> MixedForm | None:
    different, medians = _medians(np.column_stack((table.decodes, table.prefill)), table.seconds)
    if len(different) < FEWEST + 2:
        return None
    tokens = different.sum(axis=1)
    share = different[:, 0] / tokens
    design = np.column_stack((np.ones(len(tokens)), tokens, share * tokens, share**2 * tokens))
    (alpha, c0, c1, c2), r2 = _solved(design, medians)
    bend = curvature((c0, c1, c2)) if c0 + c1 + c2 > 0 else None
    return MixedForm(alpha, (c0, c1, c2), bend, r2, len(different))


def _medians(sizes: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Every different size once, with the median of its times."""
    if not len(seconds):
        return sizes, seconds
    different, place = np.unique(sizes, axis=0, return_inverse=True)
    order = np.argsort(place.ravel(), kind="stable")
    groups = np.split(seconds[order], np.cumsum(np.bincount(place.ravel()))[:-1])
    return different, np.array([np.median(group) for group in groups])


def _solved(design: Floats, seconds: Floats) -> tuple[list[float], float]:
    """Least squares, and the share of the variance it explains."""
    found = np.linalg.lstsq(design, seconds, rcond=None)[0]
    left = float(((seconds - design @ found) ** 2).sum())
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return found.tolist(), 1 - left / spread if spread else 1.0
