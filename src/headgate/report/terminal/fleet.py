"""The figures of fleets as tables for a terminal."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from headgate.core.fleet import PREFILL
from headgate.report.terminal.tables import number
from headgate.stats.fleet import FleetFigures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType
    from rich.table import Table


def fleet_table(figures: FleetFigures) -> RenderableType:
    """One line per role: least, mean and most over its engines; then the revenue."""
    from rich.console import Group
    from rich.text import Text

    table = _table()
    _add_rows(table, figures)
    lines: list[RenderableType] = [Text(f"Router {figures.router}"), table]
    if not math.isnan(figures.revenue):
        kinds = figures.kind_revenue
        each = ", ".join(f"{name or '-'} {number(value)}" for name, value in kinds.items())
        whole = f"Revenue {number(figures.revenue)} /s, {number(figures.revenue_per_engine)} per engine"
        lines.append(Text(f"{whole}: {each}" if len(kinds) > 1 else whole))
        lines.append(Text(_priced(figures), style="dim"))
    return Group(*lines)


def fleets_table(figures: Mapping[str, FleetFigures]) -> RenderableType:
    """Several fleets, one line per role of each."""
    from rich.console import Group
    from rich.text import Text

    table = _table("revenue /s\nper engine")
    for name, found in figures.items():
        table.add_row(name, "", "", "", "" if math.isnan(found.revenue) else number(found.revenue_per_engine))
        _add_rows(table, found)
    notes = dict.fromkeys(_priced(found) for found in figures.values() if found.prices)
    return Group(table, *(Text(note, style="dim") for note in notes))


def _priced(figures: FleetFigures) -> str:
    """At which prices, so that nobody takes the defaults for money."""
    return "Revenue: {prompt:g} per prompt token, {output:g} per output token.".format(**figures.prices)


def _table(*more: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("engines", overflow="fold")
    for head in (
        "busy\n%",
        "decodes at once\nleast / mean / most",
        "requests served\nleast / mean / most",
        *more,
    ):
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _add_rows(table: Table, figures: FleetFigures) -> None:
    for pool in figures.pools:
        decodes = " / ".join(map(_whole, asdict(pool.decodes).values()))
        served = " / ".join(map(_whole, asdict(pool.requests).values()))
        decodes, whom = ("", "prompts only") if pool.role == PREFILL else (decodes, served)
        table.add_row(f"  {pool.engines} {pool.role}", _whole(100 * pool.busy.mean), decodes, whom)


def _whole(value: float) -> str:
    """Without decimals; a run that failed at once has no time to share."""
    return "-" if math.isnan(value) else f"{value:,.0f}"
