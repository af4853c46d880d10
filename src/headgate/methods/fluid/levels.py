"""Service levels of a fluid plan as rows of its linear program: fairness, time per token, shares served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf, isfinite

import numpy as np

from headgate.core.errors import InputError, unknown
from headgate.methods.fluid.flows import EnginePace, Instance
from headgate.methods.fluid.program import Builder, Floats

SLOTS, TOKENS = "slots", "tokens"
WORDS = {
    "prefill_fairness": "prefill fairness",
    "decode_fairness": "decode fairness",
    "tpot": "time per token",
    "served": "share served",
    "prefilling": "engines that prefill",
}


@dataclass(frozen=True, slots=True)
class Levels:
    """What a plan must keep: section 4 of the paper, (43) to (49).

    Differences: TPOT by `tokens` is the mean over tokens that users see, (47) averages over slots as if all
    were busy; `served` and `prefilling` are ours. The paper's penalties for the same things are left out.
    """

    prefill_fairness: float | None = None  # η1: largest difference of engines prefilling two classes
    decode_fairness: float | None = None  # η2: largest difference of solo decodes of two classes
    tpot: float | None = None  # η3, seconds
    tpot_over: str = SLOTS  # or TOKENS
    served: Mapping[str, float] = field(default_factory=dict)  # least share of a class's arrivals
    prefilling: float = 1.0  # most engines that prefill, as a share of all

    @property
    def none(self) -> bool:
        """Is no service asked for? Then requests may be planned to wait for a decode slot, which the paper's
        service levels forbid. Fewer engines that prefill are a limit, not a service.
        """
        caps = (self.prefill_fairness, self.decode_fairness, self.tpot)
        return not self.served and all(cap is None for cap in caps)

    def checked(self, instance: Instance) -> Levels:
        for level in fields(self)[:3]:
            value = getattr(self, level.name)
            if value is not None and not (value >= 0 and isfinite(value)):
                raise InputError(f"{level.name.replace('_', ' ')} is {value:g}; give at least 0")
        if self.tpot_over not in (SLOTS, TOKENS):
            raise unknown("average for TPOT", self.tpot_over, (SLOTS, TOKENS))
        if not 0 <= self.prefilling <= 1:
            raise InputError(f"share of engines that prefill is {self.prefilling:g}; give 0 to 1")
        names = [flow.name for flow in instance.flows]
        for name, share in self.served.items():
            if name not in names:
                raise unknown("class", name, names)
            if not 0 <= share <= 1:
                raise InputError(f"class {name!r}: share served is {share:g}; give 0 to 1")
        fastest = min(1 / instance.pace.solo_speed, instance.pace.mixed_step)
        if self.tpot is not None and self.tpot < fastest:
            raise InputError(
                f"time per token of {self.tpot:g} s cannot be kept: the fastest step takes {fastest:g} s; "
                "ask for at least that"
            )
        return self


def slot_tpot(pace: EnginePace, prefilling: float) -> float:
    """T(X) of (47): the mean step time over slots, all taken, when X of the engines prefill."""
    slots, mixed = pace.slots, pace.mixed_step
    busy = mixed * (slots - 1) * prefilling + slots / pace.solo_speed * (1 - prefilling)
    return busy / (slots - prefilling)


def add_rows(build: Builder, instance: Instance, levels: Levels, free: str = "") -> dict[str, int]:
    """Rows of all levels; the number of the row whose dual is the price of each.

    With `free`, that level becomes the column "free" itself, to find the nearest value that can be kept.
    """
    count = len(instance.flows)
    ones = np.ones(count)
    rows: dict[str, int] = {}
    if levels.prefilling < 1 or free == "prefilling":
        rows["prefilling"] = _cap(build, {"x": ones}, levels.prefilling, free == "prefilling")
    for name, block in (("prefill_fairness", "x"), ("decode_fairness", "solo")):
        cap = getattr(levels, name)
        if cap is not None or free == name:
            ends = f"{name}.ends"
            build.columns(ends, np.zeros(2))  # the least and the largest of the block
            for one in np.eye(count):
                build.row({block: one, ends: np.array([-1.0, 0.0])}, low=0.0)
                build.row({block: one, ends: np.array([0.0, -1.0])}, high=0.0)
            limit = inf if cap is None else cap
            rows[name] = _cap(build, {ends: np.array([-1.0, 1.0])}, limit, free == name)
    if levels.tpot is not None:
        rows["tpot"] = _tpot(build, instance.pace, levels, ones)
    for number, flow in enumerate(instance.flows):
        least = levels.served.get(flow.name, 0.0) * flow.rate
        if least > 0:
            rows[f"served.{flow.name}"] = _served(build, instance, number, least, free == "served")
    return rows


def _cap(build: Builder, parts: dict[str, Floats], most: float, free: bool) -> int:
    if free:
        return build.row(parts | {"free": np.array([-1.0])}, high=0.0)
    return build.row(parts, high=most)


def _tpot(build: Builder, pace: EnginePace, levels: Levels, ones: Floats) -> int:
    """One exact row: (47) is a ratio of two affine functions of X, the token form one of Y_m and Y_s."""
    cap, slots = levels.tpot, pace.slots
    assert cap is not None
    if levels.tpot_over == TOKENS:
        parts = {"mixed": ones * (1 - cap / pace.mixed_step), "solo": ones * (1 - cap * pace.solo_speed)}
        return build.row(parts, high=0.0)
    slope = (slots - 1) * pace.mixed_step - slots / pace.solo_speed + cap
    return build.row({"x": ones * slope}, high=slots * (cap - 1 / pace.solo_speed))


def _served(build: Builder, instance: Instance, number: int, least: float, free: bool) -> int:
    """Completions of one class; with `free`, only that share of what was asked for."""
    flow, pace = instance.flows[number], instance.pace
    one = np.eye(len(instance.flows))[number]
    done = {"mixed": one / (flow.output * pace.mixed_step), "solo": one * pace.solo_speed / flow.output}
    if free:
        return build.row(done | {"free": np.array([-least])}, low=0.0)
    return build.row(done, low=least)
