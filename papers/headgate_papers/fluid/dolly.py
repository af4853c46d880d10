"""Tables of the gate-and-route paper: Dolly-15k's eight task categories as classes of a fleet."""

from __future__ import annotations

from math import nan

from headgate.methods.fluid.flows import Flow, Instance
from headgate.methods.fluid.planner import FluidPlan, plan_fluid
from headgate_papers.fluid.network_runs import NetworkJob, measured, quick_note, revenue, short
from headgate_papers.fluid.published import DOLLY, PRICES, STATED_SLOTS, THETA, pace
from headgate_papers.report import LIMIT, Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes

NAME = "gr-dolly"
ABOUT = "Dolly-15k's task categories as classes: the plan, and how much the length law matters"
RATES = (1.5, 2.5)  # all classes together, per second and engine: just enough, and too many
ENGINES, SECONDS = 100, 300.0
LAWS = ("exponential", "fixed", "lognormal")
ROUTERS = ("gate-and-route", "gate-and-route+")


def dolly(rate: float) -> FluidPlan:
    """The eight classes in their shares."""
    samples = sum(row[2] for row in DOLLY.values())
    flows = tuple(
        Flow(name, prompt, output, rate * count / samples, THETA)
        for name, (prompt, output, count, _) in DOLLY.items()
    )
    return plan_fluid(Instance(flows, pace(STATED_SLOTS), PRICES))


def jobs(options: Options) -> list[NetworkJob]:
    """Both gates under three laws of prompt and output lengths with the same means."""
    return [
        short(NetworkJob((rate, router, law), dolly(rate), router, ENGINES, SECONDS, law=law), options)
        for rate in RATES
        for router in ROUTERS
        for law in LAWS
    ]


def judge(results: Outcomes, options: Options) -> Report:
    """Revenue against the optimum by law, and whom the plan serves."""
    rows = [
        Row(
            f"{router}, {rate:g}",
            tuple(
                Cell(dolly(rate).revenue, measured(results, (rate, router, law)).mean(revenue))
                for law in LAWS
            ),
        )
        for rate in RATES
        for router in ROUTERS
    ]
    moved = [
        abs(row.cells[place].ours / row.cells[0].ours - 1)
        for row in rows[1::2]
        for place in range(1, len(LAWS))
    ]
    return Report(
        NAME,
        "eight classes of real tasks",
        (
            f"Classes in the shares of their samples, {RATES[0]:g} and {RATES[1]:g} requests per second and "
            f"engine, {STATED_SLOTS} slots, {ENGINES} engines, {SECONDS:.0f} s. 'limit' is "
            "the fluid optimum, the limit by Theorem 2; the paper prints lengths and divergences only.",
            "The published divergences from an exponential are 0.06 to 0.26; here lengths are exponential, "
            "fixed, or lognormal with a coefficient of variation of 1.5. The data set itself is not needed.",
            *quick_note(options),
        ),
        (
            Section(
                "Revenue per engine by length law",
                "router, rate",
                LAWS,
                tuple(rows),
                shared=True,
                against=LIMIT,
            ),
            _plan(),
        ),
        (
            Count(
                "GG-SP+: length law moves revenue by less than 3 %",
                sum(m < 0.03 for m in moved),
                len(moved),
                LIMIT,
            ),
        ),
        (
            "Fluid targets depend on means only. What is left of the law is how much queues fluctuate, and "
            "that shrinks with the fleet.",
        ),
    )


def _plan() -> Section:
    plan = dolly(RATES[1])
    rows = []
    for place, (name, (prompt, output, _, divergence)) in enumerate(DOLLY.items()):
        flow = plan.instance.flows[place]
        cells = (prompt, output, divergence, plan.served[place] / flow.rate, plan.shadows.arrival[place])
        rows.append(Row(name, tuple(Cell(nan, abs(cell)) for cell in cells)))
    columns = ("prompt", "output", "KL", "served", "worth")
    return Section(
        f"The plan at {RATES[1]:g}: share served, worth of one more", "class", columns, tuple(rows)
    )
