"""The document of runs: one chapter for each scene, and one over all loads where there are several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from shlex import join as shell
from typing import Any

from headgate.core.version import VERSION
from headgate.experiment.build import Unservable
from headgate.experiment.run import engine_kind, said, warning
from headgate.record.tables import Run
from headgate.report import document as doc
from headgate.report.runs import grids
from headgate.report.runs.scenes import (
    LONGER,
    Scene,
    against_load,
    bounded,
    comparable,
    distributions,
    load_grid,
    load_of,
    overloaded,
    what_differs,
)
from headgate.report.runs.timeline import ROWS, gauge_blocks, timeline
from headgate.report.runs.verdict import load_verdict, scene_verdict
from headgate.stats.comparison import Comparison, Whole
from headgate.stats.flow import unservable_rows

MOST_CHAPTERS = 4  # scenes shown in full; of more, the highest loads


def runs_page(scenes: Sequence[Scene], command: Sequence[str] = (), title: str = "") -> doc.Page:
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
    about = f"{few}; {requests:,} requests in {doc.plural(len(runs), 'run')}"
    if len(names) > 1:
        title = title or f"{len(names)} {what_differs(scenes).many} compared"
    elif not title:
        title = f"One run: {names[0]}" if len(runs) == 1 else f"{len(runs)} runs of {names[0]}"
    return doc.Page(title, about, tuple(chapters), made(runs, command), "runs", warnings(runs))


def scene_chapter(scene: Scene, rows: int = ROWS) -> doc.Chapter:
    found, head, first, runs = scene.comparison, scene.compared.head, scene.first, scene.tables
    machine = "What the engines did" if scene.engines > 1 else "What the engine did"
    pools = {name: one.fleet for name, one in first.items() if one.fleet is not None}
    fleet: list[doc.Block] = [grids.fleets(pools)] if pools else []
    by_class: list[doc.Block] = [*grids.class_grid(scene.metrics, head)]
    by_class += grids.worth_grid(scene.metrics, head)
    sections = [
        doc.Section("", tuple(_numbers(scene))),
        doc.Section("Promises", (doc.Drawn(lambda: grids.promise_panel(first)),)),
        doc.Section("How long requests wait", (doc.Drawn(lambda: distributions(scene.runs)),)),
        doc.Section(machine, (doc.Drawn(lambda: filter(None, (timeline(list(runs.items()), rows),))),)),
        doc.Section("By class", (*by_class, doc.Drawn(lambda: grids.class_figures(runs)))),
        doc.Section("By tenant", tuple(grids.tenant_grid(scene.metrics, head))),
        doc.Section("Prefix cache", tuple(grids.prefix_grid(scene.metrics))),
        doc.Section("The fleet", (*fleet, doc.Drawn(lambda: grids.fleet_figures(runs)))),
        doc.Section("What the policies estimated", (doc.Drawn(lambda: gauge_blocks(runs)),)),
    ]
    if isinstance(found, Comparison):
        every = f"Every difference from {found.baseline}"
        sections.append(doc.Section(every, (grids.differences(found, head),), doc.FOLDED))
        details = (grids.latencies(scene.metrics), grids.rates(first), grids.engines(scene.metrics))
        sections.append(doc.Section("Every latency, and the engine", details, doc.PAGE_ONLY))
    verdict, about = scene_verdict(scene), setup([scene])
    return doc.Chapter(scene.title, verdict, tuple(sections), _notes(scene), about, alarms=alarms(scene))


def _card(meta: dict[str, Any]) -> str:
    bars = _table(meta, "expected_error")
    off = f"; derived, throughput ±{100 * bars['throughput']:.0f} %" if bars else ""
    return f"{meta['card']} ({meta.get('model')} on {meta.get('gpu')}{off})"


def setup(scenes: Sequence[Scene]) -> str:
    meta = [one.run.meta for scene in scenes for own in scene.runs.values() for one in own]
    cards = (_card(one) for one in meta if one.get("card"))
    fleet = any("router" in one for one in meta)
    kinds = (engine_kind(bool(one["asynchronous"]), fleet) for one in meta if "asynchronous" in one)
    limits = [one["engine"] for one in meta if isinstance(one.get("engine"), dict)]
    return said(cards, kinds, limits, (str(one.get("arrivals") or "") for one in meta))


def _notes(scene: Scene) -> tuple[str, ...]:
    found = scene.comparison
    if isinstance(found, Comparison):
        notes = [*found.notes, *_several(len(found.policies) - 1)]
    else:
        alone = len(scene.runs) == 1  # then it stands among the facts
        notes = [one.trend.said for one in scene.first.values() if not (alone or one.trend.stationary)]
    if any(len(own) > 1 for own in scene.runs.values()):
        notes.append("several seeds: figures over time show the first seed, distributions pool all of them")
    return tuple(dict.fromkeys(map(doc.sentence, notes)))


def _several(tried: int) -> list[str]:
    """The best of several looks better than it is; intervals are not widened for that."""
    return [f"intervals are not corrected for multiple comparisons ({tried})"] if tried > 1 else []


def _numbers(scene: Scene) -> list[doc.Block]:
    found, runs = scene.comparison, scene.first
    tables: list[doc.Block]
    if isinstance(found, Comparison):
        tables = [grids.overview(found, scene.compared.head)]
    elif len(runs) == 1:
        tables = [grids.latencies(scene.metrics), *map(grids.run_facts, runs.values())]
    else:
        tables = [grids.latencies(scene.metrics), grids.rates(runs), grids.engines(scene.metrics)]
    return [*tables, bounded(scene, scene.bound.rate)] if scene.bound else tables


def loads_chapter(scenes: Sequence[Scene]) -> doc.Chapter:
    values = [scene.load.short for scene in scenes]
    section = doc.Section("Every load", (load_grid(scenes), doc.Drawn(lambda: against_load(scenes))))
    tried = sum(len(scene.runs) - 1 for scene in scenes if isinstance(scene.comparison, Comparison))
    notes = tuple(map(doc.sentence, _several(tried)))
    return doc.Chapter(f"From {values[0]} to {values[-1]}", load_verdict(scenes), (section,), notes)


# -- what must be known before any figure


def alarms(scene: Scene) -> tuple[str, ...]:
    first = next(iter(scene.tables.values()))
    lost = int(unservable_rows(first).sum())
    left_out = Unservable(lost, len(first.requests["id"]), int(first.meta.get("longest") or 0)).said
    return tuple(filter(None, (left_out, _overload(scene))))


def _overload(scene: Scene) -> str:
    if not (growing := overloaded(scene)):
        return ""
    rates = {name: doc.number(Whole.of([one]).rate) for name, one in growing.items()}
    served = doc.listed([f"{name} serves {rate}" for name, rate in rates.items()])
    offered = f"{doc.number(load_of(next(iter(growing.values())).run).value)} requests/s are offered"
    most = f" No policy serves more than {doc.number(scene.bound.rate)}." if scene.bound else ""
    return f"Overloaded: {offered}; over the whole run {served}.{most} {LONGER}"


# -- how the report was made

MOST = 4  # warnings listed one by one
Facts = tuple[tuple[str, str], ...]


def made(runs: Sequence[Run], command: Sequence[str] = ()) -> Facts:
    meta = [run.meta for run in runs]
    dates = sorted(str(one["date"]) for one in meta if one.get("date"))
    facts = {
        "Report": shell(["headgate", *command]) if command else "",
        "Runs": _each(shell(["headgate", *map(str, one["command"])]) for one in meta if one.get("command")),
        "Dates": " to ".join(dict.fromkeys((*dates[:1], *dates[-1:]))),
        "Policies": _each(_named(one, "policy", "parameters") for one in meta),
        "Routers": _each(_named(one, "router", "router_parameters") for one in meta),
        "Card": _each(f"{one['card']}: {one.get('provenance', '')}" for one in meta if one.get("card")),
        "Engines": _each(one.get("engines") for one in meta),
        "Workload": _each(_plain(one, "workload") for one in meta),
        "Seeds": _each(one.get("seed") for one in meta),
        "Driver": _each(one.get("driver") for one in meta),
        "Outcome": _each(one.get("outcome") for one in meta),
        "Versions": _each(
            f"headgate {one['headgate']}, {_plain(one, 'versions')}" for one in meta if one.get("headgate")
        ),
        "Figures": f"95 % intervals; drawn by headgate {VERSION}, nothing is loaded from elsewhere",
    }
    return tuple((name, value) for name, value in facts.items() if value)


def warnings(runs: Iterable[Run]) -> tuple[str, ...]:
    found: list[str] = []
    for run in runs:
        label, outcome = run.meta.get("label", "run"), run.meta.get("outcome", "finished")
        if outcome != "finished":
            found.append(f"{label}: the run was {outcome}; figures cover what there is")
        if "card" in run.meta and "label" in run.meta and (line := warning(run)):
            found.append(line)
    told = list(dict.fromkeys(found))
    more = [f"and {len(told) - MOST} more runs like these"] if len(told) > MOST + 1 else []
    return tuple(told[:MOST] + more if more else told)


def _table(meta: dict[str, Any], name: str) -> dict[str, Any]:
    found = meta.get(name)
    return found if isinstance(found, dict) else {}


def _each(values: Iterable[object]) -> str:
    return "; ".join(dict.fromkeys(str(value) for value in values if value not in (None, "")))


def _named(meta: dict[str, Any], name: str, settings: str) -> str:
    shown = ", ".join(f"{key}={value}" for key, value in _table(meta, settings).items())
    return f"{meta.get(name) or ''}{f' ({shown})' if shown else ''}"


def _plain(meta: dict[str, Any], name: str) -> str:
    values = _table(meta, name).items()
    return ", ".join(f"{key} {value}" for key, value in values if isinstance(value, str | int | float))
