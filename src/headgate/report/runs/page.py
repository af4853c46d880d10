"""The report of runs: one chapter for each scene, and one over all loads where there are several."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.report.runs.fleet import fleet_blocks
from headgate.report.runs.gauges import gauge_blocks
from headgate.report.runs.grids import differences, engines, latencies, overview, rates
from headgate.report.runs.groups import class_blocks, tenant_blocks
from headgate.report.runs.latency import distributions
from headgate.report.runs.load import against_load, comparable, load_grid
from headgate.report.runs.load_verdict import load_verdict
from headgate.report.runs.origin import made, warnings
from headgate.report.document import Block, Chapter, Page, Section
from headgate.report.runs.scenes import Scene, what_differs
from headgate.report.runs.timeline import ROWS, timeline
from headgate.report.runs.verdict import scene_verdict
from headgate.stats.comparison import Comparison
from headgate.record.tables import Run
from headgate.report.terminal.tables import number

MOST_CHAPTERS = 4  # scenes shown in full; of more, the highest loads


def runs_page(scenes: Sequence[Scene], command: Sequence[str] = (), title: str = "") -> Page:
    """The whole report."""
    line = comparable(scenes)
    chapters = [_loads(line)] if line else []
    shown = list(scenes)
    if len(shown) > MOST_CHAPTERS:
        shown = sorted(scenes, key=lambda scene: scene.load.value)[-MOST_CHAPTERS:]
        chapters[-1:] = [_left_out(chapters[-1], len(scenes))] if chapters else []
    budget = ROWS // max(len(shown), 1)
    chapters += [scene_chapter(scene, budget) for scene in shown]
    runs = [run for scene in scenes for own in scene.runs.values() for run in own]
    names = list(dict.fromkeys(name for scene in scenes for name in scene.runs))
    named = title or _title(names, scenes, len(runs))
    requests = sum(len(run.requests["id"]) for run in runs)
    listed = f"{', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
    about = f"{listed}; {requests:,} requests in {len(runs)} run{'s' if len(runs) > 1 else ''}"
    return Page(named, about, tuple(chapters), made(runs, command), "runs", warnings(runs))


def _title(names: Sequence[str], scenes: Sequence[Scene], runs: int) -> str:
    """What is compared, and how many of them; of a single one, in how many runs."""
    if len(names) > 1:
        return f"{len(names)} {what_differs(scenes).many} compared"
    return f"One run: {names[0]}" if runs == 1 else f"{runs} runs of {names[0]}"


def scene_chapter(scene: Scene, rows: int = ROWS) -> Chapter:
    """Verdict, tables, distributions, timeline, gauges, classes, fleet."""
    found, head = scene.comparison, scene.compared.head
    sections = [_section("The numbers", _numbers(scene))]
    sections.append(_section("How long users wait", distributions(scene.runs)))
    strip = timeline(list(scene.first.items()), rows)
    sections.append(
        _section(
            "What the engines did" if scene.engines > 1 else "What the engine did", [strip] if strip else []
        )
    )
    sections.append(_section("By class", class_blocks(scene.first, scene.metrics)))
    sections.append(_section("By tenant", tenant_blocks(scene.first)))
    sections.append(_section("The fleet", fleet_blocks(scene.first)))
    sections.append(_section("What the policies thought", gauge_blocks(scene.first)))
    if isinstance(found, Comparison):
        sections.append(
            Section("Every difference with its interval", (differences(found, head),), closed=True)
        )
        details = (latencies(scene.metrics), rates(scene.metrics), engines(scene.metrics))
        sections.append(Section("Every latency, and the engine", details, closed=True))
    notes = [*found.notes, *_several(len(found.policies) - 1)] if isinstance(found, Comparison) else []
    if any(len(own) > 1 for own in scene.runs.values()):
        notes.append("several seeds: figures over time show the first seed, distributions pool all of them")
    return Chapter(
        scene.title, scene_verdict(scene), tuple(each for each in sections if each.blocks), _sentences(notes)
    )


def _several(tried: int) -> list[str]:
    """The best of several looks better than it is; intervals are not widened for that."""
    told = f"each interval is for one comparison; the best of {tried} is named, which flatters it a little"
    return [told] if tried > 1 else []


def _sentences(notes: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{note[:1].upper()}{note[1:]}." for note in notes)


def _section(title: str, blocks: Sequence[Block]) -> Section:
    return Section(title, tuple(blocks))


def _numbers(scene: Scene) -> list[Block]:
    found = scene.comparison
    tables: list[Block] = (
        [overview(found, scene.compared.head)]
        if isinstance(found, Comparison)
        else [latencies(scene.metrics), rates(scene.metrics), engines(scene.metrics)]
    )
    return [*tables, _bounded(scene, scene.bound.rate)] if scene.bound else tables


def _bounded(scene: Scene, bound: float) -> str:
    """How much was served of what can be served at all."""
    best = max(_whole_rate(run) for run in scene.first.values())
    where = f" and {scene.engines} engines" if scene.engines > 1 else ""
    said = (
        f"On these requests{where} no policy serves more than {number(bound)} requests/s (a bound from the "
        f"card's step times). The most over a whole run, its start and end included, is {number(best)}: "
        f"{100 * best / bound:.0f} % of it."
    )
    above = max(found.request_rate.value for found in scene.metrics.values()) > bound
    lighter = " Rates of the table are from the middle of a run, where requests may be lighter than all are."
    return said + lighter if above else said


def _whole_rate(run: Run) -> float:
    """Served to the end per second of the whole run: what a bound is about, with nothing left out."""
    low, high = run.span()
    return float(run.completed().sum()) / max(high - low, 1e-9)


def _loads(scenes: Sequence[Scene]) -> Chapter:
    figures = against_load(scenes)
    values = [scene.load.short for scene in scenes]
    sections = (Section("Against load", (*figures, load_grid(scenes))),)
    tried = sum(len(scene.runs) - 1 for scene in scenes if isinstance(scene.comparison, Comparison))
    notes = _sentences(_several(tried))
    return Chapter(f"From {values[0]} to {values[-1]}", load_verdict(scenes), sections, notes)


def _left_out(chapter: Chapter, scenes: int) -> Chapter:
    note = f"Of {scenes} loads the {MOST_CHAPTERS} highest are shown in full below."
    return Chapter(chapter.title, chapter.verdict, chapter.sections, (*chapter.notes, note))
