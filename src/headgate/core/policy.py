"""The policy of one engine: hooks that listen (Observer), and plan(), which decides (BatchPolicy)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from headgate.core.plan import Plan
from headgate.core.request import Request
from headgate.core.view import View


class Steps(NamedTuple):
    """A run of consecutive steps with the same batch."""

    start: float
    ends: Sequence[float]  # when each step ended
    decodes: int  # decodes in each step
    context: int  # KV tokens the decodes of the first step read; grows by `decodes` each step
    prefill: int = 0  # prompt tokens in each step
    behind: int = 0  # KV tokens that were already there for those prompts
    kv: int = 0  # KV tokens held when the last step ended, whole blocks
    queries: int = 0  # tokens of the decodes in each step, with the drafts to verify; 0: one each


class End(Enum):
    """How a request left. Only STOPPED shows its full length; the others cut it short."""

    STOPPED = "stopped"
    LIMIT = "limit"  # it reached its own limit or the model's
    ABORTED = "aborted"  # its client hung up
    ABANDONED = "abandoned"  # its patience ended in the queue
    REFUSED = "refused"  # it could never fit, or the policy turned it away


COMPLETE = (End.STOPPED, End.LIMIT)  # it has all its tokens


class Observer:
    """Hooks for what happens in an engine. All optional, all cheap, none sees the view.

    Examples:
        >>> import headgate
        >>> class Tokens(headgate.Observer):
        ...     prefill = 0
        ...     def stepped(self, steps):
        ...         self.prefill += steps.prefill * len(steps.ends)
        >>> seen = Tokens()
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=8)
        >>> requests = headgate.Workload.of([300, 700], [20, 20])
        >>> _ = headgate.simulate(engine, "mixed", requests, observers=(seen,))
        >>> seen.prefill
        1000
    """

    def arrived(self, request: Request, now: float) -> None:
        """It joined the queue."""

    def admitted(self, request: Request, now: float) -> None:
        """It got its slot and its first KV; the step that begins now works on its prompt."""

    def prefilled(self, request: Request, now: float) -> None:
        """Its prompt is done and a token came with it; again after an eviction."""

    def held(self, request: Request, now: float) -> None:
        """A plan that names its decodes left this one out; its KV stays."""

    def resumed(self, request: Request, now: float) -> None:
        """A held decode runs again from the step that begins now."""

    def evicted(self, request: Request, now: float) -> None:
        """Its KV was dropped; it is back at the front of the queue."""

    def finished(self, request: Request, now: float, how: End) -> None:
        """It left."""

    def stepped(self, steps: Steps) -> None:
        """The engine ran these steps."""

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        """A new plan came into force."""


class BatchPolicy(Observer, ABC):
    """Decides what one engine runs. Reads no clock, draws no random number, does no I/O.

    Examples:
        >>> import headgate
        >>> class OneAtATime(headgate.BatchPolicy):
        ...     def plan(self, view):
        ...         if view.decoding:
        ...             return headgate.Plan()
        ...         return headgate.Plan(prefill=(*view.prefilling, *view.waiting)[:1])
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b")
        >>> run = headgate.simulate(engine, OneAtATime(), headgate.Workload.of([100] * 3, [20] * 3))
        >>> int(run.steps["decodes"].max())
        1
    """

    @abstractmethod
    def plan(self, view: View) -> Plan:
        """What to run from now on. Asked again as soon as the plan's lease ends."""

    def gauges(self) -> Mapping[str, float]:
        """Numbers worth plotting (threshold, mode, estimates); recorded at each new plan."""
        return {}

    def adopt(self, view: View) -> None:
        """Take over a running engine: be notified of everything in it as if it had just happened."""
        now = view.now
        for request in (*view.decoding.values(), *view.prefilling.values(), *view.waiting.values()):
            self.arrived(request, now)
        for request in (*view.decoding.values(), *view.prefilling.values()):
            self.admitted(request, now)
        for request in view.decoding.values():
            self.prefilled(request, now)
