"""Service levels that no fleet keeps: which, and the nearest ones that the best of the fleets tried would."""

from __future__ import annotations

from math import ceil, floor, inf, isfinite, log10

from headgate.advisor.capacity.slo import Level
from headgate.advisor.engines.plan import EnginesPlan, Size

DIGITS = 3  # of the value proposed, rounded up so that it is kept


def out_of_reach(plan: EnginesPlan) -> str:
    """One line of advice; empty when some fleet is enough, or when the search was interrupted."""
    if plan.interrupted or any(each.engines is not None for each in plan.found):
        return ""
    checked = [level for level in plan.levels if level.statistic]
    best = min(plan.found, key=lambda found: _ratio(found.sizes[-1], checked))
    size = best.sizes[-1]
    engines = f"{size.engines} engine{'s' if size.engines > 1 else ''}"
    more = f"raise --most-engines (now {plan.most})"
    if size.stopped:
        return f"{engines} with {best.name}: {best.gives_way}"
    if not isfinite(_ratio(size, checked)):
        return f"{engines} leave requests unserved with {best.name}; {more}"
    missed = [level for level in checked if size.highest[str(level)] > level.limit]
    nearest = [_wish(level, size.highest[str(level)]) for level in missed]
    return (
        f"{engines} cannot keep {'; '.join(map(str, missed))}: the nearest that {best.name} keeps is "
        f"--slo {','.join(nearest)}; ask for that, or {more}"
    )


def _ratio(size: Size, levels: list[Level]) -> float:
    """How far it is from keeping the level it misses most; nothing can be proposed where a run stopped."""
    if size.stopped:
        return inf
    return max((size.highest.get(str(level), inf) / level.limit for level in levels), default=inf)


def _wish(level: Level, value: float) -> str:
    """The level as a user writes it, with a limit that was kept."""
    unit, scale = ("ms", 1000.0) if value < 1 else ("s", 1.0)
    digits = DIGITS - 1 - floor(log10(value * scale))
    limit = ceil(value * scale * 10**digits) / 10**digits
    kind = f":{level.kind}" if level.kind else ""
    return f"{level.metric}={limit:g}{unit}@{level.statistic}{kind}"
