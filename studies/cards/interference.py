"""What a mixed step costs beyond its halves: `python -m studies.cards.interference NPZ... --out FILE.svg`.

The halves are priced by a law that is fitted to steps of one kind only, so nothing of the mixed steps is in
them. Each burst of mixed steps is then compared with the sum of its halves.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.fit.fit import Fitted, fit
from headgate.cost.fit.steps import MIXED, About, Floats, StepTable, cut
from headgate.cost.laws.work import WorkCost
from headgate.cost.model import Chunk, Shape
from studies.cards.plots import Panel, Point, Series, svg
from studies.cards.step_logs import read_steps

SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
TOKENS = (0, 1024, 2048, 4096, 1 << 20)
CONTEXTS = (0, 1_000, 30_000, 100_000, 200_000, 300_000, 400_000, 500_000, 700_000, 1 << 24)
FEWEST = 3  # bursts that make a point
WIDEST = 10.0  # points of per cent: bins known no better than that are left out
NOBODY = About("halves", "any", "any", 1, 1, 1, 1)


@dataclass(frozen=True)
class Bursts:
    """Bursts of mixed steps: means over their mixed steps, and the time beyond the halves."""

    share: Floats  # of decodes among the tokens
    tokens: Floats  # per mixed step
    context: Floats  # per mixed step
    halves: Floats  # seconds of both halves, per mixed step
    excess: Floats  # seconds beyond that, per mixed step


def halves(cost: WorkCost, table: StepTable) -> Floats:
    """Seconds of each row if its decodes and its prompts ran in steps of their own."""
    known = np.nan_to_num(table.prompts, nan=1.0)
    found = []
    columns = (table.decodes, table.context, table.prefill, table.behind, known)
    for decodes, context, prefill, behind, prompts in zip(
        *(c.astype(int).tolist() for c in columns), strict=True
    ):
        chunks = _equal(prefill, behind, max(1, prompts)) if prefill else ()
        spent = cost.seconds(Shape(decodes, context)) if decodes else 0.0
        found.append(spent + (cost.seconds(Shape(0, 0, prefill, behind, chunks)) if prefill else 0.0))
    return np.array(found)


def _equal(prefill: int, behind: int, prompts: int) -> tuple[Chunk, ...]:
    """Prompts of equal size: what is known is their number."""
    each, rest = divmod(prefill, prompts)
    start = behind // prompts
    return tuple(Chunk(start, each + (number < rest)) for number in range(prompts) if each or number < rest)


def bursts(table: StepTable, cost: WorkCost) -> Bursts:
    """All pieces with mixed steps."""
    pieces = cut(table, together=1)
    mixed = (table.kind == MIXED).astype(np.float64)
    apart = halves(cost, table)
    chosen = pieces.kind == MIXED
    count = pieces.sums(mixed)[chosen]
    tokens = pieces.sums(table.tokens * mixed)[chosen]
    return Bursts(
        share=pieces.sums(table.decodes * mixed)[chosen] / tokens,
        tokens=tokens / count,
        context=pieces.sums(table.context * mixed)[chosen] / count,
        halves=pieces.sums(apart * mixed)[chosen] / count,
        excess=(pieces.seconds - pieces.sums(apart))[chosen] / count,
    )


def binned(found: Bursts, x: Floats, edges: tuple[float, ...], chosen: np.ndarray, label: str) -> Series:
    """The median excess in per cent of the halves by bins of x, with 95 % by the median deviation."""
    points = []
    for low, high in pairwise(edges):
        here = chosen & (x >= low) & (x < high)
        if here.sum() < FEWEST:
            continue
        ratio = 100 * found.excess[here] / found.halves[here]
        middle = float(np.median(ratio))
        spread = 1.4826 * float(np.median(np.abs(ratio - middle)))
        half = 1.96 * 1.25 * spread / len(ratio) ** 0.5  # a median varies a quarter more than a mean
        if half <= WIDEST:
            points.append(Point(float(x[here].mean()), middle, middle - half, middle + half, len(ratio)))
    return Series(label, tuple(points))


def surface(found: Bursts) -> tuple[Panel, Panel]:
    """By decode share for several sizes of step, and by context for several shares."""
    sizes = [
        binned(found, found.share, SHARES, (found.tokens >= low) & (found.tokens < high), _range(low, high))
        for low, high in pairwise(TOKENS)
    ]
    shares = [
        binned(found, found.context, CONTEXTS, (found.share >= low) & (found.share < high), label)
        for low, high, label in (
            (0, 0.2, "decodes under 20 %"),
            (0.2, 0.6, "20 to 60 %"),
            (0.6, 1.01, "over 60 %"),
        )
    ]
    y = "mixed step over its halves, %"
    return (
        Panel("decode share of the step's tokens", y, tuple(each for each in sizes if each.points)),
        Panel("KV tokens its decodes read", y, tuple(each for each in shares if each.points)),
    )


def _range(low: int, high: int) -> str:
    return f"{low:,} tokens and more" if high >= 1 << 20 else f"{low:,} to {high:,} tokens"


def table_lines(panel: Panel) -> list[str]:
    """The points as text."""
    lines = [f"{panel.x:<40}{'median':>9}{'±':>7}{'bursts':>9}"]
    for series in panel.series:
        lines.append(series.label)
        for x, middle, low, _, count in series.points:
            lines.append(f"{x:>40,.3g}{middle:>+8.1f} %{middle - low:>6.1f}{count:>9}")
    return lines


def pure(table: StepTable) -> Fitted:
    """A law from the steps of one kind only, those beside mixed ones left out: their ends are seen late."""
    mixed = table.kind == MIXED
    beside = np.concatenate((mixed[1:], [False])) | np.concatenate(([False], mixed[:-1]))
    return fit(table.take(~(mixed | beside)), NOBODY)


def main(argv: list[str]) -> None:
    """Read, fit the halves, compare, draw."""
    parser = argparse.ArgumentParser(prog="python -m studies.cards.interference", description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path, help=".npz of headgate calibrate or of studies.h200")
    parser.add_argument("--out", type=Path, required=True, help="the figure, an SVG")
    parser.add_argument("--json", type=Path, help="the points as JSON")
    asked = parser.parse_args(argv)
    try:
        table = read_steps(asked.logs)
        if not np.any(table.kind == MIXED):
            raise InputError("no step mixes decodes and prompts; give logs of mixed batching too")
        apart = pure(table)
    except InputError as error:
        sys.exit(str(error))
    cost = WorkCost(replace(apart.terms, switch=0.0))
    found = bursts(table, cost)
    panels = surface(found)
    asked.out.write_text(svg("Extra cost of a mixed step", panels), encoding="utf-8")
    print("\n".join(["Halves, fitted to pure steps:", *apart.lines(), ""]))
    for panel in panels:
        print("\n".join([*table_lines(panel), ""]))
    total = 100 * found.excess.sum() / found.halves.sum()
    print(f"{len(found.share)} bursts; {total:+.1f} % over all of them; figure in {asked.out}")
    if asked.json:
        points = [{"x": panel.x, "series": [each.__dict__ for each in panel.series]} for panel in panels]
        asked.json.write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
