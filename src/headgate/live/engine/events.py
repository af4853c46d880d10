"""Steps on their way through a live engine; policies hear of them at once, observers when times are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from headgate.core.build import mypyc_attr, quick
from headgate.core.errors import one_line
from headgate.core.ledger import Entry
from headgate.core.listeners import Listeners
from headgate.core.plan import Plan
from headgate.core.policy import BatchPolicy, End, Observer, Steps
from headgate.live.engine.process import LOG

NO_LISTENERS = Listeners(())
MOST_AT_ONCE = 16  # steps
# Why a policy was relieved: it raised, planned nonsense or starved a request; the engine's own scheduler
# failed under its plan; or headgate itself failed.
CAUSES = RAISED, NONSENSE, STARVED, ENGINE, INTERNAL = "raised", "nonsense", "starved", "engine", "internal"
SHOWN_EVERY = 0.25  # seconds: metrics are, so nothing for them waits longer


class PromptPiece(NamedTuple):
    entry: Entry
    tokens: int
    behind: int  # KV tokens that were already there for it
    left: int  # tokens of the prompt still to run after it


class StepInFlight:
    """What a step holds. An engine may compose the next step before the tokens of this one are known.

    A step counts as *booked* when the ledger shows its effect: at its end, or when the next step is composed,
    whichever comes first. Observers hear of it at its end, when its duration is known; what happens to
    requests between booking and end waits in `later`.
    """

    __slots__ = (
        "booked", "chunks", "context", "decodes", "later", "output", "queries", "rolls", "scheduled", "start",
    )  # fmt: skip

    def __init__(
        self,
        start: float,
        decodes: int,
        context: int,
        chunks: tuple[PromptPiece, ...],
        rolls: bool,
        queries: int = 0,
    ) -> None:
        self.start, self.decodes, self.context, self.chunks = start, decodes, context, chunks
        self.rolls = rolls  # prompts it completes decode on with the others
        self.queries = queries  # as in `Steps`
        self.booked = False
        self.output: Any = None  # the engine's own name for it
        self.scheduled: Any = None  # tokens, by the engine's names of requests
        self.later: list[tuple[str, Entry, float | None]] = []  # hook, request, time (None: the step's end)


@mypyc_attr(allow_interpreted_subclasses=True)
class LiveObserver(Observer):
    reads_gauges: ClassVar[bool] = True  # those that come with each plan

    def gauged(self, gauges: Mapping[str, float], now: float) -> None:
        """The policy's numbers: after a plan, but only a few times a second."""

    def fell_back(self, reason: str, now: float, cause: str = RAISED) -> None:
        """`cause` is one of `CAUSES`; `reason` may name requests, lines and values."""

    def rescued(self, now: float) -> None:
        """The engine refused every prompt of a plan that holds decodes; they run instead."""

    def wasted(self, tokens: int, now: float) -> None:
        """Tokens were scheduled for a request that had gone when they came."""

    def bent(self, now: float) -> None:
        """The engine cannot run a step as planned, and runs the nearest."""


class Events:
    """The hooks of one policy and of any number of observers.

    A policy that raises in a hook is relieved through `relieve`; an observer that raises hears no more. While
    a step is composed with another in flight, observers hear of it only after that other one has ended:
    `waits_for` is that step.

    Steps of the same decodes, one right after the other, are told together, as the simulator does: at the
    latest before anything else is told, and before the policy is asked for a plan.
    """

    def __init__(self, observers: Sequence[Observer], relieve: Callable[[str], None]) -> None:
        self.waits_for: StepInFlight | None = None
        self._listen(list(observers))
        self._tell = NO_LISTENERS
        self._relieve = relieve
        self._ends: list[float] = []  # of the steps that are still to be told
        self._start = 0.0  # of the first of them
        self._decodes = self._context = self._kv = self._queries = 0  # as in `Steps`

    def _listen(self, observers: list[Observer]) -> None:
        self._observers, self._hear = observers, Listeners(observers)
        self.gauged = [o.gauged for o in self._live() if type(o).gauged is not LiveObserver.gauged]
        self.gauges_of_each = any(
            not isinstance(o, LiveObserver) or o.reads_gauges
            for o in observers
            if type(o).planned is not Observer.planned
        )

    def listen(self, observer: Observer, on: bool) -> None:
        self.tell()
        others = [each for each in self._observers if each is not observer]
        self._listen([*others, observer] if on else others)

    def serve(self, policy: BatchPolicy | None) -> None:
        self._tell = NO_LISTENERS if policy is None else Listeners((policy,))

    def of(self, name: str, entry: Entry, when: float | None, now: float) -> None:
        if self._ends:
            self.tell()
        own_hooks = getattr(self._tell, name)  # the policy's
        if own_hooks:
            try:
                for hook in own_hooks:
                    hook(entry, now if when is None else when)
            except Exception as error:
                self._relieve(one_line(error))
        if self.waits_for is not None and name != "arrived":
            self.waits_for.later.append((name, entry, when))
            return
        self._about(name, entry, now if when is None else when)

    def _about(self, name: str, entry: Entry, when: float) -> None:
        for hook in getattr(self._hear, name):
            try:
                hook(entry, when)
            except Exception:
                self._silence(hook)

    def finished(self, entry: Entry, now: float, how: End, air: Iterable[StepInFlight]) -> None:
        self.tell()
        self._to_policy(self._tell.finished, entry, now, how)
        for flight in air:
            for item in [item for item in flight.later if item[1] is entry]:
                name, _, when = item
                flight.later.remove(item)
                self._about(name, entry, now if when is None else when)
        self._to_all(self._hear.finished, entry, now, how)

    def away(self, entry: Entry, now: float) -> None:
        """It cannot run for now, for a reason of the engine's: to the policy it has given up waiting."""
        self.tell()
        self._to_policy(self._tell.finished, entry, now, End.ABANDONED)

    def back(self, entry: Entry) -> None:
        """It can run again: to the policy it has just come."""
        self.tell()
        self._to_policy(self._tell.arrived, entry, entry.arrival)

    def ran(
        self,
        start: float,
        end: float,
        decodes: int,
        context: int,
        prefill: int,
        behind: int,
        kv: int,
        queries: int = 0,
    ) -> None:
        """A step has ended. Decodes alone wait for the next such step, prompts are told at once."""
        ends = self._ends
        if ends:
            if (
                not prefill
                and decodes == self._decodes
                and start == ends[-1]
                and context == self._context + decodes * len(ends)
                and queries == self._queries
            ):
                ends.append(end)
                self._kv = kv
                if len(ends) >= MOST_AT_ONCE or end - self._start >= SHOWN_EVERY:
                    self.tell()
                return
            self.tell()
        if prefill:
            self._stepped(quick(Steps, (start, [end], decodes, context, prefill, behind, kv, queries)))
            return
        self._ends, self._start, self._decodes, self._context, self._kv = [end], start, decodes, context, kv
        self._queries = queries

    def tell(self) -> None:
        ends = self._ends
        if ends:
            self._ends = []
            known = self._start, ends, self._decodes, self._context, 0, 0, self._kv, self._queries
            self._stepped(quick(Steps, known))

    def _stepped(self, steps: Steps) -> None:
        self._to_policy(self._tell.stepped, steps)
        for hook in self._hear.stepped:
            try:
                hook(steps)
            except Exception:
                self._silence(hook)

    def late(self, flight: StepInFlight, end: float) -> None:
        self.tell()
        for name, entry, when in flight.later:
            self._about(name, entry, end if when is None else when)

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        self._to_policy(self._tell.planned, plan, now, gauges)
        self._to_all(self._hear.planned, plan, now, gauges)

    def show(self, gauges: Mapping[str, float], now: float) -> None:
        self._to_all(self.gauged, gauges, now)

    def beside(self, name: str, *news: object) -> None:
        """A hook that only observers of live engines have."""
        self._to_all([getattr(observer, name) for observer in self._live()], *news)

    def _live(self) -> list[LiveObserver]:
        return [observer for observer in self._observers if isinstance(observer, LiveObserver)]

    def _to_all(self, hooks: Sequence[Callable[..., None]], *news: object) -> None:
        for hook in hooks:
            try:
                hook(*news)
            except Exception:
                self._silence(hook)

    def _silence(self, hook: Callable[..., None]) -> None:
        failed = hook.__self__  # type: ignore[attr-defined]
        LOG.exception("headgate: %s failed and hears no more", type(failed).__name__)
        self._listen([observer for observer in self._observers if observer is not failed])

    def _to_policy(self, hooks: Sequence[Callable[..., None]], *news: object) -> None:
        try:
            for hook in hooks:
                hook(*news)
        except Exception as error:
            self._relieve(one_line(error))
