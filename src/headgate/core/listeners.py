"""The hooks that observers override; an event without a hook costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headgate.core.plan import Plan
from headgate.core.policy import End, Observer, StepCounter, Steps
from headgate.core.request import Request

Hook = Callable[[Request, float], None]
Ran = Callable[[float, Sequence[float], int, int, int, int, int], None]


class Listeners:
    """For each event, the hooks to call, in the order of the observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        def of(name: str) -> list[Observer]:
            return [o for o in observers if getattr(type(o), name) is not getattr(Observer, name)]

        self.arrived: list[Hook] = [o.arrived for o in of("arrived")]
        self.admitted: list[Hook] = [o.admitted for o in of("admitted")]
        self.prefilled: list[Hook] = [o.prefilled for o in of("prefilled")]
        self.held: list[Hook] = [o.held for o in of("held")]
        self.resumed: list[Hook] = [o.resumed for o in of("resumed")]
        self.evicted: list[Hook] = [o.evicted for o in of("evicted")]
        self.finished: list[Callable[[Request, float, End], None]] = [o.finished for o in of("finished")]
        stepped = of("stepped")
        counters = [o for o in stepped if type(o).stepped is StepCounter.stepped]
        self.stepped: list[Callable[[Steps], None]] = [o.stepped for o in stepped]
        self._counting: list[Ran] = [o.ran for o in counters if isinstance(o, StepCounter)]
        self._others: list[Callable[[Steps], None]] = [o.stepped for o in stepped if o not in counters]
        self.planned: list[Callable[[Plan, float, Mapping[str, float]], None]] = [
            o.planned for o in of("planned")
        ]

    def ran(
        self,
        start: float,
        ends: Sequence[float],
        decodes: int,
        context: int,
        prefill: int,
        behind: int,
        kv: int,
    ) -> None:
        """Tell of steps, first those that take them as they are."""
        for count in self._counting:
            count(start, ends, decodes, context, prefill, behind, kv)
        if self._others:
            steps = Steps(start, ends, decodes, context, prefill, behind, kv)
            for hook in self._others:
                hook(steps)
