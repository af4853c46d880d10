"""Who hears what in a live engine, and when: the policy at once, observers when the time is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headgate.core.errors import told
from headgate.core.ledger import Entry
from headgate.core.plan import Plan
from headgate.core.policy import BatchPolicy, End, Observer, Steps
from headgate.drivers.flight import Flight
from headgate.drivers.listeners import Listeners

NOBODY = Listeners(())


class LiveObserver(Observer):
    """What can happen in a live engine besides."""

    def fell_back(self, reason: str, now: float) -> None:
        """The policy was relieved; from now on the engine decides as if we were not there."""

    def rescued(self, now: float) -> None:
        """The engine refused every prompt of a plan that holds decodes; they run instead."""

    def wasted(self, tokens: int, now: float) -> None:
        """Tokens were scheduled for a request that had gone when they came."""


class News:
    """The hooks of one policy and of any number of observers.

    A policy that raises in a hook is relieved through `relieve`. While a step is composed with another in
    flight, observers hear of it only after that other one has ended: `waits_for` is that step.
    """

    def __init__(self, observers: Sequence[Observer], relieve: Callable[[str], None]) -> None:
        self.live = [observer for observer in observers if isinstance(observer, LiveObserver)]
        self.waits_for: Flight | None = None
        self._hear = Listeners(observers)
        self._tell = NOBODY
        self._relieve = relieve

    @property
    def wants_gauges(self) -> bool:
        """Does anybody listen to plans?"""
        return bool(self._hear.planned)

    def serve(self, policy: BatchPolicy | None) -> None:
        """Its hooks are called from now on; None: nobody's."""
        self._tell = NOBODY if policy is None else Listeners((policy,))

    def of(self, name: str, entry: Entry, when: float | None, now: float) -> None:
        """Something happened to a request; `when` None: at the end of the step that waits."""
        mine = getattr(self._tell, name)
        if mine:
            self._to_policy(mine, entry, now if when is None else when)
        if self.waits_for is not None and name != "arrived":
            self.waits_for.later.append((name, entry, when))
            return
        for hook in getattr(self._hear, name):
            hook(entry, now if when is None else when)

    def finished(self, entry: Entry, now: float, how: End) -> None:
        """A request left."""
        if self._tell.finished:
            self._to_policy(self._tell.finished, entry, now, how)
        for hook in self._hear.finished:
            hook(entry, now, how)

    def stepped(self, steps: Steps) -> None:
        """A step has ended."""
        if self._tell.stepped:
            self._to_policy(self._tell.stepped, steps)
        for hook in self._hear.stepped:
            hook(steps)

    def late(self, flight: Flight, end: float) -> None:
        """What had to wait for the end of this step."""
        for name, entry, when in flight.later:
            for hook in getattr(self._hear, name):
                hook(entry, end if when is None else when)

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        """A new plan is in force."""
        for hook in self._hear.planned:
            hook(plan, now, gauges)

    def _to_policy(self, hooks: Sequence[Callable[..., None]], *news: object) -> None:
        try:
            for hook in hooks:
                hook(*news)
        except Exception as error:
            self._relieve(told(error))
