"""WAIT's "high demand" experiment: three types of 100 to 300 output tokens, far beyond one GPU."""

from __future__ import annotations

from headgate.sim.engine.replica import EVERYTHING
from headgate_papers.report import Cell, Report, Row, Section
from headgate_papers.serving import Options, Outcomes
from headgate_papers.wait.runs import Machine, Mix, WaitJob
from headgate_papers.wait.study import (
    BASELINES,
    Scene,
    at_load,
    claim,
    figures,
    full,
    jobs_of,
    learned,
    load_of,
    look_ahead,
    mixed,
    paced,
    pacer,
    printed,
    shared,
    throughput,
)

NAME = "wait-high"
ABOUT = "WAIT, three types of 100, 200 and 300 output tokens; at the paper's rates and at loads from 0.5 to 2"
MIX = Mix(((6000, 20, 100), (4000, 20, 200), (2000, 20, 300)))
FREE, DEAR = Machine(), Machine(per_new=30e-6)
SLOTS = Machine(kv=1_000_000, slots=512)
WAIT = {"paced": paced, "full": full, "printed": printed, "learned": learned}
WAIT["no pause"] = pacer
WAYS = WAIT | BASELINES
LOADS = (0.5, 0.9, 0.95, 1.0, 1.2)
PRICED = (0.9, 1.2)
PAPER = "paper's"


def scenes() -> list[Scene]:
    """Loads the hardware can carry and a little more; then the paper's rates as printed."""
    found = [Scene(f"u={load:g}", FREE, at_load(FREE, MIX, load)) for load in LOADS]
    return [*found, Scene(PAPER, FREE, MIX, 30.0)]


def priced() -> list[Scene]:
    """The same where a new token costs 30 us: prompts and recomputation are no longer free."""
    return [Scene(f"d2, u={load:g}", DEAR, at_load(DEAR, MIX, load)) for load in PRICED]


def counted() -> Scene:
    """Overload with a limit on requests instead of memory."""
    return Scene("512 slots", SLOTS, MIX.times(0.05), 100.0)


COUNTED = {"printed": printed, "work share": shared, **BASELINES}
OTHERS = ("full", "mixed", "restart", "look-ahead")


def tight() -> list[Scene]:
    """Where memory is full or nearly so: the loads at which baselines differ."""
    return [scene for scene in [*scenes()[:-1], *priced()] if load_of(scene.machine, scene.mix) > 0.94]


def jobs(options: Options) -> list[WaitJob]:
    """All of it."""
    return [
        *jobs_of([*scenes(), *priced()], WAYS, options),
        *jobs_of([counted()], COUNTED, options),
        *jobs_of(tight(), {"look-ahead": look_ahead}, options),
        *jobs_of(tight(), {"restart": mixed}, options, EVERYTHING),
    ]


def judge(found: Outcomes, options: Options) -> Report:
    """Throughput, latency, and who is served in overload."""
    free, dear, names = scenes(), priced(), tuple(WAYS)
    rows = [*free, *dear]
    over = [scene for scene in rows if load_of(scene.machine, scene.mix) >= 1]
    under = [scene for scene in rows if load_of(scene.machine, scene.mix) < 1]
    return Report(
        NAME,
        "three types of longer outputs",
        (
            "d0 = 8 ms, d1 = 0.3 us per KV token, 100,000 KV tokens; rows with d2 add 30 us per new token. "
            f"The paper's 6000 + 4000 + 2000 requests/s are {load_of(FREE, MIX):.0f} times what memory can "
            "carry, whatever the policy (no time unit is printed); u is the load by the same measure.",
            "paced: fractional thresholds for iterations 5 % above the shortest that keep up. full: as "
            "large as memory allows. printed: the paper's rule, as large as memory allows. learned: `wait` "
            "as it comes. v0 is vLLM-like, mixed Sarathi-like. Latencies are of requests that finished in "
            "the middle of the run: in overload most do not.",
            "restart: mixed, but an evicted request loses its output and begins again, as the paper's "
            "argument against first come, first served assumes. look-ahead: lengths known, a prompt enters "
            "only if everybody will fit to the end.",
        ),
        (
            throughput(found, rows, names),
            figures(found, rows, names, "Mean latency, s", "latency"),
            figures(found, rows, names, "Mean TPOT, ms", "tpot", 1e3),
            figures(found, rows, names, "Evictions", "evictions"),
            _mix(found),
            figures(found, tight(), OTHERS, "Other baselines: decode tokens/s, thousands", "decodes", 1e-3),
            figures(found, tight(), OTHERS, "Other baselines: mean latency, s", "latency"),
            figures(found, tight(), OTHERS, "Other baselines: evictions", "evictions"),
        ),
        (
            claim(found, under, WAIT, "decodes", "WAIT serves more than a baseline, load below 1"),
            claim(found, over, WAIT, "decodes", "WAIT serves more than a baseline, load 1 and above"),
            claim(found, under, WAIT, "latency", "WAIT has the lower latency, load below 1"),
        ),
        _remarks(found),
    )


def _mix(found: Outcomes) -> Section:
    """Requests per second by type, with 512 slots and no memory limit at 600 requests/s."""
    rows = []
    for name in COUNTED:
        key = (counted().name, name)
        shares = next((run.shares for run in found.every(key)), (float("nan"),) * 3)
        tokens = found.figure(key, "decodes")
        rows.append(Row(name, tuple(Cell(float("nan"), value) for value in (*shares, tokens))))
    title = "Served per second by type, 512 slots, 300:200:100 arrive (no memory limit)"
    return Section(title, "policy", ("l'=100", "l'=200", "l'=300", "tokens/s"), tuple(rows))


def _remarks(found: Outcomes) -> tuple[str, ...]:
    slots = {name: found.figure((counted().name, name), "decodes") for name in COUNTED}
    dear = {name: found.figure(("d2, u=1.2", name), "decodes") for name in WAYS}
    near = [found.figure(("u=0.95", name), "latency") for name in ("paced", "v0", "mixed")]
    gain = 100 * (slots["printed"] / slots["mixed"] - 1)
    return (
        "Below saturation all serve what arrives; no policy can serve more.",
        f"Near saturation (u = 0.95) WAIT's latency is {near[0]:.1f} s, v0's {near[1]:.1f} s, mixed "
        f"batching's {near[2]:.1f} s.",
        f"The printed rule serves {gain:+.0f} % tokens against mixed batching in overload with 512 slots, "
        "by serving short requests out of proportion; with the share of work it is "
        f"{100 * (slots['work share'] / slots['mixed'] - 1):+.1f} %.",
        "Where computing again costs real time (d2), WAIT, which never evicts, serves "
        f"{100 * (dear['full'] / dear['mixed'] - 1):+.0f} % against mixed batching at u = 1.2 and "
        f"{100 * (dear['full'] / dear['v0'] - 1):+.0f} % against v0.",
        *_of_others(found),
    )


def _of_others(found: Outcomes) -> tuple[str, ...]:
    """Of the loads above 1, the gain over the two baselines of theory."""
    gains = {
        name: [
            100
            * (
                found.figure((scene.name, "full"), "decodes") / found.figure((scene.name, name), "decodes")
                - 1
            )
            for scene in tight()
            if load_of(scene.machine, scene.mix) > 1.1
        ]
        for name in ("restart", "look-ahead")
    }
    restart, ahead = (" and ".join(f"{gain:+.0f} %" for gain in gains[name]) for name in gains)
    return (
        f"Above saturation WAIT serves {restart} (without and with d2) against restart: most of that is the "
        "baseline's own making, as engines keep the output of whom they evict.",
        f"Against look-ahead it serves {ahead}: requests that enter together grow together, and what their "
        "common end will need stands empty until then; WAIT's cohorts are staggered.",
    )
