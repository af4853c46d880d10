"""The verdict over several loads: at which of them anything is to be gained, how much, and at which price."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from headgate.report.runs.scenes import RATE, Scene, what_differs
from headgate.report.runs.verdict import (
    amount,
    listed,
    percents,
    price,
    room_for,
    served_by,
    unseen,
    unseen_at,
    what_else,
    winner_of,
)
from headgate.stats.comparison import Comparison, Difference, Row
from headgate.report.terminal.tables import number

KEPT_UP = 0.97  # of what was offered; the window of a short run is not exact to more


class Gain(NamedTuple):
    """Who surely serves more than the baseline, where, and by how much."""

    winner: str
    scene: Scene
    more: Difference


def load_verdict(scenes: Sequence[Scene]) -> str:
    """The largest gain with its price, and the loads without one; of a single policy, what it serves."""
    compared = [scene for scene in scenes if isinstance(scene.comparison, Comparison)]
    if not compared:
        return _alone(scenes)
    gains = [gain for scene in compared if (gain := _gain(scene))]
    places = [gain.scene for gain in gains]
    without = [scene for scene in compared if all(scene is not place for place in places)]
    baseline = _comparison(compared[-1]).baseline
    if not gains:
        said = f"No {what_differs(scenes).one} is seen to serve more requests than {baseline}"
        return f"{said}{unseen_at(_at(without), _room(without))}.{_latencies(compared[-1])}"
    best = max(gains, key=lambda gain: gain.more.percent.value)
    said = (
        f"At {best.scene.load.short} {best.winner} serves {amount(best.more)} more requests than {baseline}"
    )
    said += f"{percents(best.more)}{', the most of all loads' if len(gains) > 1 else ''}"
    said += price(_rows(best.scene), best.winner)
    return f"{said}; {_at(without)} {unseen(_room(without))}." if without else f"{said}."


def _gain(scene: Scene) -> Gain | None:
    served = served_by(scene.comparison)
    winner = None if served is None else winner_of(served)
    return None if served is None or winner is None else Gain(winner, scene, served.others[winner])


def _comparison(scene: Scene) -> Comparison:
    assert isinstance(scene.comparison, Comparison)
    return scene.comparison


def _rows(scene: Scene) -> dict[str, Row]:
    return {row.metric: row for row in _comparison(scene).rows}


def _room(scenes: Sequence[Scene]) -> float:
    return max(room_for(served_by(scene.comparison)) for scene in scenes)


def _at(scenes: Sequence[Scene]) -> str:
    """At which loads."""
    values, unit = listed([f"{scene.load.value:,.4g}" for scene in scenes]), scenes[0].load.unit
    return f"at {values} {unit}" if unit else f"at {scenes[0].load.kind} {values}"


def _latencies(scene: Scene) -> str:
    """What differs all the same, where load is highest."""
    differs = what_else(_rows(scene))
    return f" At {scene.load.short} {differs}." if differs else ""


def _alone(scenes: Sequence[Scene]) -> str:
    """Of one policy: up to which load it keeps up, or where it serves most."""
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
    """Does it serve what is offered, as far as the run can tell?"""
    found, offered = next(iter(scene.metrics.values())).request_rate, scene.load.value
    return found.value >= KEPT_UP * offered or (found.high is not None and found.high >= offered)


def _rate(scene: Scene) -> float:
    return next(iter(scene.metrics.values())).request_rate.value
