"""The document of runs: one chapter for each scene, and one over all loads where there are several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headgate.experiment.assumed import said
from headgate.experiment.asynchrony import engine_kind
from headgate.experiment.fleet_plan import recorded_path
from headgate.report.document import FOLDED, PAGE_ONLY, Block, Chapter, Drawn, Page, Section
from headgate.report.numbers import number, plural, sentence
from headgate.report.runs.alarms import alarms
from headgate.report.runs.gauges import gauge_blocks
from headgate.report.runs.grids import (
    differences,
    engines,
    fleets,
    latencies,
    overview,
    prefix_grid,
    rates,
    run_facts,
)
from headgate.report.runs.groups import (
    class_figures,
    class_grid,
    fleet_figures,
    path_line,
    tenant_figures,
    tenant_grid,
)
from headgate.report.runs.latency import distributions
from headgate.report.runs.load import against_load, comparable, load_grid
from headgate.report.runs.origin import made, warnings
from headgate.report.runs.promise_panel import promise_panel
from headgate.report.runs.scenes import Scene, what_differs
from headgate.report.runs.timeline import ROWS, timeline
from headgate.report.runs.verdict import load_verdict, scene_verdict
from headgate.stats.comparison import Comparison

MOST_CHAPTERS = 4  # scenes shown in full; of more, the highest loads


def runs_page(scenes: Sequence[Scene], command: Sequence[str] = (), title: str = "") -> Page:
    """The whole report."""
    line = comparable(scenes)
    chapters = [loads_chapter(line)] if line else []
    shown = list(scenes)
    if len(shown) > MOST_CHAPTERS:
        shown = sorted(scenes, key=lambda scene: scene.load.value)[-MOST_CHAPTERS:]
        note = f"Of {len(scenes)} loads the {MOST_CHAPTERS} highest are shown in full below."
        chapters = [replace(chapter, notes=(*chapter.notes, note)) for chapter in chapters]
    budget = ROWS // max(len(shown), 1)
    chapters += [scene_chapter(scene, budget) for scene in shown]
    runs = [one.run for scene in scenes for own in scene.runs.values() for one in own]
    names = list(dict.fromkeys(name for scene in scenes for name in scene.runs))
    requests = sum(len(run.requests["id"]) for run in runs)
    few = f"{', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
    about = f"{few}; {requests:,} requests in {plural(len(runs), 'run')}"
    named = title or _title(names, scenes, len(runs))
    return Page(named, about, tuple(chapters), made(runs, command), "runs", warnings(runs))


def _title(names: Sequence[str], scenes: Sequence[Scene], runs: int) -> str:
    """What is compared, and how many of them; of a single one, in how many runs."""
    if len(names) > 1:
        return f"{len(names)} {what_differs(scenes).many} compared"
    return f"One run: {names[0]}" if runs == 1 else f"{runs} runs of {names[0]}"


def scene_chapter(scene: Scene, rows: int = ROWS) -> Chapter:
    """Verdict, tables, distributions, timeline, gauges, classes, fleet."""
    found, head, first, runs = scene.comparison, scene.compared.head, scene.first, scene.tables
    machine = "What the engines did" if scene.engines > 1 else "What the engine did"
    pools = {name: one.fleet for name, one in first.items() if one.fleet is not None}
    paths = {name: path for name, run in runs.items() if (path := recorded_path(run))}
    fleet: list[Block] = [fleets(pools)] if pools else []
    fleet += [path_line(name, first[name], path) for name, path in paths.items()]
    sections = [
        Section("", tuple(_numbers(scene))),
        Section("Promises", (Drawn(lambda: promise_panel(first)),)),
        Section("How long requests wait", (Drawn(lambda: distributions(scene.runs)),)),
        Section(machine, (Drawn(lambda: filter(None, (timeline(list(runs.items()), rows),))),)),
        Section("By class", (*class_grid(scene.metrics, head), Drawn(lambda: class_figures(first)))),
        Section("By tenant", (*tenant_grid(first), Drawn(lambda: tenant_figures(first)))),
        Section("Prefix cache", tuple(prefix_grid(scene.metrics))),
        Section("Prefix cache by engine", tuple(prefix_grid(scene.metrics, by_engine=True)), PAGE_ONLY),
        Section("The fleet", (*fleet, Drawn(lambda: fleet_figures(runs, paths)))),
        Section("What the policies estimated", (Drawn(lambda: gauge_blocks(runs)),)),
    ]
    if isinstance(found, Comparison):
        every = f"Every difference from {found.baseline}"
        sections.append(Section(every, (differences(found, head),), FOLDED))
        details = (latencies(scene.metrics), rates(first), engines(scene.metrics))
        sections.append(Section("Every latency, and the engine", details, PAGE_ONLY))
    return Chapter(
        scene.title,
        scene_verdict(scene),
        tuple(sections),
        _notes(scene),
        setup([scene]),
        alarms=alarms(scene),
    )


def _card(meta: dict[str, Any]) -> str:
    """Which card, of what, and how far it may be off if it was derived."""
    bars = meta.get("expected_error")
    off = f"; derived, throughput ±{100 * bars['throughput']:.0f} %" if isinstance(bars, dict) else ""
    return f"{meta['card']} ({meta.get('model')} on {meta.get('gpu')}{off})"


def setup(scenes: Sequence[Scene]) -> str:
    """The first line: what the runs have in common, and both values where they do not."""
    meta = [one.run.meta for scene in scenes for own in scene.runs.values() for one in own]
    cards = (_card(one) for one in meta if one.get("card"))
    fleet = any("router" in one for one in meta)
    kinds = (engine_kind(bool(one["asynchronous"]), fleet) for one in meta if "asynchronous" in one)
    limits = [one["engine"] for one in meta if isinstance(one.get("engine"), dict)]
    return said(cards, kinds, limits, (str(one.get("arrivals") or "") for one in meta))


def _notes(scene: Scene) -> tuple[str, ...]:
    """What to mind when reading it."""
    found = scene.comparison
    if isinstance(found, Comparison):
        notes = [*found.cautions, *_several(len(found.policies) - 1)]
    else:
        alone = len(scene.runs) == 1  # then it stands among the facts
        notes = [one.trend.said for one in scene.first.values() if not (alone or one.trend.stationary)]
    if any(len(own) > 1 for own in scene.runs.values()):
        notes.append("several seeds: figures over time show the first seed, distributions pool all of them")
    return tuple(dict.fromkeys(map(sentence, notes)))


def _several(tried: int) -> list[str]:
    """The best of several looks better than it is; intervals are not widened for that."""
    return [f"intervals are not corrected for multiple comparisons ({tried})"] if tried > 1 else []


def _numbers(scene: Scene) -> list[Block]:
    found, runs = scene.comparison, scene.first
    tables: list[Block]
    if isinstance(found, Comparison):
        tables = [overview(found, scene.compared.head)]
    elif len(runs) == 1:
        tables = [latencies(scene.metrics), *map(run_facts, runs.values())]
    else:
        tables = [latencies(scene.metrics), rates(runs), engines(scene.metrics)]
    return [*tables, _bounded(scene, scene.bound.rate)] if scene.bound else tables


def _bounded(scene: Scene, bound: float) -> str:
    """How much was served of what can be served at all, both over the time that rates are measured in."""
    best = max(found.request_rate.value for found in scene.metrics.values())
    where = f" and {scene.engines} engines" if scene.engines > 1 else ""
    said = (
        f"On the measured requests{where} no policy serves more than {number(bound)} requests/s (a bound "
        f"from the card's step times). The most served is {number(best)}: {100 * best / bound:.0f} % of it."
    )
    edges = " Above 100 %: requests at the edges of the window were partly served outside it."
    return said + edges if best > bound else said


def loads_chapter(scenes: Sequence[Scene]) -> Chapter:
    """Everything against load."""
    values = [scene.load.short for scene in scenes]
    section = Section("Every load", (load_grid(scenes), Drawn(lambda: against_load(scenes))))
    tried = sum(len(scene.runs) - 1 for scene in scenes if isinstance(scene.comparison, Comparison))
    notes = tuple(map(sentence, _several(tried)))
    return Chapter(f"From {values[0]} to {values[-1]}", load_verdict(scenes), (section,), notes)
