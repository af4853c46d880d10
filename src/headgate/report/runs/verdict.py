"""The verdict in one sentence, with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headgate.report.runs.compared import POLICIES, Compared
from headgate.report.runs.scenes import Scene
from headgate.stats.comparison import BETTER, SAME, TOO_FEW, WORSE, Comparison, Difference, Row
from headgate.stats.metrics import Metrics
from headgate.record.tables import Run
from headgate.report.terminal.tables import number, percent, time_unit

NEGLIGIBLE = 1.0  # percent of throughput
MATTER = {  # what a gain may cost, or what is left to win where throughput is not
    "goodput": "the share of kept promises",
    "mean TTFT": "mean TTFT",
    "mean TPOT": "mean TPOT",
    "p99 ITL": "p99 ITL",
}


def scene_verdict(scene: Scene) -> str:
    """Of a comparison, or of a single run."""
    found = scene.comparison
    if isinstance(found, Comparison):
        return comparison_verdict(found, scene.compared)
    if found is None:
        name, run = next(iter(scene.first.items()))
        return run_verdict(name, run, scene.metrics[name])
    return f"No verdict: {found}. The figures of each run stand below."


def run_verdict(name: str, run: Run, metrics: Metrics) -> str:
    """What one run served, how soon, and whether it came to its end."""
    outcome = str(run.meta.get("outcome", "finished"))
    ended = "" if outcome == "finished" else f"The run was {outcome}; this is what there is. "
    if not metrics.counts.completed:
        return f"{ended}No request of {metrics.counts.total:,} was served to its end."
    rate = metrics.request_rate
    said = f"{name} serves {number(rate.value)} requests/s{_span(rate.low, rate.high)}"
    first, last = _timed(metrics.ttft.mean.value), _timed(metrics.ttft.p99)
    said += f": a first token after {first} on average (p99 {last})"
    if not math.isnan(metrics.tpot.mean.value):
        said += f", then one every {_timed(metrics.tpot.mean.value)}"
    if metrics.goodput:
        share = metrics.goodput.share
        said += f"; {percent(share.value)} of the requests got what they were promised"
    busy = metrics.engine.utilisation
    spare = ", so there is time to spare" if busy < 0.8 else ""
    said += f". The engine is busy {percent(busy)} of the time{spare}."
    return ended + said


def comparison_verdict(found: Comparison, of: Compared = POLICIES) -> str:
    """Who serves more than the baseline and at which price; else what there is to win in latency."""
    rows = {row.metric: row for row in found.rows}
    served = rows.get("request throughput")
    if served is None:
        return "No request was served to its end, so there is nothing to compare."
    if all(other.verdict == TOO_FEW for other in served.others.values()):
        return f"Too few requests to tell the {of.many} apart: {_values(served, found)}."
    winner = winner_of(served)
    if winner is None:
        return _nothing_to_gain(found, rows, of)
    gain = served.others[winner]
    said = f"{winner} serves {amount(gain)} more requests than {found.baseline}{percents(gain)}"
    said += f", the most of {len(served.others)} tried" if len(served.others) > 1 else ""
    said += price(rows, winner)
    alike = [name for name in served.level if name != found.baseline]
    if served.best == winner and alike:
        said += f"; in requests served {listed(alike)} cannot be told from it"
    return said + "."


def winner_of(served: Row) -> str | None:
    """Who surely serves more than the baseline; of several, the one that serves most."""
    surely = [name for name, other in served.others.items() if other.verdict == BETTER]
    return max(surely, key=lambda name: served.others[name].value) if surely else None


def room_for(served: Row | None) -> float:
    """Percent that a gain nobody has seen may have all the same; infinite where there is no interval."""
    if served is None:
        return math.inf
    ends = [other.percent.high for other in served.others.values() if other.verdict != WORSE]
    return max((math.inf if end is None else end for end in ends), default=0.0)


def unseen(room: float) -> str:
    """What may be said of a gain that was not seen: no more than the intervals leave out."""
    return _nothing(room) if room < NEGLIGIBLE else f"no gain is seen, {_doubt(room)}"


def unseen_at(where: str, room: float) -> str:
    """The same behind the words that nobody is seen to serve more."""
    return f": {where} {_nothing(room)}" if room < NEGLIGIBLE else f" {where}, {_doubt(room)}"


def _nothing(room: float) -> str:
    return f"there is no throughput to gain (95 % intervals end at {room:+.1f} %)"


def _doubt(room: float) -> str:
    if math.isinf(room):
        return "and too little was served to leave one out"
    return f"though 95 % intervals leave room for {room:.1f} %"


def served_by(found: object) -> Row | None:
    """The line of requests per second; None where there is no comparison."""
    rows = found.rows if isinstance(found, Comparison) else ()
    return next((row for row in rows if row.metric == "request throughput"), None)


def _nothing_to_gain(found: Comparison, rows: dict[str, Row], of: Compared) -> str:
    served = rows["request throughput"]
    fewer = [name for name, other in served.others.items() if other.verdict == WORSE]
    said = f"No {of.one} is seen to serve more requests than {found.baseline}"
    said += unseen_at("at this load", room_for(served))
    if fewer:
        said += f" ({listed(fewer)} serve{'s' if len(fewer) == 1 else ''} fewer)"
    differs = what_else(rows)
    return f"{said}. What differs: {differs}." if differs else f"{said}, and no latency is seen to be better."


def what_else(rows: Mapping[str, Row]) -> str:
    """Who is best in which other figure, and what that costs in the others; "" when nobody is."""
    wins: list[str] = []
    winners: list[str] = []
    for metric, name in MATTER.items():
        row = rows.get(metric)
        better = {other: each for other, each in row.others.items() if each.verdict == BETTER} if row else {}
        if better:
            best = max(better, key=lambda other: abs(better[other].percent.value))
            winners += [] if best in winners else [best]
            wins.append(f"{best} has {_change(name, better[best])}{percents(better[best])}")
    return f"{listed(wins)}{_paid(rows, winners)}" if wins else ""


def _paid(rows: Mapping[str, Row], winners: Sequence[str]) -> str:
    """What those that win in one figure lose in another."""
    said = ""
    for winner in winners:
        each = {name: rows[metric].others[winner] for metric, name in MATTER.items() if metric in rows}
        worse = [_change(name, other) for name, other in each.items() if other.verdict == WORSE]
        said += f"; {winner} pays with {listed(worse)}" if worse else ""
    return said


def price(rows: Mapping[str, Row], winner: str) -> str:
    """What else changes with a gain; "" when nothing can be said."""
    each = [_price(rows[metric], winner, name) for metric, name in MATTER.items() if metric in rows]
    told = [part for part in each if part]
    return f", with {listed(told)}" if told else ""


def _price(row: Row, winner: str, name: str) -> str:
    """What happens to another figure; "" when nothing can be said."""
    other = row.others[winner]
    if other.verdict == SAME:
        return f"no difference seen in {name}"
    return _change(name, other) if other.verdict in (BETTER, WORSE) else ""


def _change(name: str, other: Difference) -> str:
    change = other.percent.value
    if math.isnan(change):
        return f"another {name}"
    if change >= 100:
        return f"{name} {1 + change / 100:.1f} times as high"
    return f"{name} {abs(change):.1f} % {'higher' if change > 0 else 'lower'}"


def amount(gain: Difference) -> str:
    """A gain in percent."""
    return f"{gain.percent.value:.1f} %"


def percents(other: Difference) -> str:
    """Its interval, in brackets; "" where there is none."""
    low, high = other.percent.low, other.percent.high
    return "" if low is None or high is None else f" (95 % interval {low:+.1f} to {high:+.1f} %)"


def _span(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" (95 % interval {number(low)} to {number(high)})"


def _timed(seconds: float) -> str:
    scale, unit = time_unit(seconds)
    return f"{number(seconds * scale)} {unit}"


def _values(row: Row, found: Comparison) -> str:
    values = {found.baseline: row.baseline.value} | {name: other.value for name, other in row.others.items()}
    return ", ".join(f"{name} {number(value)} requests/s" for name, value in values.items())


def listed(words: Sequence[str]) -> str:
    """As one says it: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
