"""The hooks that observers override; an event without a hook costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headgate.core.build import mypyc_attr
from headgate.core.plan import Plan
from headgate.core.policy import End, Observer, Steps
from headgate.core.request import Request

Hook = Callable[[Request, float], None]


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
        self.counting: list[StepCounter] = [
            o for o in stepped if isinstance(o, StepCounter) and type(o).stepped is StepCounter.stepped
        ]
        self.stepped: list[Callable[[Steps], None]] = [o.stepped for o in stepped]
        self.each_end: list[Callable[[Steps], None]] = [o.stepped for o in stepped if o not in self.counting]
        self.planned: list[Callable[[Plan, float, Mapping[str, float]], None]] = [
            o.planned for o in of("planned")
        ]

    def ran(
        self, start: float, ends: list[float], decodes: int, context: int, prefill: int, behind: int, kv: int
    ) -> None:
        """Tell of steps, first those that count them, which suffice where no observer wants each end."""
        for counter in self.counting:
            counter.ran(start, ends[0], ends[-1], len(ends), decodes, context, prefill, behind, kv)
        if self.each_end:
            steps = Steps(start, ends, decodes, context, prefill, behind, kv)
            for hook in self.each_end:
                hook(steps)


@mypyc_attr(allow_interpreted_subclasses=True)
class StepCounter(Observer):
    """It needs of a run of steps the first end and the last, so that long runs need not list the others."""

    def stepped(self, steps: Steps) -> None:
        start, ends, decodes, context, prefill, behind, kv, _ = steps
        self.ran(start, ends[0], ends[-1], len(ends), decodes, context, prefill, behind, kv)

    def ran(
        self, start: float, first: float, last: float, count: int, decodes: int, context: int, prefill: int,
        behind: int, kv: int,
    ) -> None:  # fmt: skip
        """The engine ran so many steps; when the first and the last of them ended."""
