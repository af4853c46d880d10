"""`headgate demo`: the five-minute experience."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Annotated

import typer

from headgate.cli.output import REPORT, check_report, run_folder
from headgate.cli.pages import Report, save_page
from headgate.experiment.settings import experiment

POLICIES = ["mixed", "v0", "eb:refill=4", "eb:refill=16", "eb:refill=64", "eb+"]
SCENES: dict[str, tuple[str, dict[str, int]]] = {
    "as-recorded": ("at the rate it was recorded, 5.2 requests/s", {}),
    "saturated": ("as fast as the engine can: 320 clients in a closed loop", {"clients": 320}),
}
TITLE = "Ten minutes of real conversations on one GPU"
AGAIN = "--trace azure-conv --clients 320 --policy mixed --policy eb:refill=16"


def demo(
    out: Annotated[str | None, typer.Option(help="folder for the runs (default: runs/NNNN-demo)")] = None,
    report: Report = None,
) -> None:
    """Ten minutes of real traffic under several policies; no GPU.

    Serves a bundled slice of the Azure 2023 conversation trace with Qwen3-8B step times measured on an H200:
    mixed batching (vLLM's default), prefill-first (vLLM v0), exclusive batches with three thresholds, and
    EB+, which chooses by itself. Prints two tables and writes one HTML report beside the run folders.

    Example: headgate demo --out my-demo
    """
    from headgate.cli.compare import choose, extrapolations, run_all
    from headgate.experiment.run import Prepared
    from headgate.report.document import SHOWN
    from headgate.report.runs.page import runs_page, scene_chapter
    from headgate.report.runs.scenes import scene_of
    from headgate.report.terminal import show

    check_report(report)
    scenes = []
    with run_folder(out, "demo", overwrite=False) as folder:
        for scene, (load, flags) in SCENES.items():
            prepared = Prepared(experiment({"trace": "azure-conv", **flags}))
            title = f"{len(prepared.workload)} conversations on {prepared.card.name}, {load}"
            print(f"\n{title}")
            runs = run_all(prepared, choose(POLICIES, prepared), 1, folder / scene)
            scenes.append(scene_of(runs, title))
            show(replace(scene_chapter(scenes[-1]), title=""), depth=SHOWN)
            for note in extrapolations(runs):
                show(f"note: {note}")
    print(f"\nRun folders: {folder}. Every difference with its interval:")
    print(f"  {os.path.relpath(sys.argv[0])} compare {AGAIN}")
    save_page(runs_page(scenes, sys.argv[1:], TITLE), report or str(folder / REPORT), sys.stdout)
