"""`headgate simulate`: one policy, one workload, one card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli.flags import option, takes_fleet_settings
from headgate.cli.output import check_json, check_report, ended_early, run_folder, save, write_json
from headgate.cli.pages import Report, said_to, save_page
from headgate.cli.progress import bar
from headgate.core.errors import InputError
from headgate.experiment.settings import Experiment

if TYPE_CHECKING:
    from headgate.experiment.run import Prepared
    from headgate.stats.measured import Measured

EXAMPLES = """Serve a workload under one policy, in virtual time.

Writes a run folder (tables as plain numpy columns, run.json, bench.json in the schema of
`vllm bench serve`) and prints the figures with units.

\b
Examples:
  headgate simulate --policy eb --set refill=48 --clients 512 --requests 4000
  headgate simulate --policy mixed --trace azure-conv --scale-rate 3
  headgate simulate --workload geometric --prompt 256 --output 128 --rate 12 --ttft 500ms --tpot 50ms
  headgate simulate --engines 16 --router power-of-two --trace azure-conv --scale-rate 30
  headgate simulate --engines 4 --router split:prefill=1 --rate 60 --prompt 512 --output 256
  headgate simulate experiment.toml --policy v0 --json -
"""


@takes_fleet_settings
def simulate(
    words: Experiment,
    policy: Annotated[list[str] | None, option(Experiment, "policy", "--policy")] = None,
    router: Annotated[list[str] | None, option(Experiment, "router", "--router")] = None,
    out: Annotated[str | None, typer.Option(help="run folder (default: runs/NNNN-...)")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a run folder that exists")] = False,
    json: Annotated[str | None, typer.Option(help="figures as JSON, to a file or - for stdout")] = None,
    detailed: Annotated[bool, typer.Option(help="with --json: every request's TTFT and ITLs")] = False,
    report: Report = None,
) -> None:
    """Run it."""
    from headgate.experiment.run import Prepared, carry_out
    from headgate.methods.make import split_name
    from headgate.record.tables import refuse_full
    from headgate.stats.measured import Measured

    if detailed and json is None:
        raise InputError("--detailed is about --json; give --json FILE or drop it")
    check_json(json)
    check_report(report)
    name, settings = split_name(_one_policy(policy, words))
    settings = {**words.set, **settings}
    prepared = Prepared(words)
    make = prepared.maker(name, settings)  # a mistake in it should not cost a folder
    routed = _one_router(router, prepared)
    say = said_to(json)
    with run_folder(out, f"{Path(name).name}-seed{words.seed}"[:100], overwrite) as folder:
        refuse_full(folder, overwrite)
        for note in prepared.notes():
            print(f"note: {note}", file=say)
        with bar(name, len(prepared.workload)) as progress:
            run = carry_out(prepared, name, settings, progress=progress, router=routed, make=make)
        found = Measured(run)
        save(found, folder, overwrite)
    _report(found, folder, (json, report), detailed, say)
    if run.meta["outcome"] != "finished":
        raise ended_early(run, "the run", folder)


def _one_policy(flags: list[str] | None, words: Experiment) -> str:
    """The policy to run; a file made for compare may name several, then a flag must choose."""
    if flags is not None and len(flags) > 1:
        raise InputError("simulate runs one policy; drop a --policy or use headgate compare")
    if flags is None and words.policies and "policy" not in words.model_fields_set:
        raise InputError("the file names policies to compare; choose one with --policy or use compare")
    return words.policy if not flags else flags[0]


def _one_router(flags: list[str] | None, prepared: Prepared) -> tuple[str, dict[str, Any]] | None:
    """The router of a fleet, made once so that a mistake in it costs nothing."""
    from headgate.experiment.routing import choose_routers

    if flags is not None and len(flags) > 1:
        raise InputError("simulate runs one router; drop a --router or use headgate compare")
    if flags is None and prepared.words.routers and prepared.words.router is None:
        raise InputError("the file names routers to compare; choose one with --router or use compare")
    chosen = choose_routers(flags or [], prepared)
    return next(iter(chosen.values()), None)


def _report(
    found: Measured, folder: Path, outputs: tuple[str | None, str | None], detailed: bool, say: IO[str]
) -> None:
    """Figures on the terminal, and as JSON and HTML where asked."""
    from headgate.experiment.coverage import warning
    from headgate.report.runs.page import runs_page
    from headgate.report.runs.scenes import scene_of
    from headgate.report.terminal import show
    from headgate.stats.vllm_bench import bench_result

    page = runs_page([scene_of({found.run.meta["label"]: [found]})], sys.argv[1:])
    show(page.chapters[0], say)
    extrapolated = warning(found.run)
    if extrapolated:
        show(f"note: {extrapolated}", say)
    print(f"run folder: {folder}", file=say)
    more = {} if found.fleet is None else {"fleet": found.fleet.as_dict()}
    json, report = outputs
    save_page(page, report, say)
    write_json(json, {**bench_result(found, detailed), "headgate": found.metrics.as_dict(), **more})


simulate.__doc__ = EXAMPLES
