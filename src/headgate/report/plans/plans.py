"""The reports of other plans: flags for plain vLLM, capacity, and how a fleet splits its engines."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from headgate.advisor.capacity.plan import CapacityPlan
from headgate.advisor.flags import FlagsPlan
from headgate.advisor.fluid.plan import FluidAnswer
from headgate.methods.fluid.frontier import Point
from headgate.report.charts.bars import Bar, Bars
from headgate.report.charts.chart import COLOURS, Axis, Chart, Mark, Series
from headgate.report.document import Block, Cell, Chapter, Figure, Grid, Page, Printed, Section
from headgate.report.runs.origin import plan_made
from headgate.report.terminal.tables import number

PARAMETERS = {
    "seats": "seats",
    "chunk": "chunk",
    "mixed_fixed": "mixed step, fixed part",
    "mixed_per_token": "mixed step, per prompt token",
    "solo_speed": "solo decode speed",
    "prompt_price": "price of prompt tokens",
    "output_price": "price of output tokens",
}
CARE = "λ* is the rate no policy exceeds. Runs are finite, so percentiles far out are optimistic."
FRONTIERS = {
    "prefill-fairness": Axis("largest difference of prefill shares", "share of an engine"),
    "decode-fairness": Axis("largest difference of solo decodes", "seats per engine"),
    "tpot": Axis("cap on the time per token", "ms"),
}


def flags_page(plan: FlagsPlan, printed: str, command: Sequence[str]) -> Page:
    """What to set in plain vLLM: words and numbers, as printed."""
    listed = " ".join(f"{flag.name} {flag.value}" for flag in plan.flags)
    verdict = f"vllm serve MODEL {listed}: predicted {number(plan.rate)} requests/s when saturated, at "
    verdict += f"{number(1000 * plan.per_token)} ms per token."
    rows = tuple(
        (Cell(flag.name), Cell(str(flag.value)), Cell(flag.why, tone="prose")) for flag in plan.flags
    )
    grid = Grid("Flags", ("flag", "value", "why"), rows)
    sections = (Section("The advice", (grid,)), Section("As printed", (Printed(printed),), closed=True))
    about = f"{plan.situation.source}, {plan.situation.workload}; {plan.model} on {plan.gpu}"
    return Page(
        "What to set in plain vLLM", about, (Chapter("", verdict, sections),), plan_made(command), "plan"
    )


def capacity_page(plan: CapacityPlan, verdict: str, printed: str, command: Sequence[str]) -> Page:
    """The rate each policy sustains under the levels, beside the rate none exceeds."""
    found = sorted(plan.found, key=lambda each: -each.rate.value)
    bars = [
        Bar(
            each.policy,
            (("sustained", f"c{place % COLOURS}", each.rate.value),),
            each.rate.low,
            each.rate.high,
        )
        for place, each in enumerate(found)
    ]
    mark = Mark(f"λ* = {number(plan.ideal.rate)}", plan.ideal.rate)
    look = "How close each comes to λ*, the rate no policy exceeds; the thin line is the interval over seeds."
    figure = Bars("sustained", "requests/s", bars, mark).figure("What each policy sustains", look)
    rows = []
    for each in found:
        span = (
            "-"
            if each.rate.low is None or each.rate.high is None
            else f"[{number(each.rate.low)}, {number(each.rate.high)}]"
        )
        reason = Cell(each.limited_by or "nothing up to λ*", tone="words")
        rate = Cell(number(each.rate.value), each.rate.value)
        share = Cell(f"{100 * each.share:.0f} %", 100 * each.share)
        rows.append(
            (Cell(each.policy), rate, Cell(span), share, reason, Cell(f"{each.runs}", float(each.runs)))
        )
    heads = ("policy", "sustained\nrequests/s", "95 % interval", "of λ*", "gives way first", "runs")
    kept = "; ".join(str(level) for level in plan.levels if level.statistic)
    sections = (
        Section(
            "What is sustained", (Grid("Sustained rates", heads, tuple(rows), (f"Levels: {kept}.",)), figure)
        ),
        Section("The whole plan, as printed", (Printed(printed),), closed=True),
    )
    chapter = Chapter("", verdict, sections, (*plan.notes, CARE))
    about = f"card {plan.card}, {plan.workload}"
    return Page("How much each policy sustains", about, (chapter,), plan_made(command), "plan")


def fluid_page(answer: FluidAnswer, level: str | None, printed: str, command: Sequence[str]) -> Page:
    """How a fleet splits its engines: who is served, who holds what, and what a service level costs."""
    blocks: list[Block] = [_classes(answer), _served(answer), _occupancies(answer)]
    if level is not None and answer.points:
        blocks.append(_frontier(answer.points, FRONTIERS[level.replace("_", "-")]))
    sections = (
        Section("The plan", tuple(blocks)),
        Section("What one percent more changes", (_sensitivity(answer),)),
        Section("The whole plan, as printed", (Printed(printed),), closed=True),
    )
    about = f"{answer.costs}, {answer.demand.source}, {answer.engines:,} engines"
    chapter = Chapter("", _fluid_verdict(answer), sections, tuple(answer.notes))
    return Page("How the fleet splits its engines", about, (chapter,), plan_made(command), "plan")


def _fluid_verdict(answer: FluidAnswer) -> str:
    plan, staffing = answer.plan, answer.staffing
    come, served = sum(flow.rate for flow in plan.instance.flows), sum(plan.served)
    said = (
        f"{staffing.mixed:,} of {answer.engines:,} engines take prompts and {staffing.solo:,} only decode; "
    )
    said += f"the fluid plan serves {100 * served / come if come else 0:.0f} % of the requests"
    held = [flow.name for flow, cut in zip(plan.instance.flows, plan.throttled, strict=True) if cut]
    said += f", holds back {', '.join(held)}" if held else ""
    more = answer.gains[0]
    worth = f"adds {number(more)} per second" if more > 1e-6 * max(1.0, plan.revenue) else "adds nothing"
    earned = number(plan.revenue * answer.engines)
    said += f" and earns {earned} per second at its prices; one more engine {worth}."
    return f"{said} A fluid knows no chance: real fleets earn a little less."


def _classes(answer: FluidAnswer) -> Grid:
    plan, engines = answer.plan, answer.engines
    heads = (
        *("class", "prompt\ntokens", "output\ntokens", "come\nper s", "served\nper s", "served\nof who come"),
        *("waiting\nrequests", "engines\nprefilling", "decodes beside\nprompts", "decodes\nalone"),
        "one more\nis worth",
    )
    columns = zip(plan.instance.flows, plan.served, plan.waiting, plan.shadows.arrival, strict=True)
    places = zip(plan.prefill, plan.mixed, plan.solo, strict=True)
    rows = []
    for (flow, served, waiting, worth), held in zip(columns, places, strict=True):
        share = 100 * served / flow.rate if flow.rate else 0.0
        queue = Cell(number(waiting * engines), waiting * engines) if isfinite(waiting) else Cell("refused")
        before = (flow.prompt, flow.output, flow.rate * engines, served * engines)
        after = (*(part * engines for part in held), worth)
        start = [Cell(flow.name), *(Cell(number(value), value) for value in before)]
        end = [Cell(number(value), value) for value in after]
        rows.append((*start, Cell(f"{share:.1f} %", share), queue, *end))
    return Grid("By class, whole fleet", heads, tuple(rows))


def _served(answer: FluidAnswer) -> Figure:
    plan, engines = answer.plan, answer.engines
    bars = []
    for flow, served in zip(plan.instance.flows, plan.served, strict=True):
        lost = max(flow.rate - served, 0.0) * engines
        bars.append(Bar(flow.name, (("served", "c0", served * engines), ("not served", "c7", lost))))
    look = "A grey end is demand the plan turns away or lets give up, because others pay more for the time."
    return Bars("requests", "per s", bars).figure("Who is served", look)


def _occupancies(answer: FluidAnswer) -> Figure:
    """Where each class is, in seats of the whole fleet: the targets a router steers by."""
    plan, engines = answer.plan, answer.engines
    bars = []
    for flow, prefill, mixed, solo in zip(
        plan.instance.flows, plan.prefill, plan.mixed, plan.solo, strict=True
    ):
        parts = (("prefill", prefill), ("beside prompts", mixed), ("alone", solo))
        styles = ("prefill", "mixed", "decode")
        bars.append(
            Bar(
                flow.name,
                tuple(
                    (name, style, value * engines) for (name, value), style in zip(parts, styles, strict=True)
                ),
            )
        )
    look = "The LP's targets: requests of each class in prefill, decoding beside prompts, decoding alone."
    return Bars("in the fleet at once", "requests", bars).figure("Class occupancies, planned", look)


def _frontier(points: Sequence[Point], axis: Axis) -> Figure:
    scale = 1000.0 if axis.unit == "ms" else 1.0
    kept = [point for point in points if point.plan is not None]
    x = np.array([point.value * scale for point in kept])
    y = np.array([point.revenue for point in kept])
    chart = Chart(axis, Axis("revenue", "per s and engine"), [Series("Pareto frontier", x, y, 0, "linked")])
    lost = len(points) - len(kept)
    note = f"{lost} tighter caps cannot be kept at all." if lost else ""
    return chart.figure(
        "What the service level costs", "Where the curve is steep, a little slack earns a lot.", note
    )


def _sensitivity(answer: FluidAnswer) -> Grid:
    rows = tuple(
        (Cell(PARAMETERS[name]), Cell(f"{value:+.3f} %", value)) for name, value in answer.sensitivity.items()
    )
    return Grid("Elasticities", ("one percent more of", "changes revenue by\n%"), rows)
