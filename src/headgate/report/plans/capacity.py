"""`plan capacity`: the rate each policy sustains under service levels, beside the rate none exceeds."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.advisor.capacity.plan import CapacityPlan, Found
from headgate.advisor.capacity.slo import Level
from headgate.report.charts.bars import Bar, Bars
from headgate.report.charts.chart import COLOURS, Mark
from headgate.report.document import Chapter, Drawn, Facts, Figure, Grid, Page, Section, row, valued
from headgate.report.numbers import interval, number, sentence
from headgate.report.runs.origin import plan_made

CARE = (
    "λ* is the rate no policy exceeds. Intervals are over seeds; runs are finite, so tails (p99) are "
    "optimistic."
)


def capacity_page(plan: CapacityPlan, command: Sequence[str]) -> Page:
    """What is asked for, what no policy exceeds, what each sustains, and the best in one sentence."""
    found = sorted(plan.found, key=lambda each: -each.rate.value)
    sections = (
        Section("", (_facts(plan),)),
        Section("Sustained rates", (_rates(found), Drawn(lambda: (_bars(plan, found),)))),
    )
    chapter = Chapter("", _verdict(plan), sections, (*map(sentence, plan.notes), CARE))
    about = f"card {plan.card}, {plan.workload}"
    return Page("Capacity", about, (chapter,), plan_made(command), "plan")


def _verdict(plan: CapacityPlan) -> str:
    """The best policy, and those without a significant difference from it."""
    best = max(plan.found, key=lambda each: each.rate.value)
    if not best.rate.value:
        return "No policy keeps these levels at any rate: ask for less."
    share = f"{100 * best.share:.0f} % of λ*"
    if len(plan.found) == 1:
        return f"{best.policy} sustains {number(best.rate.value)} requests/s, {share}."
    alike = [each.policy for each in plan.found if each is not best and _alike(each, best)]
    said = f"{best.policy} sustains most: {number(best.rate.value)} requests/s, {share}"
    return f"{said}; no significant difference from {', '.join(alike)}." if alike else f"{said}."


def _alike(one: Found, other: Found) -> bool:
    """Whether their intervals meet."""
    if one.rate.high is None or other.rate.low is None:
        return one.rate.value == other.rate.value
    return one.rate.high >= other.rate.low


def asked(levels: Sequence[Level], classes: Sequence[tuple[str, float]]) -> dict[str, str]:
    """The service levels, what is only promised, and the classes."""
    facts = {"Levels": "; ".join(str(level) for level in levels if level.statistic)}
    known = [str(level) for level in levels if not level.statistic]
    if known:
        facts["Promised"] = "; ".join(known) + " (told to policies, not checked)"
    if classes:
        total = sum(share for _, share in classes)
        facts["Classes"] = ", ".join(f"{name} {100 * share / total:g} %" for name, share in classes)
    return facts


def _facts(plan: CapacityPlan) -> Facts:
    engine, limited = plan.engine, plan.limited.rate
    bound = f"above λ* = {number(plan.ideal.rate)} requests/s"
    if limited < 0.999 * plan.ideal.rate:
        bound += f"; {number(limited)} in steps of at most {engine.batch_tokens:,} tokens"
    facts = asked(plan.levels, plan.classes)
    facts["Engine"] = f"{engine.running} seats, {engine.batch_tokens:,} tokens a step"
    facts["No policy"] = bound
    return Facts(tuple(facts.items()))


def _rates(found: Sequence[Found]) -> Grid:
    rows = []
    for each in found:
        share = valued(f"{100 * each.share:.0f} %", 100 * each.share)
        span = valued(interval(each.rate), each.rate.value)
        reason = each.limited_by or "nothing up to λ*"
        rows.append(row(each.policy, each.rate.value, span, share, reason, each.runs))
    heads = ("policy", "requests\nper s", "95 % interval", "of λ*", "limited by", "runs")
    return Grid("", heads, tuple(rows), minor=("runs",))


def _bars(plan: CapacityPlan, found: Sequence[Found]) -> Figure:
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
    return Bars("sustained", "requests/s", bars, mark).figure("What each policy sustains", look)
