"""Tables for a terminal, 80 columns wide, plain where colours are off."""

from __future__ import annotations

import math
import os
import sys
from typing import IO, TYPE_CHECKING

from headgate.stats.comparison import BETTER, WORSE, Comparison, Difference, Row
from headgate.stats.figures import Estimate, Figures
from headgate.stats.metrics import Engine, Goodput, KindMetrics, Metrics

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDTH = 80
BEST, LEVEL = "*", "="
POLICY, VALUE, CHANGE, VERDICT = 24, 10, 22, 18  # widths of a comparison's columns, 80 with the spaces
STYLES = {BETTER: "green", WORSE: "red"}


def show(table: RenderableType, file: IO[str] | None = None) -> None:
    """Print a table; without colours when NO_COLOR is set or when nobody sits at a terminal."""
    from rich.console import Console

    out = file or sys.stdout
    if "NO_COLOR" in os.environ or not out.isatty():
        Console(file=out, width=WIDTH, color_system=None, highlight=False).print(table)
    else:
        width = max(WIDTH, Console(file=out).width)  # a narrow terminal wraps; cut numbers help nobody
        Console(file=out, width=width, highlight=False).print(table)


def as_text(table: RenderableType) -> str:
    """The same as plain text."""
    from io import StringIO

    buffer = StringIO()
    show(table, buffer)
    return buffer.getvalue()


def summary_table(metrics: Metrics, title: str = "") -> RenderableType:
    """The figures of one run: latencies, rates and use of the engine, then each kind if there are several."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(title, style="bold")] if title else []
    parts += [_latencies(metrics), Text(), _facts(metrics), Text()]
    if len(metrics.kinds) > 1:
        parts += [_kinds(metrics.kinds), Text()]
    parts.append(Text(metrics.rule, style="dim"))
    if metrics.rough:
        alike = f"Rough intervals, batches too alike, take more requests: {', '.join(metrics.rough)}."
        parts.append(Text(alike, style="dim"))
    return Group(*parts)


def _latencies(metrics: Metrics) -> Table:
    """One line per latency, each in its own unit."""
    table = _table("", "mean", "95 % interval", "median", "p90", "p95", "p99", "std")
    rows = {"TTFT": metrics.ttft, "TPOT": metrics.tpot, "ITL": metrics.itl, "E2E": metrics.e2e}
    for name, found in rows.items():
        scale, unit = time_unit(found.mean.value)
        values = (found.median, found.p90, found.p95, found.p99, found.std)
        mean, between = number(found.mean.value * scale), interval(found.mean, scale)
        table.add_row(f"{name} ({unit})", mean, between, *(number(value * scale) for value in values))
    return table


def _facts(metrics: Metrics) -> Table:
    """What is one number, with its unit."""
    engine, (scale, unit) = metrics.engine, time_unit(metrics.longest_gap)
    rates = {"Requests": metrics.request_rate, "Output tokens": metrics.output_rate}
    rates |= {"All tokens": metrics.total_rate}
    rows = [(name, f"{number(rate.value)} /s", interval(rate)) for name, rate in rates.items()]
    if metrics.goodput is not None:
        good = f"{number(metrics.goodput.rate.value)} requests/s with every promise kept"
        rows.append(("Goodput", _kept(metrics.goodput), good))
    gap = f"{number(metrics.longest_gap * scale)} {unit}"
    measured = f"{number(metrics.seconds)} s measured of {number(metrics.duration)} s"
    shares = ", ".join(f"{percent(share)} {name}" for name, share in engine.time.items())
    rows += [
        ("Longest gap", gap, "between two tokens of one request"),
        ("KV", *_memory(engine)),
        ("Busy", percent(engine.utilisation), f"{measured}; steps: {shares}"),
        ("Preemptions", str(engine.preemptions), f"{percent(engine.wasted_share)} of all tokens done again"),
        ("Finished", str(metrics.counts.completed), _endings(metrics)),
        ("Stationary", "yes" if metrics.stationary else "NO", metrics.reason),
    ]
    table = _table("", "", "", header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _memory(engine: Engine) -> tuple[str, str]:
    """Mean and peak KV, as shares where the size is known."""
    if math.isnan(engine.kv_tokens):
        return f"{number(engine.kv_mean)}", f"tokens, peak {number(engine.kv_peak)}"
    peak = f"peak {percent(engine.kv_peak / engine.kv_tokens)}, of {number(engine.kv_tokens)} tokens"
    return percent(engine.kv_mean / engine.kv_tokens), peak


def _endings(metrics: Metrics) -> str:
    """What became of the requests that were not served to their end."""
    counts = metrics.counts
    others = {name: getattr(counts, name) for name in ("aborted", "abandoned", "refused", "unfinished")}
    told = [f"{number} {name}" for name, number in others.items() if number]
    return ", ".join([f"of {counts.total} requests", *told])


def _kinds(kinds: tuple[KindMetrics, ...]) -> Table:
    """One line per kind of request."""
    table = _table("kind", "requests", "TTFT mean / p99", "TPOT mean / p99", "E2E mean", "goodput")
    for kind in kinds:
        scale, unit = time_unit(kind.e2e.mean.value)
        whole = f"{number(kind.e2e.mean.value * scale)} {unit}"
        cells = (_pair(kind.ttft), _pair(kind.tpot), whole, _kept(kind.goodput))
        table.add_row(kind.name or "-", str(kind.measured), *cells)
    return table


def _pair(found: Figures) -> str:
    """Mean and 99th percentile in one unit."""
    scale, unit = time_unit(found.mean.value)
    return f"{number(found.mean.value * scale)} / {number(found.p99 * scale)} {unit}"


def _kept(goodput: Goodput | None) -> str:
    """Goodput in percent, a dash where nothing was promised."""
    return "-" if goodput is None else percent(goodput.share.value)


def comparison_table(comparison: Comparison, compared: str = "policy") -> RenderableType:
    """Metric by metric, one line per policy, or whatever is compared, so that any number of them fits."""
    from rich.console import Group
    from rich.text import Text

    head = _columns()
    cells = (compared, "value", "difference, % [95 %]", "verdict")
    head.add_row(*(Text(cell, style="bold") for cell in cells))
    parts: list[RenderableType] = [head, Text("-" * WIDTH, style="dim")]
    for row in comparison.rows:
        scale, unit = (1.0, row.unit) if row.unit != "s" else time_unit(row.baseline.value)
        wish = "higher" if row.higher_is_better else "lower"
        parts.append(Text.assemble((row.metric, "bold"), f" ({unit}, {wish} is better)"))
        parts.append(_metric(row, comparison.baseline, scale))
    parts.append(Text(_legend(comparison), style="dim"))
    return Group(*parts)


def _metric(row: Row, baseline: str, scale: float) -> Table:
    """The lines of one metric: the baseline with its own interval, the others with their difference."""
    from rich.text import Text

    table = _columns()
    value, between = number(row.baseline.value * scale), interval(row.baseline, scale)
    table.add_row(_marked(row, baseline), value, between, "baseline")
    for name, found in row.others.items():
        verdict = Text(found.verdict, style=STYLES.get(found.verdict, ""))
        table.add_row(_marked(row, name), number(found.value * scale), change(found), verdict)
    return table


def _marked(row: Row, name: str) -> str:
    """The policy's name behind the mark of the best, or of those level with it; none when all are level."""
    mark = " "
    if row.winner is not None:
        mark = BEST if name == row.winner else LEVEL if name in row.level else " "
    return f"{mark} {name}"


def _legend(comparison: Comparison) -> str:
    """What the marks mean, how runs were paired, what was left out and what to mind."""
    methods = dict.fromkeys(row.method for row in comparison.rows)
    seeds = "One seed" if comparison.seeds == 1 else f"{comparison.seeds} seeds"
    marks = f"{BEST} best   {LEVEL} cannot be told from the best   no mark: none can be told from the best"
    how = f"{seeds}; 95 % intervals, paired {', '.join(methods)}."
    return "\n".join([marks, how, comparison.rule, *(f"Mind: {note}." for note in comparison.notes)])


def change(found: Difference) -> str:
    """The paired difference in percent with its interval, written out when the baseline is zero."""
    percent = found.percent
    if math.isnan(percent.value):
        return "-"
    if percent.low is None or percent.high is None:
        return signed(percent.value)
    return f"{signed(percent.value)} [{signed(percent.low)}, {signed(percent.high)}]"


def signed(percent: float) -> str:
    """A change in percent; no decimals where they would not matter."""
    return f"{percent:+,.0f}" if abs(percent) >= 99.95 else f"{percent:+.1f}"


def _table(*names: str, header: bool = True) -> Table:
    """A table with a left column of names and right columns of numbers."""
    from rich import box
    from rich.table import Table

    lines = box.SIMPLE_HEAD if header else None
    table = Table(box=lines, show_header=header, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(names):
        words = number == 0 or (number == len(names) - 1 and not header)
        table.add_column(name, justify="left" if words else "right", no_wrap=not (words and number))
    return table


def _columns() -> Table:
    """The columns of a comparison; fixed widths keep the blocks of all metrics in line."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=POLICY, no_wrap=True, overflow="ellipsis")
    table.add_column(width=VALUE, no_wrap=True, justify="right")
    table.add_column(width=CHANGE, no_wrap=True)
    table.add_column(width=VERDICT, no_wrap=True)
    return table


def time_unit(seconds: float) -> tuple[float, str]:
    """Milliseconds below a second."""
    return (1.0, "s") if seconds >= 1 else (1000.0, "ms")


def number(value: float) -> str:
    """Four digits that matter."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:#.4g}"


def percent(share: float) -> str:
    """A share in percent."""
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def interval(estimate: Estimate, scale: float = 1.0) -> str:
    """An interval, a dash when there is none."""
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"[{number(estimate.low * scale)}, {number(estimate.high * scale)}]"
