"""In which order waiting prompts enter: by arrival, shortest first, by priority, by deadline; with ageing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from math import inf, isfinite
from typing import ClassVar

from headgate.core.build import mypyc_attr
from headgate.core.errors import InputError, unknown
from headgate.core.plan import EACH_STEP, Until
from headgate.core.request import Request, uncached
from headgate.core.view import View

Key = tuple[float, ...]  # compared; the last two are arrival and number, so that no two are equal


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class PromptOrder(ABC):
    """Which waiting request enters next. Evicted requests come first in every order.

    Keys never change: ageing lowers all of them alike as time passes, so only the arrival counts, and nothing
    is ever sorted again.
    """

    # What may bring a head that fits, when this one does not.
    blocked: ClassVar[Until] = Until(finishes=1, arrivals=1)

    @abstractmethod
    def add(self, request: Request) -> None:
        """It has come and waits."""

    @abstractmethod
    def drop(self, request: Request) -> None:
        """It waits no longer."""

    def waiting(self, view: View) -> Iterator[Request]:
        waiting = view.waiting
        first: set[int] = set()  # requests evicted before this policy was first notified
        for request in waiting.values():
            if not request.evictions:
                break
            first.add(request.id)
            yield request
        for id in self._ids(view.now):
            fresh = waiting.get(id)
            if fresh is not None and id not in first:
                yield fresh

    @abstractmethod
    def _ids(self, now: float) -> Iterator[int]:
        """Those that were never evicted."""


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class ByArrival(PromptOrder):
    """First come, first served: the order in which the view shows them."""

    blocked: ClassVar[Until] = Until(finishes=1)

    def add(self, request: Request) -> None:
        """Nothing to keep."""

    def drop(self, request: Request) -> None:
        """Nothing to keep."""

    def waiting(self, view: View) -> Iterator[Request]:
        return iter(view.waiting.values())

    def _ids(self, now: float) -> Iterator[int]:
        return iter(())


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class ShortestPrompt(PromptOrder):
    """The shortest prompt first; every second of waiting makes a prompt count as `ageing` tokens shorter.

    Of a prompt those tokens count that the prefix cache did not have when it came.
    A prompt of L tokens is then overtaken only by requests that come within L / ageing seconds after it.
    Without ageing nothing bounds the wait of a long one.
    """

    def __init__(self, ageing: float = 0.0) -> None:
        self._ageing = ageing
        self._sorted = _Sorted(self._key)

    def add(self, request: Request) -> None:
        self._sorted.add(request)

    def drop(self, request: Request) -> None:
        self._sorted.drop(request)

    def _ids(self, now: float) -> Iterator[int]:
        return self._sorted.ids()

    def _key(self, request: Request) -> Key:
        return (uncached(request) + self._ageing * request.arrival, request.arrival, request.id)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class ByPriority(ShortestPrompt):
    """The most urgent priority first, whatever the others wait; the shortest prompt first among equals."""

    def _key(self, request: Request) -> Key:
        return (request.priority, *super()._key(request))


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class EarliestDeadline(ShortestPrompt):
    """Requests that must start first to have their first token in time; late ones come after them.

    A prompt must start at its arrival plus its promise of a first token, less the time its tokens take. Once
    that moment has passed there is too much work for every promise, and it makes room for requests that can
    still be served in time. Among the late the shortest goes first, and a request that has waited as long as
    ageing takes to make its prompt count as nothing goes first: `ageing` bounds the wait here too.

    `promise` is for requests that were promised nothing, `pace` the seconds a prompt token takes.
    """

    blocked: ClassVar[Until] = EACH_STEP  # the head changes as time passes

    def __init__(self, promise: float, pace: float, ageing: float = 0.0) -> None:
        super().__init__(ageing)
        self._promise, self._pace = promise, pace
        self._by_start = _Sorted(self._start)

    def add(self, request: Request) -> None:
        super().add(request)
        self._by_start.add(request)

    def drop(self, request: Request) -> None:
        super().drop(request)
        self._by_start.drop(request)

    def _ids(self, now: float) -> Iterator[int]:
        shortest, by_start, aged = self._sorted, self._by_start, self._ageing * now
        yield from shortest.ids(most=aged)
        for id in by_start.ids(least=now):
            if shortest.key(id)[0] > aged:
                yield id
        for id in shortest.ids(least=aged):
            if shortest.key(id)[0] > aged and by_start.key(id)[0] < now:
                yield id

    def _start(self, request: Request) -> Key:
        promise = request.slo.first_token
        if promise is None:
            promise = self._promise
        return (request.arrival + promise - self._pace * uncached(request), request.arrival, request.id)


@mypyc_attr(serializable=True)
class _Sorted:
    """Requests sorted by a key that never changes: a bisection when one comes or goes, nothing else."""

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._keys: list[Key] = []
        self._of: dict[int, Key] = {}

    def add(self, request: Request) -> None:
        self.drop(request)
        key = self._of[request.id] = self._key(request)
        insort(self._keys, key)

    def drop(self, request: Request) -> None:
        key = self._of.pop(request.id, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, key)]

    def key(self, id: int) -> Key:
        return self._of[id]

    def ids(self, least: float = -inf, most: float = inf) -> Iterator[int]:
        """Those whose keys begin with a number of at least `least` and at most `most`."""
        keys = self._keys
        for index in range(bisect_left(keys, (least,)), len(keys)):
            if keys[index][0] > most:
                break
            yield int(keys[index][-1])


ORDERS = ("arrival", "shortest", "priority", "deadline")


def order_of(owner: str, name: str, ageing: float, promise: float, pace: float) -> PromptOrder:
    """An order by its name; `owner` is named in the error message."""
    if not (isfinite(ageing) and ageing >= 0):
        raise InputError(f"{owner}: ageing={ageing} tokens per second; it must be 0 (none) or more")
    if not promise > 0:
        raise InputError(f"{owner}: first_token={promise} s; a promise must be above 0")
    if name == "arrival":
        return ByArrival()
    if name == "shortest":
        return ShortestPrompt(ageing)
    if name == "priority":
        return ByPriority(ageing)
    if name == "deadline":
        return EarliestDeadline(promise, pace, ageing)
    raise unknown(f"order of {owner}", name, ORDERS)


def entering(
    view: View, order: PromptOrder, watermark: float, slots: int, tokens: int
) -> tuple[list[int], int]:
    """New prompts for so many slots and tokens, as far as their KV is free; and the tokens left over.

    The first that does not fit holds up those behind it. An empty engine takes any. `watermark` is the
    share of the KV that no new prompt may take.
    """
    block, decoding, prefilling = view.limits.block, view.decoding, view.prefilling
    room = view.kv_free - watermark * view.kv_total
    for request in prefilling.values():
        room -= request.todo
    entered: list[int] = []
    for request in order.waiting(view):
        if slots <= 0 or tokens <= 0:
            break
        room -= -(-request.room // block) * block
        if room < 0 and (entered or decoding or prefilling):
            break
        entered.append(request.id)
        tokens -= request.todo
        slots -= 1
    return entered, tokens


def share(owner: str, name: str, value: float) -> float:
    """A setting that must be a share of something, below all of it."""
    if not 0 <= value < 1:
        raise InputError(f"{owner}: {name}={value}; it is a share of the KV, from 0 to below 1")
    return value
