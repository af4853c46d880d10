"""The tables of a report: the same numbers as on the terminal, to be sorted and copied."""

from __future__ import annotations

from collections.abc import Mapping

from headgate.report.document import Cell, Grid
from headgate.stats.comparison import BETTER, WORSE, Comparison, Row
from headgate.stats.figures import Figures
from headgate.stats.metrics import Metrics
from headgate.report.terminal.tables import BEST, LEVEL, change, interval, number, percent, time_unit

TONES = {BETTER: "words good", WORSE: "words bad"}


def overview(found: Comparison, head: str) -> Grid:
    """One line for each that is compared, one column per figure, the best marked."""
    heads = [head]
    for row in found.rows:
        heads.append(f"{row.metric}\n{_unit(row)[1]} {'↑' if row.higher_is_better else '↓'}")
    rows = [
        (Cell(name), *(_marked(row, name, found.baseline) for row in found.rows)) for name in found.policies
    ]
    marks = f"{BEST} best of its column, {LEVEL} cannot be told from the best by its paired difference; "
    marks += "no mark in a column: none can be told from the best. ↑ higher is better, ↓ lower is better."
    return Grid("At a glance", tuple(heads), tuple(rows), (marks, found.rule))


def differences(found: Comparison, head: str) -> Grid:
    """Every difference from the baseline with its interval."""
    heads = ("figure", head, "value", "unit", "difference\n% [95 % interval]", "verdict")
    rows: list[tuple[Cell, ...]] = []
    for row in found.rows:
        scale, unit = _unit(row)
        base = row.baseline
        rows.append(
            (
                Cell(row.metric),
                Cell(found.baseline, tone="words"),
                _value(base.value, scale),
                Cell(unit, tone="words"),
                Cell("" if base.low is None else f"value in {interval(base, scale)}"),
                Cell("baseline", tone="words"),
            )
        )
        for name, other in row.others.items():
            shown = Cell(
                change(other), other.percent.value if other.percent.value == other.percent.value else None
            )
            rows.append(
                (
                    Cell(row.metric),
                    Cell(name, tone="words"),
                    _value(other.value, scale),
                    Cell(unit, tone="words"),
                    shown,
                    Cell(other.verdict, tone=TONES.get(other.verdict, "words")),
                )
            )
    return Grid(f"Every difference from {found.baseline}", heads, tuple(rows), _pairing(found))


def _pairing(found: Comparison) -> tuple[str, ...]:
    """How runs were paired, by figure, and what intervals are."""
    seeds = "one seed" if found.seeds == 1 else f"{found.seeds} seeds"
    paired: dict[str, list[str]] = {}
    for row in found.rows:
        paired.setdefault(row.method, []).append(row.metric)
    how = "; ".join(
        method if metrics[0] in method else f"{', '.join(metrics)} {method}"
        for method, metrics in paired.items()
    )
    limits = "cut where no value can be: below zero, of a difference below -100 %"
    return (f"95 % intervals, {seeds}, {limits}.", f"Paired: {how}.")


def latencies(metrics: Mapping[str, Metrics]) -> Grid:
    """TTFT, TPOT, ITL and E2E of every run."""
    heads = ("run", "latency", "unit", "mean", "95 % interval", "median", "p90", "p95", "p99", "longest")
    rows: list[tuple[Cell, ...]] = []
    for name, found in metrics.items():
        parts = {"TTFT": found.ttft, "TPOT": found.tpot, "ITL": found.itl, "E2E": found.e2e}
        for word, figures in parts.items():
            rows.append(_latency(name, word, figures, found.longest_gap if word == "ITL" else None))
    rules = dict.fromkeys(found.rule for found in metrics.values())
    return Grid("Latencies", heads, tuple(rows), tuple(rules))


def _latency(name: str, word: str, found: Figures, longest: float | None) -> tuple[Cell, ...]:
    scale, unit = time_unit(found.mean.value)
    values = (found.median, found.p90, found.p95, found.p99)
    return (
        Cell(name),
        Cell(word, tone="words"),
        Cell(unit, tone="words"),
        _value(found.mean.value, scale),
        Cell(interval(found.mean, scale)),
        *(_value(value, scale) for value in values),
        Cell("") if longest is None else _value(longest, scale),
    )


def rates(metrics: Mapping[str, Metrics]) -> Grid:
    """What each run served, and whether it came to rest."""
    heads = (
        *("run", "requests\nper s", "95 % interval", "output tokens\nper s", "all tokens\nper s"),
        *("served\nrequests", "lost\nrequests", "stationary"),
    )
    rows = []
    for name, found in metrics.items():
        counts = found.counts
        lost = counts.abandoned + counts.aborted + counts.refused
        rows.append(
            (
                Cell(name),
                _value(found.request_rate.value),
                Cell(interval(found.request_rate)),
                *(_value(rate.value) for rate in (found.output_rate, found.total_rate)),
                Cell(f"{counts.completed:,}", float(counts.completed)),
                Cell(f"{lost:,}", float(lost)),
                Cell("yes" if found.stationary else "no", tone="" if found.stationary else "bad"),
            )
        )
    reasons = dict.fromkeys(found.reason for found in metrics.values() if not found.stationary)
    return Grid("Throughput", heads, tuple(rows), tuple(f"Not stationary: {why}." for why in reasons))


def engines(metrics: Mapping[str, Metrics]) -> Grid:
    """How each run used the engine."""
    heads = (
        *("run", "busy\nof the time", "prefill steps\nof busy time", "decode steps\nof busy time"),
        *("mixed steps\nof busy time", "KV mean\nof memory", "KV peak\nof memory", "preemptions"),
        "done again\nof all tokens",
    )
    rows = []
    for name, found in metrics.items():
        engine = found.engine
        shares = (engine.utilisation, engine.time["prefill"], engine.time["decode"], engine.time["mixed"])
        memory = (engine.kv_mean / engine.kv_tokens, engine.kv_peak / engine.kv_tokens)
        rows.append(
            (
                Cell(name),
                *(_share(share) for share in (*shares, *memory)),
                Cell(f"{engine.preemptions:,}", float(engine.preemptions)),
                _share(engine.wasted_share),
            )
        )
    return Grid("The engine", heads, tuple(rows))


def _unit(row: Row) -> tuple[float, str]:
    if row.unit == "share":
        return 100.0, "%"
    return time_unit(row.baseline.value) if row.unit == "s" else (1.0, row.unit)


def _marked(row: Row, name: str, baseline: str) -> Cell:
    scale, _ = _unit(row)
    value = row.baseline.value if name == baseline else row.others[name].value
    if row.winner is None or not (name == row.winner or name in row.level):
        return _value(value, scale)
    best = name == row.winner
    cell = _value(value, scale)
    return Cell(f"{cell.text} {BEST if best else LEVEL}", cell.value, "best" if best else "level")


def _value(value: float, scale: float = 1.0) -> Cell:
    return Cell(number(value * scale), value * scale if value == value else None)


def _share(share: float) -> Cell:
    return Cell(percent(share), 100 * share if share == share else None)
