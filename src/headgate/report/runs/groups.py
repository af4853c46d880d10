"""By class of request and by tenant: waits, goodput, and which class holds the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.experiment.fleet_plan import fleet_plan
from headgate.methods.fluid.flows import Prices
from headgate.record.tables import Flags, Run
from headgate.report.charts.bars import Bar, Bars
from headgate.report.charts.chart import COLOURS, Axis, Chart, Mark, Series
from headgate.report.charts.scales import Floats
from headgate.report.document import Cell, Figure, Grid, row, share
from headgate.report.numbers import number, time_unit
from headgate.report.runs.scenes import compared
from headgate.sim.engine.engine import Engine
from headgate.stats.measured import Measured
from headgate.stats.metrics import Metrics
from headgate.workloads.workload import Kind, Workload

COLUMNS = 160  # of a picture over time
MOST = 12  # tenants drawn one by one
MOST_RUNS = 3  # whose occupancy is drawn


def class_grid(metrics: Mapping[str, Metrics], head: str) -> list[Grid]:
    """Figures by kind of request, where there are several kinds."""
    if not any(len(found.kinds) > 1 for found in metrics.values()):
        return []
    heads: tuple[str, ...] = ("class", head, "requests\nmeasured", "promised\nTTFT, TPOT")
    heads += ("TTFT\nmean, ms", "TTFT\np99, ms", "TPOT\nmean, ms", "TPOT\np99, ms")
    heads += ("E2E\nmean, s", "longest gap\nms", "goodput")
    rows = []
    for place in range(max(len(found.kinds) for found in metrics.values())):
        for name, found in metrics.items():
            if place >= len(found.kinds):
                continue
            kind = found.kinds[place]
            promised = ", ".join(map(_promise, (kind.first_token, kind.between_tokens))).replace("-, -", "-")
            times = (kind.ttft.mean.value, kind.ttft.p99, kind.tpot.mean.value, kind.tpot.p99)
            cells = (*(1000 * value for value in times), kind.e2e.mean.value, 1000 * kind.longest_gap)
            good = share(kind.goodput.share.value if kind.goodput else np.nan)
            rows.append(row(kind.name or "-", name, kind.measured, Cell(promised), *cells, good))
    grid = Grid("", heads, tuple(rows), grouped=True, minor=(heads[2], heads[8], heads[9], heads[3]))
    return [grid if len(metrics) > 1 else _without_names(grid)]


def _without_names(grid: Grid) -> Grid:
    """Of a single run its name says nothing."""
    rows = tuple((each[0], *each[2:]) for each in grid.rows)
    return replace(grid, heads=(grid.heads[0], *grid.heads[2:]), rows=rows, grouped=False)


def class_figures(runs: Mapping[str, Measured]) -> list[Figure]:
    """Of runs with several kinds of requests: waits by kind, and which kind decodes over time."""
    if not any(len(found.metrics.kinds) > 1 for found in runs.values()):
        return []
    waits = _waits({name: found.metrics for name, found in runs.items()})
    return [*waits, *(_occupancy(name, found.run) for name, found in list(runs.items())[:MOST_RUNS])]


def _promise(value: float | None) -> str:
    if value is None:
        return "-"
    scale, unit = time_unit(value)
    return f"{value * scale:g} {unit}"


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
                good = kind.goodput.share
                ends = [None if end is None else 100 * end for end in (good.low, good.high)]
                kept.append(Bar(label, (("kept", style, 100 * good.value),), *ends))
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
    return chart.figure(f"Decoding by class: {name}", look)


def tenant_grid(runs: Mapping[str, Measured]) -> list[Grid]:
    """Where requests say whose they are (a column `tenant`): what each tenant got."""
    held = {name: found for name, found in runs.items() if "tenant" in found.run.requests}
    if not held:
        return []
    rows = []
    for name, found in held.items():
        for tenant, mine, rate in _tenants(found.run):
            ttft = found.latencies.ttft
            waits = ttft[mine & found.window.keep & ~np.isnan(ttft)]
            mean, tail = (waits.mean(), np.quantile(waits, 0.99)) if len(waits) else (np.nan, np.nan)
            rows.append(row(tenant, name, int(mine.sum()), rate, 1000 * float(mean), 1000 * float(tail)))
    head = compared(found.run for found in held.values()).head
    heads = ("tenant", head, "requests", "tokens\nper s", "TTFT\nmean, ms", "TTFT\np99, ms")
    return [Grid("", heads, tuple(rows))]


def tenant_figures(runs: Mapping[str, Measured]) -> list[Figure]:
    """How even the service is between tenants."""
    bars = [
        Bar(f"tenant {tenant}, {name}", (("tokens", f"c{colour % COLOURS}", rate),))
        for colour, (name, found) in enumerate(runs.items())
        if "tenant" in found.run.requests
        for tenant, _, rate in _tenants(found.run)
    ]
    look = "Equal bars: equal shares of the engine."
    figure = Bars("served", "tokens/s", _sorted(bars)).figure("Service by tenant", look)
    return [figure] if bars else []


def _tenants(run: Run) -> Iterator[tuple[str, Flags, float]]:
    """Each tenant with its requests and its tokens per second."""
    seconds = max(run.span()[1] - run.span()[0], 1e-9)
    tokens = np.where(run.completed(), run.requests["prompt"] + run.requests["output"], 0)
    for tenant in np.unique(run.requests["tenant"]).tolist()[:MOST]:
        mine = run.requests["tenant"] == tenant
        yield str(tenant), mine, float(tokens[mine].sum()) / seconds


def decode_targets(run: Run) -> dict[str, float]:
    """Requests of each class that decode at once in the whole fleet, by the linear program; {} without one.

    Planned from the requests as they came, so for a closed loop, or where the card is gone, there is no plan.
    """
    engines, limits = run.meta.get("engines"), run.meta.get("engine")
    if not isinstance(engines, int) or engines < 2 or not isinstance(limits, dict) or len(run.kinds) < 2:
        return {}
    requests = run.requests
    order = np.argsort(requests["arrival"], kind="stable")
    kept = order[requests["output"][order] >= 1]
    try:
        engine = Engine(load_card(run.meta["card"]).cost, **limits)
        kinds = [Kind(str(kind.get("name", ""))) for kind in run.kinds]
        come, kind = requests["arrival"][kept], requests["kind"][kept]
        offered = Workload.of(
            requests["prompt"][kept], requests["output"][kept], kinds=kinds, arrival=come, kind=kind
        )
        prices = run.meta.get("prices") or {}
        plan = fleet_plan(
            engine, engines, offered, Prices(prices.get("prompt", 1.0), prices.get("output", 2.0))
        )
    except (InputError, KeyError, TypeError):
        return {}
    held = zip(plan.instance.flows, plan.mixed, plan.solo, strict=True)
    return {flow.name: engines * (mixed + solo) for flow, mixed, solo in held}
