"""The report of `plan wait`: thresholds, and the memory they need beside what there is."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from headgate.advisor.wait.plan import Nested, WaitPlan
from headgate.report.charts.bars import Bar, Bars
from headgate.report.charts.marks import Mark
from headgate.report.document import Block, Cell, Chapter, Figure, Grid, Page, Printed, Section
from headgate.report.runs.origin import plan_made
from headgate.report.terminal.tables import number


def wait_page(plan: WaitPlan, printed: str, command: Sequence[str]) -> Page:
    """The whole report."""
    grids: list[Block] = [_types(plan)]
    if plan.nested is not None:
        grids.append(_segments(plan.nested))
    sections = (
        Section("The memory", (_memory(plan),)),
        Section("The thresholds", tuple(grids)),
        Section("The whole plan, as printed", (Printed(printed),), closed=True),
    )
    about = f"{plan.source}, {plan.workload}, {number(plan.mix.rate)} requests/s"
    chapter = Chapter("", _verdict(plan), sections, tuple(plan.notes))
    return Page("How many to wait for", about, (chapter,), plan_made(command), "plan")


def _verdict(plan: WaitPlan) -> str:
    sizes = [
        f"{size:.3g}{f' ({name})' if name else ''}"
        for name, size in zip(plan.mix.names, plan.thresholds.sizes, strict=True)
    ]
    load = plan.mix.rate / plan.most
    waits = f"a threshold of {sizes[0]}" if len(sizes) == 1 else f"thresholds of {', '.join(sizes)}"
    said = f"At {100 * load:.0f} % of what the card can carry, WAIT with {waits} requests holds at most "
    said += f"{number(plan.need)} of {plan.capacity:,} KV tokens, if outputs are as long as their type says"
    if (total := _nested_need(plan)) is not None and plan.nested is not None:
        said += (
            f"; Nested WAIT, which needs no such forecast, holds at most {number(total)} with probability "
        )
        said += f"{1 - plan.nested.miss:g} over {number(plan.wishes.horizon)} s"
    return f"{said}."


def _nested_need(plan: WaitPlan) -> float | None:
    """KV tokens that are enough with the probability asked for; None where no memory is."""
    total = None if plan.nested is None else plan.nested.bound.total
    return total if total is not None and isfinite(total) else None


def _memory(plan: WaitPlan) -> Figure:
    bars = [
        Bar("fluid equilibrium", (("", "c0", plan.fluid.kv),)),
        Bar("WAIT, at most", (("", "c1", plan.need),)),
    ]
    if (total := _nested_need(plan)) is not None and plan.nested is not None:
        bars.append(Bar(f"Nested WAIT, with probability {1 - plan.nested.miss:g}", (("", "c2", total),)))
    mark = Mark(f"memory: {number(float(plan.capacity))}", float(plan.capacity))
    look = "Bars that end before the dashed line fit; nobody is evicted then."
    return Bars("KV", "tokens", bars, mark).figure("Memory that the thresholds need", look)


def _types(plan: WaitPlan) -> Grid:
    heads = ("type", "stages", "KV at its end\ntokens", "threshold\nrequests")
    rows = []
    for name, part, size in zip(plan.mix.names, plan.mix.parts, plan.thresholds.sizes, strict=True):
        stages, peak = Cell(number(part.stages), float(part.stages)), Cell(number(part.peak), part.peak)
        rows.append((Cell(name or "all"), stages, peak, Cell(f"{size:.4g}", size)))
    return Grid("WAIT, by type", heads, tuple(rows))


def _segments(nested: Nested) -> Grid:
    heads = ("iterations", "reach it\nper s", "go on\nof these", "threshold\nrequests")
    segments, sizes = nested.segments, nested.thresholds.sizes
    stays = [*(Cell(f"{100 * stay:.1f} %", 100 * stay) for stay in segments.stays), Cell("-")]
    rows = []
    for begin, end, reach, stay, size in zip(
        segments.begins, segments.ends, segments.reach, stays, sizes, strict=True
    ):
        rows.append(
            (Cell(f"{begin + 1} to {end}"), Cell(number(reach), reach), stay, Cell(f"{size:.4g}", size))
        )
    return Grid("Nested WAIT, by segment", heads, tuple(rows))
