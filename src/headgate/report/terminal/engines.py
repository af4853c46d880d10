"""The fewest engines for a load as text for a terminal of 80 columns."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

from headgate.advisor.capacity.slo import Level
from headgate.advisor.engines.plan import EnginesPlan, FleetFound, Size
from headgate.report.terminal.tables import number
from headgate.stats.figures import Estimate

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

LONGEST = 24  # letters of a name that is not broken


def engines_text(plan: EnginesPlan) -> RenderableType:
    """What is asked for, what no fleet goes below, what each needs, and the best in one sentence."""
    from rich.console import Group
    from rich.text import Text

    title = Text.assemble(
        ("Engines", "bold"), f": card {plan.card}, {plan.workload}, {number(plan.rate)} requests/s"
    )
    parts: list[RenderableType] = [title, Text(), _facts(plan), Text(), _fleets(plan), Text()]
    parts.append(Text(engines_verdict(plan), style="bold"))
    parts.append(
        Text(
            "Enough: every level is kept with every seed; below it, if tried, one engine fewer. In time: "
            "percent of requests (TBT: of gaps) within the limit. Seats: taken by decodes. Of λ*: the load.",
            style="dim",
        )
    )
    return Group(*parts)


def engines_verdict(plan: EnginesPlan) -> str:
    """The smallest fleet, and how far it is from the bound."""
    enough = [each for each in plan.found if each.engines is not None]
    if not enough and plan.interrupted:
        return "Interrupted before any fleet was found to be enough."
    if not enough:
        return f"{plan.most} engines are too few for these levels: ask for less, or raise --most-engines."
    best = min(each.engines for each in enough if each.engines is not None)
    names = [each.name for each in enough if each.engines == best]
    engines = f"{best} engine{'s' if best > 1 else ''}"
    over = best - plan.least
    gap = "as few as any fleet can have" if not over else f"{over} more than any fleet must have"
    return f"{engines} {'are' if best > 1 else 'is'} enough with {' or '.join(names)}, {gap}."


def _facts(plan: EnginesPlan) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("Levels", "; ".join(str(level) for level in plan.levels if level.statistic))
    known = [str(level) for level in plan.levels if not level.statistic]
    if known:
        table.add_row("Promised", "; ".join(known) + " (told to policies, not checked)")
    if plan.classes:
        total = sum(share for _, share in plan.classes)
        table.add_row("Classes", ", ".join(f"{name} {100 * s / total:g} %" for name, s in plan.classes))
    seeds = f"{plan.seeds} seed{'s' if plan.seeds > 1 else ''}"
    table.add_row("Runs", f"{plan.requests:,} requests each, {seeds}")
    one = f"{plan.engine.running} seats, {plan.engine.batch_tokens:,} tokens a step"
    table.add_row("Engine", f"{one}; λ* = {number(plan.bound.rate)} requests/s")
    table.add_row("No fleet", f"of fewer than {plan.least} (load / λ* = {plan.rate / plan.bound.rate:.2f})")
    table.add_row("Fluid", f"a gate-and-route fleet serves everybody with {number(plan.fluid)}")
    for note in plan.notes:
        table.add_row("Note", note)
    return table


def _fleets(plan: EnginesPlan) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    longest = max((len(part) for found in plan.found for part in _parts(found)), default=0)
    table.add_column("router\n+ policy", overflow="fold", no_wrap=longest <= LONGEST)
    checked = [level for level in plan.levels if level.statistic]
    for name in ("engines", "seeds", *map(_short, checked), "seats", "of λ*"):
        table.add_column(name, justify="right")
    for found in plan.found:
        for place, size in enumerate(_shown(found)):
            shares = (_percent(size.shares[str(level)]) for level in checked)
            used = (
                "-" if isnan(share) else f"{100 * share:.0f} %" for share in (size.seats.value, size.load)
            )
            row = (str(size.engines), f"{size.kept}/{size.seeds}", *shares, *used)
            style = "" if size.engines == found.engines else "dim"
            table.add_row("" if place else "\n".join(_parts(found)), *row, style=style)
    return table


def _parts(found: FleetFound) -> tuple[str, ...]:
    """Its name, router and policy on lines of their own."""
    router, plus, policy = found.name.rpartition(" + ")
    return router, f"+ {policy}" if plus else policy


def _shown(found: FleetFound) -> list[Size]:
    """The answer and the largest fleet that is too few; without an answer the largest tried."""
    if found.engines is None:
        return list(found.sizes[-1:])
    wanted = (found.size(found.engines), found.size(found.engines - 1))
    return [size for size in wanted if size]


def _short(level: Level) -> str:
    of = f" {level.kind}" if level.kind else ""
    wanted = f" (want {level.statistic[1:]})" if level.statistic.startswith("p") else ""
    return f"{level.metric.upper()}{of} in time, %{wanted}"


def _percent(share: Estimate) -> str:
    """With half its interval, where there is one."""
    if isnan(share.value):
        return "-"
    if share.low is None or share.high is None:
        return f"{100 * share.value:.1f}"
    return f"{100 * share.value:.1f} ± {50 * (share.high - share.low):.1f}"
