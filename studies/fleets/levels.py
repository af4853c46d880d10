"""What plans with service levels earn and keep in a finite fleet, under the literal gate and others."""

from __future__ import annotations

from typing import Any

import numpy as np

from headgate.methods.fluid.levels import Levels, slot_tpot
from headgate.methods.fluid.planner import plan_fluid
from studies.fleets.worlds import INSTANCES, SECONDS, SEEDS, Case, carry_out, interval

LEVELS = {
    "TPOT ≤ 23 ms (I1)": Levels(tpot=0.023),
    "prefill fairness ≤ 0.1 (I2)": Levels(prefill_fairness=0.1),
    "decode fairness ≤ 1 (I3)": Levels(decode_fairness=1.0),
}
PREFILL, DECODE = "engines prefilling two classes differ by at most", "solo decodes differ by at most"
PRICED: tuple[tuple[str, Levels, float, str], ...] = (  # with the unit of the price at the margin
    *((f"TPOT at most {ms:g} ms", Levels(tpot=ms / 1000), 1000, "ms") for ms in (24, 23, 22.5)),
    *((f"{PREFILL} {most:g}", Levels(prefill_fairness=most), 1, "unit") for most in (0.15, 0.1, 0.0)),
    *((f"{DECODE} {most:g}", Levels(decode_fairness=most), 1, "decode") for most in (3.0, 1.0, 0.0)),
    ("`code` served in full", Levels(served={"class0": 1.0}), 100, "percent"),
)
ROUTERS: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "gate-and-route": ("gate-and-route", ()),
    "gate-and-route+": ("gate-and-route+", ()),
    "token-bucket": ("token-bucket", ()),
    "service-level, literal": ("service-level", (("gate", "occupancy"),)),
    "service-level": ("service-level", ()),
}
SIZES = (20, 200)


def main(quick: bool) -> None:
    cases = [
        Case("A1", router, n, SEEDS[n], SECONDS[n], levels, settings, f"{name} / {level}")
        for n in SIZES
        for level, levels in LEVELS.items()
        for name, (router, settings) in ROUTERS.items()
    ]
    rows = carry_out("levels", cases, quick)
    free = plan_fluid(INSTANCES["A1"]).revenue
    prices(free)
    for level, levels in LEVELS.items():
        plan = plan_fluid(INSTANCES["A1"], levels)
        print(
            f"\n{level}: plan {plan.revenue:.2f}, {100 * (1 - plan.revenue / free):.1f} % below the optimum\n"
        )
        names = " | ".join(f"n = {n}: revenue / plan | kept" for n in SIZES)
        print(f"| router | {names} |\n|---" + "|---|---" * len(SIZES) + "|")
        for name in ROUTERS:
            cells = [
                _cells([r for r in rows if r["router"] == f"{name} / {level}" and r["engines"] == n], level)
                for n in SIZES
            ]
            print(f"| `{name}` | " + " | ".join(cells) + " |")


def prices(free: float) -> None:
    """What each level costs the plan, and what a little more of it would."""
    print(
        f"\n| level (A1; optimum {free:.1f} per engine) | revenue | below the optimum | price at the margin |"
    )
    print("|---|---|---|---|")
    for label, levels, scale, unit in PRICED:
        plan = plan_fluid(INSTANCES["A1"], levels)
        (price,) = plan.shadows.levels.values()
        below = 100 * (1 - plan.revenue / free)
        print(f"| {label} | {plan.revenue:.1f} | {below:.1f} % | {abs(price) / scale:.1f} per {unit} |")


def _cells(rows: list[dict[str, Any]], level: str) -> str:
    """Revenue over the plan's, and the level that was kept."""
    if not rows:
        return "- | -"
    mean, half = interval(rows)
    if level.startswith("TPOT"):
        kept = float(np.mean([slot_tpot(INSTANCES["A1"].pace, sum(row["x"])) for row in rows]))
        return f"{mean:.3f} ± {half:.3f} | {1000 * kept:.2f} ms"
    block = "x" if level.startswith("prefill") else "solo"
    gap = float(np.mean([max(row[block]) - min(row[block]) for row in rows]))
    return f"{mean:.3f} ± {half:.3f} | {gap:.3f}"
