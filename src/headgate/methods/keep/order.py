"""In which order prompts enter: in time what is worth most, then the late, then those without a promise."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush, merge
from itertools import chain, islice
from math import inf
from typing import NamedTuple, TypeVar

from headgate.core.build import mypyc_attr, quick
from headgate.core.request import Request, weight_of
from headgate.core.view import View
from headgate.methods.orders import NO_TENANT, TenantAccounts, TenantQueues

ALMS = 0.1  # of all prompt tokens admitted: may go to the late before all others
LATE = 4.0  # promises a request must have waited for that
REST = 0.02  # of them: may go to requests without a promise before all others
LONG = 40.0  # seconds a request must have waited for that
MOST_CREDIT = 16_384  # tokens of such a share saved up at most
MOST_DEBT = 163_840.0  # tokens that the late owe at most, unless one prompt is longer
BEHIND = 1e-3  # of what a kept promise is worth, where its tenant is ahead of another that waits
TRIED = 16  # requests left out that a plan tries again
SETTLED = 512  # requests in time that a plan looks at; later deadlines wait until these have entered
ROUNDS = 64  # of such trials in one plan, each with requests that the one before had no place for
MOST_RANK = 2**53
LEAST_WEIGHT = 1e-9  # nothing is worth less, whatever clients say
SPARED = 32  # prompts in a set that is searched for one that can leave instead of others
FEW = 16  # so many are sorted in or out one by one
# Compared; the last two are arrival and number, so that no two are equal.
Key = tuple[float, float, float, int]
Cheap = tuple[float, int, int, float]  # tokens over worth, negative; number, tokens, worth


class WaitingPrompt(NamedTuple):
    """A promised prompt that waits, as the rule sees it; sorted by deadline."""

    deadline: float
    arrival: float
    id: int
    todo: int
    weight: float = 1.0
    tenant: str = ""


Sortable = TypeVar("Sortable", bound=tuple[object, ...])


@mypyc_attr(serializable=True)
class Waiting:
    """Requests that wait: promised ones to be in time, by deadline; those left out; those past their
    deadline; those without a promise. And the credit of the late and of those without a promise.

    With `tenants` the owner tells which requests come, enter and leave before it tells the queue.

    A plan looks at those in time and at the first few of the others, so its price does not grow with the
    queue. A request that is left out comes back as soon as there is time for it.
    """

    def __init__(self, default: float | None) -> None:
        self._default = default
        self.tenants = TenantAccounts()
        self._ahead = NO_TENANT  # tenants whose promises count less, as of the last plan
        self._weights: dict[float, int] = {}  # promised requests by weight
        self._jobs: dict[int, WaitingPrompt] = {}
        self._keys: dict[int, Key] = {}  # of those left out or late: tokens over worth, 0, arrival, number
        self._in: list[WaitingPrompt] = []
        self._out: list[Key] = []
        self._due: list[WaitingPrompt] = []  # those of `_out`, by deadline
        self._late: list[Key] = []
        self._past: list[WaitingPrompt] = []  # those of `_late`, by deadline
        self._long: list[Key] = []  # those of `_late`, by the time from which they have waited long
        self._tokens = 0  # of those in time or left out, not yet late
        self._rest: OrderedDict[int, Request] = OrderedDict()  # without a promise, the oldest first
        self._urgent = TenantQueues(self.tenants)  # the same by tenant, then weight, priority and arrival
        self._evicted: dict[int, bool] = {}  # the oldest first; has it a promise?
        self._credit = self._rest_credit = 0.0  # tokens; below 0: owed

    def __len__(self) -> int:
        return len(self._jobs) + len(self._rest) + len(self._evicted)

    def promise(self, request: Request) -> float | None:
        if request.slo.background:
            return None
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
            # clients may send priorities that no float can be
            rank = float(max(-MOST_RANK, min(request.priority, MOST_RANK)))
            self._urgent.add(request, (-weight_of(request), rank, request.arrival, request.id))
            return
        deadline, weight = request.arrival + promise, max(LEAST_WEIGHT, weight_of(request))
        tenant = self.tenants.name(request)
        job = self._jobs[request.id] = quick(
            WaitingPrompt, (deadline, request.arrival, request.id, request.todo, weight, tenant)
        )
        self._keys[request.id] = self._key(job)
        self._tokens += request.todo
        self._weights[weight] = self._weights.get(weight, 0) + 1
        insort(self._in, job)

    def drop(self, request: Request) -> None:
        if self._evicted.pop(request.id, None) is not None:
            return
        if self._rest.pop(request.id, None) is not None:
            self._urgent.drop(request)
            return
        job = self._jobs.pop(request.id, None)
        if job is None:
            return
        key = self._keys.pop(request.id)
        self._weights[job.weight] -= 1
        if not self._weights[job.weight]:
            del self._weights[job.weight]
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
        Steps are as long as what waits makes them, and at most `step` seconds. Where weights differ the rule
        is no optimum, so a set that can be in time gives way only to one that is worth more.
        """
        self._rank_again(self.tenants.ahead())
        for _ in range(ROUNDS):
            self._expire(start)
            tried = self._tried(waiting)
            jobs: Iterable[WaitingPrompt] = self._fresh(waiting)
            if tried:
                jobs = merge(self._in, sorted(tried))  # few of which are looked at
            half = min(step, pace * self._tokens * (1 - 1 / max(1, len(self._in) + len(self._out)))) / 2
            kept, looked = on_time(jobs, start + half, pace, self._ahead)
            if len(kept) == len(looked) and not tried:
                return
            trying = {job.id for job in tried}
            gone = [job for job in looked if job.id not in kept and job.id not in trying]
            back = [job for job in tried if job.id in kept]
            if gone and self._worths_differ():
                before = [job for job in looked if job.id not in trying]
                if not self._worth_more(back, gone) and in_time(before, start + half, pace):
                    gone, back = [], fitting(before, tried, start + half, pace)
            if not gone and not back:
                return
            self._leave_out(gone)
            for job in back:
                del self._due[bisect_left(self._due, job)]
                insort(self._in, job)
            _take(self._out, [self._keys[job.id] for job in back])

    def _rank_again(self, ahead: frozenset[str]) -> None:
        """Where a tenant is ahead now, or no longer, its requests left out and late have another rank."""
        if ahead == self._ahead:
            return
        changed = ahead ^ self._ahead
        self._ahead = ahead
        for line, jobs in ((self._out, self._due), (self._late, self._past)):
            moved = [job for job in jobs if job.tenant in changed]
            _take(line, [self._keys[job.id] for job in moved])
            for job in moved:
                self._keys[job.id] = self._key(job)
            _put(line, [self._keys[job.id] for job in moved])

    def _worth_more(self, some: list[WaitingPrompt], others: list[WaitingPrompt]) -> bool:
        some_worth, other_worth = [sum([self._worth(job) for job in jobs]) for jobs in (some, others)]
        if some_worth != other_worth:
            return some_worth > other_worth
        return sum([job.todo for job in some]) < sum([job.todo for job in others])

    def _worths_differ(self) -> bool:
        return len(self._weights) > 1 or bool(self._ahead)

    def _worth(self, job: WaitingPrompt) -> float:
        return BEHIND * job.weight if job.tenant in self._ahead else job.weight

    def _key(self, job: WaitingPrompt) -> Key:
        """Those worth least a token come last, by what its tenant has had so far."""
        return (job.todo / self._worth(job), 0.0, job.arrival, job.id)

    def timely(self, request: Request) -> bool:
        """Is it promised, and to be in time or evicted before?"""
        job = self._jobs.get(request.id)
        if job is None:
            return self._evicted.get(request.id, False)
        place = bisect_left(self._in, job)
        return place < len(self._in) and self._in[place] == job

    def left_out(self, waiting: Mapping[int, Request]) -> tuple[int, ...]:
        ids = [key[3] for key in (*self._out, *self._late)]
        return tuple(id for id in ids if id in waiting and not waiting[id].evictions)

    def order(self, view: View) -> Iterator[tuple[Request, bool]]:
        """Those that wait, the next one first; and whether it is to have only what the others leave.

        First promised ones: evicted; then a late one and one without a promise that have waited long, if
        there is credit for them; those in time (`_promised`); the late, those worth most a token
        first. Then the others: evicted ones, then those of the tenant served least, each tenant's by
        weight, priority and arrival.
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
        for id in chain([request.id for request in others], self._urgent.ids(waiting)):
            if id in waiting and id not in seen:
                seen.add(id)
                yield waiting[id], True

    def _promised(self) -> Iterator[int]:
        """Those in time, then the late; compiled, a generator comprehension would be a list of them all.

        Those in time go by deadline. Where weights differ and some had to be left out, there is no time for
        errors of the forecast: those worth most a token go first, so that an error costs the least.
        """
        settled = 0
        if (self._out or self._late) and self._worths_differ():
            settled = SETTLED
            for job in sorted(self._in[:SETTLED], key=self._key):
                yield job.id
        for job in islice(self._in, settled, None):
            yield job.id
        for key in merge(self._out, self._late):
            yield key[3]

    def _favoured(self, view: View, evicted: list[Request]) -> list[Request]:
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
            deadline, arrival, id, todo, weight, tenant = jobs[place]
            request = waiting.get(id)
            if request is not None and request.todo != todo:
                self._tokens += request.todo - todo
                job = quick(WaitingPrompt, (deadline, arrival, id, request.todo, weight, tenant))
                jobs[place] = self._jobs[id] = job
        return jobs

    def _tried(self, waiting: Mapping[int, Request]) -> list[WaitingPrompt]:
        jobs: list[WaitingPrompt] = []
        for _, _, _, number in self._out[:TRIED]:
            deadline, arrival, id, todo, weight, tenant = job = self._jobs[number]
            request = waiting.get(id)
            if request is not None and request.todo != todo:
                self._tokens += request.todo - todo
                del self._due[bisect_left(self._due, job)]
                del self._out[bisect_left(self._out, self._keys[id])]
                shorter = (deadline, arrival, id, request.todo, weight, tenant)
                job = self._jobs[id] = quick(WaitingPrompt, shorter)
                self._keys[id] = self._key(job)
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
            _put(self._due, back)
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
        _put(self._past, gone)

    def _leave_out(self, jobs: list[WaitingPrompt]) -> None:
        if len(jobs) > FEW:
            gone = {job.id for job in jobs}
            end = bisect_left(self._in, jobs[-1]) + 1  # they come by deadline
            self._in[:end] = [job for job in self._in[:end] if job.id not in gone]
        else:
            for job in jobs:
                del self._in[bisect_left(self._in, job)]
        _put(self._due, jobs)
        for job in jobs:
            self._keys[job.id] = self._key(job)
        _put(self._out, [self._keys[job.id] for job in jobs])


def on_time(
    jobs: Iterable[WaitingPrompt], start: float, pace: float, ahead: frozenset[str] = NO_TENANT
) -> tuple[set[int], list[WaitingPrompt]]:
    """Prompts that can be done by their deadlines on one machine, worth together as much as a greedy finds.

    `jobs` come by deadline. The machine is free from `start` on and takes `pace` seconds for a token.
    Whenever a prompt would end late, those worth least a token so far leave the set; where more than one has
    to, those that still fit come back, the worthiest first. In a small set one alone leaves instead that is
    worth less than they are together, unless the whole is worth more without this rule: many short ones may
    be worth more than a long one. With equal weights the longest leaves, and this is Moore and Hodgson's
    rule, which no other set exceeds. Promises of tenants `ahead` of others count less.
    With the set come the jobs that were looked at: no more once `SETTLED` are in it. Tokens are summed as
    whole numbers, so that the set, looked at again, is the set.
    """
    kept, looked, worth, spared = _greedy(jobs, start, pace, ahead, SPARED)
    if spared:
        others, seen, more, _ = _greedy(looked, start, pace, ahead, 0)
        if more >= worth:
            return others, seen
    return kept, looked


def _greedy(
    jobs: Iterable[WaitingPrompt], start: float, pace: float, ahead: frozenset[str], small: int
) -> tuple[set[int], list[WaitingPrompt], float, bool]:
    """The set, the jobs that were looked at, what the set is worth, and whether one alone left instead of
    others while the set was `small`.
    """
    tokens, total, spared = 0, 0.0, False
    looked: list[WaitingPrompt] = []
    kept: set[int] = set()
    cheapest: list[Cheap] = []  # a heap once one had to leave
    dropped = False
    for job in jobs:
        if len(kept) >= SETTLED:
            break
        deadline, _, number, todo, worth, tenant = job
        looked.append(job)
        if start + todo * pace > deadline:  # late even if it ran at once: the rule would drop it itself
            continue
        if tenant in ahead:
            worth *= BEHIND
        kept.add(number)
        if dropped:
            heappush(cheapest, (-todo / worth, number, todo, worth))
        else:
            cheapest.append((-todo / worth, number, todo, worth))
        tokens += todo
        total += worth
        if start + tokens * pace > deadline:
            if not dropped:
                heapify(cheapest)
                dropped = True
            alone = _alone(cheapest, tokens, start, pace, deadline) if len(cheapest) <= small else None
            gone = _drop(cheapest, tokens, start, pace, deadline)
            lost = sum([one[3] for one in gone])
            if alone is not None and alone[3] < lost:
                cheapest += gone
                cheapest.remove(alone)
                heapify(cheapest)
                gone, lost, spared = [alone], alone[3], True
            kept.difference_update([one[1] for one in gone])
            tokens -= sum([one[2] for one in gone])
            total -= lost
    return kept, looked, total, spared


def _alone(cheapest: list[Cheap], tokens: int, start: float, pace: float, deadline: float) -> Cheap | None:
    """The one worth least without which the last one is in time; the longest of these."""
    enough = [one for one in cheapest if start + (tokens - one[2]) * pace <= deadline]
    return max(enough, key=_worthiest) if enough else None


def _drop(cheapest: list[Cheap], tokens: int, start: float, pace: float, deadline: float) -> list[Cheap]:
    """Those worth least a token leave until the last one is in time."""
    gone: list[Cheap] = []
    while start + tokens * pace > deadline:
        gone.append(heappop(cheapest))
        tokens -= gone[-1][2]
    if len(gone) > 1:
        for one in sorted(gone, key=_worthiest):
            if start + (tokens + one[2]) * pace <= deadline:
                tokens += one[2]
                gone.remove(one)
                heappush(cheapest, one)
    return gone


def _worthiest(one: Cheap) -> tuple[float, int, int]:
    return (-one[3], one[2], one[1])


def in_time(jobs: list[WaitingPrompt], start: float, pace: float) -> bool:
    tokens = 0
    for job in jobs:
        tokens += job.todo
        if start + tokens * pace > job.deadline:
            return False
    return True


def fitting(
    line: list[WaitingPrompt], tried: list[WaitingPrompt], start: float, pace: float
) -> list[WaitingPrompt]:
    """The first of `tried` that can be in time beside all of `line`, by deadline; none: an empty list."""
    before = [0]
    for job in line:
        before.append(before[-1] + job.todo)
    slack = [inf] * (len(line) + 1)  # seconds by which all from this place on may end later
    for place in range(len(line) - 1, -1, -1):
        slack[place] = min(slack[place + 1], line[place].deadline - start - before[place + 1] * pace)
    for job in tried:
        place = bisect_left(line, job)
        ends = start + (before[place] + job.todo) * pace
        fits = ends <= job.deadline and job.todo * pace <= slack[place]
        if fits and in_time([*line[:place], job, *line[place:]], start, pace):  # exactly, too
            return [job]
    return []


def _spend(credit: float, tokens: float, most: float) -> float:
    """What is left of a credit; `most` tokens may be owed, unless more were before."""
    return max(credit - tokens, min(credit, -most))


def _long(job: WaitingPrompt) -> Key:
    return (job.arrival + LATE * (job.deadline - job.arrival), 0.0, job.arrival, job.id)


def _put(into: list[Sortable], new: list[Sortable]) -> None:
    if len(new) > FEW:
        into.extend(new)
        into.sort()
    else:
        for one in new:
            insort(into, one)


def _take(out_of: list[Key], keys: list[Key]) -> None:
    if len(keys) > FEW:
        gone = set(keys)
        out_of[:] = [key for key in out_of if key not in gone]
    else:
        for key in keys:
            del out_of[bisect_left(out_of, key)]
