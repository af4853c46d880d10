"""A sweep as text for a terminal of 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headgate.experiment.sweep import Over
from headgate.record.tables import Run
from headgate.report.runs.compared import compared
from headgate.report.terminal.tables import number
from headgate.stats.metrics import Metrics, summarise

if TYPE_CHECKING:
    from rich.table import Table

Found = Mapping[Any, Mapping[str, Sequence[Run]]]


def sweep_table(found: Found, first: Over | None) -> Table:
    """One line per point and whatever is compared; means over seeds."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    if first is not None:
        table.add_column(first.word.replace("_", "-"), justify="right", no_wrap=True)
    table.add_column(_head(found), overflow="fold")
    heads = (
        "requests\nper s",
        "TTFT\nmean, ms",
        "TTFT\np99, ms",
        "TPOT\nmean, ms",
        "ITL\np99, ms",
        "busy\n%",
    )
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for at, runs in found.items():
        for place, (label, own) in enumerate(runs.items()):
            values = _means([summarise(run) for run in own])
            start = [] if first is None else ["" if place else str(at)]
            table.add_row(*start, label, *(number(value) for value in values))
    return table


def _head(found: Found) -> str:
    """What the lines of one point differ in."""
    at_one = next(iter(found.values()))
    return compared(own[0] for own in at_one.values()).head


def _means(metrics: Sequence[Metrics]) -> list[float]:
    rows = [
        (
            found.request_rate.value,
            1000 * found.ttft.mean.value,
            1000 * found.ttft.p99,
            1000 * found.tpot.mean.value,
            1000 * found.itl.p99,
            100 * found.engine.utilisation,
        )
        for found in metrics
    ]
    return [float(value) for value in np.mean(np.array(rows), axis=0)]


def sweep_document(found: Found, axes: Sequence[Over]) -> dict[str, Any]:
    """Every run with all its figures."""
    points = [
        {
            "at": at,
            "label": label,
            "seed": run.meta.get("seed"),
            "outcome": run.meta["outcome"],
            "metrics": summarise(run).as_dict(),
        }
        for at, runs in found.items()
        for label, own in runs.items()
        for run in own
    ]
    return {"over": {axis.word: list(axis.values) for axis in axes}, "points": points}
