"""Nested WAIT's first experiment: outputs of 20, 40, 80 and 160 tokens that nobody can predict."""

from __future__ import annotations

from headgate_papers.report import Report
from headgate_papers.serving import Options, Outcomes
from headgate_papers.wait.runs import Machine, Mix, WaitJob
from headgate_papers.wait.study import (
    BASELINES,
    Scene,
    at_load,
    jobs_of,
    learned_nested,
    load_of,
    nested,
    nested_pacer,
    nested_report,
)

NAME = "wait-nested"
ABOUT = "Nested WAIT, outputs of 20, 40, 80, 160 tokens at rates 20:40:80:160; loads from 0.5 to 1.03"
MIX = Mix(((20, 10, 20), (40, 10, 40), (80, 10, 80), (160, 10, 160)))
FREE, DEAR = Machine(), Machine(per_new=30e-6)
WAIT = {"e=0": nested(0.0), "e=.02": nested(0.02), "learned": learned_nested(4), "one": learned_nested(1)}
WAIT["no pause"] = nested_pacer
WAYS = WAIT | BASELINES
LOADS = (0.5, 0.9, 0.95)
PRICED = (0.9, 1.2)


def scenes() -> list[Scene]:
    """Loads below 1, the paper's 300 requests/s, and two loads where new tokens are dear."""
    found = [Scene(f"u={load:g}", FREE, at_load(FREE, MIX, load), 100.0) for load in LOADS]
    found.append(Scene("300/s", FREE, MIX, 100.0))
    return found + [Scene(f"d2,u={load:g}", DEAR, at_load(DEAR, MIX, load), 100.0) for load in PRICED]


def jobs(options: Options) -> list[WaitJob]:
    """Every load under every policy."""
    return jobs_of(scenes(), WAYS, options)


def judge(found: Outcomes, options: Options) -> Report:
    """Throughput, latency and memory."""
    return nested_report(
        NAME,
        "outputs of 20, 40, 80 and 160 tokens",
        (
            "d0 = 8 ms, d1 = 0.3 us per KV token, 100,000 KV tokens; rows with d2 add 30 us per new token. "
            f"300/s is the paper's rate if it is per second: {load_of(FREE, MIX):.3f} of what memory can "
            "carry.",
            "e=0: thresholds in the paper's ratios 15:14:12:8, which are the survival probabilities. e=.02: "
            "with so much slack per segment, as condition (10) asks. learned: `nested-wait` as it comes, 4 "
            "segments. one: the same with 1 segment; no pause: with max_pause=0. v0 is vLLM-like, mixed "
            "Sarathi-like.",
        ),
        found,
        scenes(),
        WAIT,
        _remarks(found),
        (("Evictions", "evictions"),),
    )


def _remarks(found: Outcomes) -> tuple[str, ...]:
    dear = {name: found.figure(("d2,u=1.2", name), "decodes") for name in WAYS}
    waits = {name: found.figure(("u=0.9", name), "latency") for name in WAYS}
    return (
        f"At u = 0.9 latency is {waits['e=.02']:.2f} s with slack 0.02, {waits['v0']:.2f} s with v0 and "
        f"{waits['mixed']:.2f} s with mixed batching.",
        f"One segment for everybody ({waits['one']:.2f} s) does better than several: what helps is that "
        "prompts enter at the rate at which requests leave, not that segments pause.",
        "Where computing again costs real time (d2) at u = 1.2, Nested WAIT serves "
        f"{100 * (dear['e=.02'] / dear['mixed'] - 1):+.0f} % against mixed batching, "
        f"{100 * (dear['e=.02'] / dear['v0'] - 1):+.0f} % against v0.",
    )
