"""Commands that show results: `report` of runs that exist, `reproduce` a published experiment."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli import output
from headgate.core.errors import InputError, unknown

if TYPE_CHECKING:
    from headgate.report.runs.scenes import Scene


def report(
    runs: Annotated[list[str], typer.Argument(help="run folders, folders of them, or live traces")],
    out: Annotated[str, typer.Option(help="the file to write")] = output.REPORT,
    baseline: Annotated[
        str | None, typer.Option(help="the policy or router others are compared with")
    ] = None,
    title: Annotated[str, typer.Option(help="heading of the report")] = "",
    json: Annotated[str | None, typer.Option(help="verdicts and comparisons as JSON, to a file or -")] = None,
) -> None:
    """Show runs in one HTML file that needs nothing but a browser.

    Takes run folders, folders of them (what compare, demo and sweep write), and step traces of a live engine
    (.jsonl). Runs on the same requests are compared; runs at several loads are drawn against load.

    Examples:
      headgate report runs/0001-compare
      headgate report runs/0003-mixed-seed0 runs/0004-eb-seed0 --out both.html
      headgate report runs/0002-demo --baseline mixed
      headgate report serve.jsonl
    """
    from headgate.record.tables import Run
    from headgate.report.runs.page import runs_page
    from headgate.report.runs.scenes import gather
    from headgate.report.terminal import show

    output.check_json(json)
    output.check_report(out, "--out")
    places = [place for run in runs for place in find_runs(run)]
    with output.bar("reading runs", len(places)) as progress:
        loaded = []
        for number, place in enumerate(places, 1):
            loaded.append(Run.load(place))
            progress(number)
    scenes = gather(loaded)
    if baseline is not None:
        for scene in scenes:
            if baseline not in scene.runs:
                raise unknown("name among these runs", baseline, scene.runs)
        scenes = [replace(each, runs={baseline: each.runs[baseline], **each.runs}) for each in scenes]
    output.summed_up(scenes)
    page = runs_page(scenes, sys.argv[1:], title)
    say = output.said_to(json)
    for chapter in page.chapters:
        show(f"{chapter.title}: {chapter.verdict}", say)
    output.save_page(page, out, say)
    output.write_json(json, _document(out, scenes))


def find_runs(text: str) -> list[Path]:
    from headgate.record.tables import RECORD

    place = Path(text)
    if place.suffix == ".jsonl" or (place / RECORD).is_file() or not place.is_dir():
        return [place]
    found = sorted(place.rglob(RECORD), key=lambda record: (record.stat().st_mtime_ns, str(record)))
    if not found:
        raise InputError(f"no run in folder {place}; give a folder that simulate, compare or demo wrote")
    return [record.parent for record in found]


def _document(out: str, scenes: list[Scene]) -> dict[str, Any]:
    from headgate.report.runs.verdict import scene_verdict
    from headgate.stats.comparison import Comparison

    found = []
    for scene in scenes:
        result = scene.comparison
        one: dict[str, Any] = {"title": scene.title, "load": scene.load.text, "verdict": scene_verdict(scene)}
        one["bound"] = scene.bound.rate if scene.bound else None
        one["comparison"] = result.as_dict() if isinstance(result, Comparison) else result
        one["runs"] = {name: metrics.as_dict() for name, metrics in scene.metrics.items()}
        found.append(one)
    return {"report": out, "scenes": found}


# -- reproduce


def reproduce(
    name: Annotated[str | None, typer.Argument(help="the experiment, such as eb-table3")] = None,
    quick: Annotated[bool, typer.Option(help="a tenth of the requests: to try it, not to quote it")] = False,
    seed: Annotated[int, typer.Option(min=0, help="one number for all randomness")] = 0,
    json: Annotated[str | None, typer.Option(help="all numbers as JSON, to a file or - for stdout")] = None,
    report: output.Report = None,
) -> None:
    """Run a published experiment; print published and our numbers.

    A table has the published number, ours, their ratio, and why they differ. Without a name, lists the
    experiments. Nothing is written unless --json says where.

    Examples:
      headgate reproduce
      headgate reproduce eb-table3
      headgate reproduce eb-table10 --quick --json -
    """
    outputs = output.Outputs(json, report).checked()
    point = next(iter(metadata.entry_points(group="headgate.papers")), None)
    if point is None:
        raise InputError(
            "the experiments are in the package headgate-papers; install it: pip install ./papers in a clone"
        )
    papers = point.load()
    if name is None:
        if json is not None:
            output.write_json(json, {key: experiment.about for key, experiment in papers.EXPERIMENTS.items()})
        if json != "-":
            for source in dict.fromkeys(experiment.source for experiment in papers.EXPERIMENTS.values()):
                print(f"Experiments of {source}:")
                for key, experiment in papers.EXPERIMENTS.items():
                    if experiment.source == source:
                        print(f"  {key:11} {experiment.about}")
        return
    options = papers.Options(seed, quick)
    jobs = papers.find(name).jobs(options)
    with output.bar(name, len(jobs)) as progress:
        found = papers.reproduce(name, options, jobs, progress)
    document = {"seed": seed, "quick": quick, "interrupted": found.interrupted, **found.as_dict()}
    output.tell(papers.published_page(found, sys.argv[1:], quick), document, outputs)
    if found.interrupted:
        raise KeyboardInterrupt
