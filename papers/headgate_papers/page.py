"""A reproduction: published numbers beside ours, what came out as published, and why not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headgate.report.charts import LINEAR, LOG, Axis, Chart, Series
from headgate.report.document import (
    Block,
    Cell,
    Drawn,
    Figure,
    Grid,
    Listed,
    Page,
    Section,
    plan_page,
    row,
    valued,
)
from headgate_papers.report import LIMIT, PAPER, REFERENCE, Count, Report
from headgate_papers.report import Cell as Pair
from headgate_papers.report import Row as Setting
from headgate_papers.report import Section as Table

WIDE = 20.0  # numbers that differ by more than this factor are drawn on log axes
QUICK = "--quick: a tenth of the requests; do not quote these numbers"


def published_page(report: Report, command: Sequence[str], quick: bool = False) -> Page:
    """Set-up, tables, what came out as published, remarks."""
    counts, remarks = tuple(map(_count, report.counts)), tuple(report.remarks)
    sections = [Section("", report.setup)]
    sections += [Section(table.title, _blocks(table)) for table in report.sections]
    published = any(count.against == PAPER for count in report.counts)
    sections.append(Section("As published" if published else "As expected", (Listed(counts),)))
    sections.append(Section("Where they differ, and why", (Listed(remarks),)))
    said = f"Quick and rough: {_verdict(report)}" if quick else _verdict(report)
    page = plan_page(report.name, report.title, said, sections, (), command, caution=QUICK if quick else "")
    return replace(page, kind="reproduce")


def _count(count: Count) -> str:
    share = f" ({100 * count.agree / count.of:.0f} %)" if count.of else ""
    whose = {REFERENCE: " (our own reference)", LIMIT: " (theory)"}.get(count.against, "")
    return f"{count.what}{whose}: {count.agree} of {count.of}{share}"


def _verdict(report: Report) -> str:
    """What is published, what is our own reference and what theory says are never counted together."""
    published = _tally(report, PAPER, "came out as published", "the published one")
    others = [
        _tally(report, REFERENCE, "are as in our own reference", "that of our own reference"),
        _tally(report, LIMIT, "are as theory says", "the theoretical limit"),
    ]
    if not published:
        published = "Nothing was published to put beside these numbers."
    return " ".join(filter(None, (published, *others)))


def _tally(report: Report, against: str, came: str, whose: str) -> str:
    tables = [table for table in report.sections if table.against == against and not table.points]
    ratios = [ratio for table in tables for ratio in table.ratios()]
    counts = [count for count in report.counts if count.against == against]
    agree, of = sum(count.agree for count in counts), sum(count.of for count in counts)
    said = f"{agree} of {of} checked signs, orders and winners {came}" if of else ""
    if ratios:
        spread = f"our number is {np.median(ratios):.2f} times {whose} (median of {len(ratios)}, "
        spread += f"from {min(ratios):.2f} to {max(ratios):.2f})"
        said = f"{said}; {spread}" if said else spread[:1].upper() + spread[1:]
    return f"{said}." if said else ""


def _blocks(table: Table) -> tuple[Block, ...]:
    return _grid(table), Drawn(lambda: filter(None, (_scatter(table),)))


def _grid(table: Table) -> Grid:
    """Published, ours and the ratio (or the difference in points) for each column."""
    shared = table.shared and not table.bare
    last = "diff." if table.points else "ratio"
    each = ("ours",) if table.bare else ("ours", last) if shared else (table.against, "ours", last)
    heads = [table.first, *((table.against,) if shared else ())]
    heads += [f"{name}\n{word}" for name in table.columns for word in each]
    rows = tuple(row(setting.setting, *_numbers(setting, table)) for setting in table.rows)
    return Grid("", tuple(heads), rows, joined=True)


def _numbers(setting: Setting, table: Table) -> list[Cell]:
    if table.bare:
        return [_brief(pair.ours, table.points) for pair in setting.cells]
    shown = [_brief(setting.cells[0].published, table.points)] if table.shared else []
    for pair in setting.cells:
        shown += [] if table.shared else [_brief(pair.published, table.points)]
        shown += [_brief(pair.ours, table.points), _off(pair, table.points)]
    return shown


def _brief(value: float, points: bool) -> Cell:
    """Three digits that matter, whole numbers from a thousand on; percentages with one decimal."""
    if math.isnan(value):
        return Cell("-")
    return valued(
        f"{value:.1f}" if points else f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}", value
    )


def _off(pair: Pair, points: bool) -> Cell:
    value = pair.ours - pair.published if points else pair.ratio
    return valued("-" if math.isnan(value) else f"{value:+.1f}" if points else f"{value:.2f}", value)


def _scatter(table: Table) -> Figure | None:
    """Ours against theirs; None with fewer than three pairs."""
    series = []
    for place, column in enumerate(table.columns):
        pairs = [(each.cells[place].published, each.cells[place].ours) for each in table.rows]
        known = np.array([pair for pair in pairs if all(map(math.isfinite, pair))], float).reshape(-1, 2)
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
    look = "Points on the line agree; a common slope off it is a common factor."
    return chart.figure("Ours against theirs", look)
