"""The hooks that observers override; an event without a hook costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
        self.stepped: list[Callable[[Steps], None]] = [o.stepped for o in of("stepped")]
        self.planned: list[Callable[[Plan, float, Mapping[str, float]], None]] = [
            o.planned for o in of("planned")
        ]
