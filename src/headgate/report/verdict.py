"""The verdict in one sentence, with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headgate.report.scenes import Scene
from headgate.results.compare import BETTER, SAME, TOO_FEW, WORSE, Comparison, Difference, Row
from headgate.results.metrics import Metrics
from headgate.results.tables import Run
from headgate.results.text import number, percent, time_unit

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
        return comparison_verdict(found)
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


def comparison_verdict(found: Comparison) -> str:
    """Who serves more than the baseline and at which price; else what there is to win in latency."""
    rows = {row.metric: row for row in found.rows}
    served = rows.get("request throughput")
    if served is None:
        return "No request was served to its end, so there is nothing to compare."
    if all(other.verdict == TOO_FEW for other in served.others.values()):
        return f"Too few requests to tell the policies apart: {_values(served, found)}."
    winner = _winner(served)
    if winner is None:
        return _nothing_to_gain(found, rows)
    gain = served.others[winner]
    said = f"{winner} serves {_amount(gain)} more requests than {found.baseline}{_percents(gain)}"
    said += f", the most of {len(served.others)} tried" if len(served.others) > 1 else ""
    price = [_price(rows[metric], winner, name) for metric, name in MATTER.items() if metric in rows]
    told = [part for part in price if part]
    said += f", with {_listed(told)}" if told else ""
    alike = [name for name in served.level if name != found.baseline]
    if served.best == winner and alike:
        said += f"; in requests served {_listed(alike)} cannot be told from it"
    return said + "."


def load_verdict(scenes: Sequence[Scene]) -> str:
    """At which of several loads anything is to be gained, and how much at most."""
    gains: list[tuple[float, str, Scene, Difference]] = []
    without: list[Scene] = []
    baseline = ""
    for scene in scenes:
        if not isinstance(scene.comparison, Comparison):
            continue
        baseline = scene.comparison.baseline
        served = _served(scene.comparison)
        winner = None if served is None else _winner(served)
        if served is None or winner is None:
            without.append(scene)
        else:
            gain = served.others[winner]
            gains.append((gain.percent.value, winner, scene, gain))
    none = _without_gain(without)
    if not gains:
        return f"No policy is seen to serve more requests than {baseline}: {none}." if without else ""
    _, winner, scene, gain = max(gains, key=lambda each: each[0])
    said = f"{winner} serves up to {_amount(gain)} more requests than {baseline}{_percents(gain)}"
    said += f", at {scene.load.short}"
    return f"{said}; {none}." if without else f"{said}."


def _winner(served: Row) -> str | None:
    """The policy that surely serves more than the baseline; of several, the one that serves most."""
    surely = [name for name, other in served.others.items() if other.verdict == BETTER]
    return max(surely, key=lambda name: served.others[name].value) if surely else None


def _room(served: Row | None) -> float:
    """Percent that a gain nobody has seen may have all the same; infinite where there is no interval."""
    if served is None:
        return math.inf
    ends = [other.percent.high for other in served.others.values() if other.verdict != WORSE]
    return max((math.inf if end is None else end for end in ends), default=0.0)


def _unseen(room: float) -> str:
    """What may be said of a gain that was not seen: no more than the intervals leave out."""
    if room < NEGLIGIBLE:
        return f"there is no throughput to gain (95 % intervals end at {room:+.1f} %)"
    if math.isinf(room):
        return "no gain is seen, and too little was served to leave one out"
    return f"no gain is seen, though 95 % intervals leave room for {room:.1f} %"


def _without_gain(scenes: Sequence[Scene]) -> str:
    """The same of all loads at which nobody serves more."""
    if not scenes:
        return ""
    values = _listed([f"{scene.load.value:,.4g}" for scene in scenes])
    unit = scenes[0].load.unit
    loads = f"{values} {unit}" if unit else f"{scenes[0].load.kind} {values}"
    room = max(_room(_served(scene.comparison)) for scene in scenes)
    return f"at {loads} {_unseen(room)}"


def _served(found: object) -> Row | None:
    rows = found.rows if isinstance(found, Comparison) else ()
    return next((row for row in rows if row.metric == "request throughput"), None)


def _nothing_to_gain(found: Comparison, rows: dict[str, Row]) -> str:
    served = rows["request throughput"]
    fewer = [name for name, other in served.others.items() if other.verdict == WORSE]
    room = _unseen(_room(served))
    said = f"No policy is seen to serve more requests than {found.baseline}: at this load {room}"
    if fewer:
        said += f" ({_listed(fewer)} serve{'s' if len(fewer) == 1 else ''} fewer)"
    wins: list[str] = []
    winners: list[str] = []
    for metric, name in MATTER.items():
        row = rows.get(metric)
        if row is None:
            continue
        better = {other: each for other, each in row.others.items() if each.verdict == BETTER}
        if better:
            best = max(better, key=lambda other: abs(better[other].percent.value))
            winners += [] if best in winners else [best]
            wins.append(f"{best} has {_change(name, better[best])}{_percents(better[best])}")
    if not wins:
        return f"{said}, and no latency that can be told from its own is better."
    return f"{said}. What differs is latency: {_listed(wins)}{_paid(rows, winners)}."


def _paid(rows: dict[str, Row], winners: Sequence[str]) -> str:
    """What policies that win in one latency lose in another."""
    said = ""
    for winner in winners:
        each = {name: rows[metric].others[winner] for metric, name in MATTER.items() if metric in rows}
        worse = [_change(name, other) for name, other in each.items() if other.verdict == WORSE]
        said += f"; {winner} pays with {_listed(worse)}" if worse else ""
    return said


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


def _amount(gain: Difference) -> str:
    return f"{gain.percent.value:.1f} %"


def _percents(other: Difference) -> str:
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


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
