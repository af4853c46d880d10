"""A report on a terminal."""

from __future__ import annotations

import math
from typing import IO, TYPE_CHECKING

from headgate.report.terminal.tables import show
from headgate.reproduce.report import Cell, Report, Row, Section

if TYPE_CHECKING:
    from rich.table import Table


def print_report(report: Report, file: IO[str]) -> None:
    """Title, set-up, tables, what came out as published, remarks."""
    from rich.text import Text

    show(Text(f"{report.name}: {report.title}", style="bold"), file)
    for line in report.setup:
        show(Text(line), file)
    for section in report.sections:
        print(file=file)
        show(Text(section.title, style="bold"), file)
        show(section_table(section), file)
    print(file=file)
    show(Text("As published", style="bold"), file)
    for count in report.counts:
        share = f" ({100 * count.agree / count.of:.0f} %)" if count.of else ""
        show(Text(f"- {count.what}: {count.agree} of {count.of}{share}"), file)
    print(file=file)
    show(Text("Where they differ, and why", style="bold"), file)
    for remark in report.remarks:
        show(Text(f"- {remark}"), file)


def section_table(section: Section) -> Table:
    """Published, ours and the ratio (or the difference in points) for each column."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(f"\n{section.first}", no_wrap=True)
    last = "diff." if section.points else "ratio"
    if section.shared and not section.bare:
        table.add_column(f"\n{section.against}", justify="right", no_wrap=True)
    for name in section.columns:
        heads = ("ours",) if section.bare else ("ours", last)
        if not (section.bare or section.shared):
            heads = (section.against, *heads)
        for place, head in enumerate(heads):
            table.add_column(f"{'' if place else name}\n{head}", justify="right", no_wrap=True)
    for row in section.rows:
        table.add_row(row.setting, *_numbers(row, section))
    return table


def _numbers(row: Row, section: Section) -> list[str]:
    brief = _percent if section.points else _brief
    if section.bare:
        return [brief(cell.ours) for cell in row.cells]
    shown = [brief(row.cells[0].published)] if section.shared else []
    for cell in row.cells:
        if not section.shared:
            shown.append(brief(cell.published))
        shown += [brief(cell.ours), _difference(cell) if section.points else _ratio(cell)]
    return shown


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def _brief(value: float) -> str:
    """Three digits that matter, whole numbers from a thousand on."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _ratio(cell: Cell) -> str:
    return "-" if math.isnan(cell.ratio) else f"{cell.ratio:.2f}"


def _difference(cell: Cell) -> str:
    difference = cell.ours - cell.published
    return "-" if math.isnan(difference) else f"{difference:+.1f}"
