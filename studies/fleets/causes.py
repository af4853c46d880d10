"""Why the network and the token level differ: the network without some of its simplifications."""

from __future__ import annotations

import json
import sys
from math import inf
from typing import Any

import numpy as np

from headgate.experiment.fleet import make_router
from headgate.methods.fluid.flows import Instance
from headgate.methods.fluid.planner import plan_fluid
from headgate.stats.figures import half_width
from headgate_papers.network.network import Network
from headgate_papers.network.source import Block, Poisson
from studies.fleets.tokens import SEEDS, Run, token_run
from studies.fleets.worlds import INSTANCES, RESULTS

CASES = (
    ("A1", "gate-and-route"),
    ("A1", "token-bucket"),
    ("C1", "gate-and-route"),
    ("C1", "gate-and-route+"),
    ("C1", "token-bucket"),
    ("C1", "density-first"),
)
VARIANTS = {"as it is": "", "stay": "s", "whole": "w", "both": "sw"}
COLUMNS = ("network", "no abandonment after the prompt", "prompts take whole steps", "both", "token level")
TOKENS = "tokens"


class Changed:
    """The network's requests, some of which stay until they are served, or whose prompts take whole steps."""

    def __init__(self, instance: Instance, run: Run, how: str) -> None:
        self._inner = Poisson(instance, run.engines, run.seed, run.law)
        self._pace, self._how = instance.pace, how

    def next_block(self) -> Block:
        """As the network draws it, changed."""
        block = self._inner.next_block()
        if "s" in self._how:
            block = block._replace(decode_patience=[inf] * len(block.time))
        if "w" in self._how:
            block = block._replace(prompt=self._whole(np.array(block.prompt)).tolist())
        return block

    def _whole(self, seconds: Any) -> Any:
        """A prompt's last chunk takes a step, however short: no less than a decode step."""
        pace = self._pace
        tokens = np.maximum(1, np.rint(seconds * pace.chunk / pace.mixed_step))
        full, rest = np.divmod(tokens, pace.chunk)
        last = np.maximum(1 / pace.solo_speed, pace.mixed_fixed + pace.mixed_per_token * rest)
        return full * pace.mixed_step + np.where(rest > 0, last, 0.0)


def network_row(run: Run, how: str) -> dict[str, Any]:
    """Revenue over the optimum, and prompts of the first class per second and engine."""
    instance = INSTANCES[run.instance]
    plan = plan_fluid(instance)
    router = make_router(run.router, plan, run.engines, run.seed)
    network = Network(instance, run.engines, router, Changed(instance, run, how))
    (window,) = network.windows(run.warm + run.seconds, [run.warm])
    prompts = float(window.rate("prompts_started")[0])
    return {"revenue": window.revenue() / plan.revenue, "prompts": prompts, "planned": plan.prompts[0]}


def main(quick: bool) -> None:
    path = RESULTS / "causes.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() and not quick else []
    done = {(row["instance"], row["router"], row["variant"], row["seed"]) for row in rows}
    for name, router in CASES:
        for seed in range(SEEDS):
            for variant in (*VARIANTS, TOKENS):
                if (name, router, variant, seed) in done:
                    continue
                run = Run(name, router, "exponential", seed)
                if quick:
                    run = run._replace(engines=10, seconds=40.0, warm=20.0)
                found = token_row(run) if variant == TOKENS else network_row(run, VARIANTS[variant])
                rows.append({"instance": name, "router": router, "variant": variant, "seed": seed, **found})
                if not quick:
                    with path.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
            print(f"{name} {router} seed {seed}", file=sys.stderr, flush=True)
    table(rows, "revenue", "Revenue over the optimum")
    table(rows, "prompts", "Prompts of `code` started per second and engine")


def token_row(run: Run) -> dict[str, Any]:
    """The same at token level."""
    plan = plan_fluid(INSTANCES[run.instance])
    revenue, prompts = token_run(run)
    return {"revenue": revenue, "prompts": prompts, "planned": plan.prompts[0]}


def table(rows: list[dict[str, Any]], what: str, title: str) -> None:
    """Each variant, and what the last one leaves of the difference, paired by seed."""
    print(f"\n{title}\n\n| instance | router | {' | '.join(COLUMNS)} | token level less both | plan |")
    print("|---" * (len(COLUMNS) + 4) + "|")
    for name, router in CASES:
        mine = [row for row in rows if (row["instance"], row["router"]) == (name, router)]
        values = [
            np.array([row[what] for row in mine if row["variant"] == variant])
            for variant in (*VARIANTS, TOKENS)
        ]
        cells = " | ".join(_cell(each) for each in (*values, values[-1] - values[-2]))
        plan = "1" if what == "revenue" else f"{mine[0]['planned']:.3f}"
        print(f"| {name} | `{router}` | {cells} | {plan} |")


def _cell(values: Any) -> str:
    half = half_width(values)
    return f"{values.mean():.3f}" + (f" ± {half:.3f}" if half is not None else "")
