"""`headgate sweep`: a grid of runs on all local cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli.flags import option, takes_fleet_settings
from headgate.cli.output import REPORT, check_json, check_report, run_folder, save, write_json
from headgate.cli.pages import Report, said_to, save_page, summed_up
from headgate.cli.progress import bar
from headgate.core.errors import InputError, RunError, RunInterruptedError
from headgate.experiment.settings import Experiment
from headgate.experiment.workers import ON, Workers

if TYPE_CHECKING:
    from headgate.cli.compare import Chosen
    from headgate.experiment.run import Prepared
    from headgate.experiment.sweep import Over, Task
    from headgate.record.tables import Run
    from headgate.report.runs.scenes import Scene

MOST_SEEDS = 1000
LOADS = ("rate", "clients", "scale_rate")  # runs are compared at equal loads, so these come first
RECORD = "sweep.json"  # marks a folder that a sweep may go on in

EXAMPLES = """Run a grid of settings, policies and seeds on all cores.

--over takes any setting of a run (rate, clients, scale-rate, slots, budget, prompt, ...) or a parameter of
the policies (refill, ...). The load, else the first setting, is the x-axis of the report. An interrupted
sweep goes on when the same command names its folder with --out.

\b
Examples:
  headgate sweep --policy mixed --policy eb+ --over rate=4,8,12,16,20 --requests 2000
  headgate sweep --policy eb --over refill=4,16,64 --over clients=64,256,512 --seeds 3
  headgate sweep --policy mixed --trace azure-conv --over scale-rate=1,2,4 --over slots=64,256 --out grid
  headgate sweep --policy mixed --policy eb+ --over rate=4,8,12,16,20 --seeds 50 --on ray:10.0.0.1:6379
"""

Many = Annotated[list[str] | None, typer.Option("--over", help="NAME=VALUE,VALUE,...; may be repeated")]


@takes_fleet_settings
def sweep(
    words: Experiment,
    over: Many = None,
    policy: Annotated[list[str] | None, option(Experiment, "policies", "--policy")] = None,
    router: Annotated[list[str] | None, option(Experiment, "routers", "--router")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="so many seeds, from --seed on")] = 1,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes (default: one per core)")] = None,
    on: Annotated[str, typer.Option(help=ON)] = "",
    out: Annotated[str | None, typer.Option(help="folder for the runs (default: runs/NNNN-sweep)")] = None,
    json: Annotated[str | None, typer.Option(help="every point as JSON, to a file or -")] = None,
    report: Report = None,
) -> None:
    """Run it."""
    from headgate.experiment.coverage import warning
    from headgate.experiment.sweep import by_place, is_word, parse_grid
    from headgate.report.runs.load import load_grid
    from headgate.report.runs.page import runs_page, setup
    from headgate.report.runs.scenes import swept
    from headgate.report.terminal import show

    check_json(json)
    check_report(report)
    workers = Workers(jobs or os.cpu_count() or 1, on).checked()
    axes = sorted(parse_grid(over or []), key=lambda axis: axis.word not in LOADS)
    if not axes:
        raise InputError("sweep needs something to sweep over; pass --over rate=2,4,8")
    tasks = make_tasks(words, axes, policy, router, seeds)
    say = said_to(json)
    _notes(tasks, say)
    going_on = out is not None and (Path(out) / RECORD).is_file()
    with run_folder(out, "sweep", going_on) as folder:
        runs = run_all(tasks, folder, workers, say)
    first = next((axis for axis in axes if is_word(axis)), None)
    scenes = {at: swept(own, first.word if first else "", at) for at, own in by_place(runs).items()}
    summed_up(list(scenes.values()))
    show(setup(list(scenes.values())), say)
    print(file=say)
    show(load_grid(list(scenes.values())), say)
    for line in dict.fromkeys(line for _, run in runs if (line := warning(run))):
        show(f"note: {line}", say)
    print(f"run folders: {folder}", file=say)
    page = runs_page(list(scenes.values()), sys.argv[1:])
    save_page(page, report or str(folder / REPORT), say)
    write_json(json, _document(scenes, axes))
    _all_ended_well(runs, folder)


sweep.__doc__ = EXAMPLES


def _notes(tasks: Sequence[Task], say: Any) -> None:
    """What the runs leave out, each said once."""
    from headgate.cost.card import load_card, renamed
    from headgate.cost.error_bar import error_bar
    from headgate.experiment.asynchrony import partly
    from headgate.experiment.conflicts import renamed_promise

    kinds = {(task.words.card, task.words.engines is not None): task.words for task in tasks}
    notes = [renamed(card) for card, _ in kinds]
    notes += [note for card, _ in kinds for note in error_bar(load_card(card))]
    notes += [note for task in tasks for note in renamed_promise(task.words)]
    notes += [note for (card, fleet), each in kinds.items() for note in partly(each, load_card(card), fleet)]
    for note in dict.fromkeys(filter(None, notes)):
        print(f"note: {note}", file=say)


def _all_ended_well(runs: Sequence[tuple[Task, Run]], folder: Path) -> None:
    """A run that failed is no reason to lose the others, but one to say so."""
    failed = [(task, run) for task, run in runs if run.meta["outcome"] != "finished"]
    if failed:
        task, run = failed[0]
        place = folder / _place(task)
        raise RunError(f"{len(failed)} of {len(runs)} runs did not end; {place}: {run.meta['outcome']}")


def make_tasks(
    words: Experiment, axes: Sequence[Over], policy: list[str] | None, router: list[str] | None, seeds: int
) -> list[Task]:
    """The whole grid; every policy is made once at every point, so that mistakes cost nothing."""
    from headgate.experiment.run import Prepared
    from headgate.experiment.sweep import MOST, Task, expand_policies, is_word, variants, with_value

    of_runs = [axis for axis in axes if is_word(axis)]
    texts = expand_policies(
        policy or list(words.policies) or [words.policy], [a for a in axes if not is_word(a)]
    )
    places: list[tuple[Any, Experiment]] = [(None, words)]
    if of_runs:
        places = [(value, with_value(words, of_runs[0], value)) for value in of_runs[0].values]
    tasks: list[Task] = []
    for at, here in places:
        for suffix, own in variants(here, of_runs[1:]).items():
            prepared = Prepared(own)
            for text, chosen in _chosen(own, texts, router, prepared).items():
                name, settings, routed = chosen.policy, chosen.settings, chosen.router
                each = range(words.seed, words.seed + seeds)
                tasks += [Task(at, text + suffix, own, name, settings, routed, seed) for seed in each]
            if len(tasks) > MOST:
                raise InputError(f"more than {MOST:,} runs; take fewer values or seeds")
    return tasks


def _chosen(
    words: Experiment, texts: list[str], router: list[str] | None, prepared: Prepared
) -> dict[str, Chosen]:
    """As for compare, but one of a kind is enough."""
    from headgate.cli.compare import choose, choose_all
    from headgate.experiment.routing import choose_routers

    routers = choose_routers(list(words.routers) if router is None else router, prepared)
    if len(texts) > 1 or len(routers) > 1:
        return choose_all(words, texts, router, prepared)
    routed = next(iter(routers.values()), None)
    return {text: each._replace(router=routed) for text, each in choose(texts, prepared).items()}


def run_all(tasks: Sequence[Task], folder: Path, workers: Workers, say: Any) -> list[tuple[Task, Run]]:
    """Every run that is not there yet, each into its own folder as soon as it ends."""
    from headgate.experiment.sweep import carry_out_all

    places = {task.fingerprint: folder / _place(task) for task in tasks}
    (folder / RECORD).write_text('{"runs": %d}\n' % len(tasks), encoding="utf-8")  # noqa: UP031
    there = {task.fingerprint for task in tasks if _finished(places[task.fingerprint], task)}
    left = [task for task in tasks if task.fingerprint not in there]
    if there:
        print(f"{len(there)} of {len(tasks)} runs are there already", file=say)
    try:
        with bar("sweep", len(left)) as progress:
            for done, (task, run) in enumerate(carry_out_all(left, workers, sys.argv[1:]), 1):
                save(run, places[task.fingerprint], overwrite=True)
                progress(done)
                if run.meta["outcome"] == "interrupted":
                    raise KeyboardInterrupt
    except (KeyboardInterrupt, RunInterruptedError):
        here = sum(_finished(place, task) for task, place in zip(tasks, places.values(), strict=True))
        said = f"interrupted: {here} of {len(tasks)} runs stand in {folder}"
        raise RunInterruptedError(f"{said}; the same command with --out {folder} goes on") from None
    return _load(tasks, places)


def _load(tasks: Sequence[Task], places: dict[str, Path]) -> list[tuple[Task, Run]]:
    from headgate.record.tables import Run

    return [(task, Run.load(places[task.fingerprint])) for task in tasks]


def _place(task: Task) -> str:
    """Where on the grid, as a path."""
    import re

    name = re.sub(r"[^\w.+=-]+", "-", task.label)[:120]
    return f"{'' if task.at is None else f'{task.at}/'}{name}-seed{task.seed}"


def _finished(place: Path, task: Task) -> bool:
    """Whether the run stands there, whole. Another run in its place is refused rather than replaced."""
    from headgate.record.tables import Run

    if not (place / "run.json").is_file():
        return False
    meta = Run.load(place).meta
    if meta.get("sweep") != task.fingerprint:
        raise InputError(f"{place} holds a run of another sweep; choose another folder with --out")
    return bool(meta.get("outcome") == "finished")


def _document(scenes: dict[Any, Scene], axes: Sequence[Over]) -> dict[str, Any]:
    """Every run with all its figures."""
    points = [
        {
            "at": at,
            "label": label,
            "seed": one.run.meta.get("seed"),
            "outcome": one.run.meta["outcome"],
            "metrics": one.metrics.as_dict(),
        }
        for at, scene in scenes.items()
        for label, own in scene.runs.items()
        for one in own
    ]
    return {"over": {axis.word: list(axis.values) for axis in axes}, "points": points}
