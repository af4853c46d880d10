"""The tables of runs: at a glance, every difference, every latency, the engine, the fleet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from headgate.core.fleet import PREFILL
from headgate.report.document import (
    BEST,
    LEVEL,
    MARKS,
    TIED,
    Cell,
    Facts,
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
from headgate.stats.comparison import BETTER, WORSE, Comparison
from headgate.stats.comparison import MetricRow as Compared
from headgate.stats.figures import Figures
from headgate.stats.fleet import FleetFigures
from headgate.stats.measured import Measured
from headgate.stats.metrics import EngineUse, Metrics, PrefixHits

TONES = {BETTER: "words good", WORSE: "words bad"}
SHORT = {"request throughput": "requests", "total token throughput": "tokens"}  # "p99 ITL": ITL, p99
MINOR = ("lost requests", "mean E2E", "total token throughput")  # the last is left out first


def overview(found: Comparison, head: str) -> Grid:
    """One line for each that is compared, one column per figure, the best marked."""
    heads = {line.metric: _head(line) for line in found.rows}
    rows = (row(name, *(_marked(line, name, found) for line in found.rows)) for name in found.policies)
    notes = [f"{MARKS} ↑ higher is better, ↓ lower is better."]
    if found.doubts:
        notes.append(f"Not compared per s, without a mark: {', '.join(found.doubts)}; see the verdict.")
    minor = tuple(heads[metric] for metric in MINOR if metric in heads)
    return Grid("", (head, *heads.values()), tuple(rows), tuple(notes), minor=minor)


def differences(found: Comparison, head: str) -> Grid:
    """Every difference from the baseline with its interval."""
    rows: list[Row] = []
    for line in found.rows:
        scale, unit = _unit(line)
        title = f"{line.metric} ({unit}, {'higher' if line.higher_is_better else 'lower'} is better)"
        base = line.baseline
        span = Cell("" if base.low is None else f"value in {interval(base, scale)}", tone="words")
        value = base.value * scale
        rows.append(row(title, f"{_mark(line, found.baseline)} {found.baseline}", value, span, "baseline"))
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


def _marked(line: Compared, name: str, found: Comparison) -> Cell:
    value = line.baseline.value if name == found.baseline else line.others[name].value
    value *= _unit(line)[0]
    mark = _mark(line, name)
    return valued(f"{number(value)}{mark}", value, {BEST: "best", LEVEL: "level"}.get(mark, ""))


def _pairing(found: Comparison) -> tuple[str, ...]:
    """How runs were paired, by figure, and what intervals are."""
    seeds = "one seed" if found.seeds == 1 else f"{found.seeds} seeds"
    paired: dict[str, list[str]] = {}
    for line in found.rows:
        paired.setdefault(line.method, []).append(line.metric)
    pairs = paired.items()
    how = "; ".join(how if names[0] in how else f"{', '.join(names)} {how}" for how, names in pairs)
    limits = "cut where no value can be: below zero, of a difference below -100 %"
    return (f"95 % intervals, {seeds}, {limits}.", f"Paired: {how}.", found.rule)


def latencies(metrics: Mapping[str, Metrics]) -> Grid:
    """TTFT, TPOT, ITL and E2E of every run, each in its own unit."""
    alone, rows = len(metrics) == 1, []
    for name, found in metrics.items():
        gap = "gap of deliveries" if found.bursts else "ITL"
        parts = {"TTFT": found.ttft, "TPOT": found.tpot, gap: found.itl, "E2E": found.e2e}
        rows += [(*(() if alone else row(name)), *_latency(*part)) for part in parts.items()]
    heads = ("latency", "mean", "95 % interval", "median", "p90", "p95", "p99", "std")
    notes = tuple(dict.fromkeys(found.rule for found in metrics.values()))
    title, first = ("", ()) if alone else ("Latencies", ("run",))
    return Grid(title, (*first, *heads), tuple(rows), notes, grouped=not alone)


def _latency(name: str, found: Figures) -> Row:
    scale, unit = time_unit(found.mean.value)
    values = (value * scale for value in (found.median, found.p90, found.p95, found.p99, found.std))
    span = Cell(interval(found.mean, scale))
    return row(f"{name} ({unit})", found.mean.value * scale, span, *values)


def run_facts(found: Measured) -> Facts:
    """What is one number in a run, with its unit."""
    metrics = found.metrics
    engine, counts, why = metrics.engine, metrics.counts, found.trend.said.removeprefix("Not stationary: ")
    rates = {"Requests": metrics.request_rate, "Output tokens": metrics.output_rate}
    rates |= {"All tokens": metrics.total_rate}
    rows = {name: f"{number(rate.value)} /s {interval(rate)}".rstrip(" -") for name, rate in rates.items()}
    if metrics.goodput is not None:
        good = f"{number(metrics.goodput.rate.value)} requests/s with every promise kept"
        rows["Goodput"] = f"{percent(metrics.goodput.share.value)}: {good}"
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
    return Facts.of(rows)


def _hits(hits: PrefixHits) -> str:
    """The share of prompt tokens that were found, what that saved, and evictions."""
    parts = f"{percent(hits.all.share)} of prompt tokens found"
    if len(hits.engines) > 1:
        shares = [found.share for found in hits.engines.values()]
        parts += f", {percent(min(shares))} to {percent(max(shares))} by engine"
    if hits.all.saved is not None:
        parts += f"; {number(hits.all.saved)} s of prefill saved"
    evicted = "as recorded" if hits.evicted is None else f"{hits.evicted:,} cached blocks evicted"
    return f"{parts}; {evicted}"


def prefix_grid(metrics: Mapping[str, Metrics], by_engine: bool = False) -> list[Grid]:
    """Hits of several runs or classes, or of the engines of fleets; a single line stands among the facts."""
    rows: list[Row] = []
    for name, found in metrics.items():
        hits = found.prefix_cache
        if hits is None:
            continue
        if by_engine:
            parts = {f"engine {each}": part for each, part in hits.engines.items()}
            evicted = {f"engine {each}": count for each, count in hits.evicted_by_engine.items()}
        else:
            parts = {"all": hits.all, **(hits.kinds if len(hits.kinds) > 1 else {})}
            evicted = {} if hits.evicted is None else {"all": hits.evicted}
        for part, each in parts.items():
            saved = "" if each.saved is None else each.saved
            cells = share(each.share), each.tokens, saved, evicted.get(part, "")
            rows.append(row(name, part, *cells))
    if len(rows) < 2:
        return []
    heads = ("run", "of", "prompt tokens\nfound", "tokens\nfound", "prefill saved\ns")
    return [Grid("", (*heads, "cached blocks\nevicted"), tuple(rows), grouped=True)]


def _memory(engine: EngineUse) -> str:
    """Mean and peak KV, as shares where the size is known."""
    if math.isnan(engine.kv_tokens):
        return f"{number(engine.kv_mean)} tokens, peak {number(engine.kv_peak)}"
    mean, peak = percent(engine.kv_mean / engine.kv_tokens), percent(engine.kv_peak / engine.kv_tokens)
    return f"{mean}, peak {peak}, of {number(engine.kv_tokens)} tokens"


def rates(runs: Mapping[str, Measured]) -> Grid:
    """What each run served, and whether it came to rest."""
    rows = []
    for name, measured in runs.items():
        found = measured.metrics
        counts, rate = found.counts, found.request_rate
        tokens = (found.output_rate.value, found.total_rate.value)
        lost = counts.abandoned + counts.aborted + counts.refused
        steady = Cell("yes" if found.stationary else "no", tone="" if found.stationary else "bad")
        rows.append(row(name, rate.value, Cell(interval(rate)), *tokens, counts.completed, lost, steady))
    heads = ("run", "requests\nper s", "95 % interval", "output tokens\nper s", "all tokens\nper s")
    said = dict.fromkeys(f"{each.trend.said}." for each in runs.values() if not each.trend.stationary)
    return Grid("Throughput", (*heads, "served", "lost", "stationary"), tuple(rows), tuple(said))


def engines(metrics: Mapping[str, Metrics]) -> Grid:
    """How each run used the engine."""
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
    """Several fleets, one line per role of each: least, mean and most over its engines."""
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
    notes = dict.fromkeys(note for found in figures.values() for note in _earned(found))
    return Grid("", heads, tuple(rows), tuple(notes), grouped=True)


def _earned(found: FleetFigures) -> list[str]:
    """At which prices, so that no reader takes the defaults for money; by class where there are several."""
    if not found.prices:
        return []
    notes = ["Revenue: {prompt:g} per prompt token, {output:g} per output token.".format(**found.prices)]
    if len(found.kind_revenue) > 1:
        each = ", ".join(f"{name or '-'} {number(value)}" for name, value in found.kind_revenue.items())
        notes.append(f"{found.router}: revenue {number(found.revenue)} /s: {each}.")
    return notes
