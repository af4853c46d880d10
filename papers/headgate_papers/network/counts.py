"""The books of a stochastic network: who came and went by class, how many were where and for how long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import RunError
from headgate.methods.fluid.flows import BUNDLED, Instance

Floats = NDArray[np.float64]
COUNTS = (
    "arrivals",  # A
    "prompts_started",  # U_p
    "prompts_done",  # S_p
    "gave_up",  # Ab_p
    "rejected",
    "dropped",  # Ab_d: gave up before their decode
    "mixed_started",  # U_dm
    "solo_started",  # U_ds
    "mixed_done",  # S_dm
    "solo_done",  # S_ds
    "to_mixed",  # Sw s→m
    "to_solo",  # Sw m→s
    "waiting_again",  # of those below: their engine failed, and they wait for their prompt once more
    "lost_prompts",
    "lost_handoffs",
    "lost_mixed",
    "lost_solo",
)
LEVELS = ("waiting", "prefilling", "handoff", "mixed", "solo")  # Q_p, X, Q_d, Y_m, Y_s
WAITING, PREFILLING, HANDOFF, MIXED, SOLO = range(len(LEVELS))


class Counts:
    """Counts and levels by class (position in the instance); every transition of the network is entered once.

    The time spent in a state is the sum of the moments of leaving it less those of entering it, so a
    transition costs two additions; who is still there counts up to the moment somebody looks.
    """

    def __init__(self, kinds: int) -> None:
        self.counts = {name: [0] * kinds for name in COUNTS}
        self.levels = [[0] * kinds for _ in LEVELS]
        self._spent = [[0.0] * kinds for _ in LEVELS]

    def enter(self, level: int, kind: int, now: float) -> None:
        self.levels[level][kind] += 1
        self._spent[level][kind] -= now

    def leave(self, level: int, kind: int, now: float) -> None:
        self.levels[level][kind] -= 1
        self._spent[level][kind] += now

    def move(self, out: int, to: int, kind: int, now: float) -> None:
        """One goes from one level to another."""
        self.levels[out][kind] -= 1
        self._spent[out][kind] += now
        self.levels[to][kind] += 1
        self._spent[to][kind] -= now

    def switch(self, decodes: Iterable[int], mixed: bool, now: float) -> None:
        """So many decodes of each class on one engine change their speed."""
        to, out = (MIXED, SOLO) if mixed else (SOLO, MIXED)
        counted = self.counts["to_mixed" if mixed else "to_solo"]
        levels_to, levels_out = self.levels[to], self.levels[out]
        spent_to, spent_out = self._spent[to], self._spent[out]
        for kind, number in enumerate(decodes):
            if number:
                counted[kind] += number
                levels_to[kind] += number
                levels_out[kind] -= number
                moment = number * now
                spent_to[kind] -= moment
                spent_out[kind] += moment

    def page(self, now: float) -> Page:
        spent = np.array(self._spent) + now * np.array(self.levels)
        counts = {name: np.array(values, dtype=np.int64) for name, values in self.counts.items()}
        return Page(now, counts, spent, np.array(self.levels, dtype=np.int64))

    def check(self) -> None:
        """The balance equations (15) to (19), exact because all are whole numbers."""
        c = {name: np.array(values) for name, values in self.counts.items()}
        levels = {
            "waiting": c["arrivals"] - c["prompts_started"] - c["gave_up"] - c["rejected"],
            "prefilling": c["prompts_started"] - c["prompts_done"],
            "handoff": c["prompts_done"] - c["mixed_started"] - c["solo_started"] - c["dropped"],
            "mixed": c["mixed_started"] - c["mixed_done"] + c["to_mixed"] - c["to_solo"],
            "solo": c["solo_started"] - c["solo_done"] + c["to_solo"] - c["to_mixed"],
        }
        levels["waiting"] += c["waiting_again"]
        for name, lost in (("prefilling", "prompts"), ("handoff", "handoffs"), ("mixed",) * 2, ("solo",) * 2):
            levels[name] -= c[f"lost_{lost}"]
        for name, found in levels.items():
            if found.tolist() != self.levels[LEVELS.index(name)]:
                raise RunError(f"the books do not balance: {name} is {self.levels[LEVELS.index(name)]}")


@dataclass(frozen=True, slots=True)
class Page:
    """The books at one moment; the difference of two pages is a window."""

    time: float
    counts: dict[str, NDArray[np.int64]]
    spent: Floats  # request-seconds by level and class
    levels: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two pages, per engine."""

    instance: Instance
    engines: int
    first: Page
    last: Page

    @property
    def seconds(self) -> float:
        return self.last.time - self.first.time

    def rate(self, name: str) -> Floats:
        """Events of that name per second and engine, by class."""
        return (self.last.counts[name] - self.first.counts[name]) / (self.seconds * self.engines)

    def mean(self, level: int) -> Floats:
        """Requests at that level per engine, by class, averaged over time."""
        found: Floats = (self.last.spent[level] - self.first.spent[level]) / (self.seconds * self.engines)
        return found

    @property
    def served(self) -> Floats:
        """Requests of each class that finished, per second and engine."""
        return self.rate("mixed_done") + self.rate("solo_done")

    def revenue(self, charging: str = BUNDLED) -> float:
        """Per second and engine, (22) or (23)."""
        if charging == BUNDLED:
            return float(self.served @ np.array(self.instance.values()))
        prices, flows = self.instance.prices, self.instance.flows
        prompts = np.array([prices.prompt * flow.prompt for flow in flows])
        outputs = np.array([prices.output * flow.output for flow in flows])
        return float(self.rate("prompts_done") @ prompts + self.served @ outputs)
