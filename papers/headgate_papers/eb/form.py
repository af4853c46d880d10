"""Timed steps in the form of the EB paper: alpha, beta, kappa and R2 of prefill, decode and mixed batches.

    python -m headgate_papers.eb.form card.steps.npz [MORE.steps.npz]

`headgate calibrate` writes the steps beside a card. Each size counts once, with the median of its times.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headgate.cost.fit.steps import DECODE, MIXED, PREFILL, StepTable, concat

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
    by_share: tuple[float, float, float]
    kappa: float | None  # (11): negative if a mixed batch costs more than its parts; None: no price at r = 1
    r2: float
    sizes: int


@dataclass(frozen=True)
class PaperForm:
    """All phases; None for one with too few sizes."""

    prefill: PhaseLine | None
    decode: PhaseLine | None
    mixed: MixedForm | None

    def lines(self) -> list[str]:
        text = ["in the form of the EB paper (least squares of median step times):"]
        for name, line, unit in (("prefill", self.prefill, "token"), ("decode", self.decode, "request")):
            if line is None:
                text.append(f"  {name}: fewer than {FEWEST} sizes measured")
                continue
            text.append(
                f"  {name}: alpha {1e3 * line.alpha:.4g} ms, beta {1e6 * line.beta:.4g} us per {unit}, "
                f"R2 {line.r2:.4f} ({line.sizes} sizes)"
            )
        mixed = self.mixed
        if mixed is None:
            return [*text, f"  mixed: fewer than {FEWEST + 2} sizes measured"]
        c0, c1, c2 = (1e6 * price for price in mixed.by_share)
        kappa = "not defined" if mixed.kappa is None else f"{mixed.kappa:.3g}"
        return [
            *text,
            f"  mixed: alpha {1e3 * mixed.alpha:.4g} ms, R2 {mixed.r2:.4f} ({mixed.sizes} sizes), at decode "
            "share r",
            f"    beta(r) {c0:.4g} {c1:+.4g} r {c2:+.4g} r^2 us per token, kappa {kappa}",
        ]


def paper_form(table: StepTable) -> PaperForm:
    """The fits of all three kinds of step."""
    kind = table.kind
    return PaperForm(
        _fitted_line(table.prefill[kind == PREFILL], table.seconds[kind == PREFILL]),
        _fitted_line(table.decodes[kind == DECODE], table.seconds[kind == DECODE]),
        _mixed(table.take(kind == MIXED)),
    )


def _fitted_line(sizes: Floats, seconds: Floats) -> PhaseLine | None:
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
    alone = c0 + c1 + c2
    bend = 2 * c2 / alone if alone > 0 else None
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


def main(files: Sequence[str]) -> None:
    print(*paper_form(concat(StepTable.load(file) for file in files)).lines(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
