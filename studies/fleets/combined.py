"""Exclusive batches on the engines, a gate before them, or both: revenue and latencies at token level."""

from __future__ import annotations

import itertools
import json
import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from headgate.cost.card import load_card
from headgate.experiment.build import make_engine
from headgate.experiment.fleet import FleetSetup
from headgate.experiment.settings import Experiment, experiment
from headgate.methods.bounds import Requests, engine_bound
from headgate.methods.fluid.flows import TokenPrices
from headgate.methods.make import make_policy
from headgate.sim.engine.engine import Engine
from headgate.stats.figures import half_width
from headgate.workloads.streams import stream
from headgate.workloads.workload import Kind, Workload
from studies.fleets.worlds import RESULTS

CLASSES = {"chat": (400, 300, 0.5), "code": (300, 1000, 0.25), "paper": (3000, 400, 0.25)}
PATIENCE = 20.0  # mean seconds
PRICES = TokenPrices(0.1, 0.2)
CARDS = ("linear-h200-qwen3-8b", "pub-rtx-pro-6000-qwen3-8b")
BY_SECONDS = "density-deep, by engine seconds"
ROUTERS = ("round-robin", "gate-and-route+", "density-first", "density-deep", BY_SECONDS)
POLICIES = ("mixed", "eb+")
LOADS = (0.9, 1.3)  # of λ*
ENGINES, SLOTS, SEEDS = 8, 256, 4
FRESH = range(100, 104)  # seeds on which nothing was chosen: neither the spare depth nor the order of classes
PARTS = {("round-robin", "eb+"): "EB+ alone", (BY_SECONDS, "mixed"): "the gate alone"}
BOTH = (BY_SECONDS, "eb+")
SECONDS, WARM = 240.0, 90.0


class Arm(NamedTuple):
    """One run."""

    card: str
    load: float
    router: str
    policy: str
    seed: int
    engines: int = ENGINES
    seconds: float = SECONDS


def requests(rate: float, until: float, seed: int) -> Workload:
    """A Poisson stream of the classes; lengths geometric, patience exponential."""
    rng = stream(seed, "combined")
    count = int(rate * until * 1.1 + 100)
    time = np.cumsum(rng.exponential(1 / rate, count))
    count = int(np.searchsorted(time, until))
    shares = np.cumsum([share for *_, share in CLASSES.values()])
    kind = np.searchsorted(shares, rng.random(count), side="right").clip(max=len(shares) - 1)
    prompts, outputs = (np.array([row[place] for row in CLASSES.values()])[kind] for place in (0, 1))
    return Workload.of(
        rng.geometric(1 / prompts),
        rng.geometric(1 / outputs),
        arrival=time[:count],
        kind=kind,
        patience=rng.exponential(PATIENCE, count),
        kinds=tuple(Kind(name) for name in CLASSES),
    )


def words(card: str) -> Experiment:
    return experiment({"card": card, "slots": SLOTS})


@lru_cache
def highest_rate(card: str) -> float:
    """λ* of one engine."""
    one, drawn = engine(card), requests(100.0, 200.0, 0)
    fits = drawn.prompt < one.longest
    lengths = Requests.of(drawn.prompt[fits], drawn.output[fits] - 1)
    return engine_bound(one.cost, lengths, one.running, one.batch_tokens, one.kv_tokens).rate


@lru_cache
def engine(card: str) -> Engine:
    return make_engine(words(card), load_card(card))


@lru_cache
def by_seconds(card: str) -> str:
    """Classes by value per second that a request takes from a full engine at least, best first."""
    one, drawn, worth = engine(card), requests(100.0, 600.0, 0), {}
    limits = one.running, one.batch_tokens, one.kv_tokens
    for number, (name, (prompt, output, _)) in enumerate(CLASSES.items()):
        mine = (drawn.kind == number) & (drawn.prompt < one.longest)
        lengths = Requests.of(drawn.prompt[mine], drawn.output[mine] - 1)
        value = PRICES.prompt * prompt + PRICES.output * output
        worth[name] = value / engine_bound(one.cost, lengths, *limits).seconds
    return "/".join(sorted(worth, key=lambda name: -worth[name]))


def serve(arm: Arm) -> dict[str, float]:
    """Value of finished requests per second and engine after warming up, and what users saw."""
    one, until = engine(arm.card), WARM + arm.seconds
    offered = requests(arm.load * highest_rate(arm.card) * arm.engines, until, arm.seed)
    setup = FleetSetup(one, arm.engines, prices=PRICES)
    name, *ordered = arm.router.split(", ")
    settings = {"order": by_seconds(arm.card)} if ordered else {}
    router, _ = setup.router(name, settings, offered, arm.seed)
    run = setup.run(lambda role: make_policy(arm.policy, {}, one)[0], router, offered)
    if run.meta["outcome"] != "finished":
        raise SystemExit(run.meta["outcome"])
    return measured(run.requests, arm) | {"optimum": setup.plan(offered).revenue}


def measured(table: dict[str, Any], arm: Arm) -> dict[str, float]:
    finished, first, arrival = table["finished"], table["first_token"], table["arrival"]
    done = (finished >= WARM) & (finished < WARM + arm.seconds) & (table["how"] <= 1)
    came = (arrival >= WARM) & (arrival < WARM + arm.seconds)
    worth = PRICES.prompt * table["prompt"][done] + PRICES.output * table["output"][done]
    space = arm.engines * arm.seconds
    gaps = np.maximum(table["output"][done] - 1, 1)
    return {
        "revenue": float(worth.sum()) / space,
        "requests": float(done.sum()) / space,
        "lost": float(np.mean(table["how"][came] > 1)),
        "ttft": float(np.mean((first - arrival)[done])),
        "tpot": float(np.mean((finished - first)[done] / gaps)),
    } | {
        f"served.{name}": float((done & (table["kind"] == number)).sum()) / space
        for number, name in enumerate(CLASSES)
    }


def main(quick: bool) -> None:
    arms = [*itertools.starmap(Arm, itertools.product(CARDS, LOADS, ROUTERS, POLICIES, range(SEEDS)))]
    if not quick:
        checked = itertools.product(CARDS, FRESH, (*PARTS, BOTH))
        arms += [Arm(card, LOADS[-1], *way, seed) for card, seed, way in checked]
    rows = carry_out(arms, quick)
    for card, load in itertools.product(CARDS, LOADS):
        mine = [row for row in rows if (row["card"], row["load"]) == (card, load)]
        table(card, load, [row for row in mine if row["seed"] not in FRESH])
        fresh(card, load, [row for row in mine if row["seed"] in FRESH])


def carry_out(arms: list[Arm], quick: bool) -> list[dict[str, Any]]:
    """All of them that have not been run before."""
    path = RESULTS / "combined.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() and not quick else []
    done = {tuple(row[key] for key in Arm._fields[:5]) for row in rows}
    for arm in arms:
        if tuple(arm[:5]) in done:
            continue
        arm = arm._replace(engines=2, seconds=20.0) if quick else arm
        rows.append(arm._asdict() | serve(arm))
        print(" ".join(map(str, arm)), file=sys.stderr, flush=True)
        if not quick:
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return rows


def fresh(card: str, load: float, rows: list[dict[str, Any]]) -> None:
    """Both together against either alone on seeds that decided nothing, paired by seed."""
    revenue = {(row["router"], row["policy"], row["seed"]): row["revenue"] for row in rows}
    for way, name in PARTS.items() if rows else ():
        gain = np.array([100 * (revenue[*BOTH, seed] / revenue[*way, seed] - 1) for seed in FRESH])
        said = f"{gain.mean():+.1f} % ± {half_width(gain):.1f}"
        print(f"\n{card}, {load:g} of λ*, fresh seeds: both against {name} {said}")


def table(card: str, load: float, rows: list[dict[str, Any]]) -> None:
    """Every arm, and its revenue against mixed engines behind round robin, paired by seed."""
    print(f"\n{card}, {load:g} of λ*, {ENGINES} engines: fluid optimum {rows[-1]['optimum']:.0f}\n")
    print("| router | policy | revenue | against mixed, round robin | lost | TTFT, s | TPOT, ms |")
    print("|---|---|---|---|---|---|---|")
    base = {
        row["seed"]: row["revenue"]
        for row in rows
        if (row["router"], row["policy"]) == ("round-robin", "mixed")
    }
    for router in ROUTERS:
        for policy in POLICIES:
            mine = [row for row in rows if (row["router"], row["policy"]) == (router, policy)]
            revenue, lost, ttft, tpot = (
                np.array([row[key] for row in mine]) for key in ("revenue", "lost", "ttft", "tpot")
            )
            gain = 100 * (revenue / np.array([base[row["seed"]] for row in mine]) - 1)
            half = half_width(gain)
            said = f"{gain.mean():+.1f} %" + (f" ± {half:.1f}" if half else "")
            latencies = f"{100 * lost.mean():.1f} % | {ttft.mean():.2f} | {1000 * tpot.mean():.1f}"
            print(f"| `{router}` | `{policy}` | {revenue.mean():.0f} | {said} | {latencies} |")
