"""`headgate compare`: several policies on the same requests."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headgate.cli.flags import option, takes_fleet_settings
from headgate.cli.output import REPORT, check_json, check_report, ended_early, run_folder, save, write_json
from headgate.cli.pages import Report, said_to, save_page
from headgate.cli.progress import bar
from headgate.core.errors import InputError, unknown
from headgate.experiment.settings import Experiment

if TYPE_CHECKING:
    from headgate.experiment.run import Maker, Prepared
    from headgate.stats.measured import Measured


class Chosen(NamedTuple):
    """What one of the runs compared is made of; without a router there is one engine."""

    policy: str  # its name in headgate
    settings: dict[str, Any]
    make: Maker
    router: tuple[str, dict[str, Any]] | None = None


MOST_SEEDS = 10_000

EXAMPLES = """Serve the same requests under several policies, side by side.

Prints paired differences with intervals. The first policy is the baseline. With several seeds, runs are
paired by seed; with one, by request. With --engines, routers are compared in the same way, or every router
with every policy.

\b
Examples:
  headgate compare --policy mixed --policy v0 --policy eb:refill=48 --clients 1024 --slots 512
  headgate compare --policy mixed --policy eb:refill=16 --trace azure-conv --scale-rate 4
  headgate compare --policy mixed --policy eb:refill=64 --workload geometric --rate 20 --seeds 5
  headgate compare --engines 8 --router round-robin --router power-of-two --trace azure-conv --scale-rate 30
"""


@takes_fleet_settings
def compare(
    words: Experiment,
    policy: Annotated[list[str] | None, option(Experiment, "policies", "--policy")] = None,
    router: Annotated[list[str] | None, option(Experiment, "routers", "--router")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="so many seeds, from --seed on")] = 1,
    out: Annotated[str | None, typer.Option(help="folder for the runs (default: runs/NNNN-compare)")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace run folders that exist")] = False,
    json: Annotated[str | None, typer.Option(help="the comparison as JSON, to a file or -")] = None,
    report: Report = None,
) -> None:
    """Run them."""
    from headgate.experiment.run import Prepared
    from headgate.report.runs.page import runs_page
    from headgate.report.runs.scenes import scene_of
    from headgate.report.terminal import show
    from headgate.stats.comparison import Comparison

    check_json(json)
    check_report(report)
    prepared = Prepared(words)
    chosen = choose_all(words, policy, router, prepared)
    if seeds > 1 and prepared.requests(words.seed) == prepared.requests(words.seed + 1):
        raise InputError("these requests are the same for every seed (nothing is drawn); drop --seeds")
    say = said_to(json)
    with run_folder(out, "compare", overwrite) as folder:
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
    print(f"run folders: {folder}", file=say)
    save_page(page, report or str(folder / REPORT), say)
    fleets = {name: one.fleet.as_dict() for name, one in scene.first.items() if one.fleet is not None}
    write_json(json, scene.comparison.as_dict() | ({"fleets": fleets} if fleets else {}))


compare.__doc__ = EXAMPLES


def extrapolations(runs: Mapping[str, list[Measured]]) -> list[str]:
    """Which of the runs lean on the card beyond what it measured."""
    from headgate.experiment.coverage import warning

    return [line for each in runs.values() if (line := warning(each[0].run))]


def choose_all(
    words: Experiment, policy: list[str] | None, router: list[str] | None, prepared: Prepared
) -> dict[str, Chosen]:
    """What is compared: policies, routers, or every router with every policy."""
    from headgate.experiment.routing import choose_routers

    wanted = list(words.policies) if policy is None else policy
    routers = choose_routers(list(words.routers) if router is None else router, prepared)
    if len(wanted) * max(1, len(routers)) < 2 and len(routers) < 2:
        also = ", or --router round-robin --router split" if prepared.words.engines else ""
        raise InputError(
            f"compare needs at least two different policies; pass --policy mixed --policy v0{also}"
        )
    policies = choose(wanted or [words.policy], prepared)
    if not routers:
        return policies
    if len(routers) == 1:
        (routed,) = routers.values()
        return {text: each._replace(router=routed) for text, each in policies.items()}
    return {
        name if len(policies) == 1 else f"{name} {text}": each._replace(router=routed)
        for name, routed in routers.items()
        for text, each in policies.items()
    }


def choose(policies: list[str], prepared: Prepared) -> dict[str, Chosen]:
    """Every policy by what the user called it. A setting of all goes to those that have such a parameter.

    All are made once here: a mistake in the last should not cost the others' time.
    """
    from headgate.methods.make import policy_parameters, split_name

    chosen: dict[str, Chosen] = {}
    common = prepared.words.set
    known: set[str] = set()
    made: list[tuple[str, dict[str, Any]]] = []
    for text in policies:
        name, settings = split_name(text)
        own = policy_parameters(name)
        known |= set(own)
        settings = {key: value for key, value in common.items() if key in own} | settings
        make = prepared.maker(name, settings)
        same = (name, make.parameters)
        if same in made:
            raise InputError(f"compare needs different policies; {text!r} is there twice, drop one")
        made.append(same)
        chosen[text] = Chosen(name, settings, make)
    for setting in common:
        if setting not in known:
            raise unknown("parameter of any of these policies", setting, known)
    return chosen


def run_all(
    prepared: Prepared, chosen: Mapping[str, Chosen], seeds: int, folder: Path, overwrite: bool = False
) -> dict[str, list[Measured]]:
    """Every policy on every seed, each into its own run folder."""
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
        with bar(f"{text} seed {seed}", len(prepared.workload)) as progress:
            run = carry_out(prepared, name, settings, seed, text, progress, router, make)
        found = Measured(run)
        save(found, place, overwrite)
        if run.meta["outcome"] != "finished":
            raise ended_early(run, f"{text}: the run", place)
        runs[text].append(found)
    return runs


def _file_name(text: str) -> str:
    """A policy as part of a path."""
    return re.sub(r"[^\w.+=-]+", "-", text)[:200]
