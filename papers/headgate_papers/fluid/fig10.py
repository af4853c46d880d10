"""Figure 10 of the gate-and-route paper: revenue over slots and beta, and over the two prices."""

from __future__ import annotations

from dataclasses import replace
from math import nan

from headgate.methods.fluid.flows import TokenPrices
from headgate.methods.fluid.planner import plan_fluid
from headgate_papers.fluid.network_runs import NetworkJob
from headgate_papers.fluid.published import FIG10_PRICES, FIG10_SCALES, LIKELY_SLOTS, pace, two_classes
from headgate_papers.report import LIMIT, Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes

NAME = "gr-fig10"
ABOUT = "revenue over slots and beta, and over the prices of prompt and output tokens"
SLOTS = (2, 8, 16, 24, 32, 40)
SLOPES = (1e-5, 2e-4, 5e-4, 1e-3)
Map = dict[tuple[float, float], float]
STEPS = (0.05, 0.10, 0.15, 0.20, 0.25, 0.30)


def jobs(options: Options) -> list[NetworkJob]:
    """Linear programs only."""
    return []


def judge(results: Outcomes, options: Options) -> Report:
    """Both maps, and their ends against the colour scales."""
    map_a: Map = {(slots, slope): _by_engine(slots, slope) for slots in SLOTS for slope in SLOPES}
    map_b: Map = {(p, d): _by_price(p, d) for p in STEPS for d in STEPS}
    ends = [
        Row(name, (Cell(low, min(values.values())), Cell(high, max(values.values()))))
        for (name, (low, high)), values in zip(FIG10_SCALES.items(), (map_a, map_b), strict=True)
    ]
    edge = [max(STEPS, key=lambda p: map_b[p, round(0.35 - p, 2)])]
    return Report(
        NAME,
        "revenue over engines and prices",
        (
            f"Base instance, 0.5 arrivals per second, engine and class; linear programs; prices at "
            f"{LIKELY_SLOTS} slots. 'paper' are the ends of the printed colour scales.",
        ),
        (
            Section("Least and most", "map", ("least", "most"), tuple(ends)),
            _table("Slots down, β across", SLOTS, SLOPES, map_a),
            _table("Price of a prompt token down, of an output token across", STEPS, STEPS, map_b),
        ),
        (
            Count(
                "best prices on c_p + c_d = 0.35 are at an end",
                int(edge[0] in (STEPS[0], STEPS[-1])),
                1,
                LIMIT,
            ),
        ),
        (
            "With arrivals that do not depend on prices revenue is convex and in proportion to both, so on "
            "any line c_p + c_d = k the best point is a corner: the 'optimal ratio' of the paper is the "
            "edge of its price range, and no advice on pricing without a demand curve.",
        ),
    )


def _by_engine(slots: int, slope: float) -> float:
    start = two_classes()
    return plan_fluid(replace(start, pace=replace(pace(slots), mixed_per_token=slope))).revenue


def _by_price(prompt: float, output: float) -> float:
    assert FIG10_PRICES[0] <= min(prompt, output) and max(prompt, output) <= FIG10_PRICES[1]
    return plan_fluid(two_classes(slots=LIKELY_SLOTS, prices=TokenPrices(prompt, output))).revenue


def _table(title: str, down: tuple[float, ...], across: tuple[float, ...], values: Map) -> Section:
    rows = [Row(f"{one:g}", tuple(Cell(nan, values[one, other]) for other in across)) for one in down]
    return Section(title, "", tuple(f"{other:g}" for other in across), tuple(rows))
