"""Figure 6 of the gate-and-route paper: with the randomised router decodes follow the plan class by class."""

from __future__ import annotations

from dataclasses import replace

from headgate.methods.fluid.levels import Levels
from headgate.methods.fluid.planner import FluidPlan, plan_fluid
from headgate_papers.fluid.network_runs import NetworkJob, level, measured, quick_note, revenue, short
from headgate_papers.fluid.published import two_classes
from headgate_papers.network.counts import MIXED, PREFILLING, SOLO
from headgate_papers.report import LIMIT, Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes

NAME = "gr-fig6"
ABOUT = "decodes by class under the randomised router, against the plan; fairness under three gates"
SIZES, SECONDS = (20, 200), {20: 1500.0, 200: 300.0}
GATES: dict[str, str | None] = {"greedy": None, "randomised": "occupancy"}
FAIR = {"literal gate": "occupancy", "token bucket": "token-bucket"}


def apart() -> FluidPlan:
    """An optimal vertex: code decodes alone, summaries take the rest of the solo slots and the mixed ones."""
    best = plan_fluid(two_classes())
    pace, flows = best.instance.pace, best.instance.flows
    tokens = [rate * flow.output for rate, flow in zip(best.served, flows, strict=True)]
    alone = tokens[0] / pace.solo_speed
    rest = sum(best.solo) - alone
    return replace(best, mixed=(0.0, sum(best.mixed)), solo=(alone, rest))


def fair() -> FluidPlan:
    """At most one solo decode per engine between the classes."""
    return plan_fluid(two_classes(), Levels(decode_fairness=1.0))


def jobs(options: Options) -> list[NetworkJob]:
    """The vertex under both decode routers, the fair plan under both gates."""
    found = []
    for n in SIZES:
        for name, gate in GATES.items():
            settings = {"gate": gate} if gate else {}
            router = "service-level" if gate else "gate-and-route"
            found.append(NetworkJob(("vertex", name, n), apart(), router, n, SECONDS[n], settings=settings))
        for name, gate in FAIR.items():
            key, settings = ("fair", name, n), {"gate": gate}
            found.append(NetworkJob(key, fair(), "service-level", n, SECONDS[n], settings=settings))
    return [short(job, options) for job in found]


def judge(results: Outcomes, options: Options) -> Report:
    """Occupancies by class against the plan."""
    vertex = [_section(results, "vertex", apart(), tuple(GATES), n) for n in SIZES]
    even = [_section(results, "fair", fair(), tuple(FAIR), n) for n in SIZES]
    largest = SIZES[-1]
    spread = {name: _difference(results, ("fair", name, largest)) for name in FAIR}
    pairs = [(row.cells[0], row.cells[1]) for row in vertex[-1].rows[2:]]
    nearer = sum(abs(b.ours - b.published) < abs(a.ours - a.published) for a, b in pairs)
    return Report(
        NAME,
        "decodes by class follow the plan",
        (
            "Base instance. 'limit' is the plan, to which occupancies converge class by class (Theorem 4). "
            "vertex: an optimal plan in which code decodes alone; fair: solo decodes of the classes differ "
            "by at most 1 per engine.",
            f"{SECONDS[20]:.0f} s (20 engines) and {SECONDS[200]:.0f} s (200).",
            *quick_note(options),
        ),
        (*vertex, *even, _revenue(results)),
        (
            Count(
                f"n = {largest}: randomised nearer to the plan than greedy, by slot and class",
                nearer,
                len(pairs),
            ),
            Count(
                "fairness cap of 1 kept (within 10 %)", sum(gap < 1.1 for gap in spread.values()), len(spread)
            ),
        ),
        (
            "The literal gate over-serves code at finite n, so the fair plan earns more than it says and its "
            f"cap of 1 is missed: {spread['literal gate']:.2f} per engine at {largest} engines. With the "
            f"token bucket the difference is {spread['token bucket']:.2f}.",
        ),
    )


def _section(results: Outcomes, plan_name: str, plan: FluidPlan, names: tuple[str, ...], n: int) -> Section:
    rows = []
    for what, number, planned in (
        ("prefilling", PREFILLING, plan.prefill),
        ("mixed", MIXED, plan.mixed),
        ("solo", SOLO, plan.solo),
    ):
        for kind, flow in enumerate(plan.instance.flows):
            cells = (
                Cell(planned[kind], measured(results, (plan_name, name, n)).mean(level(number, kind)))
                for name in names
            )
            rows.append(Row(f"{what}, {flow.name}", tuple(cells)))
    title = f"{plan_name}, n = {n}: requests per engine"
    return Section(title, "where", names, tuple(rows), shared=True, against=LIMIT)


def _revenue(results: Outcomes) -> Section:
    rows = [
        Row(f"{name}, n = {n}", (Cell(plan.revenue, measured(results, (kind, name, n)).mean(revenue)),))
        for kind, plan, names in (("vertex", apart(), GATES), ("fair", fair(), FAIR))
        for name in names
        for n in SIZES
    ]
    return Section("Revenue per engine and second", "router", ("revenue",), tuple(rows), against=LIMIT)


def _difference(results: Outcomes, key: tuple[str, str, int]) -> float:
    found = measured(results, key)
    return abs(found.mean(level(SOLO, 0)) - found.mean(level(SOLO, 1)))
