"""What a bound on decode stalls costs: throughput against the longest gap, with a plot."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headgate.stats.gaps import Gaps
from headgate.stats.metrics import summarise
from studies.eb.plot import Series, draw
from studies.eb.worlds import HERE, Row, engine, everywhere, rate, requests, serve, short, show

BOUNDS = (None, 2.0, 1.0, 0.5, 0.25, 0.1, 0.05)
CARDS = ("linear-h200-qwen3-8b", "pub-rtx-pro-6000-qwen3-8b")
SLOTS, LENGTHS = 512, "uniform 512/256"
REFILL = {"linear-h200-qwen3-8b": 48, "pub-rtx-pro-6000-qwen3-8b": 28}  # near the best by study 1
COLOURS = dict(zip(CARDS, ("#1f77b4", "#d65f00"), strict=True))
MARKS = {"mixed": "square", "eb": "ring", "eb-online": "dot"}
PLOT = HERE.parent.parent / "docs" / "policies" / "eb_gap.svg"


class Cell(NamedTuple):
    """One run."""

    card: str
    policy: str
    bound: float | None
    number: int


def measure(cell: Cell) -> Row:
    """Throughput, gaps, and how many requests had a gap above the bound."""
    settings: dict[str, Any] = {} if cell.bound is None else {"max_gap": cell.bound}
    if cell.policy == "eb":
        settings["refill"] = REFILL[cell.card]
    run = serve(engine(cell.card, SLOTS), cell.policy, settings, requests(LENGTHS, cell.number, 2 * SLOTS))
    figures = summarise(run)
    longest = Gaps(run).longest()
    longest = longest[~np.isnan(longest)]
    over = 0.0 if cell.bound is None else max(0.0, float(longest.max()) - cell.bound)
    return {
        "card": short(cell.card), "policy": cell.policy, "max_gap s": cell.bound,
        "requests/s": rate(run, 2 * SLOTS, cell.number - 2 * SLOTS),
        "longest gap s": float(longest.max()),
        "broken": None if cell.bound is None else int(np.count_nonzero(longest > cell.bound * (1 + 1e-9))),
        "over by ms": None if cell.bound is None else 1e3 * over,
        "p99 ITL ms": 1e3 * figures.itl.p99, "TPOT ms": 1e3 * figures.tpot.mean.value,
        "TTFT s": figures.ttft.mean.value, "preemptions": int(run.requests["evictions"].sum()),
    }  # fmt: skip


def plot(rows: list[Row]) -> None:
    """One line for each card and policy; mixed batching is a point."""
    series = []
    for card in CARDS:
        of_card = [row for row in rows if row["card"] == short(card)]
        top = next(row["requests/s"] for row in of_card if row["policy"] == "mixed")
        for policy in ("mixed", "eb", "eb-online"):
            points = [row for row in of_card if row["policy"] == policy]
            xy = sorted((row["longest gap s"], 100 * (row["requests/s"] / top - 1)) for row in points)
            series.append(Series(f"{policy}, {short(card)}", xy, COLOURS[card], MARKS[policy]))
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(
        draw(series, "longest gap between two tokens of a request, s", "throughput against mixed, %")
    )


def main(quick: bool) -> None:
    """Study 4."""
    number = 3000 if quick else 6000
    cells = [
        Cell(card, policy, bound, number)
        for card in CARDS
        for policy in ("mixed", "eb", "eb-online")
        for bound in (BOUNDS if policy != "mixed" else (None,))
    ]
    rows = everywhere(measure, cells)
    columns = {"card": "", "policy": "", "max_gap s": "", "requests/s": ".2f", "longest gap s": ".3f"}
    columns |= {"broken": "d", "over by ms": ".2f", "p99 ITL ms": ".0f", "TPOT ms": ".1f", "TTFT s": ".1f"}
    show(f"max_gap: {LENGTHS}, {SLOTS} slots, {2 * SLOTS} clients", rows, columns, "" if quick else "gap")
    if not quick:
        plot(rows)
