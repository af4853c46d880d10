"""The results as Markdown: rates kept, and against the best fixed budget, seed by seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from headgate.stats.figures import Spread

Line = dict[str, Any]
DEFAULT = "mixed:budget=8192"


def table(lines: Iterable[Line], promise: str, synchronous: bool) -> str:
    """Requests per second with all levels kept, mean over seeds; differences are paired by seed."""
    rates: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    bounds: dict[str, float] = {}
    for line in lines:
        if (line["promise"], line["synchronous"]) == (promise, synchronous):
            rates[line["workload"]][line["policy"]][line["seed"]] = line["kept"]
            bounds[line["workload"]] = line["bound"]
    names = list(rates)
    policies = list(dict.fromkeys(policy for each in rates.values() for policy in each))
    rows = [["", *names], ["bound (no policy exceeds it)", *(f"{bounds[name]:.1f}" for name in names)]]
    for policy in policies:
        rows.append([f"`{policy}`", *(_mean(rates[name].get(policy, {})) for name in names)])
    for policy in policies:
        if not policy.startswith("mixed"):
            best = [_against(rates[name], policy, _best(rates[name])) for name in names]
            rows.append([f"`{policy}` against the best mixed", *best])
            if DEFAULT in policies:
                default = [_against(rates[name], policy, DEFAULT) for name in names]
                rows.append([f"`{policy}` against the default budget", *default])
    return markdown(rows)


def overload_table(lines: Iterable[Line], promise: str, synchronous: bool) -> str:
    """Share of first tokens in time, and of gaps, at loads around the bound; means over seeds."""
    found: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        if (line["promise"], line["synchronous"]) == (promise, synchronous):
            found[line["workload"], line["policy"]].append(line)
    loads = next(iter(found.values()))[0]["loads"] if found else []
    rows = [["workload", "policy", *(f"{load:g} of the bound" for load in loads)]]
    for (name, policy), mine in found.items():
        cells = []
        for place in range(len(loads)):
            shares = np.mean([line["tried"][place]["shares"] for line in mine], axis=0)
            cells.append(f"{100 * shares[0]:.0f} % / {100 * shares[-1]:.1f} %")
        rows.append([name, f"`{policy}`", *cells])
    return markdown(rows)


def _best(rates: dict[str, dict[int, float]]) -> str:
    fixed = {
        policy: np.mean([*seeds.values()]) for policy, seeds in rates.items() if policy.startswith("mixed")
    }
    return max(fixed, key=fixed.__getitem__) if fixed else ""


def _mean(seeds: dict[int, float]) -> str:
    return f"{np.mean([*seeds.values()]):.2f}" if seeds else "-"


def _against(rates: dict[str, dict[int, float]], policy: str, other: str) -> str:
    mine, theirs = rates.get(policy, {}), rates.get(other, {})
    both = sorted(mine.keys() & theirs.keys())
    if not both:
        return "-"
    change = np.array([100 * (mine[seed] / theirs[seed] - 1) for seed in both])
    if len(both) == 1:
        return f"{change[0]:+.1f} %"
    low = Spread.of_values(change).estimate().low
    return f"{change.mean():+.1f} %" if low is None else f"{change.mean():+.1f} ± {change.mean() - low:.1f} %"


def markdown(rows: list[list[str]]) -> str:
    """Rows as a table, the first as its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
