"""The verdict in one sentence, with its uncertainty: of a comparison, of a run, and over several loads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from headgate.report.document import listed, number, percent, timed
from headgate.report.runs.scenes import POLICIES, RATE, Compared, Scene, served_rates, unsteady, what_differs
from headgate.stats.comparison import (
    ABOVE,
    BETTER,
    CANNOT_TELL,
    GROWS,
    SAME,
    TOO_FEW,
    UNSETTLED,
    WORSE,
    Comparison,
    Difference,
    MetricRow,
)
from headgate.stats.measured import Measured

KEPT_UP = 0.97  # of what was offered; the window of a short run is not exact to more
LEAST_KEPT = 0.01  # of requests with their promises kept; below, nothing is compared
NEGLIGIBLE = 1.0  # percent of throughput
TWICE = 100.0  # percent more; from here on a figure is told as times of another
# what a gain may cost, or what is left to win where throughput is not
MATTER = {"goodput": "the share of kept promises"}
LATENCIES = ("mean TTFT", "mean TPOT", "p99 ITL")  # of all requests: none is judged beside background work
MATTER |= {name: name for name in LATENCIES}


def scene_verdict(scene: Scene) -> str:
    found = scene.comparison
    if isinstance(found, Comparison):
        return comparison_verdict(found, scene.compared, _background(scene))
    if found is None:
        name, run = next(iter(scene.first.items()))
        return run_verdict(name, run)
    return f"No verdict: {found}. The figures of each run stand below."


def run_verdict(name: str, found: Measured) -> str:
    metrics, outcome, ended = found.metrics, str(found.run.meta.get("outcome", "finished")), ""
    if outcome != "finished":
        ended = f"The run ended early ({outcome}); these are its results so far. "
    if not metrics.counts.completed:
        return f"{ended}No request of {metrics.counts.total:,} was served to its end."
    rate = served_rates(found)["Requests"]
    said = f"{name} serves {number(rate.value)} requests/s{_span(rate.low, rate.high)}"
    said += " over the whole run" if unsteady(found) else ""
    first, last = timed(metrics.ttft.mean.value), timed(metrics.ttft.p99)
    said += f": a first token after {first} on average (p99 {last})"
    if not math.isnan(metrics.tpot.mean.value):
        said += f", then one every {timed(metrics.tpot.mean.value)}"
    if metrics.goodput:
        said += f"; {percent(metrics.goodput.share.value)} of the requests with a promise got it"
    busy = metrics.engine.utilisation
    if math.isnan(busy):  # a router's trace has no steps
        return f"{ended}{said}."
    spare = ", so there is time to spare" if busy < 0.8 else ""
    return f"{ended}{said}. The engine is busy {percent(busy)} of the time{spare}."


def comparison_verdict(found: Comparison, of: Compared = POLICIES, background: bool = False) -> str:
    rows = _judged_rows(found, background)
    served = rows.get("request throughput")
    if served is None:
        return "No request was served to its end, so there is nothing to compare."
    if all(other.verdict == TOO_FEW for other in served.others.values()):
        values = {found.baseline: served.baseline} | served.others
        each = ", ".join(f"{name} {number(own.value)} requests/s" for name, own in values.items())
        return f"Too few requests to tell the {of.many} apart: {each}."
    if not _judged(found):
        differs = what_else(rows)
        return f"{_no_verdict(found)}.{f' What differs: {differs}.' if differs else ''}"
    if (winner := winner_of(served)) is None:
        return f"{_nothing_to_gain(found, rows, of)}{_left_out(found)}"
    gain = served.others[winner]
    said = f"{winner} serves {gain.percent.value:.1f} % more requests than {found.baseline}{percents(gain)}"
    said += f", the most of {len(served.others)} tried" if len(served.others) > 1 else ""
    said += price(rows, winner)
    alike = [name for name in served.level if name != found.baseline]
    if served.best == winner and alike:
        said += f"; in requests served {listed(alike)} cannot be told from it"
    return f"{said}.{_left_out(found)}"


def _judged_rows(found: Comparison, background: bool) -> dict[str, MetricRow]:
    return {row.metric: row for row in found.rows if not background or row.metric not in LATENCIES}


def _background(scene: Scene) -> bool:
    return any(kind.get("background") for run in scene.tables.values() for kind in run.kinds)


def _judged(found: Comparison) -> list[str]:
    if found.baseline in found.doubts:
        return []
    return [name for name in found.policies[1:] if name not in found.doubts]


def _no_verdict(found: Comparison) -> str:
    said = f"No verdict on throughput: {_why(found)}"
    steady = [name for name in found.policies if name not in found.doubts]
    if GROWS in found.doubts.values() and steady:
        said += f", {listed(steady)} keep{'s' if len(steady) == 1 else ''} up with what is offered"
    each = [f"{name} {number(whole.rate)}" for name, whole in found.whole.items()]
    return f"{said}. Requests/s served over the whole run: {listed(each)}" if each else said


def _why(found: Comparison) -> str:
    words = {GROWS: "has a growing backlog", UNSETTLED: "is not stationary", ABOVE: "serves more than"}
    many = {GROWS: "have a growing backlog", UNSETTLED: "are not stationary", ABOVE: "serve more than"}
    said = []
    for doubt in words:
        names = [name for name in found.policies if found.doubts.get(name) == doubt]
        if names:
            most = f" the {number(found.bound)} that any policy can" if doubt == ABOVE and found.bound else ""
            said.append(f"{listed(names)} {(words if len(names) == 1 else many)[doubt]}{most}")
    return f"in the measured window {listed(said)}"


def _left_out(found: Comparison) -> str:
    return f" {_no_verdict(found)}." if found.doubts else ""


def winner_of(served: MetricRow) -> str | None:
    surely = [name for name, other in served.others.items() if other.verdict == BETTER]
    return max(surely, key=lambda name: served.others[name].value) if surely else None


def room_for(served: MetricRow | None) -> float:
    """Percent that a gain which was not seen may have all the same; infinite where there is no interval."""
    if served is None:
        return math.inf
    told = [other for other in served.others.values() if other.verdict not in (GROWS, UNSETTLED, ABOVE)]
    ends = [other.percent.high for other in told if other.verdict != WORSE]
    return max((math.inf if end is None else end for end in ends), default=0.0)


def unseen(room: float, where: str = "") -> str:
    """What may be said of a gain that was not seen: no more than the intervals leave out.

    With a place it goes behind the words that none is seen to serve more.
    """
    if room < NEGLIGIBLE:
        nothing = f"there is no throughput to gain (95 % intervals end at {room:+.1f} %)"
        return f": {where} {nothing}" if where else nothing
    doubt = f"though 95 % intervals leave room for {room:.1f} %"
    if math.isinf(room):
        doubt = "and too little was served to leave one out"
    return f" {where}, {doubt}" if where else f"no gain is seen, {doubt}"


def served_by(found: object) -> MetricRow | None:
    rows = found.rows if isinstance(found, Comparison) else ()
    return next((row for row in rows if row.metric == "request throughput"), None)


def _nothing_to_gain(found: Comparison, rows: dict[str, MetricRow], of: Compared) -> str:
    served = rows["request throughput"]
    differs = what_else(rows)
    others = served.others.items()
    untold = {name: other.percent.value for name, other in others if other.verdict == CANNOT_TELL}
    if more := {name: value for name, value in untold.items() if value > 0}:
        best = max(more, key=lambda name: more[name])
        said = f"Cannot tell: {best} serves {more[best]:.1f} % more requests than {found.baseline}"
        said += " by this card, which was derived and may be off by more"
        return f"{said}. What differs clearly: {differs}." if differs else f"{said}."
    fewer = [name for name, other in others if other.verdict == WORSE]
    said = f"No {of.one} is seen to serve more requests than {found.baseline}"
    said += unseen(room_for(served), "at this load")
    if fewer:
        said += f" ({listed(fewer)} serve{'s' if len(fewer) == 1 else ''} fewer)"
    seen = "latency is seen to be better" if "mean TTFT" in rows else "promise is seen to be kept more often"
    return f"{said}. What differs: {differs}." if differs else f"{said}, and no {seen}."


def what_else(rows: Mapping[str, MetricRow]) -> str:
    wins: list[str] = []
    winners: list[str] = []
    told = {name: row for metric, name in MATTER.items() if (row := _told(rows, metric))}
    for name, row in told.items():
        better = {other: each for other, each in row.others.items() if each.verdict == BETTER}
        if better:
            best = max(better, key=lambda other: abs(better[other].percent.value))
            winners.append(best)
            wins.append(f"{best} has {_change(name, better[best])}{percents(better[best], TWICE)}")
    said = listed(wins)
    for winner in dict.fromkeys(winners):
        each = {name: row.others[winner] for name, row in told.items()}
        worse = [_change(name, other) for name, other in each.items() if other.verdict == WORSE]
        said += f"; {winner} pays with {listed(worse)}" if worse else ""
    return said


def _told(rows: Mapping[str, MetricRow], metric: str) -> MetricRow | None:
    row = rows.get(metric)
    if row is None or metric != "goodput":
        return row
    kept = [row.baseline.value, *(other.value for other in row.others.values())]
    return row if max(kept) >= LEAST_KEPT else None


def price(rows: Mapping[str, MetricRow], winner: str) -> str:
    told = []
    for metric, name in MATTER.items():
        if row := _told(rows, metric):
            other = row.others[winner]
            if other.verdict == SAME:
                told.append(f"no difference seen in {name}")
            elif other.verdict in (BETTER, WORSE):
                told.append(_change(name, other))
    return f", with {listed(told)}" if told else ""


def _change(name: str, other: Difference) -> str:
    change = other.percent.value
    if math.isnan(change):  # the baseline has none; of all these figures only a share may be zero
        return f"{name} at {percent(other.value)} instead of 0"
    if change >= TWICE:
        return f"{name} {1 + change / 100:.1f} times as high"
    return f"{name} {abs(change):.1f} % {'higher' if change > 0 else 'lower'}"


def percents(other: Difference, most: float = math.inf) -> str:
    low, high = other.percent.low, other.percent.high
    if low is None or high is None:
        return ""
    if other.percent.value >= most:
        return f" (95 % interval {1 + low / 100:.1f} to {1 + high / 100:.1f} times)"
    return f" (95 % interval {low:+.1f} to {high:+.1f} %)"


def _span(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" (95 % interval {number(low)} to {number(high)})"


class Gain(NamedTuple):
    winner: str
    scene: Scene
    more: Difference


def load_verdict(scenes: Sequence[Scene]) -> str:
    """The largest gain with its price, and the loads without one; of a single policy, what it serves.

    Loads at which no throughput is compared are named with the reason.
    """
    every = [scene for scene in scenes if isinstance(scene.comparison, Comparison)]
    if not every:
        return _alone(scenes)
    compared = [scene for scene in every if _judged(_comparison(scene))]
    doubtful = [scene for scene in every if _comparison(scene).doubts]
    untold = "".join(f" At {scene.load.short}: {_no_verdict(_comparison(scene))}." for scene in doubtful)
    if not compared:
        return f"{untold.strip()}{_latencies(every[-1])}"
    return f"{_gained(compared, scenes)}{untold}"


def _gained(compared: Sequence[Scene], scenes: Sequence[Scene]) -> str:
    gains = [gain for scene in compared if (gain := _gain(scene))]
    places = [gain.scene for gain in gains]
    without = [scene for scene in compared if all(scene is not place for place in places)]
    baseline = _comparison(compared[-1]).baseline
    if not gains:
        said = f"No {what_differs(scenes).one} is seen to serve more requests than {baseline}"
        return f"{said}{unseen(_room(without), _at(without))}.{_latencies(compared[-1])}"
    best = max(gains, key=lambda gain: gain.more.percent.value)
    more = f"{best.more.percent.value:.1f} % more requests than {baseline}"
    said = f"At {best.scene.load.short} {best.winner} serves {more}"
    said += f"{percents(best.more)}{', the most of all loads' if len(gains) > 1 else ''}"
    said += price(_rows(best.scene), best.winner)
    return f"{said}; {_at(without)} {unseen(_room(without))}." if without else f"{said}."


def _gain(scene: Scene) -> Gain | None:
    served = served_by(scene.comparison)
    winner = served and winner_of(served)
    return Gain(winner, scene, served.others[winner]) if served and winner else None


def _comparison(scene: Scene) -> Comparison:
    assert isinstance(scene.comparison, Comparison)
    return scene.comparison


def _rows(scene: Scene) -> dict[str, MetricRow]:
    return _judged_rows(_comparison(scene), _background(scene))


def _room(scenes: Sequence[Scene]) -> float:
    return max(room_for(served_by(scene.comparison)) for scene in scenes)


def _at(scenes: Sequence[Scene]) -> str:
    values, unit = listed([f"{scene.load.value:,.4g}" for scene in scenes]), scenes[0].load.unit
    return f"at {values} {unit}" if unit else f"at {scenes[0].load.kind} {values}"


def _latencies(scene: Scene) -> str:
    differs = what_else(_rows(scene))
    return f" At {scene.load.short} {differs}." if differs else ""


def _alone(scenes: Sequence[Scene]) -> str:
    known = [scene for scene in scenes if len(scene.runs) == 1 and _rate(scene) > 0]
    if not known:
        return ""
    name, most = next(iter(known[0].runs)), max(known, key=_rate)
    peak = f"serves most at {most.load.short}: {number(_rate(most))} requests/s"
    if most.load.kind != RATE:
        return f"{name} {peak}."
    kept = list(takewhile(_keeps_up, known))
    if len(kept) == len(known):
        return f"{name} keeps up with every load tried, up to {known[-1].load.short}."
    behind = known[len(kept)].load.short
    if not kept:
        return f"{name} falls behind at {behind} already; it {peak}."
    return f"{name} keeps up with {kept[-1].load.short} and falls behind at {behind}; it {peak}."


def _keeps_up(scene: Scene) -> bool:
    (own,), offered = scene.first.values(), scene.load.value
    found = own.metrics.request_rate  # in the window, for a whole run also fills up and drains
    alike = found.value >= KEPT_UP * offered or (found.high is not None and found.high >= offered)
    return alike and not own.trend.growing


def _rate(scene: Scene) -> float:
    return scene.served(next(iter(scene.runs))).value
