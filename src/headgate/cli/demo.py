"""`headgate demo`: what scheduling is worth on one GPU, beside what an H200 did with the same requests."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from headgate.cli import output
from headgate.cli.simulate import choose_all, extrapolations, run_all
from headgate.experiment.settings import experiment

if TYPE_CHECKING:
    from headgate.report.document import Chapter
    from headgate.stats.measured import Measured

# The load of studies/h200 that rises: requests/s, seconds of each stair, and which of these count.
STAIRS, STAIR, BEGIN, END, SEED = (16, 18, 20, 22, 24), 26.0, 5.0, 20.0, 61
PROMISED = {"ttft": "500ms", "tbt": "100ms", "slots": 512, "graph": 4096}
RISING = {"vLLM": "mixed", "best budget": "mixed:budget=2560", "headgate": "keep"}
FULL: dict[str, Any] = {"workload": "uniform", "prompt": 512, "output": 512, "clients": 640}
FULL |= {"slots": 512, "budget": 16384, "requests": 4000}
SATURATED = {"vLLM (mixed)": "mixed", "eb+ (headgate)": "eb+"}
# Measured on an H200: % of requests with both promises kept, on the same requests; median TTFT at 16/s in
# milliseconds; requests/s. tests/unit/cli/test_demo.py holds them against the raw lines in studies/h200.
KEPT = {
    "mixed": (76, 17, 10, 10, 1),
    "mixed:budget=2560": (100, 100, 100, 78, 13),
    "keep": (100, 100, 100, 100, 88),
}
FIRST = {"mixed": 49.3, "keep": 49.3}
SERVED = {"mixed": 22.14, "eb+": 23.58}
ABOUT = (
    "Conversations (Azure 2023) come to Qwen3-8B on one H200 at rising rates. Promised: the first token "
    "within 500 ms, no gap between two tokens above 100 ms. Simulated here; H200: measured on the same "
    "requests through vLLM's HTTP server."
)
POLICIES = (
    "vLLM: policy mixed, as vLLM schedules by itself; best budget: with --max-num-batched-tokens 2560, found "
    "by a search; headgate: policy keep, which it chooses by itself when something is promised. H200: one "
    "run, of these very requests. With other seeds, at 24 requests/s, the best budget kept 56 and 82 %, "
    "headgate 93 and 96 %; at 16, vLLM kept 30 and 33 %, headgate 91 to 100 %."
)
IN_PROCESS = "H200: an engine without HTTP, kept full with lengths drawn from the same law."
TITLE = "What scheduling is worth on one GPU"
NEXT = """On your traffic:  headgate advise --trace YOUR_TRACE.csv --slo ttft=500ms@p95,tbt=100ms@p99
On your GPU:      headgate serve MODEL --ttft 500ms --tbt 100ms
To prove it:      headgate trial --config FILE --arm vllm --arm auto   (FILE: serve names it)"""


def demo(
    out: Annotated[str | None, typer.Option(help="folder for the runs (default: runs/NNNN-demo)")] = None,
    report: output.Report = None,
) -> None:
    """What scheduling is worth on one GPU; runs without a GPU.

    Serves conversations of Azure 2023 at rising rates with the step times of Qwen3-8B on an H200: under
    vLLM's own scheduling, the same with its best static budget, and under headgate. Then a saturated engine.
    Beside each figure stands what a real H200 measured. Writes one HTML report.

    Example: headgate demo --out my-demo
    """
    from headgate.experiment.run import Prepared
    from headgate.report.runs.page import runs_page
    from headgate.report.runs.scenes import scene_of
    from headgate.report.terminal import show

    with output.run_folder(out, "demo", overwrite=False) as folder:
        load = folder / "rising.csv"
        count = write_rising(load)
        rising = Prepared(experiment({"trace": str(load), **PROMISED}))
        kept = run_all(rising, choose_all(list(RISING.values()), None, rising), 1, folder / "rising")
        full = Prepared(experiment(FULL))
        served = run_all(full, choose_all(list(SATURATED.values()), None, full), 1, folder / "saturated")
    first = [{name: runs[0] for name, runs in every.items()} for every in (kept, served)]
    told = story(*first)
    show(told)
    for note in {**dict.fromkeys(extrapolations(kept)), **dict.fromkeys(extrapolations(served))}:
        show(f"note: {note}")
    print(f"\n{NEXT}")
    if which("headgate") is None:
        print(f"(headgate is {Path(sys.argv[0]).absolute()}, not on your PATH; pip install . brings all)")
    print(f"\nRun folders: {folder}")
    scenes = [
        scene_of(kept, f"{count:,} conversations, {STAIRS[0]} to {STAIRS[-1]} requests/s"),
        scene_of(served, "Saturated: 640 clients, prompts and outputs of 512 tokens on average"),
    ]
    page = runs_page(scenes, sys.argv[1:], TITLE)
    page = replace(page, chapters=(replace(told, title="In short"), *page.chapters))
    output.save_page(page, report or str(folder / output.REPORT), sys.stdout)


def write_rising(place: Path) -> int:
    from headgate.workloads.traces import bundled

    trace, name = bundled("azure-conv"), b"azure-conv"
    rng = np.random.default_rng([SEED, *name])
    seconds = STAIR * len(STAIRS)
    count = int(rng.poisson(sum(STAIRS) / len(STAIRS) * seconds))
    rows = rng.integers(len(trace), size=count)
    drawn = np.sort(rng.uniform(0.0, seconds, count)) / seconds
    shares = np.concatenate([[0.0], np.cumsum(STAIRS)]) / sum(STAIRS)
    arrival = np.interp(drawn, shares, np.linspace(0.0, seconds, len(STAIRS) + 1))
    columns = (arrival, trace.prompt[rows], trace.output[rows])
    with place.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival", "prompt", "output"])
        writer.writerows(zip(*(column.tolist() for column in columns), strict=True))
    return count


def story(kept: dict[str, Measured], served: dict[str, Measured]) -> Chapter:
    from headgate.report import document as doc

    shares = {}
    for policy in RISING.values():
        promises = kept[policy].promises
        assert promises is not None
        shares[policy] = [float(promises.met[counts].mean()) for counts in _counted(kept[policy])]
    rows = []
    for place, rate in enumerate(STAIRS):
        both = [(100 * shares[policy][place], KEPT[policy][place]) for policy in RISING.values()]
        rows.append((*doc.row(rate), *(doc.valued(f"{one:.0f}", one) for pair in both for one in pair)))
    heads = ["requests\nper s", *(f"{label}\n{where}" for label in RISING for where in ("simulated", "H200"))]
    title = "Requests with both promises kept, %"
    rising = doc.Grid(title, tuple(heads), tuple(rows), (POLICIES,), joined=True)
    rows = []
    for label, policy in SATURATED.items():
        pairs = ((served[name].metrics.request_rate.value, SERVED[name]) for name in (policy, "mixed"))
        cells = []
        for ours, vllm in zip(*pairs, strict=True):
            cells.append(f"{ours:.1f}" + (f" ({100 * (ours / vllm - 1):+.1f} %)" if ours != vllm else ""))
        rows.append(doc.row(label, *cells))
    full = doc.Grid("Saturated, requests/s", ("policy", "simulated", "H200"), tuple(rows), (IN_PROCESS,))
    said = []
    for place in (STAIRS.index(20), len(STAIRS) - 1):
        vllm, ours = (f"{100 * shares[policy][place]:.0f} %" for policy in ("mixed", "keep"))
        real = f"(H200: {KEPT['mixed'][place]} and {KEPT['keep'][place]} %)"
        at = f"at {STAIRS[place]} requests/s"
        said.append(f"{at} vLLM keeps {vllm} of its promises, headgate {ours} {real}")
    first = {policy: kept[policy].latencies.ttft[_counted(kept[policy])[0]] for policy in FIRST}
    light = {policy: 1000 * float(np.median(times)) for policy, times in first.items()}
    nothing = (
        f"Light load: there is nothing to gain. At {STAIRS[0]} requests/s the first token comes after "
        f"{light['mixed']:.0f} ms with vLLM and {light['keep']:.0f} ms with headgate (median; "
        f"H200: {FIRST['mixed']:.0f} and {FIRST['keep']:.0f} ms)."
    )
    verdict, blocks = doc.sentence("; ".join(said)), (ABOUT, rising, full, nothing)
    return doc.Chapter(TITLE, verdict, (doc.Section("", blocks),), answer_first=True)


def _counted(run: Measured) -> list[Any]:
    within = [run.run.requests["arrival"] - STAIR * place for place in range(len(STAIRS))]
    return [(since >= BEGIN) & (since <= END) for since in within]
