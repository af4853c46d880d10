"""What happened over time: steps by phase, with queue, slots and KV under them, and what policies thought."""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from headgate.record.tables import Integers, Run
from headgate.report import charts
from headgate.report.document import Figure, number
from headgate.report.html.page import Markup, position, tag
from headgate.stats.flow import waiting

ROWS = 110_000  # steps that one report carries for zooming, over all its runs
FEWEST = 2_000  # of one run
WIDTH = 1000
PHASES = ("prefill", "decode", "mixed")
STRIP, STRIP_STEP, PANEL, PANEL_STEP = 20.0, 40.0, 76.0, 100.0  # as in timeline.js
LEFT, RIGHT, TOP = 52.0, 10.0, 16.0
MOST_STRIPS = 8
COARSE = 120  # columns of the picture before the script draws it finer
LOOK = (
    "Height is share of time: prefill, decode and mixed steps, grey where the engine was idle. "
    "Decodes stand still during prefill, so wide prefill blocks are the gaps users see."
)
KEYS = (*((phase, f"block {phase}") for phase in PHASES), ("idle", "block idle-key"))


@dataclass(frozen=True)
class Strip:
    name: str
    colour: int
    start: charts.Floats
    seconds: charts.Floats
    phase: Integers  # counts into PHASES
    slots: charts.Floats
    queue: charts.Floats
    kv: charts.Floats
    thinned: bool  # into stretches of equal length, where there are too many steps

    @property
    def style(self) -> str:
        """The colour of this run elsewhere; lines as jagged as these are drawn without dashes."""
        return charts.style_of(self.colour, alone=True)


def timeline(runs: Sequence[tuple[str, Run]], rows: int = ROWS) -> Figure | None:
    chosen = _chosen(runs)
    share = max(FEWEST, rows // max(len(chosen), 1))
    strips = [_strip(name, colour, run, replica, share) for name, colour, run, replica in chosen]
    strips = [strip for strip in strips if len(strip.start)]
    if not strips:
        return None
    ends = max(float((strip.start + strip.seconds)[-1]) for strip in strips)
    low, high = min(0.0, *(float(strip.start[0]) for strip in strips)), ends
    meta = runs[0][1].meta
    slots = dict(meta.get("engine") or {}).get("running")
    panels = (
        {"name": "queue", "unit": "requests", "limit": None, "bound": ""},
        {"name": "slots in use", "unit": "requests", "limit": slots, "bound": "slots"},
        {"name": "KV", "unit": "tokens", "limit": meta.get("kv_tokens"), "bound": "memory"},
    )
    note = "Drag across it to zoom in, double-click for the whole run; arrow keys and + - 0 work too."
    if any(strip.thinned for strip in strips):
        note += " Long runs are drawn by stretches, not by single steps."
    entries = tuple((strip.name, strip.style) for strip in strips) if len(strips) > 1 else ()
    drawing = _draw(strips, panels, low, high)
    data = {"timeline": _packed(strips, panels, low, high)}
    return Figure("Phases over time", LOOK, drawing, data, (*KEYS, *entries), wide=True, note=note)


def _chosen(runs: Sequence[tuple[str, Run]]) -> list[tuple[str, int, Run, int | None]]:
    found: list[tuple[str, int, Run, int | None]] = []
    each = max(1, MOST_STRIPS // max(len(runs), 1))
    for colour, (name, run) in enumerate(runs):
        replicas = np.unique(run.steps["replica"]).tolist()
        if len(replicas) <= 1:
            found.append((name, colour, run, None))
            continue
        for engine in some_engines(run, replicas, each):
            found.append((f"{name}, {engine_name(run, engine)}", colour, run, engine))
    return found


def some_engines(run: Run, replicas: Sequence[int], most: int) -> list[int]:
    """So many of them at most, one of every role before a second of any."""
    roles: Counter[str] = Counter()
    ranked: list[tuple[int, int]] = []
    for engine in replicas:
        role = engine_name(run, engine).removeprefix(f"engine {engine}")
        ranked.append((roles[role], engine))
        roles[role] += 1
    return sorted(engine for _, engine in sorted(ranked)[:most])


def engine_name(run: Run, replica: int) -> str:
    roles = run.meta.get("roles")
    known = isinstance(roles, list) and 0 <= replica < len(roles) and roles[replica] != "any"
    return f"engine {replica} ({roles[replica]})" if known and roles else f"engine {replica}"


def _strip(name: str, colour: int, run: Run, replica: int | None, most: int) -> Strip:
    steps = run.steps
    rows = np.ones(len(steps["start"]), bool) if replica is None else steps["replica"] == replica
    start, seconds = steps["start"][rows].astype(float), steps["seconds"][rows].astype(float)
    decodes, prefill = steps["decodes"][rows] > 0, steps["prefill"][rows] > 0
    phase = np.where(prefill & decodes, 2, np.where(prefill, 0, 1)).astype(np.int64)
    if replica is not None:
        mine = run.requests["replica"] == replica
        run = replace(run, requests={name: column[mine] for name, column in run.requests.items()})
    queue, slots = waiting(run, start).astype(float), _admitted(run, start)
    strip = Strip(name, colour, start, seconds, phase, slots, queue, steps["kv"][rows].astype(float), False)
    return strip if len(start) <= most else _stretched(strip, most)


def _admitted(run: Run, times: charts.Floats) -> charts.Floats:
    """How many had been admitted and not left, at each moment; evicted requests keep counting."""
    admitted, left = (run.requests[name] for name in ("admitted", "finished"))
    left = left[~np.isnan(admitted) & ~np.isnan(left)]
    came = np.searchsorted(np.sort(admitted[~np.isnan(admitted)]), times, side="right")
    return np.asarray(came - np.searchsorted(np.sort(left), times, side="right"), np.float64)


def _stretched(strip: Strip, most: int) -> Strip:
    """Equal stretches of time; each phase of a stretch becomes one step as long as its share of it."""
    begin, end = float(strip.start[0]), float(strip.start[-1] + strip.seconds[-1])
    edges = np.linspace(begin, end, most // len(PHASES) + 1)
    mean = partial(_means, strip, edges)
    by = [mean((strip.phase == phase) * 1.0) for phase in range(3)]
    busy = np.maximum(sum(by), 1e-12)
    width = edges[1] - edges[0]
    seconds = np.stack(by, axis=1) * width
    start = edges[:-1, None] + np.cumsum(seconds, axis=1) - seconds
    kept = (seconds > 1e-9 * width).ravel()
    phase = np.tile(np.arange(3), len(edges) - 1)[kept]
    levels = (mean(level) / busy for level in (strip.slots, strip.queue, strip.kv))
    slots, queue, kv = (np.repeat(level, 3)[kept] for level in levels)
    times = {"start": start.ravel()[kept], "seconds": seconds.ravel()[kept]}
    return replace(strip, **times, phase=phase, slots=slots, queue=queue, kv=kv, thinned=True)


def _means(strip: Strip, edges: charts.Floats, values: charts.Floats) -> charts.Floats:
    return charts.over_time(strip.start, strip.seconds, values, edges).mean


def _packed(
    strips: Sequence[Strip], panels: Sequence[dict[str, Any]], low: float, high: float
) -> dict[str, Any]:
    tick = max(1e-5, (high - low) / 2e9)
    kv_tick = max(1.0, max(float(strip.kv.max()) for strip in strips) / 1e4)
    runs = []
    for strip in strips:
        begin = np.rint((strip.start - low) / tick).astype(np.int64)
        end = np.rint((strip.start + strip.seconds - low) / tick).astype(np.int64)
        idle = begin - np.concatenate(([0], end[:-1]))  # nearly always zero, which takes no room
        levels = (strip.slots, strip.queue, strip.kv / kv_tick)
        changes = (np.diff(np.rint(level), prepend=0.0) for level in levels)
        columns = (*changes, idle, end - begin, strip.phase)
        whole = b"".join(column.astype("<i4").view(np.uint8).reshape(-1, 4).T.tobytes() for column in columns)
        data = base64.b64encode(zlib.compress(whole, 9)).decode("ascii")
        about = {"name": strip.name, "style": strip.style, "rows": len(strip.start)}
        runs.append(about | {"data": data})
    axis = {"low": low, "high": high, "tick": tick, "kv_tick": kv_tick}
    return {**axis, "panels": list(panels), "runs": runs}


def _draw(strips: Sequence[Strip], panels: Sequence[dict[str, Any]], low: float, high: float) -> Markup:
    """The whole run, for print and for browsers that cannot unpack the steps."""
    bottom = TOP + len(strips) * STRIP_STEP + len(panels) * PANEL_STEP
    x = charts.Scale(low, high, LEFT, WIDTH - RIGHT)
    edges = np.linspace(low, high, COARSE + 1)
    parts = charts.ruler(x, x.ticks(10), TOP, bottom, "time since the start (s)")
    for place, strip in enumerate(strips):
        parts += _phases(strip, x, edges, TOP + place * STRIP_STEP)
    top = TOP + len(strips) * STRIP_STEP + 8
    for place, (panel, field) in enumerate(zip(panels, ("queue", "slots", "kv"), strict=True)):
        found = [
            (strip.style, charts.over_time(strip.start, strip.seconds, getattr(strip, field), edges))
            for strip in strips
        ]
        parts += _panel(panel, found, x, top + place * PANEL_STEP)
    box = f"0 0 {WIDTH} {position(bottom + 36)}"
    return tag("svg", *parts, viewBox=box, role="img", aria_label="Phases over time")


def _phases(strip: Strip, x: charts.Scale, edges: charts.Floats, top: float) -> Iterator[Markup]:
    yield tag("text", strip.name, class_="name", x=x.start, y=top - 4)
    yield tag("rect", class_="idle", x=x.start, y=top, width=x.end - x.start, height=STRIP)
    left, size = x(edges[:-1]), (x.end - x.start) / (len(edges) - 1)
    base = np.full(len(left), top + STRIP)
    for phase, name in enumerate(PHASES):
        tall = STRIP * np.clip(_means(strip, edges, (strip.phase == phase) * 1.0), 0, 1)
        outline = "".join(
            f"M{position(at)} {position(foot - high)}h{size:.2f}v{position(high)}h-{size:.2f}z"
            for at, foot, high in zip(left.tolist(), base.tolist(), tall.tolist(), strict=True)
            if high > 0.05
        )
        base = base - tall
        yield tag("path", class_=f"bar {name}", d=outline)


def _panel(
    panel: dict[str, Any], found: Sequence[tuple[str, charts.Columns]], x: charts.Scale, top: float
) -> Iterator[Markup]:
    most = max(float(columns.high.max()) for _, columns in found) or 1.0
    limit = panel["limit"] if panel["limit"] and panel["limit"] < 1.6 * most else None
    y = charts.Scale(0.0, 1.08 * max(most, limit or 0.0), top + PANEL, top)
    yield tag("text", f"{panel['name']} ({panel['unit']})", class_="name", x=x.start, y=top - 5)
    for value, label in y.ticks(4):
        at = float(y(value))
        yield tag("line", class_="grid", x1=x.start, x2=x.end, y1=at, y2=at)
        yield tag("text", label, class_="tick", x=x.start - 6, y=at + 4, text_anchor="end")
    for style, columns in found:
        line = charts.path(x(columns.middle), y(columns.mean))
        yield tag("path", class_=f"line thin {style}", d=line)
    if limit:
        at, said = float(y(limit)), f"{panel['bound']}: {number(float(limit))}"
        yield tag("line", class_="mark", x1=x.start, x2=x.end, y1=at, y2=at)
        yield tag("text", said, class_="marked", x=x.end - 3, y=at + 12, text_anchor="end")


# -- what policies thought while they ran

POINTS = 400
PREFIX = "gauge."


class Dial(NamedTuple):
    title: str
    axis: str
    unit: str
    look: str


KNOWN = {
    "exclusive": Dial("Mode", "0: mixed, 1: exclusive", "", "Which batches ran; switches follow the load."),
    "refill": Dial("Refill threshold", "refill", "requests", "It should settle; drift: traffic changes."),
    "share": Dial("Refill threshold as a share", "θ*", "share of slots", "The optimum for lengths so far."),
    "slots": Dial("Slots that are used", "slots", "requests", "Below the engine's slots: memory limits."),
    "gain": Dial("Predicted gain of exclusive batches", "gain", "share", "Above its margin: exclusive."),
    "demand": Dial("Requests in the system, smoothed", "demand", "requests", "The mode follows from it."),
    "output": Dial("Estimated output length", "output", "tokens", "It should approach the workload's mean."),
    "prompt": Dial("Estimated prompt length", "prompt", "tokens", "It should approach the workload's mean."),
    "step": Dial("Predicted step", "step", "s", "How long the next full step is thought to take."),
    "crowded": Dial("Memory is crowded", "0: no, 1: yes", "", "While it is 1, decodes wait for no prompt."),
    "pace": Dial("Pace", "pace", "s", "The least time between two batches of prompts."),
    "segments": Dial("Segments that moved", "segments", "", "How many the newest batch moved together."),
    "started": Dial("Prompts of the cycle", "prompts", "requests", "How far the prefill cycle is."),
}
SKIPPED = ("refilling",)  # it swings with every refill and says nothing
MODES = ("mixed", "exclusive")  # what the gauge of this name counts into


def gauge_blocks(runs: Mapping[str, Run]) -> list[Figure | str]:
    columns = dict.fromkeys(column for run in runs.values() for column in run.plans)
    names = [column.removeprefix(PREFIX) for column in columns if column.startswith(PREFIX)]
    figures = [figure for name in names if name not in SKIPPED and (figure := _figure(name, runs))]
    return [*_kept_mode(runs), *figures]


def _kept_mode(runs: Mapping[str, Run]) -> list[str]:
    kept: dict[int, list[str]] = {}
    for name, run in runs.items():
        found = np.unique(run.plans.get(PREFIX + "exclusive", np.empty(0)))
        if len(found) == 1 and found[0] in (0, 1):
            kept.setdefault(int(found[0]), []).append(name)
    return [
        f"{', '.join(names)} ran {MODES[mode]} batches all the time: the mode never changed."
        for mode, names in kept.items()
    ]


def _mean_length(name: str, runs: Mapping[str, Run]) -> list[charts.Mark]:
    if name not in ("prompt", "output"):
        return []
    run = next(iter(runs.values()))
    lengths = run.requests[name][run.completed()]
    mean = float(lengths.mean()) if len(lengths) else np.nan
    return [charts.Mark(f"mean: {number(mean)}", mean, "y")] if len(lengths) else []


def _figure(name: str, runs: Mapping[str, Run]) -> Figure | None:
    held = {label: run.plans for label, run in runs.items() if PREFIX + name in run.plans}
    series, moved = [], False
    for label, plans in held.items():
        time, value = plans["time"].astype(float), plans[PREFIX + name].astype(float)
        known = np.isfinite(value)
        time, value = time[known], value[known]
        if not len(time):
            continue
        moved = moved or bool(np.ptp(value) > 0)
        x, y = charts.changes(time, value, POINTS)
        series.append(charts.Series(label, x, y, list(runs).index(label), "step"))
    if not moved:
        return None
    about = KNOWN.get(name, Dial(name.capitalize(), name, "", "As the policy reports it."))
    along, up = charts.Axis("time since the start", "s"), charts.Axis(about.axis, about.unit)
    return charts.Chart(along, up, series, _mean_length(name, runs)).figure(about.title, about.look)
