"""What must be known before any figure of a scene is read: requests that cannot be served, and overload."""

from __future__ import annotations

from headgate.experiment.unservable import Unservable
from headgate.report.numbers import number
from headgate.report.runs.scenes import RATE, Scene
from headgate.stats.measured import Measured
from headgate.stats.promises import unservable


def alarms(scene: Scene) -> tuple[str, ...]:
    """Sentences for the first lines of an answer, "" left out."""
    first = next(iter(scene.tables.values()))
    lost = int(unservable(first).sum())
    left_out = Unservable(lost, len(first.requests["id"]), int(first.meta.get("longest") or 0)).said
    return tuple(filter(None, (left_out, _overload(scene))))


def _overload(scene: Scene) -> str:
    """Offered, served, the bound, and how fast the backlog grows; for open loops alone."""
    growing = {name: one for name, one in scene.first.items() if one.trend.growth > 0}
    if scene.load.kind != RATE or not growing:
        return ""
    offered = f"{number(scene.load.value)} requests/s are offered"
    each = "; ".join(f"{name} {_served(one)}" for name, one in growing.items())
    most = f" No policy serves more than {number(scene.bound.rate)}." if scene.bound else ""
    return (
        f"Overloaded: {offered}. {each}.{most} Latencies and kept promises get worse the longer the run: "
        "lower the rate or add engines before comparing them."
    )


def _served(one: Measured) -> str:
    low, high = one.run.span()
    rate = float(one.run.completed().sum()) / max(high - low, 1e-9)
    grows = f"its backlog grows by {number(one.trend.growth)} requests/s"
    return f"serves {number(rate)} over the whole run, and {grows}"
