"""Proposition 4's instance: nine tokens of memory, where only a handful of requests fit."""

from __future__ import annotations

from math import nan

from headgate.sim.engine.replica import EVERYTHING
from headgate_papers.report import LIMIT, Cell, Report, Row, Section
from headgate_papers.serving import Options, Outcomes
from headgate_papers.wait.runs import FOR_EVER, Machine, Mix, WaitJob
from headgate_papers.wait.study import (
    BASELINES,
    Scene,
    Way,
    at_load,
    claim,
    figures,
    jobs_of,
    look_ahead,
    mixed,
    watermarked,
)

NAME = "wait-tiny"
ABOUT = "WAIT where only a few requests fit (Proposition 4: 9 KV tokens), requests/s and latency"
TYPES = ((1.0, 1, 1), (1.0, 1, 2))
SECONDS = 20_000.0


def ones(machine: Machine, mix: Mix) -> tuple[str, dict[str, object]]:
    """One of each type at each stage fills memory exactly."""
    return "wait", {"thresholds": "1", **FOR_EVER}


WAYS: dict[str, Way] = {"(1,1)": ones, **BASELINES}
OTHERS = ("(1,1)", "look-ahead", "no token", "restart")


def scenes() -> list[Scene]:
    """The paper's instance, a little less of it, and one where the fixed cost dominates."""
    short, long, dear = Machine(0.1, 0.1, kv=9), Machine(0.91, 0.01, kv=9), Machine(0.1, 0.1, 0.1, kv=9)
    mix = Mix(TYPES)
    return [
        Scene("u=1", short, mix, SECONDS),
        Scene("u=0.9", short, mix.times(0.9), SECONDS),
        Scene("u=0.9, d0=.91", long, mix.times(0.9), SECONDS),
        Scene("u=1, d2=.1", dear, at_load(dear, mix, 1.0), SECONDS),
        Scene("u=0.9, d2=.1", dear, at_load(dear, mix, 0.9), SECONDS),
    ]


def jobs(options: Options) -> list[WaitJob]:
    """Every load under every policy."""
    return [
        *jobs_of(scenes(), WAYS | {"look-ahead": look_ahead}, options),
        *jobs_of(scenes(), {"no token": watermarked}, options, 1),
        *jobs_of(scenes(), {"restart": mixed}, options, EVERYTHING),
    ]


def judge(found: Outcomes, options: Options) -> Report:
    """Completed requests and latency."""
    rows, names = scenes(), tuple(WAYS)
    served = tuple(
        Row(
            scene.name,
            tuple(
                Cell(sum(each[0] for each in scene.mix.types), found.figure((scene.name, name), "requests"))
                for name in names
            ),
        )
        for scene in rows
    )
    waited = tuple(
        Row(scene.name, tuple(Cell(nan, found.figure((scene.name, name), "latency")) for name in names))
        for scene in rows
    )
    return Report(
        NAME,
        "nine tokens of memory",
        (
            "Two types, prompts of 1 token, 1 and 2 decode iterations, one request/s each at u = 1; d0 = d1 "
            "= 0.1 s, where the row says so d0 = 0.91 and d1 = 0.01, or d2 = 0.1 s more per new token. "
            "Whole thresholds (1,1) hold exactly 9 KV tokens.",
            "look-ahead: lengths known, a prompt enters only if everybody will fit to the end. no token: "
            "mixed with a token of memory kept free, and the step that computes an evicted request again "
            "brings no token, as where prompts bring none. restart: mixed, and an evicted request begins "
            "again from nothing.",
        ),
        (
            Section("Requests/s (limit: fluid)", "load", names, served, shared=True, against=LIMIT),
            Section("Mean latency, s", "load", names, waited),
            figures(found, rows, OTHERS, "Other baselines: requests/s", "requests"),
            figures(found, rows, OTHERS, "Other baselines: mean latency, s", "latency"),
        ),
        (claim(found, rows, ("(1,1)",), "requests", "WAIT completes more than a baseline (paper: yes)"),),
        _remarks(found, rows, options),
    )


def _remarks(found: Outcomes, rows: list[Scene], options: Options) -> tuple[str, ...]:
    full, dear = rows[0], rows[3]
    came = sum(rate for rate, _, _ in full.mix.types) * (full.seconds / 10 if options.quick else full.seconds)
    out = {name: found.figure((full.name, name), "evictions") / came for name in WAYS}
    shares = [
        100
        * found.figure((scene.name, "mixed"), "requests")
        / found.figure((scene.name, "(1,1)"), "requests")
        for scene in (full, dear)
    ]
    worse = {
        name: 100
        * found.figure((full.name, name), "requests")
        / found.figure((full.name, "(1,1)"), "requests")
        for name in OTHERS
    }
    later = found.figure((dear.name, "mixed"), "latency") / found.figure((dear.name, "(1,1)"), "latency")
    return (
        f"At C = M* mixed batching evicts {out['mixed']:.2f} times per request, v0, whose loss is steps of "
        f"prompts alone, {out['v0']:.2f} times; WAIT keeps memory exactly full and evicts {out['(1,1)']:.2f} "
        "times.",
        "In an engine the step that computes a prompt again brings the next token too, so an eviction costs "
        f"little where new tokens cost nothing: mixed batching serves {shares[0]:.0f} % of what WAIT does. "
        f"With d2 it is {shares[1]:.0f} %, and {later:.1f} times the latency.",
        f"The paper's argument takes an evicted request to start from nothing. Then mixed batching serves "
        f"{worse['restart']:.0f} % of what WAIT does at u = 1, and {worse['no token']:.0f} % where only the "
        "token of the step that computes again is lost: the loss that Proposition 4 proves is seen on such "
        "engines, and not on those that keep the output of whom they evict.",
    )
