"""In which order prompts enter: as many in time as possible, shortest first, and a share for the late."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from headgate.core.build import mypyc_attr, quick
from headgate.core.request import Request
from headgate.core.view import View

LOOSE = 10.0  # seconds: deadline of requests without a promise where others have one
ALMS = 0.1  # of all prompt tokens admitted: may go to the late before all others
LATE = 4.0  # promises a request must have waited for that
MOST_CREDIT = 16_384  # tokens of that share saved up at most


class Job(NamedTuple):
    """A prompt that waits, as the rule sees it; sorted by deadline."""

    deadline: float
    arrival: float
    id: int
    todo: int


def on_time(jobs: Iterable[Job], start: float, pace: float) -> set[int]:
    """Moore and Hodgson's rule: the most prompts that can be done by their deadlines on one machine.

    `jobs` come by deadline. The machine is free from `start` on and takes `pace` seconds for a token.
    Whenever a prompt would end late, the longest one so far leaves the set.
    """
    clock = start
    kept: set[int] = set()
    longest: list[tuple[int, int]] = []  # (-todo, id); a heap once somebody had to leave
    dropped = False
    for deadline, _, number, todo in jobs:
        alone = todo * pace
        if start + alone > deadline:  # late even if it ran at once: the rule would drop it itself
            continue
        kept.add(number)
        if dropped:
            heappush(longest, (-todo, number))
        else:
            longest.append((-todo, number))
        clock += alone
        if clock > deadline:
            if not dropped:
                heapify(longest)
                dropped = True
            tokens, id = heappop(longest)
            kept.discard(id)
            clock += tokens * pace
    return kept


@mypyc_attr(serializable=True)
class Waiting:
    """Those that wait, by deadline and by length, and the credit of the late."""

    def __init__(self, default: float | None) -> None:
        self._default = default
        self._jobs: dict[int, Job] = {}
        self._by_deadline: list[Job] = []
        self._by_length: list[tuple[int, float, int]] = []
        self._promised = 0  # of those, how many have a promise
        self._credit = 0.0  # tokens

    def __len__(self) -> int:
        return len(self._jobs)

    def promise(self, request: Request) -> float | None:
        """Seconds to the first token that the request was promised."""
        own = request.slo.first_token
        return self._default if own is None else own

    def add(self, request: Request) -> None:
        """It waits from now on."""
        self.drop(request)
        promise = self.promise(request)
        self._promised += promise is not None
        deadline = request.arrival + (LOOSE if promise is None else promise)
        job = self._jobs[request.id] = quick(Job, (deadline, request.arrival, request.id, request.todo))
        insort(self._by_deadline, job)
        insort(self._by_length, (job.todo, job.arrival, job.id))

    def drop(self, request: Request) -> None:
        job = self._jobs.pop(request.id, None)
        if job is None:
            return
        self._promised -= self.promise(request) is not None
        del self._by_deadline[bisect_left(self._by_deadline, job)]
        del self._by_length[bisect_left(self._by_length, (job.todo, job.arrival, job.id))]

    def admitted(self, request: Request, now: float) -> None:
        """A share of what enters is credited to the late; one of them that enters uses it up."""
        self._credit += ALMS * request.todo
        if now >= request.arrival + LATE * (self.promise(request) or LOOSE):
            self._credit -= request.todo
        self._credit = min(self._credit, MOST_CREDIT)

    def in_time(self, start: float, pace: float) -> set[int]:
        """Those that can have their first token in time, prompts before them included."""
        first = bisect_left(self._by_deadline, (start,))
        return on_time(self._by_deadline[first:], start, pace)

    def order(self, view: View, start: float, pace: float) -> Iterator[Request]:
        """Evicted requests; a late one if there is credit; those in time and then the late, shortest first.

        Where nobody who waits was promised a first token, it is the order of arrival.
        """
        waiting = view.waiting
        if not self._promised:
            yield from waiting.values()
            return
        seen: set[int] = set()
        for request in waiting.values():
            if not request.evictions:
                break
            seen.add(request.id)
            yield request
        favoured = self._favoured(view.now)
        if favoured in waiting and favoured not in seen:
            seen.add(favoured)
            yield waiting[favoured]
        yield from self._shortest(view, seen, self.in_time(start, pace))

    def _shortest(self, view: View, seen: set[int], timely: set[int]) -> Iterator[Request]:
        waiting = view.waiting
        for wanted in (True, False):
            for _, _, id in self._by_length:
                if (id in timely) is wanted and id not in seen:
                    request = waiting.get(id)
                    if request is not None:
                        yield request

    def _favoured(self, now: float) -> int:
        """The earliest deadline, if it was missed by several promises and there is credit; -1: none."""
        if self._credit <= 0 or not self._by_deadline:
            return -1
        deadline, arrival, id, _ = self._by_deadline[0]
        return id if now >= arrival + LATE * (deadline - arrival) else -1
