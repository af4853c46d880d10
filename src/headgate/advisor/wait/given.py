"""Thresholds that a user gave, held against the conditions of a plan for WAIT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.advisor.wait.mix import Mix
from headgate.core.errors import InputError
from headgate.methods.wait.inventory import check_thresholds
from headgate.methods.wait.nested import check_nested
from headgate.methods.wait.sorting import read_thresholds

if TYPE_CHECKING:
    from headgate.advisor.wait.plan import WaitPlan


def check_given(plan: WaitPlan) -> None:
    """Thresholds that the user gave: the first violated inequality ends the plan."""
    given = read_thresholds("plan wait", plan.wishes.thresholds)
    if not given:
        return
    everyone = given.get("", ())
    if len(everyone) > 1:
        faults = _nested_faults(plan, everyone)
    else:
        faults = check_thresholds(plan.lines, plan.mix.parts, _by_type(plan.mix, given), plan.capacity)
    if faults:
        raise InputError(f"--thresholds violate {faults[0]}")


def _by_type(mix: Mix, given: dict[str, tuple[float, ...]]) -> list[float]:
    """One for each type, or for all."""
    names = [name for name in mix.names if name]
    strange = [name for name in given if name and name not in names]
    if strange or any(len(sizes) > 1 for sizes in given.values()):
        known = f"types here are {', '.join(names)}" if names else "there is one type, write --thresholds 2"
        raise InputError(f"--thresholds {'+'.join(given)}: {known}; by segment only for all, such as 8/4/2")
    missing = [name for name in mix.names if name not in given]
    if missing and "" not in given:
        raise InputError(f"--thresholds: none for type {missing[0]!r}; give one for each, or one for all")
    return [given[name if name in given else ""][0] for name in mix.names]


def _nested_faults(plan: WaitPlan, sizes: tuple[float, ...]) -> list[str]:
    """What thresholds by segment violate."""
    if plan.nested is None:
        raise InputError(plan.why_not_nested)
    segments = plan.nested.segments
    if len(sizes) != len(segments.ends):
        raise InputError(f"--thresholds: {len(sizes)} for {len(segments.ends)} segments; give --ends too")
    return check_nested(plan.lines, segments, sizes, plan.capacity)
