"""A comparison at a glance: one line per policy, the winner of each metric marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.report.terminal.tables import BEST, LEVEL, number, time_unit
from headgate.stats.comparison import Comparison, Row

if TYPE_CHECKING:
    from rich.console import RenderableType

SHORT = {
    "request throughput": "requests\n{}",
    "mean TTFT": "TTFT\nmean, {}",
    "p99 TTFT": "TTFT\np99, {}",
    "mean TPOT": "TPOT\nmean, {}",
    "p99 ITL": "ITL\np99, {}",
    "longest gap": "longest\ngap, {}",
    "goodput": "goodput\n{}",
}


def overview_table(comparison: Comparison, compared: str = "policy") -> RenderableType:
    """One line per policy, or whatever is compared, one column per metric; differences and intervals are in
    the long table.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = [row for row in comparison.rows if row.metric in SHORT]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(compared, overflow="fold")  # a long name takes two lines, so that no number is cut
    for row in shown:
        table.add_column(SHORT[row.metric].format(_unit(row)), justify="right", no_wrap=True)
    for name in comparison.policies:
        table.add_row(name, *(_cell(row, name, comparison.baseline) for row in shown))
    told = [row.metric for row in shown if row.winner is not None]
    marks = f"{BEST} best of its column, {LEVEL} cannot be told from the best"
    if len(told) < len(shown):
        marks += "; no mark: none can be told from the best"
    return Group(table, Text(marks, style="dim"))


def _unit(row: Row) -> str:
    if row.unit == "s":
        return time_unit(row.baseline.value)[1]
    return row.unit.replace("requests/s", "per s").replace("tokens/s", "per s")


def _cell(row: Row, name: str, baseline: str) -> str:
    scale = time_unit(row.baseline.value)[0] if row.unit == "s" else 1.0
    value = row.baseline.value if name == baseline else row.others[name].value
    mark = ""
    if row.winner is not None:
        mark = BEST if name == row.winner else LEVEL if name in row.level else ""
    return f"{number(value * scale)}{mark or ' '}"
