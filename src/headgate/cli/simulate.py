"""Commands that simulate: `simulate` one policy, `compare` several, `sweep` a grid."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headgate.cli import output
from headgate.cli.flags import option, takes_fleet_settings
from headgate.cli.help import Number, Text, Texts
from headgate.core.errors import InputError, RunError, RunInterruptedError
from headgate.experiment.settings import Experiment
from headgate.experiment.workers import ON, Workers

if TYPE_CHECKING:
    from headgate.experiment.run import Axis, Faults, Maker, Prepared, SweepTask
    from headgate.record.tables import Run
    from headgate.stats.measured import Measured


@takes_fleet_settings
def simulate(
    words: Experiment,
    policy: Annotated[Texts, option(Experiment, "policy", "--policy")] = None,
    router: Annotated[Texts, option(Experiment, "router", "--router")] = None,
    out: Annotated[Text, typer.Option(help="run folder (default: runs/NNNN-...)")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a run folder that exists")] = False,
    json: Annotated[Text, output.json_option("figures as JSON, to a file or - for stdout")] = None,
    detailed: Annotated[bool, typer.Option(help="with --json: every request's TTFT and ITLs")] = False,
    report: output.Report = None,
) -> None:
    """Serve a workload under one policy, in virtual time.

    Writes a run folder (tables as plain numpy columns, run.json, bench.json in the schema of `vllm bench
    serve`) and prints the figures with units.

    Examples:
      headgate simulate --policy eb --set refill=48 --clients 512 --requests 4000
      headgate simulate --policy mixed --trace azure-conv --scale-rate 3
      headgate simulate --workload geometric --prompt 256 --output 128 --rate 12 --ttft 500ms --tpot 50ms
      headgate simulate --engines 16 --router power-of-two --trace azure-conv --scale-rate 30
      headgate simulate --engines 8 --autoscale plan:start=90s --trace azure-conv --scale-rate 10
      headgate simulate --engines 4 --router split:prefill=1 --rate 60 --prompt 512 --output 256
      headgate simulate experiment.toml --policy v0 --json -
    """
    from headgate.experiment.run import Maker, Prepared, carry_out, choose_routers
    from headgate.methods.make import split_name
    from headgate.record.tables import refuse_full
    from headgate.stats.measured import Measured

    if detailed and json is None:
        raise InputError("--detailed is about --json; give --json FILE or drop it")
    name, settings = split_name(*_one("policy", policy, words) or [words.policy])
    settings = {**words.set, **settings}
    prepared = Prepared(words)
    make = Maker(name, settings, prepared.engine)  # a mistake in it should not cost a folder
    routed = next(iter(choose_routers(_one("router", router, words), prepared).values()), None)
    say = output.said_to(json)
    with output.run_folder(out, f"{Path(name).name}-seed{words.seed}"[:100], overwrite) as folder:
        refuse_full(folder, overwrite)
        for note in prepared.notes():
            print(f"note: {note}", file=say)
        with output.bar(name, len(prepared.workload)) as progress:
            run = carry_out(prepared, name, settings, progress=progress, router=routed, make=make)
        found = Measured(run)
        output.save(found, folder, overwrite)
    if run.meta["outcome"] == "finished" or json or report or run.completed().any():
        _report(found, folder, json, report, detailed)
    if run.meta["outcome"] != "finished":
        raise output.ended_early(run, "the run", folder)


def _one(what: str, flags: list[str] | None, words: Experiment) -> list[str]:
    several = {"policy": "policies", "router": "routers"}[what]
    if flags is not None and len(flags) > 1:
        raise InputError(f"simulate runs one {what}; drop a --{what} or use headgate compare")
    if flags is None and getattr(words, several) and what not in words.model_fields_set:
        raise InputError(f"the file names {several} to compare; choose one with --{what} or use compare")
    return flags or []


def _report(found: Measured, folder: Path, json: str | None, report: str | None, detailed: bool) -> None:
    from headgate.experiment.run import warning
    from headgate.report.runs.page import runs_page
    from headgate.report.runs.scenes import scene_of
    from headgate.report.terminal import show
    from headgate.stats.vllm_bench import bench_result

    scene, say = scene_of({found.run.meta["label"]: [found]}), output.said_to(json)
    page = runs_page([scene], sys.argv[1:])
    show(page.chapters[0], say)
    if extrapolated := warning(found.run):
        show(f"note: {extrapolated}", say)
    more: dict[str, Any] = {} if found.fleet is None else {"fleet": found.fleet.as_dict()}
    if scaled := found.run.meta.get("autoscale"):
        more["autoscale"] = scaled
        hours, least, most = scaled["engine_hours"], scaled["least"], scaled["most"]
        print(f"autoscale {scaled['rule']}: {hours:.2f} engine-hours, {least} to {most} engines", file=say)
    print(f"run folder: {folder}", file=say)
    output.save_page(page, report, say)
    figures = {**found.metrics.as_dict(), "bound": scene.bound and scene.bound.rate}
    output.write_json(json, {**bench_result(found, detailed), "headgate": figures, **more})


# -- compare


class Chosen(NamedTuple):
    policy: str  # its name in headgate
    settings: dict[str, Any]
    make: Maker
    router: tuple[str, dict[str, Any]] | None = None


MOST_SEEDS = 10_000


@takes_fleet_settings
def compare(
    words: Experiment,
    policy: Annotated[Texts, option(Experiment, "policies", "--policy")] = None,
    router: Annotated[Texts, option(Experiment, "routers", "--router")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="so many seeds, from --seed on")] = 1,
    out: Annotated[Text, typer.Option(help="folder for the runs (default: runs/NNNN-compare)")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace run folders that exist")] = False,
    json: Annotated[Text, output.json_option("the comparison as JSON, to a file or -")] = None,
    report: output.Report = None,
) -> None:
    """Serve the same requests under several policies, side by side.

    Prints paired differences with intervals. The first policy is the baseline. With several seeds, runs are
    paired by seed; with one, by request. With --engines, routers are compared in the same way, or every
    router with every policy.

    Examples:
      headgate compare --policy mixed --policy v0 --policy eb:refill=48 --clients 1024 --slots 512
      headgate compare --policy mixed --policy eb:refill=16 --trace azure-conv --scale-rate 4
      headgate compare --policy mixed --policy eb:refill=64 --workload geometric --rate 20 --seeds 5
      headgate compare --engines 8 --router round-robin --router power-of-two --trace azure-conv
          --scale-rate 30
    """
    from headgate.experiment.run import Prepared
    from headgate.report.plans.flags import sglang_said
    from headgate.report.runs.page import runs_page
    from headgate.report.runs.scenes import scene_of
    from headgate.report.terminal import show
    from headgate.stats.comparison import Comparison

    prepared = Prepared(words)
    chosen = choose_all(list(words.policies) if policy is None else policy, router, prepared)
    if len(chosen) < 2:
        also = ", or --router round-robin --router split" if words.engines else ""
        example = f"--policy mixed --policy v0{also}"
        raise InputError(f"compare needs at least two different policies; pass {example}")
    if seeds > 1 and prepared.requests(words.seed) == prepared.requests(words.seed + 1):
        raise InputError("these requests are the same for every seed (nothing is drawn); drop --seeds")
    say = output.said_to(json)
    with output.run_folder(out, "compare", overwrite) as folder:
        for note in prepared.notes():
            print(f"note: {note}", file=say)
        runs = run_all(prepared, chosen, seeds, folder, overwrite)
    scene = scene_of(runs)
    if not isinstance(scene.comparison, Comparison):
        raise InputError(str(scene.comparison))
    page = runs_page([scene], sys.argv[1:])
    show(page.chapters[0], say)
    for line in extrapolations(runs):
        show(f"note: {line}", say)
    if words.engine == "sglang":
        made = {text: (each.policy, each.make.parameters) for text, each in chosen.items()}
        for line in sglang_said(made, prepared.engine):
            show(line, say)
    print(f"run folders: {folder}", file=say)
    output.save_page(page, report or str(folder / output.REPORT), say)
    fleets = {name: one.fleet.as_dict() for name, one in scene.first.items() if one.fleet is not None}
    output.write_json(json, scene.comparison.as_dict() | ({"fleets": fleets} if fleets else {}))


def extrapolations(runs: Mapping[str, list[Measured]]) -> list[str]:
    from headgate.experiment.run import warning

    return [line for each in runs.values() if (line := warning(each[0].run))]


def choose_all(
    policies: list[str], router: list[str] | None, prepared: Prepared, faults: Faults | None = None
) -> dict[str, Chosen]:
    from headgate.experiment.run import Maker, choose_routers, each_once

    words = prepared.words
    routers = choose_routers(list(words.routers) if router is None else router, prepared)

    def made(name: str, settings: dict[str, Any]) -> tuple[Chosen, dict[str, Any]]:
        make = Maker(name, settings, prepared.engine)
        return Chosen(name, settings, make), make.parameters

    chosen = each_once("policy", policies or [words.policy], words.set, made, faults)
    if len(routers) < 2:
        routed = next(iter(routers.values()), None)
        return {text: each._replace(router=routed) for text, each in chosen.items()}
    return {
        name if len(policies) < 2 else f"{name} {text}": each._replace(router=routed)
        for name, routed in routers.items()
        for text, each in chosen.items()
    }


def run_all(
    prepared: Prepared, chosen: Mapping[str, Chosen], seeds: int, folder: Path, overwrite: bool = False
) -> dict[str, list[Measured]]:
    from headgate.experiment.run import carry_out
    from headgate.record.tables import refuse_full
    from headgate.stats.measured import Measured

    first = prepared.words.seed
    runs: dict[str, list[Measured]] = {text: [] for text in chosen}
    places = {
        (text, seed): folder / (_file_name(text) + (f"-seed{seed}" if seeds > 1 else ""))
        for text in chosen
        for seed in range(first, first + seeds)
    }
    for place in places.values():
        refuse_full(place, overwrite)
    for (text, seed), place in places.items():
        name, settings, make, router = chosen[text]
        with output.bar(f"{text} seed {seed}", len(prepared.workload)) as progress:
            run = carry_out(prepared, name, settings, seed, text, progress, router, make)
        found = Measured(run)
        output.save(found, place, overwrite)
        if run.meta["outcome"] != "finished":
            raise output.ended_early(run, f"{text}: the run", place)
        runs[text].append(found)
    return runs


def _file_name(text: str, longest: int = 200) -> str:
    return re.sub(r"[^\w.+=-]+", "-", text)[:longest]


# -- sweep

MOST_SWEPT_SEEDS = 1000
LOADS = ("rate", "clients", "scale_rate")  # runs are compared at equal loads, so these come first
RECORD = "sweep.json"  # marks a folder that a sweep may go on in


Many = Annotated[Texts, typer.Option("--over", help="NAME=VALUE,VALUE,...; may be repeated")]


@takes_fleet_settings
def sweep(
    words: Experiment,
    over: Many = None,
    policy: Annotated[Texts, option(Experiment, "policies", "--policy")] = None,
    router: Annotated[Texts, option(Experiment, "routers", "--router")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=MOST_SWEPT_SEEDS, help="so many seeds, from --seed on")
    ] = 1,
    jobs: Annotated[Number, typer.Option(min=1, help="processes (default: one per core)")] = None,
    on: Annotated[str, typer.Option(help=ON)] = "",
    out: Annotated[Text, typer.Option(help="folder for the runs (default: runs/NNNN-sweep)")] = None,
    json: Annotated[Text, output.json_option("every point as JSON, to a file or -")] = None,
    report: output.Report = None,
) -> None:
    """Run a grid of settings, policies and seeds on all cores.

    --over takes any setting of a run (rate, clients, scale-rate, slots, budget, prompt, ...) or a parameter
    of the policies (refill, ...). The load, else the first setting, is the x-axis of the report. An
    interrupted sweep goes on when the same command names its folder with --out.

    Examples:
      headgate sweep --policy mixed --policy eb+ --over rate=4,8,12,16,20 --requests 2000
      headgate sweep --policy eb --over refill=4,16,64 --over clients=64,256,512 --seeds 3
      headgate sweep --policy mixed --trace azure-conv --over scale-rate=1,2,4 --over slots=64,256 --out grid
      headgate sweep --policy mixed --policy eb+ --over rate=4,8,12,16,20 --seeds 50 --on ray:10.0.0.1:6379
    """
    from headgate.experiment.run import by_place, is_word, parse_grid, warning
    from headgate.report.runs.page import runs_page, setup
    from headgate.report.runs.scenes import load_grid, swept
    from headgate.report.terminal import show

    workers = Workers(jobs or os.cpu_count() or 1, on).checked()
    axes = sorted(parse_grid(over or []), key=lambda axis: axis.word not in LOADS)
    if not axes:
        raise InputError("sweep needs something to sweep over; pass --over rate=2,4,8")
    tasks, left_out = make_tasks(words, axes, policy, router, seeds)
    say = output.said_to(json)
    _notes(tasks, left_out, say)
    going_on = out is not None and (Path(out) / RECORD).is_file()
    with output.run_folder(out, "sweep", going_on) as folder:
        runs = sweep_all(tasks, folder, workers, say)
    first = next((axis for axis in axes if is_word(axis)), None)
    places = {at: swept(own, first.word if first else "", at) for at, own in by_place(runs).items()}
    scenes = list(places.values())
    output.summed_up(scenes)
    show(setup(scenes), say)
    print(file=say)
    show(load_grid(scenes), say)
    for line in dict.fromkeys(line for _, run in runs if (line := warning(run))):
        show(f"note: {line}", say)
    print(f"run folders: {folder}", file=say)
    page = runs_page(scenes, sys.argv[1:])
    output.save_page(page, report or str(folder / output.REPORT), say)
    points = []
    for at, scene in places.items():
        for label, own in scene.runs.items():
            for one in own:
                meta = one.run.meta
                point = {"at": at, "label": label, "seed": meta.get("seed"), "outcome": meta["outcome"]}
                points.append(point | {"metrics": one.metrics.as_dict()})
    grid = {axis.word: list(axis.values) for axis in axes}
    output.write_json(json, {"over": grid, "left_out": left_out, "points": points})
    failed = [(task, run) for task, run in runs if run.meta["outcome"] != "finished"]
    if failed:
        task, run = failed[0]
        why = f"{folder / _place(task)}: {run.meta['outcome']}"
        raise RunError(f"{len(failed)} of {len(runs)} runs did not end; {why}")


def _notes(tasks: Sequence[SweepTask], left_out: Sequence[str], say: Any) -> None:
    from headgate.cost.card import load_card
    from headgate.cost.likeness import error_bar
    from headgate.experiment.run import partly

    kinds = {(task.words.card, task.words.engines is not None): task.words for task in tasks}
    notes = [*left_out]
    for (name, fleet), words in kinds.items():
        card = load_card(name)
        notes += [*error_bar(card), *partly(words, card, fleet)]
    for note in dict.fromkeys(filter(None, notes)):
        print(f"note: {note}", file=say)


def make_tasks(
    words: Experiment, axes: Sequence[Axis], policy: list[str] | None, router: list[str] | None, seeds: int
) -> tuple[list[SweepTask], list[str]]:
    """The whole grid, and what is left out of it. All policies are made first: mistakes cost nothing."""
    from headgate.experiment import run as runs

    of_runs = [axis for axis in axes if runs.is_word(axis)]
    of_policies = [axis for axis in axes if not runs.is_word(axis)]
    texts = runs.expand_policies(policy or list(words.policies) or [words.policy], of_policies)
    first = of_runs[0] if of_runs else None
    places = [(at, runs.with_value(words, first, at)) for at in first.values] if first else [(None, words)]
    tasks: list[SweepTask] = []
    faults: Faults = {text: [] for text in texts}
    points = 0
    for at, here in places:
        for suffix, own in runs.variants(here, of_runs[1:]).items():
            prepared, points = runs.Prepared(own), points + 1
            chosen = choose_all(texts, router, prepared, faults)
            for text, (name, settings, _, routed) in chosen.items():
                for seed in range(words.seed, words.seed + seeds):
                    tasks.append(runs.SweepTask(at, text + suffix, own, name, settings, routed, seed))
            if len(tasks) > runs.MOST:
                raise InputError(f"more than {runs.MOST:,} runs; take fewer values or seeds")
    for each in faults.values():
        if len(each) == points:
            raise each[0]
    found = [(text, len(each), each[0]) for text, each in faults.items() if each]
    return tasks, [f"{text} is left out at {count} of {points} points: {why}" for text, count, why in found]


def sweep_all(
    tasks: Sequence[SweepTask], folder: Path, workers: Workers, say: Any
) -> list[tuple[SweepTask, Run]]:
    from headgate.experiment.run import carry_out_all
    from headgate.record.tables import Run

    def finished(task: SweepTask) -> bool:
        place = places[task.fingerprint]
        meta = Run.load(place).meta if (place / "run.json").is_file() else None
        if meta is not None and meta.get("sweep") != task.fingerprint:
            raise InputError(f"{place} holds a run of another sweep; choose another folder with --out")
        return meta is not None and meta.get("outcome") == "finished"

    places = {task.fingerprint: folder / _place(task) for task in tasks}
    (folder / RECORD).write_text('{"runs": %d}\n' % len(tasks), encoding="utf-8")  # noqa: UP031
    there = {task.fingerprint for task in tasks if finished(task)}
    left = [task for task in tasks if task.fingerprint not in there]
    if there:
        print(f"{len(there)} of {len(tasks)} runs are there already", file=say)
    try:
        with output.bar("sweep", len(left)) as progress:
            for done, (task, run) in enumerate(carry_out_all(left, workers, sys.argv[1:]), 1):
                output.save(run, places[task.fingerprint], overwrite=True)
                progress(done)
                if run.meta["outcome"] == "interrupted":
                    raise KeyboardInterrupt
    except (KeyboardInterrupt, RunInterruptedError):
        said = f"interrupted: {sum(map(finished, tasks))} of {len(tasks)} runs stand in {folder}"
        raise RunInterruptedError(f"{said}; the same command with --out {folder} goes on") from None
    return [(task, Run.load(places[task.fingerprint])) for task in tasks]


def _place(task: SweepTask) -> str:
    return f"{'' if task.at is None else f'{task.at}/'}{_file_name(task.label, 120)}-seed{task.seed}"
