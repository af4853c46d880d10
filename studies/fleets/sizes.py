"""Revenue per engine against the fluid optimum for growing fleets, every router."""

from __future__ import annotations

from typing import Any

from studies.fleets.worlds import SECONDS, SEEDS, SIZES, Case, carry_out, interval

ROUTERS = (
    "gate-and-route",
    "gate-and-route+",
    "token-bucket",
    "density-first",
    "gi-wsp",
    "fi-wsp",
    "fg-sp",
    "gf-wsp",
)
SEPARATE = (("A2", "prioritize-and-route"), ("C2", "prioritize-and-route"), ("E3", "prioritize-and-route"))


def cases() -> list[Case]:
    """Small fleets first, so that an interrupted study has whole tables of them."""
    found = []
    for engines in SIZES:
        seconds, few = SECONDS[engines], min(2, SEEDS[engines])
        for name in ("A1", "C1", "E1"):
            found += [Case(name, router, engines, SEEDS[engines], seconds) for router in ROUTERS]
        found += [Case(name, router, engines, few, seconds) for name, router in SEPARATE]
        if engines in (20, 200):
            found += [Case("B1", router, engines, few, seconds) for router in ROUTERS]
            busy = min(seconds, 30_000 / engines)  # 5.5 arrivals per second and engine
            found += [Case("N1", router, engines, few, busy) for router in ROUTERS]
    return found


def main(quick: bool) -> None:
    rows = carry_out("sizes", cases(), quick)
    for name in dict.fromkeys(row["instance"] for row in rows):
        table(name, [row for row in rows if row["instance"] == name])


def table(name: str, rows: list[dict[str, Any]]) -> None:
    sizes = sorted({row["engines"] for row in rows})
    best = rows[0]["best"]
    print(f"\n{name}, optimum {best:.2f}: revenue / optimum, 95 % interval\n")
    print("| router | " + " | ".join(f"n = {size}" for size in sizes) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    charge = "separate" if name in ("A2", "C2", "E3") else "bundled"
    for router in dict.fromkeys(row["router"] for row in rows):
        cells = []
        for size in sizes:
            mine = [row for row in rows if row["router"] == router and row["engines"] == size]
            cells.append("{:.3f} ± {:.3f}".format(*interval(mine, charge)) if mine else "-")
        print(f"| `{router}` | " + " | ".join(cells) + " |")
