"""The report of a reproduction: published numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from headgate.report.charts.chart import LINEAR, LOG, Axis, Chart, Series
from headgate.report.document import Block, Cell, Chapter, Figure, Grid, Page, Section
from headgate.report.runs.origin import plan_made
from headgate.report.terminal.tables import number
from headgate.reproduce.report import Report
from headgate.reproduce.report import Section as Table

WIDE = 20.0  # numbers that differ by more than this factor are drawn on log axes


def published_page(report: Report, command: Sequence[str], quick: bool = False) -> Page:
    """The whole report."""
    sections = [Section(table.title, _blocks(table)) for table in report.sections]
    counts = tuple(
        (Cell(count.what), Cell(f"{count.agree}", count.agree), Cell(f"{count.of}", count.of))
        for count in report.counts
    )
    if counts:
        heads = ("what", "as published", "of")
        sections.insert(0, Section("As published", (Grid("What came out as published", heads, counts),)))
    sections.append(Section("Where they differ, and why", tuple(report.remarks)))
    notes = [
        *report.setup,
        *(["--quick: a tenth of the requests; do not quote these numbers."] if quick else []),
    ]
    verdict = f"Quick and rough: {_verdict(report)}" if quick else _verdict(report)
    shown = tuple(section for section in sections if section.blocks)
    chapter = Chapter("", verdict, shown, tuple(notes))
    return Page(
        f"{report.name}: {report.title}",
        "Published numbers beside ours",
        (chapter,),
        plan_made(command),
        "reproduce",
    )


def _verdict(report: Report) -> str:
    ratios = [ratio for table in report.sections if not table.points for ratio in table.ratios()]
    agree, of = sum(count.agree for count in report.counts), sum(count.of for count in report.counts)
    said = f"{agree} of {of} checked signs, orders and winners came out as published" if of else ""
    if ratios:
        spread = (
            f"our number is {np.median(ratios):.2f} times the published one (median of {len(ratios)}, from "
        )
        spread += f"{min(ratios):.2f} to {max(ratios):.2f})"
        said = f"{said}; {spread}" if said else spread[:1].upper() + spread[1:]
    return f"{said}." if said else "Nothing was published to put beside these numbers."


def _blocks(table: Table) -> tuple[Block, ...]:
    figure = _scatter(table)
    return (_grid(table),) if figure is None else (_grid(table), figure)


def _grid(table: Table) -> Grid:
    last = "difference\npoints" if table.points else "ratio\nours over theirs"
    heads = (
        (table.first, "column", "ours")
        if table.bare
        else (table.first, "column", table.against, "ours", last)
    )
    rows: list[tuple[Cell, ...]] = []
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells, strict=True):
            own = _cell(cell.ours)
            if table.bare:
                rows.append((Cell(row.setting), Cell(column, tone="words"), own))
                continue
            change = cell.ours - cell.published if table.points else cell.ratio
            shown = (
                Cell(f"{change:+.1f}" if table.points else f"{change:.2f}", change)
                if isfinite(change)
                else Cell("-")
            )
            rows.append((Cell(row.setting), Cell(column, tone="words"), _cell(cell.published), own, shown))
    return Grid("Published and ours", heads, tuple(rows))


def _cell(value: float) -> Cell:
    return Cell(number(value), value) if isfinite(value) else Cell("-")


def _scatter(table: Table) -> Figure | None:
    """Ours against theirs; None with fewer than three pairs."""
    series = []
    for place, column in enumerate(table.columns):
        pairs = [(row.cells[place].published, row.cells[place].ours) for row in table.rows]
        known = np.array([pair for pair in pairs if all(map(isfinite, pair))], float).reshape(-1, 2)
        if len(known):
            series.append(Series(column, known[:, 0], known[:, 1], place, "points"))
    if sum(len(each.x) for each in series) < 3:
        return None
    values = np.concatenate([each.x for each in series] + [each.y for each in series])
    kind = LOG if values.min() > 0 and values.max() > WIDE * values.min() else LINEAR
    ends = np.array([values.min(), values.max()])
    equal = Series("equal", ends, ends, 7)
    unit = "%" if table.points else table.title.rpartition(": ")[2]
    chart = Chart(Axis(table.against, unit, kind), Axis("ours", unit, kind), [equal, *series])
    return chart.figure(
        "Ours against theirs", "Points on the line agree; a common slope off it is a common factor."
    )
