"""In which order prompts enter: as many in time as can be, then the late, then those without a promise."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush, merge
from itertools import chain, islice
from typing import NamedTuple

from headgate.core.build import mypyc_attr, quick
from headgate.core.request import Request
from headgate.core.view import View

ALMS = 0.1  # of all prompt tokens admitted: may go to the late before all others
LATE = 4.0  # promises a request must have waited for that
REST = 0.02  # of them: may go to requests without a promise before all others
LONG = 40.0  # seconds a request must have waited for that
MOST_CREDIT = 16_384  # tokens of such a share saved up at most
MOST_DEBT = 163_840.0  # tokens that the late owe at most, unless one prompt is longer
TRIED = 16  # requests left out that a plan tries again
SETTLED = 512  # requests in time that a plan looks at; later deadlines wait until these have entered
ROUNDS = 64  # of such trials in one plan, each with requests that the one before had no place for
MOST_RANK = 2**53
FEW = 16  # so many are sorted in or out one by one
# Compared; the last two are arrival and number, so that no two are equal.
Key = tuple[float, float, float, int]


class WaitingPrompt(NamedTuple):
    """A promised prompt that waits, as the rule sees it; sorted by deadline."""

    deadline: float
    arrival: float
    id: int
    todo: int


@mypyc_attr(serializable=True)
class Waiting:
    """Requests that wait: promised ones to be in time, by deadline; those left out; those past their
    deadline; those without a promise. And the credit of the late and of those without a promise.

    A plan looks at those in time and at the first few of the others, so its price does not grow with the
    queue. A request that is left out comes back as soon as there is time for it.
    """

    def __init__(self, default: float | None) -> None:
        self._default = default
        self._jobs: dict[int, WaitingPrompt] = {}
        self._keys: dict[int, Key] = {}  # of those left out or late: priority, tokens, arrival, number
        self._in: list[WaitingPrompt] = []
        self._out: list[Key] = []
        self._due: list[WaitingPrompt] = []  # those of `_out`, by deadline
        self._late: list[Key] = []
        self._past: list[WaitingPrompt] = []  # those of `_late`, by deadline
        self._long: list[Key] = []  # those of `_late`, by the time from which they have waited long
        self._tokens = 0  # of those in time or left out, not yet late
        self._rest: OrderedDict[int, Request] = OrderedDict()  # without a promise, the oldest first
        self._urgent: list[Key] = []  # the same by priority, then arrival
        self._evicted: dict[int, bool] = {}  # the oldest first; has it a promise?
        self._credit = self._rest_credit = 0.0  # tokens; below 0: owed

    def __len__(self) -> int:
        return len(self._jobs) + len(self._rest) + len(self._evicted)

    def promise(self, request: Request) -> float | None:
        own = request.slo.first_token
        return self._default if own is None else own

    def add(self, request: Request) -> None:
        self.drop(request)
        promise = self.promise(request)
        if request.evictions:
            self._evicted[request.id] = promise is not None
            return
        if promise is None:
            self._rest[request.id] = request
            insort(self._urgent, _urgency(request))
            return
        deadline = request.arrival + promise
        job = self._jobs[request.id] = quick(
            WaitingPrompt, (deadline, request.arrival, request.id, request.todo)
        )
        self._keys[request.id] = (_rank(request), float(request.todo), request.arrival, request.id)
        self._tokens += request.todo
        insort(self._in, job)

    def drop(self, request: Request) -> None:
        if self._evicted.pop(request.id, None) is not None:
            return
        if self._rest.pop(request.id, None) is not None:
            del self._urgent[bisect_left(self._urgent, _urgency(request))]
            return
        job = self._jobs.pop(request.id, None)
        if job is None:
            return
        key = self._keys.pop(request.id)
        place = bisect_left(self._in, job)
        if place < len(self._in) and self._in[place] == job:
            del self._in[place]
            self._tokens -= job.todo
            return
        place = bisect_left(self._out, key)
        if place < len(self._out) and self._out[place] == key:
            del self._out[place]
            self._tokens -= job.todo
            del self._due[bisect_left(self._due, job)]
        else:
            del self._late[bisect_left(self._late, key)]
            del self._past[bisect_left(self._past, job)]
            del self._long[bisect_left(self._long, _long(job))]

    def admitted(self, request: Request, now: float) -> None:
        """A share of what enters is credited to the late, and one to those without a promise; one that enters
        uses it up. What is owed is bounded, because much of it may be for what others left.
        """
        todo, promise = float(request.todo), self.promise(request)
        self._credit = min(self._credit + ALMS * todo, MOST_CREDIT)
        if promise is None:
            self._rest_credit = _spend(self._rest_credit, todo, todo)
            return
        self._rest_credit = min(self._rest_credit + REST * todo, MOST_CREDIT)
        if now >= request.arrival + LATE * promise:
            self._credit = _spend(self._credit, todo, max(todo, MOST_DEBT))

    def settle(self, waiting: Mapping[int, Request], start: float, pace: float, step: float) -> None:
        """Decide which promised requests are to be in time, prompts before them included.

        A first token comes at the end of its step, in the mean half a step after the prompt's own tokens.
        Steps are as long as what waits makes them, and at most `step` seconds.
        """
        for _ in range(ROUNDS):
            self._expire(start)
            tried = self._tried(waiting)
            jobs: Iterable[WaitingPrompt] = self._fresh(waiting)
            if tried:
                jobs = merge(self._in, sorted(tried))  # few of which are looked at
            half = min(step, pace * self._tokens * (1 - 1 / max(1, len(self._in) + len(self._out)))) / 2
            kept, looked = on_time(jobs, start + half, pace)
            if len(kept) == len(looked) and not tried:
                return
            trying = {job.id for job in tried}
            gone = [job for job in looked if job.id not in kept and job.id not in trying]
            back = [job for job in tried if job.id in kept]
            if not gone and not back:
                return
            self._leave_out(gone)
            self._come_back(back)

    def left_out(self, waiting: Mapping[int, Request]) -> tuple[int, ...]:
        ids = [key[3] for key in (*self._out, *self._late)]
        return tuple(id for id in ids if id in waiting and not waiting[id].evictions)

    def order(self, view: View) -> Iterator[tuple[Request, bool]]:
        """Those that wait, the next one first; and whether it is to have only what the others leave.

        First promised ones: evicted; then a late one and one without a promise that have waited long, if
        there is credit for them; those in time, the earliest deadline first; the late, the most urgent and
        then the shortest first. Then the others: evicted ones, then by priority and arrival.
        """
        waiting = view.waiting
        first: list[Request] = []
        others: list[Request] = []
        for id, promised in reversed(self._evicted.items()):
            if id in waiting:
                (first if promised else others).append(waiting[id])
        first += [request for request in self._favoured(view, others) if request not in first]
        for request in first:
            yield request, False
        seen = {request.id for request in first}
        for id in self._promised():
            if id in waiting and id not in seen:
                yield waiting[id], False
        for id in chain([request.id for request in others], (key[3] for key in self._urgent)):
            if id in waiting and id not in seen:
                seen.add(id)
                yield waiting[id], True

    def _promised(self) -> Iterator[int]:
        """Those in time, then the late; compiled, a generator comprehension would be a list of them all."""
        for job in self._in:
            yield job.id
        for key in merge(self._out, self._late):
            yield key[3]

    def _favoured(self, view: View, evicted: list[Request]) -> list[Request]:
        """The late one that has waited longest and the oldest without a promise, each if there is credit."""
        waiting, favoured = view.waiting, []
        if self._credit > 0 and self._long and view.now >= self._long[0][0]:
            id = self._long[0][3]
            if id in waiting:
                favoured.append(waiting[id])
        if self._rest_credit > 0:
            old = [*evicted, *islice(self._rest.values(), 1)]
            old = [request for request in old if request.id in waiting and view.now >= request.arrival + LONG]
            favoured += sorted(old, key=lambda request: (request.arrival, request.id))[:1]
        return favoured

    def _fresh(self, waiting: Mapping[int, Request]) -> list[WaitingPrompt]:
        """Those to be in time, with what the prefix cache leaves of those that a plan looks at by now."""
        jobs = self._in
        for place in range(min(len(jobs), SETTLED)):
            deadline, arrival, id, todo = jobs[place]
            request = waiting.get(id)
            if request is not None and request.todo != todo:
                self._tokens += request.todo - todo
                jobs[place] = self._jobs[id] = quick(WaitingPrompt, (deadline, arrival, id, request.todo))
        return jobs

    def _tried(self, waiting: Mapping[int, Request]) -> list[WaitingPrompt]:
        """The first of those left out, each as long as it is by now."""
        jobs: list[WaitingPrompt] = []
        for _, _, _, number in self._out[:TRIED]:
            deadline, arrival, id, todo = job = self._jobs[number]
            request = waiting.get(id)
            if request is not None and request.todo != todo:
                self._tokens += request.todo - todo
                del self._due[bisect_left(self._due, job)]
                del self._out[bisect_left(self._out, self._keys[id])]
                job = self._jobs[id] = quick(WaitingPrompt, (deadline, arrival, id, request.todo))
                self._keys[id] = _key(job, self._keys[id])
                insort(self._due, job)
                insort(self._out, self._keys[id])
            jobs.append(job)
        return jobs

    def _expire(self, start: float) -> None:
        """Those left out whose deadline is before `start` are late, until it no longer is: `start` is a
        forecast, and half-done prompts may leave.
        """
        again = bisect_left(self._past, (start,))
        if again < len(self._past):
            back = self._past[again:]
            del self._past[again:]
            self._tokens += sum([job.todo for job in back])
            keys = [self._keys[job.id] for job in back]
            _take(self._late, keys)
            _take(self._long, [_long(job) for job in back])
            _put(self._out, keys)
            _line_up(self._due, back)
        past = bisect_left(self._due, (start,))
        if not past:
            return
        gone = self._due[:past]
        del self._due[:past]
        self._tokens -= sum([job.todo for job in gone])
        keys = [self._keys[job.id] for job in gone]
        _take(self._out, keys)
        _put(self._late, keys)
        _put(self._long, [_long(job) for job in gone])
        _line_up(self._past, gone)

    def _leave_out(self, jobs: list[WaitingPrompt]) -> None:
        if len(jobs) > FEW:
            gone = {job.id for job in jobs}
            self._in = [job for job in self._in if job.id not in gone]
        else:
            for job in jobs:
                del self._in[bisect_left(self._in, job)]
        _line_up(self._due, jobs)
        for job in jobs:
            self._keys[job.id] = _key(job, self._keys[job.id])
        _put(self._out, [self._keys[job.id] for job in jobs])

    def _come_back(self, jobs: list[WaitingPrompt]) -> None:
        for job in jobs:
            del self._due[bisect_left(self._due, job)]
            insort(self._in, job)
        _take(self._out, [self._keys[job.id] for job in jobs])


def on_time(jobs: Iterable[WaitingPrompt], start: float, pace: float) -> tuple[set[int], list[WaitingPrompt]]:
    """Moore and Hodgson's rule: the most prompts that can be done by their deadlines on one machine.

    `jobs` come by deadline. The machine is free from `start` on and takes `pace` seconds for a token.
    Whenever a prompt would end late, the longest one so far leaves the set. With the set come the jobs that
    were looked at: no more once `SETTLED` are in it. Tokens are summed as whole numbers, so that the set,
    looked at again, is the set.
    """
    tokens = 0
    looked: list[WaitingPrompt] = []
    kept: set[int] = set()
    longest: list[tuple[int, int]] = []  # (-todo, id); a heap once one had to leave
    dropped = False
    for job in jobs:
        if len(kept) >= SETTLED:
            break
        deadline, _, number, todo = job
        looked.append(job)
        if start + todo * pace > deadline:  # late even if it ran at once: the rule would drop it itself
            continue
        kept.add(number)
        if dropped:
            heappush(longest, (-todo, number))
        else:
            longest.append((-todo, number))
        tokens += todo
        if start + tokens * pace > deadline:
            if not dropped:
                heapify(longest)
                dropped = True
            less, id = heappop(longest)
            kept.discard(id)
            tokens += less
    return kept, looked


def _spend(credit: float, tokens: float, most: float) -> float:
    """What is left of a credit; `most` tokens may be owed, unless more were before."""
    return max(credit - tokens, min(credit, -most))


def _urgency(request: Request) -> Key:
    return (_rank(request), 0.0, request.arrival, request.id)


def _rank(request: Request) -> float:
    """Its priority; clients may send numbers that no float can be."""
    return float(max(-MOST_RANK, min(request.priority, MOST_RANK)))


def _key(job: WaitingPrompt, before: Key) -> Key:
    """The key of a job whose prompt may have become shorter."""
    return (before[0], float(job.todo), job.arrival, job.id)


def _long(job: WaitingPrompt) -> Key:
    """By when it will have waited long."""
    return (job.arrival + LATE * (job.deadline - job.arrival), 0.0, job.arrival, job.id)


def _line_up(into: list[WaitingPrompt], jobs: list[WaitingPrompt]) -> None:
    if len(jobs) > FEW:
        into.extend(jobs)
        into.sort()
    else:
        for job in jobs:
            insort(into, job)


def _put(into: list[Key], keys: list[Key]) -> None:
    if len(keys) > FEW:
        into.extend(keys)
        into.sort()
    else:
        for key in keys:
            insort(into, key)


def _take(out_of: list[Key], keys: list[Key]) -> None:
    if len(keys) > FEW:
        gone = set(keys)
        out_of[:] = [key for key in out_of if key not in gone]
    else:
        for key in keys:
            del out_of[bisect_left(out_of, key)]
