"""Figures 4 and 5 of the gate-and-route paper: revenue, queues and occupancies of growing fleets."""

from __future__ import annotations

from math import nan

from headgate.methods.fluid.planner import FluidPlan, plan_fluid
from headgate_papers.fluid.network_runs import NetworkJob, level, measured, quick_note, revenue, short
from headgate_papers.fluid.published import SIZES, two_classes
from headgate_papers.network.counts import HANDOFF, MIXED, PREFILLING, SOLO, WAITING
from headgate_papers.report import LIMIT, Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes

NAME = "gr-fig4"
ABOUT = "revenue, queues and occupancies of gate-and-route for 5 to 500 engines, against the optimum"
ROUTERS = {"literal": "gate-and-route", "GG-SP+": "gate-and-route+"}
SECONDS = {5: 3000.0, 20: 1500.0, 50: 800.0, 200: 400.0, 500: 250.0}
RUNS = {5: 3, 20: 3, 50: 2, 200: 1, 500: 1}


def plan() -> FluidPlan:
    """The base instance."""
    return plan_fluid(two_classes())


def jobs(options: Options) -> list[NetworkJob]:
    """Both gates, every size, several seeds."""
    best = plan()
    return [
        short(NetworkJob((name, engines), best, router, engines, SECONDS[engines], run), options)
        for engines in SIZES
        for name, router in ROUTERS.items()
        for run in range(2 if options.quick else RUNS[engines])
    ]


def judge(results: Outcomes, options: Options) -> Report:
    """Revenue against the limit, then where everybody is."""
    best = plan()
    gaps = {
        name: [1 - measured(results, (name, engines)).mean(revenue) / best.revenue for engines in SIZES]
        for name in ROUTERS
    }
    return Report(
        NAME,
        "growing fleets against the fluid optimum",
        (
            "Base instance, 16 slots, 0.5 arrivals per second, engine and class. 'limit' is the fluid "
            "optimum, which Theorem 2 gives as the limit and Fig. 4 marks; no other number is printed.",
            "literal: the paper's gate. GG-SP+: ours, with spare mixed engines and a gate that withholds. "
            "Intervals: see docs/fleet.md.",
            *quick_note(options),
        ),
        (_revenue(results, best), *_queues(results, best), _occupancies(results, best)),
        (
            Count(
                "revenue within 10 % of the optimum", sum(g < 0.1 for gap in gaps.values() for g in gap), 10
            ),
            Count("the gap shrinks from 5 to 500 engines", sum(gap[-1] < gap[0] for gap in gaps.values()), 2),
            Count(
                "decode queue below one request per engine",
                sum(measured(results, (name, n)).mean(level(HANDOFF)) < 1 for name in ROUTERS for n in SIZES),
                10,
            ),
        ),
        (
            f"The literal gate is {100 * gaps['literal'][-1]:.1f} % below the optimum at 500 engines, ours "
            f"{100 * gaps['GG-SP+'][-1]:.1f} %: the plan gives code {500 * best.prefill[0]:.1f} engines "
            "there and 0.1 at 5, but a class with nobody in prefill always wins the literal index.",
            "Occupancies by class: prefill follows the plan; decodes settle where each class has its share "
            "of both kinds of slot, one of many optimal splits (Fig. 5 shows the same).",
        ),
    )


def _revenue(results: Outcomes, best: FluidPlan) -> Section:
    rows = tuple(
        Row(
            f"n = {n}",
            tuple(Cell(best.revenue, measured(results, (name, n)).mean(revenue)) for name in ROUTERS),
        )
        for n in SIZES
    )
    return Section(
        "Revenue per engine and second", "engines", tuple(ROUTERS), rows, shared=True, against=LIMIT
    )


def _queues(results: Outcomes, best: FluidPlan) -> tuple[Section, ...]:
    found = []
    for what, number, planned in (("prefill", WAITING, sum(best.waiting)), ("a decode slot", HANDOFF, nan)):
        rows = tuple(
            Row(
                f"n = {n}",
                tuple(Cell(planned, measured(results, (name, n)).mean(level(number))) for name in ROUTERS),
            )
            for n in SIZES
        )
        title = f"Waiting for {what}, per engine; 'limit' is the plan"
        found.append(Section(title, "engines", tuple(ROUTERS), rows, shared=True, against=LIMIT))
    return tuple(found)


def _occupancies(results: Outcomes, best: FluidPlan) -> Section:
    largest = SIZES[-1]
    plans = {
        "prefilling": (PREFILLING, best.prefill),
        "mixed": (MIXED, best.mixed),
        "solo": (SOLO, best.solo),
    }
    rows = []
    for what, (number, planned) in plans.items():
        for kind, flow in enumerate(best.instance.flows):
            cells = (
                Cell(planned[kind], measured(results, (name, largest)).mean(level(number, kind)))
                for name in ROUTERS
            )
            rows.append(Row(f"{what}, {flow.name}", tuple(cells)))
    return Section(
        "Requests per engine in the largest fleet; 'limit' is the plan",
        "where",
        tuple(ROUTERS),
        tuple(rows),
        shared=True,
        against=LIMIT,
    )
