"""A fluid plan as text for a terminal of 80 columns."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from headgate.advisor.fluid.plan import FluidAnswer
from headgate.methods.fluid.plan import NOTHING, FluidPlan
from headgate.report.plans.plans import PARAMETERS
from headgate.report.terminal.tables import number

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

LEVELS = {
    "prefill_fairness": "prefill fairness",
    "decode_fairness": "decode fairness",
    "tpot": "time per token",
    "prefilling": "engines that prefill",
}


def fluid_text(answer: FluidAnswer) -> RenderableType:
    """Who is served, how engines are split, what it is worth, and what to do with the next one."""
    from rich.console import Group
    from rich.text import Text

    plan = answer.plan
    parts: list[RenderableType] = [
        Text.assemble(("Fluid plan", "bold"), f": {answer.costs}, {answer.demand.source}, {_fleet(answer)}"),
        Text(_steps(plan)),
        Text(),
        _served(answer),
        Text(),
        _placed(answer),
        Text(),
        Text(_split(answer), style="bold"),
        Text(_revenue(answer)),
        Text(_next(answer)),
        Text(_router(answer)),
        Text(_prices(plan)),
    ]
    named = not answer.demand.source.startswith("trace")  # clusters have no names a router could know
    if named and len(answer.per_second) > 1 and any(plan.throttled):
        parts.append(Text(_per_second(answer)))
    parts += [Text(line) for line in _levels(answer)]
    if answer.points:
        parts += [Text(), _frontier(answer)]
    parts += [Text(), _sensitivity(answer)]
    parts += [Text(f"note: {note}", style="dim") for note in answer.notes]
    return Group(*parts)


def _fleet(answer: FluidAnswer) -> str:
    return f"{answer.engines:,} engine{'s' if answer.engines > 1 else ''}"


def _steps(plan: FluidPlan) -> str:
    pace = plan.instance.pace
    return (
        f"{pace.seats} seats; a step with a chunk of {pace.chunk} takes {1000 * pace.mixed_step:.4g} ms, one "
        f"without {1000 / pace.solo_speed:.4g} ms"
    )


def _served(answer: FluidAnswer) -> Table:
    plan, engines = answer.plan, answer.engines
    table = _table("class", "prompt", "output", "come/s", "served/s", "share", "wait", "one more is worth")
    columns = zip(plan.instance.flows, plan.served, plan.waiting, plan.shadows.arrival, strict=True)
    for flow, served, waiting, worth in columns:
        share = 100 * served / flow.rate if flow.rate else 0.0
        queue = number(waiting * engines) if isfinite(waiting) else "refused"
        cells = (
            number(flow.prompt),
            number(flow.output),
            number(flow.rate * engines),
            number(served * engines),
        )
        table.add_row(flow.name, *cells, f"{share:.1f} %", queue, number(_zero(worth)))
    return table


def _placed(answer: FluidAnswer) -> Table:
    plan, engines = answer.plan, answer.engines
    table = _table("class", "engines prefilling", "decodes beside prompts", "decodes alone")
    rows = zip(plan.instance.flows, plan.prefill, plan.mixed, plan.solo, strict=True)
    for flow, *cells in rows:
        table.add_row(flow.name, *(number(cell * engines) for cell in cells))
    totals = (plan.prefilling, sum(plan.mixed), sum(plan.solo))
    table.add_row("all", *(number(total * engines) for total in totals))
    return table


def _split(answer: FluidAnswer) -> str:
    staffing, spare, seats = answer.staffing, answer.spare, answer.plan.instance.pace.seats
    return (
        f"Engines: {staffing.mixed:,} take prompts and up to {seats - 1} decodes each, {staffing.solo:,} "
        f"only decode (with spare ones for a gate that withholds: {spare.mixed:,} and {spare.solo:,})."
    )


def _revenue(answer: FluidAnswer) -> str:
    plan, engines = answer.plan, answer.engines
    return (
        f"Revenue: {number(plan.revenue * engines)} /s, {number(plan.revenue)} per engine; time per token "
        f"{1000 * plan.token_tpot:.4g} ms over tokens, {1000 * plan.tpot:.4g} ms over seats."
    )


def _next(answer: FluidAnswer) -> str:
    more, less = answer.gains
    mean = answer.plan.revenue
    if more <= 1e-6 * max(1.0, mean):
        return (
            f"The next engine adds nothing: as a fluid, {number(answer.full)} engines serve everybody. "
            f"One engine fewer costs {number(-less)} /s."
        )
    role = "take prompts" if answer.next_mixed else "only decode"
    return (
        f"The next engine adds {number(more)} /s ({100 * more / mean:.0f} % of what one brings now) and "
        f"should {role}; one fewer costs {number(-less)} /s. As a fluid, {number(answer.full)} engines serve "
        "everybody."
    )


def _router(answer: FluidAnswer) -> str:
    plan, engines = answer.plan, answer.engines
    flows = plan.instance.flows
    if not plan.levels.none and plan.levels.by_class:
        return "Router: service-level (each decode draws its pool), with the token-bucket gate."
    if not any(plan.throttled):
        return "Router: any; nobody has to be held back."
    if not plan.levels.none:
        return "Router: token-bucket; a gate that fills every free seat would break the levels."
    held = [flow.name for flow, throttled in zip(flows, plan.throttled, strict=True) if throttled]
    few = [
        flow.name
        for flow, share, throttled in zip(flows, plan.prefill, plan.throttled, strict=True)
        if throttled and 0 < share * engines < 1
    ]
    said = f"Router: gate-and-route+ holds back {', '.join(held)}"
    if plan.prefilling >= 1 - NOTHING and few:
        return f"{said}; prefill binds and {', '.join(few)} need less than one engine: prefer token-bucket."
    if few:
        return f"{said}; the literal gate would over-serve {', '.join(few)}, who need less than one engine."
    return f"{said}."


def _per_second(answer: FluidAnswer) -> str:
    """The order of classes for engines that run several prompts in a step."""
    listed = ", ".join(f"{name} {number(value)}" for name, value in answer.per_second.items())
    return (
        f"A full engine with one class alone earns per second: {listed}. Where engines run several prompts "
        f"in a step: router density-deep:order={'/'.join(answer.per_second)}."
    )


def _prices(plan: FluidPlan) -> str:
    """Seats, and what an engine's time costs while it prefills: the x-row of the dual (EC.1)."""
    shadows, seats = plan.shadows, plan.instance.pace.seats
    prefill = shadows.prefill + seats * shadows.solo - (seats - 1) * shadows.mixed
    alone, beside, held = (number(_zero(price, 1e-6)) for price in (shadows.solo, shadows.mixed, prefill))
    return (
        f"Worth per second: a decode seat alone {alone}, one beside prompts {beside}; an engine that "
        f"prefills takes {held}."
    )


def _levels(answer: FluidAnswer) -> list[str]:
    """What each service level costs at the margin."""
    found = []
    for name, price in answer.plan.shadows.levels.items():
        what = LEVELS.get(name, f"share of {name.removeprefix('served.')} served")
        worth, unit = (price / 1000, "ms") if name == "tpot" else (price, "unit")
        bites = f"costs {number(abs(worth))} per engine and {unit}" if abs(price) > 1e-6 else "does not bind"
        found.append(f"Level: {what} {bites}.")
    return found


def _frontier(answer: FluidAnswer) -> Table:
    table = _table("cap", "revenue per engine", "of the most", "slope")
    most = max(point.revenue for point in answer.points)
    for point in answer.points:
        if point.plan is None:
            table.add_row(f"{point.value:.5g}", "cannot be kept", "", "")
        else:
            share = f"{100 * point.revenue / most:.1f} %" if most else ""
            table.add_row(f"{point.value:.5g}", number(point.revenue), share, number(_zero(point.slope)))
    return table


def _sensitivity(answer: FluidAnswer) -> Table:
    table = _table("one percent more of", "changes revenue by")
    for name, value in answer.sensitivity.items():
        table.add_row(PARAMETERS[name], f"{_zero(value, 5e-4):+.3f} %")
    return table


def _zero(value: float, tiny: float = 1e-9) -> float:
    """Without the noise, or the sign, of a zero."""
    return 0.0 if abs(value) < tiny else value


def _table(*names: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left", no_wrap=place == 0)
    return table
