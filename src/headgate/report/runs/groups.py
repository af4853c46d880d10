"""Panels by class of request and by tenant: who waits, who is served well, who holds the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headgate.report.charts.bars import Bar, Bars
from headgate.report.charts.chart import COLOURS, Axis, Chart, Mark, Series
from headgate.report.runs.compared import compared
from headgate.report.document import Cell, Figure, Grid
from headgate.report.charts.scales import Floats
from headgate.report.runs.targets import decode_targets
from headgate.stats.metrics import Metrics
from headgate.stats.promises import Latencies
from headgate.record.tables import Run
from headgate.report.terminal.tables import number, percent, time_unit
from headgate.stats.windows import choose

COLUMNS = 160  # of a picture over time
MOST = 12  # tenants drawn one by one
MOST_RUNS = 3  # whose occupancy is drawn


def class_blocks(runs: Mapping[str, Run], metrics: Mapping[str, Metrics]) -> list[Grid | Figure]:
    """Of runs with several kinds of requests: figures by kind, and who decodes over time."""
    if not any(len(found.kinds) > 1 for found in metrics.values()):
        return []
    blocks: list[Grid | Figure] = [_grid(metrics, compared(runs.values()).head)]
    blocks += _waits(metrics)
    blocks += [_occupancy(name, run) for name, run in list(runs.items())[:MOST_RUNS]]
    return blocks


def _grid(metrics: Mapping[str, Metrics], head: str) -> Grid:
    heads = (
        *("class", head, "requests\nmeasured", "promised\nTTFT, TPOT", "TTFT mean\nms", "TTFT p99\nms"),
        *("TPOT mean\nms", "TPOT p99\nms", "E2E mean\ns", "longest gap\nms", "goodput\nof requests"),
    )
    rows = []
    for place in range(max(len(found.kinds) for found in metrics.values())):
        for name, found in metrics.items():
            if place >= len(found.kinds):
                continue
            kind = found.kinds[place]
            promised = ", ".join(map(_promise, (kind.first_token, kind.between_tokens))).replace("-, -", "-")
            times = (kind.ttft.mean.value, kind.ttft.p99, kind.tpot.mean.value, kind.tpot.p99)
            good = kind.goodput.share.value if kind.goodput else np.nan
            rows.append(
                (
                    Cell(kind.name or "-"),
                    Cell(name, tone="words"),
                    Cell(f"{kind.measured:,}", float(kind.measured)),
                    Cell(promised),
                    *(_cell(1000 * value) for value in times),
                    _cell(kind.e2e.mean.value),
                    _cell(1000 * kind.longest_gap),
                    Cell(percent(good), None if np.isnan(good) else 100 * good),
                )
            )
    return Grid("Every class", heads, tuple(rows))


def _promise(value: float | None) -> str:
    if value is None:
        return "-"
    scale, unit = time_unit(value)
    return f"{value * scale:g} {unit}"


def _cell(value: float) -> Cell:
    return Cell(number(value), None if np.isnan(value) else value)


def _waits(metrics: Mapping[str, Metrics]) -> list[Figure]:
    """p99 TTFT of each class in each run, and kept promises where there are any."""
    late, kept = [], []
    for colour, (name, found) in enumerate(metrics.items()):
        style = f"c{colour % COLOURS}"
        for kind in found.kinds:
            label = f"{kind.name or '-'}, {name}"
            if not np.isnan(kind.ttft.p99):
                late.append(Bar(label, (("p99 TTFT", style, kind.ttft.p99),)))
            if kind.goodput is not None and not np.isnan(kind.goodput.share.value):
                share = kind.goodput.share
                ends = [None if end is None else 100 * end for end in (share.low, share.high)]
                kept.append(Bar(label, (("kept", style, 100 * share.value),), *ends))
    found_figures = []
    if late:
        scale, unit = time_unit(min(bar.length for bar in late))
        late = [Bar(bar.name, tuple((*part[:2], part[2] * scale) for part in bar.parts)) for bar in late]
        look = "Whether one class pays for the other."
        found_figures.append(Bars("p99 TTFT", unit, _sorted(late)).figure("First tokens by class", look))
    if kept:
        look = "Requests that got what their class was promised; the thin line is the interval."
        found_figures.append(Bars("promises kept", "%", _sorted(kept)).figure("Goodput by class", look))
    return found_figures


def _sorted(bars: Sequence[Bar]) -> list[Bar]:
    return sorted(bars, key=lambda bar: bar.name)


def occupancy(run: Run, edges: Floats) -> dict[str, tuple[Floats, Floats]]:
    """By kind: how many are between seat and first token, and how many decode, on average in each column."""
    requests, (_, end) = run.requests, run.span()
    found = {}
    for place, kind in enumerate(run.kinds):
        mine = requests["kind"] == place
        admitted, first, finished = (requests[name][mine] for name in ("admitted", "first_token", "finished"))
        last = np.where(np.isnan(finished), end, finished)
        prefilling = _present(admitted, np.where(np.isnan(first), last, first), edges)
        found[str(kind.get("name") or "-")] = prefilling, _present(first, last, edges)
    return found


def _present(since: Floats, until: Floats, edges: Floats) -> Floats:
    """How many were there on average between two edges: the time each spent, over the width."""
    known = ~np.isnan(since)
    begin, end = np.sort(since[known]), np.sort(until[known])

    def spent(moments: Floats) -> Floats:
        sums = np.concatenate(([0.0], np.cumsum(moments)))
        count = np.searchsorted(moments, edges)
        return np.asarray(count * edges - sums[count])

    return np.asarray(np.diff(spent(begin) - spent(end)) / np.diff(edges))


def _occupancy(name: str, run: Run) -> Figure:
    low, high = run.span()
    edges = np.linspace(low, max(high, low + 1e-9), COLUMNS + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    series = [
        Series(kind, middle, decoding, place)
        for place, (kind, (_, decoding)) in enumerate(occupancy(run, edges).items())
    ]
    targets = decode_targets(run)
    marks = [Mark(f"LP target: {kind} {number(value)}", value, "y") for kind, value in targets.items()]
    look = "Which class holds the engine's seats, and whether that settles."
    if marks:
        look = "Whether each class settles at what the linear program would have it hold (dashed)."
    chart = Chart(Axis("time since the start", "s"), Axis("decoding", "requests", low=0.0), series, marks)
    return chart.figure(f"Who decodes: {name}", look)


def tenant_blocks(runs: Mapping[str, Run]) -> list[Grid | Figure]:
    """Where requests say whose they are (a column `tenant`): what each tenant got."""
    held = {name: run for name, run in runs.items() if "tenant" in run.requests}
    if not held:
        return []
    head = compared(held.values()).head
    heads = ("tenant", head, "requests", "tokens\nper s", "TTFT mean\nms", "TTFT p99\nms")
    rows, bars = [], []
    for colour, (name, run) in enumerate(held.items()):
        keep, ttft = choose(run).keep, Latencies.of(run).ttft
        seconds = max(run.span()[1] - run.span()[0], 1e-9)
        tokens = np.where(run.completed(), run.requests["prompt"] + run.requests["output"], 0)
        for tenant in np.unique(run.requests["tenant"]).tolist()[:MOST]:
            mine = run.requests["tenant"] == tenant
            waits = ttft[mine & keep & ~np.isnan(ttft)]
            mean, tail = (
                (float(waits.mean()), float(np.quantile(waits, 0.99))) if len(waits) else (np.nan, np.nan)
            )
            rate = float(tokens[mine].sum()) / seconds
            cells = (_cell(rate), _cell(1000 * mean), _cell(1000 * tail))
            rows.append(
                (
                    Cell(str(tenant)),
                    Cell(name, tone="words"),
                    Cell(f"{int(mine.sum()):,}", float(mine.sum())),
                    *cells,
                )
            )
            bars.append(Bar(f"tenant {tenant}, {name}", (("tokens", f"c{colour % COLOURS}", rate),)))
    figure = Bars("served", "tokens/s", _sorted(bars)).figure(
        "Service by tenant", "Equal bars: equal shares of the engine."
    )
    return [Grid("Every tenant", heads, tuple(rows)), figure]
