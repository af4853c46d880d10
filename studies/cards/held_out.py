"""A card against step logs it has not seen: `python -m studies.cards.held_out --fit NPZ... --test NPZ...`.

With `--card FILE` (one that `headgate calibrate` wrote) instead of `--fit` nothing is fitted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.cost.fit.fit import Quality, fit, measure
from headgate.cost.fit.solve import seconds
from headgate.cost.fit.steps import About, StepTable
from headgate.cost.laws.work import WorkTerms
from studies.cards.step_logs import read_steps

NOBODY = About("held-out", "any", "any", 1, 1, 1, 1)


def report(table: StepTable, quality: Quality) -> list[str]:
    """Errors by region, then of the sum of step times of each part."""
    lines = [f"{'region':<12}{'median':>9}{'p95':>9}{'total':>9}{'pieces':>9}"]
    for name, figures in quality.regions.items():
        shown = "".join(f"{100 * figures[key]:>7.1f} %" for key in ("median", "p95", "total"))
        lines.append(f"{name:<12}{shown}{figures['pieces']:>9.0f}")
    lines.append(f"{'part':<40}{'seconds':>9}{'total':>9}")
    for index, error in quality.parts.items():
        spent = table.seconds[table.part == int(index)].sum()
        lines.append(f"{table.labels[int(index)]:<40}{spent:>9.2f}{100 * error:>+7.2f} %")
    totals = np.abs(list(quality.parts.values()))
    lines.append(
        f"{len(totals)} parts: median {100 * np.median(totals):.2f} %, worst {100 * totals.max():.2f} %"
    )
    return lines


def main(argv: list[str]) -> None:
    """Fit or load, then compare."""
    parser = argparse.ArgumentParser(prog="python -m studies.cards.held_out", description=__doc__)
    parser.add_argument("--fit", nargs="+", type=Path, help=".npz to fit a law to")
    parser.add_argument("--card", help="or a calibrated card")
    parser.add_argument("--test", nargs="+", type=Path, required=True, help=".npz to compare it with")
    asked = parser.parse_args(argv)
    try:
        terms = _terms(asked)
        table = read_steps(asked.test)
    except InputError as error:
        sys.exit(str(error))
    print("\n".join(report(table, measure(table, seconds(terms, table)))))


def _terms(asked: argparse.Namespace) -> WorkTerms:
    if asked.fit:
        fitted = fit(read_steps(asked.fit), NOBODY)
        print("\n".join([*fitted.lines(), ""]))
        return fitted.terms
    card = load_card(asked.card or "")
    if card.work is None:
        raise InputError(
            f"card {card.name} was not calibrated (it has no `work`); calibrate one or give --fit"
        )
    return card.work


if __name__ == "__main__":
    main(sys.argv[1:])
