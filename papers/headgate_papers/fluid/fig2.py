"""Figure 2 of the gate-and-route paper: revenue and queues against arrivals, for both ways of charging."""

from __future__ import annotations

from math import nan

from headgate.methods.fluid.flows import BUNDLED, SEPARATE
from headgate.methods.fluid.planner import plan_fluid
from headgate_papers.fluid.network_runs import NetworkJob, level, measured, quick_note, short
from headgate_papers.fluid.published import FIG2, FIG2_EDGE, LIKELY_SLOTS, STATED_SLOTS, two_classes
from headgate_papers.network.counts import HANDOFF, WAITING
from headgate_papers.report import Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes

NAME = "gr-fig2"
ABOUT = "revenue and queues against arrivals: bundled congestion before prefill, separate before decode"
RATES = (0.3, 0.5, 0.8, 1.2)
ENGINES, SECONDS = 50, 400.0
ROUTERS = {BUNDLED: "gate-and-route+", SEPARATE: "prioritize-and-route"}


def jobs(options: Options) -> list[NetworkJob]:
    """The two policies of the two ways of charging, at B = 8."""
    found = []
    for charging, router in ROUTERS.items():
        for rate in RATES:
            plan = plan_fluid(two_classes(rate, LIKELY_SLOTS, charging))
            found.append(short(NetworkJob((charging, rate), plan, router, ENGINES, SECONDS), options))
    return found


def judge(results: Outcomes, options: Options) -> Report:
    """The marked optima, and where people wait."""
    return Report(
        NAME,
        "revenue and queues against arrivals",
        (
            f"Two classes at equal rates up to {FIG2_EDGE} per second and engine; the optimum of the linear "
            f"programs with {STATED_SLOTS} slots as stated and {LIKELY_SLOTS} as the numbers suggest.",
            f"Queues and revenue: stochastic network, {ENGINES} engines, {LIKELY_SLOTS} slots, "
            f"{SECONDS:.0f} s; bundled: gate-and-route+, separate: prioritize-and-route.",
            *quick_note(options),
        ),
        (_optima(), _queues(results)),
        _counts(results),
        (
            "With 16 slots the marked optima would need different arrival rates (0.509 and 1.004), and the "
            "bundled curve would not be flat before 1.43: the figure cannot be B = 16. With 8 slots the "
            "separate optimum at the right edge is the marked one, and the bundled plateau 0.1 % above it.",
            "Separate charging pays for prompts whose outputs then wait: the value of requests that finish "
            "is below what the same engines earn under the bundled plan.",
        ),
    )


def _optima() -> Section:
    rows = []
    for charging, marked in FIG2.items():
        cells = [
            Cell(marked, plan_fluid(two_classes(FIG2_EDGE, slots, charging)).revenue)
            for slots in (STATED_SLOTS, LIKELY_SLOTS)
        ]
        rows.append(Row(charging, tuple(cells)))
    columns = (f"{STATED_SLOTS} slots", f"{LIKELY_SLOTS} slots")
    return Section(
        f"Optimum at {FIG2_EDGE} arrivals, marked in the figure", "charging", columns, tuple(rows), True
    )


def _queues(results: Outcomes) -> Section:
    rows = []
    for charging in ROUTERS:
        for rate in RATES:
            plan, found = (
                plan_fluid(two_classes(rate, LIKELY_SLOTS, charging)),
                measured(results, (charging, rate)),
            )
            figures = (
                plan.revenue,
                found.mean(lambda window: window.revenue(window.instance.charging)),
                found.mean(lambda window: window.revenue()),
                found.mean(level(WAITING)),
                found.mean(level(HANDOFF)),
            )
            rows.append(Row(f"{charging} {rate}", tuple(Cell(nan, figure) for figure in figures)))
    columns = ("optimum", "revenue", "finished", "wait p.", "wait d.")
    return Section(
        "Per engine: revenue, value of finished requests, queues", "arrivals", columns, tuple(rows)
    )


def _counts(results: Outcomes) -> tuple[Count, ...]:
    """In overload, where does the congestion sit?"""
    heavy = [rate for rate in RATES if rate >= 0.8]
    before = [_before_decode(results, BUNDLED, rate) for rate in heavy]
    behind = [_before_decode(results, SEPARATE, rate) for rate in heavy]
    return (
        Count("bundled: overload waits before prefill", sum(share < 0.5 for share in before), len(heavy)),
        Count("separate: overload waits before decode", sum(share > 0.5 for share in behind), len(heavy)),
    )


def _before_decode(results: Outcomes, charging: str, rate: float) -> float:
    found = measured(results, (charging, rate))
    decode, prompt = found.mean(level(HANDOFF)), found.mean(level(WAITING))
    return decode / (decode + prompt) if decode + prompt > 0 else 0.0
