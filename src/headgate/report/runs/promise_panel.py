"""What users were promised, and how many got it: by class, for every run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from headgate.report.document import Cell, Grid, Row, row, valued
from headgate.report.numbers import percent, time_unit
from headgate.report.runs.scenes import compared
from headgate.stats.measured import Measured
from headgate.stats.promises import between_tokens, by_mean, promised

KEPT = 0.95  # a promise that fewer requests get is shown as broken
HEADS = ("kept", "both", "promised", "TTFT\nin time", "tokens\nin time", "requests")
NOTE = (
    f"Requests after warm-up and before cool-down. Kept: at least {100 * KEPT:.0f} % of the requests got "
    "every promise; requests that were refused, or left, did not. Tokens in time: requests with every gap "
    "between two tokens within the promise, or their mean where TPOT was promised."
)


def promise_panel(runs: Mapping[str, Measured]) -> Iterator[Grid]:
    """One row for every run and class that was promised anything; nothing where none was."""
    rows = [line for name, found in runs.items() for line in _rows(name, found)]
    if rows:
        head = compared(found.run for found in runs.values()).head
        yield Grid("", (head, "class", *HEADS), tuple(rows), (NOTE,))


def _rows(name: str, found: Measured) -> Iterator[Row]:
    promises, latencies = found.promises, found.latencies
    if promises is None:
        return
    paces = between_tokens(found.run, latencies, found.longest)
    for number, kind in enumerate(found.run.kinds):
        mine = (found.run.requests["kind"] == number) & found.window.keep & promises.judged
        if not promised(kind) or not mine.any():
            continue
        first, between = kind.get("first_token"), kind.get("between_tokens")
        both = float(promises.met[mine].mean())
        said = ", ".join(
            filter(None, (_limit("TTFT", first), _limit("TPOT" if by_mean(kind) else "gaps", between)))
        )
        yield row(
            name,
            str(kind.get("name") or "all"),
            Cell("yes", tone="words good") if both >= KEPT else Cell("no", tone="words bad"),
            valued(percent(both), 100 * both),
            Cell(said, tone="words"),
            _in_time(latencies.ttft[mine], first, 0.0),
            _in_time(paces[mine], between, 1.0),
            int(mine.sum()),
        )


def _limit(name: str, limit: float | None) -> str:
    if limit is None:
        return ""
    scale, unit = time_unit(limit)
    return f"{name} ≤ {scale * limit:g} {unit}"


def _in_time(times: np.ndarray, limit: float | None, unknown: float) -> Cell:
    """The share within the limit; `unknown` is what requests without such a time count as."""
    if limit is None:
        return Cell("-")
    share = float(np.where(np.isnan(times), unknown, times <= limit).mean())
    return valued(percent(share), 100 * share)
