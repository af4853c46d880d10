"""Promises on a host that launches steps slower than the card says, simulated: `--help`.

The loads are those of the runs on the H200; policies know the card, not the host. Without `--rates`: the
share of requests kept, over the requests that were sent to the GPU. With it: the highest rate at which 95 %
are kept. Each answer is a line of results/promises/slow-host.jsonl; those that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from headgate.advisor.capacity.search import Search
from headgate.cost.card import load_card
from headgate.cost.laws.terms import HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.cost.model import Shape
from studies.h200.promises.load import SEED, draw, parse
from studies.h200.promises.table import PLAIN_GRAPH, kept, replay
from studies.promises.__main__ import NEAR
from studies.promises.worlds import CARD, world

OUT = Path(__file__).parents[1] / "results" / "promises" / "slow-host.jsonl"
WARM = 10.0  # seconds
SETUP = {
    "card": CARD,
    "budget": 0,
    "slots": 0,
    "graph": 0,
    "ttft": "500ms",
    "tbt": "100ms",
    "delivery": "10ms",
    "warm": WARM,
}
UNEVEN, FIRST_USE = "uneven", "first-use"
HOSTS = ("1", "1.2", "1.5", UNEVEN, FIRST_USE)
GROUP = 16  # requests
MEDIAN, NINE_TENTHS = 39.5 / 34, 48.5 / 34  # of launches behind the HTTP server, over the card's
ARMS = ("plain", "mixed:budget=2560", "slai", "keep")
LOADS = ("azure-conv:20", "azure-code:15", "sharegpt-8k:8")
KEPT = 0.95
PRECISION = 0.02
TIMES = ("constant", "per_request", "prompts", "ungraphed")
Line = dict[str, Any]


@dataclass(frozen=True)
class Uneven(HostTerms):
    """Launches of steps with prompts that take at random more or less: a lognormal of this spread."""

    spread: float = 0.0
    rng: np.random.Generator = field(default_factory=np.random.default_rng, compare=False)

    def seconds(self, shape: Shape, width: int = 1) -> float:
        spent = super().seconds(shape, width)
        return spent * exp(self.rng.normal(0.0, self.spread)) if shape.prefill else spent


class FirstUse(WorkCost):
    """The first step with prompts of a number of requests, in groups of 16, is launched when the GPU is idle.

    So the launch is added to the time of the step instead of running beside the step before it.
    """

    def __init__(self, terms: WorkTerms, host: HostTerms) -> None:
        super().__init__(terms, host)
        self._launches = host
        self._groups: set[int] = set()

    def unhosted(self) -> WorkCost:
        made = FirstUse(super().unhosted().terms, self._launches)
        made.host = None
        return made

    def seconds(self, shape: Shape) -> float:
        spent = super().seconds(shape)
        group = -(-(shape.decodes + len(shape.chunks)) // GROUP)
        if not shape.prefill or group in self._groups:
            return spent
        self._groups.add(group)
        return spent + self._launches.seconds(shape)


def slow(name: str, seed: int) -> WorkCost:
    """The card's host so many times as slow; launches as measured behind the server; those and first uses."""
    cost = load_card(CARD).cost.graphed(PLAIN_GRAPH)
    assert isinstance(cost, WorkCost) and cost.host is not None
    measured = name in (UNEVEN, FIRST_USE)
    terms = {each: (MEDIAN if measured else float(name)) * getattr(cost.host, each) for each in TIMES}
    if not measured:
        return WorkCost(cost.terms, HostTerms(**terms, graph=cost.host.graph))
    spread = log(NINE_TENTHS / MEDIAN) / 1.2816  # the normal's 90th percentile
    host = Uneven(**terms, graph=cost.host.graph, spread=spread, rng=np.random.default_rng(seed))
    return (FirstUse if name == FIRST_USE else WorkCost)(cost.terms, host)


def replayed(name: str, rate: float, arm: str, host: str, seconds: float, seed: int) -> float:
    """Of requests kept, in one run."""
    return kept(
        replay(draw(name, rate, seconds, seed), arm, SETUP, slow(host, seed)),
        {**SETUP, "measure": seconds},
        WARM,
    )


def highest(name: str, arm: str, host: str, seconds: float, seed: int, around: float) -> Line:
    """The highest rate at which enough are kept; rates near `around` are tried first."""
    search = Search(world(name, "100ms").bound, PRECISION)
    near = [around * share for share in NEAR]
    while (rate := near.pop(0) if near else search.next()) is not None:
        search.tell(rate, (1 - replayed(name, rate, arm, host, seconds, seed)) / (1 - KEPT))
    return {
        "rate": search.answer,
        "tried": {f"{rate:.3f}": 1 - (1 - KEPT) * x for rate, x in search.tried.items()},
    }


def options(argv: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.h200.promises.slow_host", description=__doc__)
    add = parser.add_argument
    add("--loads", nargs="+", default=list(LOADS), help="WORKLOAD:RATE; with --rates where to begin")
    add("--arms", nargs="+", default=list(ARMS))
    add(
        "--hosts",
        nargs="+",
        default=list(HOSTS),
        help="times the card's; uneven: as measured; first-use: and stalls",
    )
    add("--rates", action="store_true", help=f"the highest rate at which {KEPT:.0%}% are kept")
    add("--seeds", type=int, default=1)
    add("--first-seed", type=int, default=SEED)
    add("--seconds", type=float, help="of a run (default: 70 as on the GPU; with --rates 600)")
    add("--table", action="store_true", help="print the table of what is there")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Run what is missing, print the table."""
    asked = options(argv)
    lines = [json.loads(row) for row in OUT.read_text().splitlines()] if OUT.exists() else []
    asked.seconds = asked.seconds or (600.0 if asked.rates else 70.0)
    if not asked.table:
        _fill(asked, lines)
    print(table(lines, asked.rates))


def _fill(asked: argparse.Namespace, lines: list[Line]) -> None:
    """Every answer that has no line yet."""
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    for seed, text, arm, host in product(seeds, asked.loads, asked.arms, asked.hosts):
        (part,) = parse(text)  # batch beside it is not replayed
        name, rate = part.name, part.rate
        about = {"workload": name, "arm": arm, "host": host, "seconds": asked.seconds}
        about |= {} if asked.rates else {"at": rate}
        same = [x for x in lines if about.items() <= x.items() and ("rate" in x) is asked.rates]
        if any(line["seed"] == seed for line in same):
            continue
        if asked.rates:
            around = float(np.mean([line["rate"] for line in same])) if same else rate
            found = highest(name, arm, host, asked.seconds, seed, around)
        else:
            found = {"kept": replayed(name, rate, arm, host, asked.seconds, seed)}
        lines.append({**about, "seed": seed, **found})
        with OUT.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(lines[-1], file=sys.stderr, flush=True)


def table(lines: list[Line], rates: bool) -> str:
    """Means over seeds, a column for each host."""
    cells: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if ("rate" in line) is rates:
            load = line["workload"] if rates else f"{line['workload']}, {line['at']:g}/s"
            cells[load, line["arm"]][line["host"]].append(line["rate" if rates else "kept"])
    hosts = list(dict.fromkeys(host for found in cells.values() for host in found))
    rows = [["workload", "arm", *hosts], ["---"] * (2 + len(hosts))]
    for (load, arm), found in sorted(cells.items(), key=lambda item: item[0][0]):
        values = [found.get(host) for host in hosts]
        texts = [
            "-" if not x else f"{np.mean(x):.1f}" if rates else f"{100 * np.mean(x):.0f} %" for x in values
        ]
        rows.append([load, f"`{arm}`", *texts])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    main(sys.argv[1:])
