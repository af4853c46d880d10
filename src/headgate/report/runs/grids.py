"""The tables of runs: at a glance, every difference, every latency, the engine, the fleet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

import numpy as np

from headgate.core.fleet import PREFILL
from headgate.core.request import ENVELOPE, GAP
from headgate.record.tables import Run
from headgate.report.charts import Axis, Chart, Floats, Series, over_time
from headgate.report.document import (
    BEST,
    LEVEL,
    MARKS,
    TIED,
    Cell,
    Facts,
    Figure,
    Grid,
    Row,
    change,
    interval,
    number,
    percent,
    row,
    share,
    time_unit,
    timed,
    valued,
    whole,
)
from headgate.report.runs.scenes import UNKNOWN, WHOLE, compared, served_rates, unsteady
from headgate.settings_base import BETWEEN_SHOWN
from headgate.stats.comparison import BETTER, WORSE, Comparison
from headgate.stats.comparison import MetricRow as Compared
from headgate.stats.measured import Measured, between_kind, promised
from headgate.stats.metrics import EngineUse, FleetFigures, Metrics, PrefixHits

TONES = {BETTER: "words good", WORSE: "words bad"}
SHORT = {"request throughput": "requests", "total token throughput": "tokens"}  # "p99 ITL": ITL, p99
MINOR = ("lost requests", "mean E2E", "total token throughput")  # the last is left out first


def overview(found: Comparison, head: str) -> Grid:
    def marked(line: Compared, name: str) -> Cell:
        value = line.baseline.value if name == found.baseline else line.others[name].value
        value *= _unit(line)[0]
        mark = _mark(line, name)
        return valued(f"{number(value)}{mark}", value, {BEST: "best", LEVEL: "level"}.get(mark, ""))

    heads = {line.metric: _head(line) for line in found.rows}
    rows = (row(name, *(marked(line, name) for line in found.rows)) for name in found.policies)
    notes = [f"{MARKS} ↑ higher is better, ↓ lower is better."]
    if found.doubts:
        notes.append(f"Not compared per s, without a mark: {', '.join(found.doubts)}; see the verdict.")
    minor = tuple(heads[metric] for metric in MINOR if metric in heads)
    return Grid("", (head, *heads.values()), tuple(rows), tuple(notes), minor=minor)


def differences(found: Comparison, head: str) -> Grid:
    rows: list[Row] = []
    for line in found.rows:
        scale, unit = _unit(line)
        title = f"{line.metric} ({unit}, {'higher' if line.higher_is_better else 'lower'} is better)"
        base, named = line.baseline, f"{_mark(line, found.baseline)} {found.baseline}"
        span = Cell("" if base.low is None else f"value in {interval(base, scale)}", tone="words")
        rows.append(row(title, named, base.value * scale, span, "baseline"))
        for name, other in line.others.items():
            verdict = Cell(other.verdict, tone=TONES.get(other.verdict, "words"))
            percents = valued(change(other), other.percent.value, "words")
            rows.append(row(title, f"{_mark(line, name)} {name}", other.value * scale, percents, verdict))
    heads = ("figure", head, "value", "difference, %\n[95 % interval]", "verdict")
    return Grid("", heads, tuple(rows), _pairing(found), grouped=True)


def _head(line: Compared) -> str:
    unit = _unit(line)[1].replace("requests/s", "per s").replace("tokens/s", "per s")
    statistic, _, latency = line.metric.partition(" ")
    short = SHORT.get(line.metric, line.metric)
    name = f"{latency}\n{statistic}, " if statistic in ("mean", "p99") else f"{short}\n"
    return f"{name}{unit}{TIED}{'↑' if line.higher_is_better else '↓'}"


def _unit(line: Compared) -> tuple[float, str]:
    if line.unit == "share":
        return 100.0, "%"
    return time_unit(line.baseline.value) if line.unit == "s" else (1.0, line.unit)


def _mark(line: Compared, name: str) -> str:
    if line.winner is None:
        return " "
    return BEST if name == line.winner else LEVEL if name in line.level else " "


def _pairing(found: Comparison) -> tuple[str, ...]:
    seeds = "one seed" if found.seeds == 1 else f"{found.seeds} seeds"
    paired: dict[str, list[str]] = {}
    for line in found.rows:
        paired.setdefault(line.method, []).append(line.metric)
    pairs = paired.items()
    how = "; ".join(how if names[0] in how else f"{', '.join(names)} {how}" for how, names in pairs)
    limits = "cut where no value can be: below zero, of a difference below -100 %"
    return (f"95 % intervals, {seeds}, {limits}.", f"Paired: {how}.", found.rule)


def latencies(metrics: Mapping[str, Metrics]) -> Grid:
    alone = len(metrics) == 1
    rows: list[Row] = []
    for name, found in metrics.items():
        gap = "gap of deliveries" if found.bursts else "ITL"
        parts = {"TTFT": found.ttft, "TPOT": found.tpot, gap: found.itl, "E2E": found.e2e}
        for part, each in parts.items():
            scale, unit = time_unit(each.mean.value)
            values = (value * scale for value in (each.median, each.p90, each.p95, each.p99, each.std))
            span = Cell(interval(each.mean, scale))
            cells = row(f"{part} ({unit})", each.mean.value * scale, span, *values)
            rows.append(cells if alone else (*row(name), *cells))
    heads = ("latency", "mean", "95 % interval", "median", "p90", "p95", "p99", "std")
    notes = tuple(dict.fromkeys(found.rule for found in metrics.values()))
    title, first = ("", ()) if alone else ("Latencies", ("run",))
    return Grid(title, (*first, *heads), tuple(rows), notes, grouped=not alone)


def run_facts(found: Measured) -> Facts:
    metrics = found.metrics
    engine, counts, why = metrics.engine, metrics.counts, found.trend.said.removeprefix("Not stationary: ")
    rates, whole = served_rates(found), " over the whole run" if unsteady(found) else ""
    rows = {
        name: f"{number(rate.value)} /s {interval(rate)}".rstrip(" -") + whole for name, rate in rates.items()
    }
    if metrics.goodput is not None:
        good = f": {number(metrics.goodput.rate.value)} requests/s with every promise kept"
        rows["Goodput"] = percent(metrics.goodput.share.value) + (
            " of the requests measured" if whole else good
        )
    shares = ", ".join(f"{percent(part)} {name}" for name, part in engine.time.items())
    measured = f"{number(metrics.seconds)} s measured of {number(metrics.duration)} s"
    again = f"{percent(engine.wasted_share)} of all tokens computed again"
    others = {name: getattr(counts, name) for name in ("aborted", "abandoned", "refused", "unfinished")}
    ended = [f"{many} {name}" for name, many in others.items() if many]
    rows |= {
        "Longest gap": f"{timed(metrics.longest_gap)} between two tokens of one request",
        "KV": _memory(engine),
        "Busy": f"{percent(engine.utilisation)} of the time, {measured}; steps: {shares}",
        "Preemptions": f"{engine.preemptions:,}, {again}",
        "Finished": ", ".join([f"{counts.completed:,} of {counts.total:,} requests", *ended]),
        "Stationary": f"yes, {metrics.reason}" if metrics.stationary else f"NO: {why[:1].lower()}{why[1:]}",
    }
    if metrics.prefix_cache:
        rows["Prefix cache"] = _hits(metrics.prefix_cache)
    if metrics.rough:
        names = ", ".join(metrics.rough)
        rows["Intervals"] = f"unreliable: samples are correlated ({names}); use more requests"
    return Facts(rows)


def _hits(hits: PrefixHits) -> str:
    parts = f"{percent(hits.all.share)} of prompt tokens found"
    if len(hits.engines) > 1:
        shares = [found.share for found in hits.engines.values()]
        parts += f", {percent(min(shares))} to {percent(max(shares))} by engine"
    if hits.all.saved is not None:
        parts += f"; {number(hits.all.saved)} s of prefill saved"
    evicted = "as recorded" if hits.evicted is None else f"{hits.evicted:,} cached blocks evicted"
    return f"{parts}; {evicted}"


def prefix_grid(metrics: Mapping[str, Metrics]) -> list[Grid]:
    rows: list[Row] = []
    for name, found in metrics.items():
        hits = found.prefix_cache
        if hits is None:
            continue
        for part, each in {"all": hits.all, **(hits.kinds if len(hits.kinds) > 1 else {})}.items():
            saved = "" if each.saved is None else each.saved
            evicted = "" if part != "all" or hits.evicted is None else hits.evicted
            rows.append(row(name, part, share(each.share), each.tokens, saved, evicted))
    if len(rows) < 2:
        return []
    heads = ("run", "of", "prompt tokens\nfound", "tokens\nfound", "prefill saved\ns")
    return [Grid("", (*heads, "cached blocks\nevicted"), tuple(rows), grouped=True)]


def _memory(engine: EngineUse) -> str:
    if math.isnan(engine.kv_tokens):
        return f"{number(engine.kv_mean)} tokens, peak {number(engine.kv_peak)}"
    mean, peak = percent(engine.kv_mean / engine.kv_tokens), percent(engine.kv_peak / engine.kv_tokens)
    return f"{mean}, peak {peak}, of {number(engine.kv_tokens)} tokens"


def rates(runs: Mapping[str, Measured]) -> Grid:
    rows = []
    for name, measured in runs.items():
        found, told = measured.metrics, served_rates(measured)
        counts, rate = found.counts, told["Requests"]
        tokens = (told.get("Output tokens", UNKNOWN).value, told["All tokens"].value)
        lost = counts.abandoned + counts.aborted + counts.refused
        steady = Cell("yes" if found.stationary else "no", tone="" if found.stationary else "bad")
        rows.append(row(name, rate.value, Cell(interval(rate)), *tokens, counts.completed, lost, steady))
    heads = ("run", "requests\nper s", "95 % interval", "output tokens\nper s", "all tokens\nper s")
    said = dict.fromkeys(f"{each.trend.said}." for each in runs.values() if not each.trend.stationary)
    said |= dict.fromkeys([WHOLE] if any(map(unsteady, runs.values())) else [])
    return Grid("Throughput", (*heads, "served", "lost", "stationary"), tuple(rows), tuple(said))


def engines(metrics: Mapping[str, Metrics]) -> Grid:
    rows = []
    for name, found in metrics.items():
        engine = found.engine
        shares = [engine.utilisation, engine.time["prefill"], engine.time["decode"], engine.time["mixed"]]
        shares += [engine.kv_mean / engine.kv_tokens, engine.kv_peak / engine.kv_tokens]
        rows.append(row(name, *map(share, shares), engine.preemptions, share(engine.wasted_share)))
    steps = (f"{phase} steps\nof busy time" for phase in ("prefill", "decode", "mixed"))
    heads = ("run", "busy\nof the time", *steps, "KV mean\nof memory", "KV peak\nof memory", "preemptions")
    return Grid("The engine", (*heads, "computed again\nof all tokens"), tuple(rows))


def fleets(figures: Mapping[str, FleetFigures]) -> Grid:
    rows: list[Row] = []
    priced = any(not math.isnan(found.revenue) for found in figures.values())
    for name, found in figures.items():
        router = f", router {found.router}" if found.router and found.router not in name else ""
        for place, pool in enumerate(found.pools):
            spreads = (pool.decodes, pool.requests)
            decodes, served = (" / ".join(map(whole, asdict(part).values())) for part in spreads)
            decodes, served = ("", "prompts only") if pool.role == PREFILL else (decodes, served)
            busy = valued(whole(100 * pool.busy.mean), 100 * pool.busy.mean)
            each = found.revenue_per_engine
            revenue = Cell("") if place else valued(number(each), each)
            cells = (Cell(decodes), Cell(served), *((revenue,) if priced else ()))
            rows.append(row(f"{name}{router}", f"{pool.engines} {pool.role}", busy, *cells))
    heads: tuple[str, ...] = ("fleet", "engines", "busy\n%", "decodes at once\nleast / mean / most")
    heads += ("requests served\nleast / mean / most", *(("revenue /s\nper engine",) if priced else ()))
    notes = dict.fromkeys(note for name, found in figures.items() for note in _earned(name, found))
    return Grid("", heads, tuple(rows), tuple(notes), grouped=True)


def _earned(name: str, found: FleetFigures) -> Iterator[str]:
    if found.prices:
        yield "Revenue: {prompt:g} per prompt token, {output:g} per output token.".format(**found.prices)
    if found.prices and len(found.kind_revenue) > 1:
        each = ", ".join(f"{name or '-'} {number(value)}" for name, value in found.kind_revenue.items())
        yield f"{name}: revenue {number(found.revenue)} /s: {each}."


# -- by class of request, by tenant and by engine

COLUMNS = 160  # of a picture over time
VALUE = "Value kept: {} (the weights of kept promises over those of all promised requests)."
MOST_RUNS = 3  # whose classes are drawn


def class_grid(metrics: Mapping[str, Metrics], head: str) -> list[Grid]:
    if not any(len(found.kinds) > 1 for found in metrics.values()):
        return []
    heads: tuple[str, ...] = ("class", head, "requests\nmeasured", "promised\nTTFT, tokens")
    heads += ("TTFT\nmean, ms", "TTFT\np99, ms", "TPOT\nmean, ms", "TPOT\np99, ms")
    heads += ("E2E\nmean, s", "longest gap\nms", "goodput")
    rows = []
    for place in range(max(len(found.kinds) for found in metrics.values())):
        for name, found in metrics.items():
            if place >= len(found.kinds):
                continue
            kind = found.kinds[place]
            limits = (kind.first_token, kind.between_tokens)
            told = ("-" if limit is None else within("", limit) for limit in limits)
            promised = ", ".join(told).replace("-, -", "-")
            if kind.between_kind != GAP and kind.between_tokens is not None:
                promised += f" {kind.between_kind}"
            times = (kind.ttft.mean.value, kind.ttft.p99, kind.tpot.mean.value, kind.tpot.p99)
            cells = (*(1000 * value for value in times), kind.e2e.mean.value, 1000 * kind.longest_gap)
            good = share(kind.goodput.share.value if kind.goodput else np.nan)
            rows.append(row(kind.name or "-", name, kind.measured, Cell(promised), *cells, good))
    grid = Grid("", heads, tuple(rows), grouped=True, minor=(heads[2], heads[8], heads[9], heads[3]))
    return _named(grid, metrics)


def worth_grid(metrics: Mapping[str, Metrics], head: str) -> list[Grid]:
    rows, kept = [], []
    for name, found in metrics.items():
        for kind in found.kinds:
            if (standing := kind.standing) is None:
                continue
            weight = "by priority" if standing.weight is None else f"{standing.weight:g}"
            good = share(kind.goodput.share.value if kind.goodput else np.nan)
            worth = "background" if standing.background else weight
            rows.append(row(kind.name or "-", name, worth, good, standing.evictions, standing.token_rate))
        if found.value_kept is not None:
            alone = "" if len(metrics) == 1 else f"{name} "
            kept.append(f"{alone}{percent(found.value_kept)}")
    if not rows:
        return []
    heads = ("class", head, "weight", "promises\nkept", "evictions", "tokens\nper s")
    grid = Grid("", heads, tuple(rows), (VALUE.format("; ".join(kept)),) if kept else ())
    return _named(grid, metrics)


def _named(grid: Grid, metrics: Mapping[str, Metrics]) -> list[Grid]:
    if len(metrics) > 1:
        return [grid]
    rows = tuple((each[0], *each[2:]) for each in grid.rows)
    return [replace(grid, heads=(grid.heads[0], *grid.heads[2:]), rows=rows, grouped=False)]


def class_figures(runs: Mapping[str, Run]) -> Iterator[Figure]:
    several = any(len(run.kinds) > 1 for run in runs.values())
    for name, run in list(runs.items())[:MOST_RUNS] if several else ():
        edges, middle = _columns(run)
        requests, end = run.requests, run.span()[1]
        series = []
        for place, kind in enumerate(run.kinds):
            mine = requests["kind"] == place
            first, finished = (requests[word][mine] for word in ("first_token", "finished"))
            decoding = _present(first, np.where(np.isnan(finished), end, finished), edges)
            series.append(Series(str(kind.get("name") or "-"), middle, decoding, place))
        chart = Chart(Axis("time since the start", "s"), Axis("decoding", "requests", low=0.0), series)
        look = "Which class holds the engine's slots, and whether that settles."
        yield chart.figure(f"Decoding by class: {name}", look)


def _present(since: Floats, until: Floats, edges: Floats) -> Floats:
    known = ~np.isnan(since)
    begin, end = np.sort(since[known]), np.sort(until[known])

    def spent(moments: Floats) -> Floats:
        sums = np.concatenate(([0.0], np.cumsum(moments)))
        count = np.searchsorted(moments, edges)
        return np.asarray(count * edges - sums[count])

    return np.asarray(np.diff(spent(begin) - spent(end)) / np.diff(edges))


def _columns(run: Run) -> tuple[Floats, Floats]:
    low, high = run.span()
    edges = np.linspace(low, max(high, low + 1e-9), COLUMNS + 1)
    return edges, (edges[:-1] + edges[1:]) / 2


def tenant_grid(metrics: Mapping[str, Metrics], head: str) -> list[Grid]:
    rows, apart = [], []
    for name, found in metrics.items():
        if (figures := found.tenants) is None:
            continue
        for each in (*figures.tenants, *([figures.rest] if figures.rest else ())):
            shares = share(each.contended), share(each.kept)
            rows.append(row(each.name, name, each.requests, each.service, *shares))
        if not np.isnan(figures.apart):
            alone = "" if len(metrics) == 1 else f"{name}: "
            apart.append(f"{alone}{figures.ahead} got {number(figures.apart)} more than {figures.behind}")
    if not rows:
        return []
    heads = ("tenant", head, "requests", "service\ntokens", "share while\nothers wait", "promises\nkept")
    worst = f"The most that one gained on another while both waited: {'; '.join(apart)}"
    worst = worst if apart else "No two tenants ever waited at the same time"
    said = f"Service: prompt tokens and twice the output tokens. {worst}."
    return _named(Grid("", heads, tuple(rows), (said,)), metrics)


def fleet_figures(runs: Mapping[str, Run]) -> Iterator[Figure]:
    slots = []
    for colour, (name, run) in enumerate(runs.items()):
        engines = np.unique(run.steps["replica"])
        if len(engines) < 2:
            continue
        edges, middle = _columns(run)
        decodes = []
        for engine in engines:
            rows = run.steps["replica"] == engine
            start, seconds = (run.steps[word][rows].astype(float) for word in ("start", "seconds"))
            decodes.append(over_time(start, seconds, run.steps["decodes"][rows].astype(float), edges).mean)
        low, mean, high = (getattr(np, name)(decodes, axis=0) for name in ("min", "mean", "max"))
        slots += [Series(name, middle, mean, colour, "band", low, high), Series(name, middle, mean, colour)]
    if slots:
        up = Axis("decoding", "requests per engine", low=0.0)
        look = "A wide band means some engines idle while others are full."
        chart = Chart(Axis("time since the start", "s"), up, slots)
        yield chart.figure("Slots in use across the fleet", look)


# -- promises, by class

KEPT = 0.95  # a promise that fewer requests get is shown as broken
HEADS = ("kept", "both", "promised", "TTFT\nin time", "tokens\nin time", "requests")
NOTE = (
    f"Requests after warm-up and before cool-down. Kept: at least {100 * KEPT:.0f} % of the requests got "
    "every promise; requests that were refused, or left, did not. Tokens in time: requests with every gap "
    "between two tokens within the promise, or their mean where TPOT was promised."
)
DUE = "Where an envelope was promised: requests with token j by the promised TTFT and j times the envelope."


def promise_panel(runs: Mapping[str, Measured]) -> Iterator[Grid]:
    rows = [line for name, found in runs.items() for line in _rows(name, found)]
    if rows:
        head = compared(found.run for found in runs.values()).head
        due = any(between_kind(kind) == ENVELOPE for found in runs.values() for kind in found.run.kinds)
        yield Grid("", (head, "class", *HEADS), tuple(rows), (NOTE, DUE) if due else (NOTE,))


def _rows(name: str, found: Measured) -> Iterator[Row]:
    promises, latencies = found.promises, found.latencies
    if promises is None:
        return
    for position, kind in enumerate(found.run.kinds):
        mine = (found.run.requests["kind"] == position) & found.window.keep & promises.judged
        if not promised(kind) or not mine.any():
            continue
        first, between = kind.get("first_token"), kind.get("between_tokens")
        both = float(promises.met[mine].mean())
        limits = (within("TTFT", first), within(BETWEEN_SHOWN[between_kind(kind)], between))
        kept = Cell("yes", tone="words good") if both >= KEPT else Cell("no", tone="words bad")
        promise = Cell(", ".join(filter(None, limits)), tone="words")
        in_time = _in_time(latencies.ttft[mine], first, 0.0)
        gaps = _in_time(found.between_tokens[mine], between, 1.0)
        named = str(kind.get("name") or "all")
        yield row(name, named, kept, share(both), promise, in_time, gaps, int(mine.sum()))


def within(name: str, limit: float | None) -> str:
    if limit is None:
        return ""
    scale, unit = time_unit(limit)
    return f"{f'{name} ≤ ' if name else ''}{scale * limit:g} {unit}"


def _in_time(times: np.ndarray, limit: float | None, unknown: float) -> Cell:
    """The share within the limit; `unknown` is what requests without such a time count as."""
    if limit is None:
        return Cell("-")
    return share(float(np.where(np.isnan(times), unknown, times <= limit).mean()))
