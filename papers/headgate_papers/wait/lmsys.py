"""Nested WAIT's chat experiment: ten bins of up to 500 output tokens, as often as in a chat data set."""

from __future__ import annotations

from headgate_papers.report import Report
from headgate_papers.serving import Options, Outcomes
from headgate_papers.wait.runs import Machine, Mix, WaitJob
from headgate_papers.wait.study import (
    BASELINES,
    LONG,
    Scene,
    at_load,
    jobs_of,
    learned_nested,
    load_of,
    nested,
    nested_pacer,
    nested_report,
)

NAME = "wait-lmsys"
ABOUT = "Nested WAIT, chat lengths in ten bins up to 500 tokens, 55 and 550 requests/s, and loads between"
RATES = (23, 11, 8, 7, 6, 4, 3, 2, 1, 1)
WIDTH, PROMPT, QPS = 50, 60, 55.0
MACHINE = Machine()
MIX = Mix(tuple((QPS * rate / sum(RATES), PROMPT, WIDTH * place) for place, rate in enumerate(RATES, 1)))
WAIT = {"e=0": nested(0.0), "e=.05": nested(0.05), "learned": learned_nested(4), "one": learned_nested(1)}
WAIT["no pause"] = nested_pacer
WAYS = WAIT | BASELINES
LOADS = (0.8, 0.9, 1.0)


def scenes() -> list[Scene]:
    """The paper's two rates, loads between them, and lengths spread over each bin."""
    found = [Scene("55/s", MACHINE, MIX)]
    found += [Scene(f"u={load:g}", MACHINE, at_load(MACHINE, MIX, load)) for load in LOADS]
    found.append(Scene("550/s", MACHINE, MIX.times(10), LONG / 2))
    spread = MIX._replace(spread=WIDTH, free_prompts=True)
    return [*found, Scene("spread", MACHINE, spread)]


def jobs(options: Options) -> list[WaitJob]:
    """Every load under every policy."""
    return jobs_of(scenes(), WAYS, options)


def judge(found: Outcomes, options: Options) -> Report:
    """Throughput, latency and memory."""
    return nested_report(
        NAME,
        "chat lengths in ten bins",
        (
            f"d0 = 8 ms, d1 = 0.3 us per KV token, 100,000 KV tokens. 55/s is {load_of(MACHINE, MIX):.3f} "
            "of what memory can carry, 550/s ten times that. Prompts of 60 tokens, outputs at the upper end "
            "of their bin; 'spread' has them anywhere in it, and exponential prompts, at 55/s: for it the "
            "offered tokens shown are those of the bins' ends. We do not have the 50,000 prompts the paper "
            "sampled.",
            "e=0: thresholds in the paper's ratios 66:43:32:24:17:11:7:4:2:1. e=.05: with slack. learned: "
            "`nested-wait` as it comes, 4 segments; one: with 1; no pause: max_pause=0. v0 is vLLM-like, "
            "mixed Sarathi-like.",
        ),
        found,
        scenes(),
        WAIT,
        _remarks(found),
    )


def _remarks(found: Outcomes) -> tuple[str, ...]:
    waits = {name: found.figure(("55/s", name), "latency") for name in WAYS}
    peaks = {name: found.figure(("55/s", name), "peak") for name in WAYS}
    full = {name: found.figure(("550/s", name), "decodes") / 1e3 for name in WAYS}
    return (
        f"At 55/s Nested WAIT with the paper's ratios needs {waits['e=0'] - waits['mixed']:.1f} s more per "
        f"request than mixed batching, with slack 0.05 {waits['e=.05'] - waits['mixed']:.1f} s more, with "
        f"one segment {waits['one'] - waits['mixed']:.1f} s more (the paper says about 0.5 s).",
        f"The paper's ratios have no drift: KV reaches {peaks['e=0']:,.0f} tokens at 55/s against "
        f"{peaks['e=.05']:,.0f} with slack and {peaks['mixed']:,.0f} with mixed batching.",
        f"In overload (550/s) mixed batching serves {full['mixed']:.2f} thousand tokens/s, Nested WAIT at "
        f"most {max(full[name] for name in WAIT):.2f}: part of its memory is paused.",
    )
