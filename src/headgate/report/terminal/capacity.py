"""A capacity plan as text for a terminal of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.advisor.capacity.plan import CapacityPlan, Found
from headgate.report.terminal.tables import number

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def capacity_text(plan: CapacityPlan) -> RenderableType:
    """What is asked for, what no policy exceeds, what each sustains, and the best in one sentence."""
    from rich.console import Group
    from rich.text import Text

    title = Text.assemble(("Capacity", "bold"), f": card {plan.card}, {plan.workload}")
    parts: list[RenderableType] = [title, Text(), _facts(plan), Text(), _policies(plan), Text()]
    parts.append(Text(verdict(plan), style="bold"))
    parts.append(
        Text("Intervals are over seeds; runs are finite, so tails (p99) are optimistic.", style="dim")
    )
    return Group(*parts)


def verdict(plan: CapacityPlan) -> str:
    """The best policy, and whether others can be told from it."""
    best = max(plan.found, key=lambda each: each.rate.value)
    if not best.rate.value:
        return "No policy keeps these levels at any rate: ask for less."
    share = f"{100 * best.share:.0f} % of λ*"
    if len(plan.found) == 1:
        return f"{best.policy} sustains {number(best.rate.value)} requests/s, {share}."
    alike = [each.policy for each in plan.found if each is not best and _alike(each, best)]
    said = f"{best.policy} sustains most: {number(best.rate.value)} requests/s, {share}"
    return f"{said}; it cannot be told from {', '.join(alike)}." if alike else f"{said}."


def _alike(one: Found, other: Found) -> bool:
    """Whether their intervals meet."""
    if one.rate.high is None or other.rate.low is None:
        return one.rate.value == other.rate.value
    return one.rate.high >= other.rate.low


def _facts(plan: CapacityPlan) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    kept = [str(level) for level in plan.levels if level.statistic]
    table.add_row("Levels", "; ".join(kept))
    known = [str(level) for level in plan.levels if not level.statistic]
    if known:
        table.add_row("Promised", "; ".join(known) + " (told to policies, not checked)")
    if plan.classes:
        total = sum(share for _, share in plan.classes)
        table.add_row(
            "Classes", ", ".join(f"{name} {100 * share / total:g} %" for name, share in plan.classes)
        )
    engine, limited = plan.engine, plan.limited.rate
    table.add_row("Engine", f"{engine.running} seats, {engine.batch_tokens:,} tokens a step")
    bound = f"λ* = {number(plan.ideal.rate)} requests/s"
    if limited < 0.999 * plan.ideal.rate:
        bound += f"; {number(limited)} in steps of at most {engine.batch_tokens:,} tokens"
    table.add_row("No policy", f"above {bound}")
    for note in plan.notes:
        table.add_row("Note", note)
    return table


def _policies(plan: CapacityPlan) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("policy")
    for name in ("requests/s", "95 % interval", "of λ*"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("gives way first")
    for each in sorted(plan.found, key=lambda found: -found.rate.value):
        rate = each.rate
        interval = (
            "" if rate.low is None or rate.high is None else f"{number(rate.low)} .. {number(rate.high)}"
        )
        reason = each.limited_by or "nothing up to λ*"
        table.add_row(each.policy, number(rate.value), interval, f"{100 * each.share:.0f} %", reason)
    return table
