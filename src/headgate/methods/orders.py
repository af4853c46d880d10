"""In which order waiting prompts enter: by arrival, shortest first, by priority, by deadline, by tenant.

Tenants have accounts of what they were served; routers' queues use them too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush, heapreplace
from math import inf, isfinite
from typing import ClassVar

from headgate.core.build import mypyc_attr
from headgate.core.errors import InputError, unknown
from headgate.core.plan import EACH_STEP, Until
from headgate.core.request import MOST_TENANTS, OUTPUT_SERVICE, Request, uncached
from headgate.core.view import View

Key = tuple[float, ...]  # compared; the last two are arrival and number, so that no two are equal


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class PromptOrder:
    """Which waiting request enters next: here by arrival, as the view shows them.

    Evicted requests come first in every order.
    """

    # What may bring a head that fits, when this one does not.
    blocked: ClassVar[Until] = Until(finishes=1)

    def add(self, request: Request) -> None:
        """It has come and waits."""

    def drop(self, request: Request) -> None:
        """It waits no longer."""

    def admitted(self, request: Request) -> None:
        self.drop(request)

    def finished(self, request: Request) -> None:
        self.drop(request)

    def waiting(self, view: View) -> Iterator[Request]:
        return iter(view.waiting.values())


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class KeyedOrder(PromptOrder):
    """By keys that never change: ageing lowers all of them alike as time passes, so only the arrival counts,
    and nothing is ever sorted again.
    """

    blocked: ClassVar[Until] = Until(finishes=1, arrivals=1)

    def waiting(self, view: View) -> Iterator[Request]:
        waiting = view.waiting
        first: set[int] = set()  # requests evicted before this policy was first notified
        for request in waiting.values():
            if not request.evictions:
                break
            first.add(request.id)
            yield request
        for id in self._ids(view):
            fresh = waiting.get(id)
            if fresh is not None and id not in first:
                yield fresh

    def _ids(self, view: View) -> Iterator[int]:
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class ShortestPrompt(KeyedOrder):
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

    def _ids(self, view: View) -> Iterator[int]:
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

    def _ids(self, view: View) -> Iterator[int]:
        now = view.now
        shortest, by_start, aged = self._sorted, self._by_start, self._ageing * now
        yield from shortest.ids(most=aged)
        for id in by_start.ids(least=now):
            if shortest.key(id)[0] > aged:
                yield id
        for id in shortest.ids(least=aged):
            if shortest.key(id)[0] > aged and by_start.key(id)[0] < now:
                yield id

    def _start(self, request: Request) -> Key:
        due = first_due(request, self._promise)
        return (due - self._pace * uncached(request), request.arrival, request.id)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DeadlineAndLength(KeyedOrder):
    """By the time a first token is due plus `alpha` seconds for each prompt token (QoServe).

    Requests that would be late even if they started now come after all others, in the same order. `promise`
    is for requests that were promised nothing, `pace` the seconds a prompt token takes; 0: none is ever late.
    """

    blocked: ClassVar[Until] = EACH_STEP  # requests become late as time passes

    def __init__(self, promise: float, pace: float, alpha: float) -> None:
        self._promise, self._pace, self._alpha = promise, pace, alpha
        self._in_time, self._late = _Sorted(self.key), _Sorted(self.key)
        self._by_start = _Sorted(self._start)

    def add(self, request: Request) -> None:
        self._in_time.add(request)
        if self._pace > 0:
            self._by_start.add(request)

    def drop(self, request: Request) -> None:
        self._in_time.drop(request)
        self._late.drop(request)
        self._by_start.drop(request)

    def key(self, request: Request) -> Key:
        due = first_due(request, self._promise)
        return (due + self._alpha * uncached(request), request.arrival, request.id)

    def _start(self, request: Request) -> Key:
        due = first_due(request, self._promise)
        return (due - self._pace * uncached(request), request.arrival, request.id)

    def _ids(self, view: View) -> Iterator[int]:
        """Time does not go back, so a request that was once late stays so."""
        for id in list(self._by_start.ids(most=view.now)):
            request = view.waiting.get(id)
            if request is not None:
                self.drop(request)
                self._late.add(request)
        yield from self._in_time.ids()
        yield from self._late.ids()


def first_due(request: Request, promise: float) -> float:
    """When its first token is due, by `promise` where it has none of its own."""
    own = request.slo.first_token
    return request.arrival + (promise if own is None else own)


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
        keys = self._keys
        for index in range(bisect_left(keys, (least,)), len(keys)):
            if keys[index][0] > most:
                break
            yield int(keys[index][-1])


QUANTUM = 20_000.0  # tokens by which a tenant may be ahead of another that waits
SAVED = 2 * QUANTUM  # tokens that a tenant counts as behind the most served at most
RECENT = 100  # outputs that a tenant's mean goes back


@mypyc_attr(serializable=True)
class Account:
    def __init__(self, tenant: str, served: float) -> None:
        self.tenant, self.served = tenant, served
        self.here = self.waiting = 0  # requests that wait or run; those of them that never ran
        self.ends, self.output = 0, 0.0  # outputs seen, and their mean


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class TenantAccounts:
    """Tokens that each tenant was served, as VTC counts them (arXiv 2401.00588).

    A prompt counts when it enters, without what the prefix cache has; an output token counts twice. Until a
    request ends, its output counts as predicted, or as the mean of its tenant's. A tenant that comes back
    starts at no less than the least served of those here, so that none saves up. We differ: a tenant is here
    while its requests wait or run, not only while they wait, so one that is served at once stays behind a
    flood; and it counts as `SAVED` tokens behind the most served at most, however little it asked for.

    Nothing is counted until a request has a tenant; those that wait by then without one share an account, as
    all later ones without one do. An account whose tenant has left is forgotten once that
    changes nothing. Beyond `MOST_TENANTS` accounts new tenants share that of requests without a tenant.
    Routers make one in plain Python, which compiled needs the mark for subclasses.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._line: list[tuple[float, str]] = []  # those here, the least served first
        self._floor = 0.0  # no account counts less; idle ones that have no more are forgotten
        self._of: dict[int, tuple[Account, float | None]] = {}  # by request: what was charged for its output
        self._nameless: dict[int, Request] = {}  # those that wait while no request has a tenant

    def arrived(self, request: Request) -> None:
        if not self._accounts:
            if not request.tenant:
                self._nameless[request.id] = request
                return
            nameless, self._nameless = self._nameless, {}
            for other in nameless.values():
                self._count(other)
        self._count(request)

    def _count(self, request: Request) -> None:
        self.left(request)
        account = self._account(request.tenant)
        if not account.here:
            account.served = max(account.served, self._least())
            insort(self._line, (account.served, account.tenant))
        account.here += 1
        account.waiting += 1
        self._of[request.id] = (account, None)

    def admitted(self, request: Request) -> None:
        """Charged once: that it was evicted is not its tenant's doing."""
        account, charged = self._of.get(request.id, (None, None))
        if account is None:
            self._nameless.pop(request.id, None)
            return
        if charged is not None:
            return
        account.waiting -= 1
        charged = OUTPUT_SERVICE * _expected(request, account)
        self._of[request.id] = (account, charged)
        self._charge(account, uncached(request) + charged)

    def left(self, request: Request) -> None:
        account, charged = self._of.pop(request.id, (None, None))
        if account is None:
            self._nameless.pop(request.id, None)
            return
        if charged is None:
            account.waiting -= 1
        else:
            self._charge(account, OUTPUT_SERVICE * request.generated - charged)
            account.ends += 1
            account.output += (request.generated - account.output) / min(account.ends, RECENT)
        account.here -= 1
        if not account.here:
            self._floor = self._least()
            del self._line[bisect_left(self._line, (account.served, account.tenant))]
            if account.served <= self._floor:
                del self._accounts[account.tenant]

    def name(self, request: Request) -> str:
        account, _ = self._of.get(request.id, (None, None))
        return "" if account is None else account.tenant

    def served(self, tenant: str) -> float:
        account = self._accounts.get(tenant)
        return self._floor if account is None else max(self._floor, account.served)

    def least_served(self) -> Iterator[tuple[float, str]]:
        """Tenants with requests that wait or run, the least served first."""
        for served, tenant in self._line:
            yield (max(self._floor, served), tenant)

    def price(self, request: Request) -> float:
        account, _ = self._of.get(request.id, (None, None))
        return uncached(request) + (0.0 if account is None else OUTPUT_SERVICE * _expected(request, account))

    def ahead(self) -> frozenset[str]:
        """Tenants more than `QUANTUM` ahead of another, both with requests that wait."""
        line, most = self._line, inf
        if len(line) < 2 or line[-1][0] - line[0][0] <= QUANTUM:
            return NO_TENANT
        tenants: list[str] = []
        for served, tenant in line:
            if self._accounts[tenant].waiting:
                if most == inf:
                    most = max(self._floor, served) + QUANTUM
                elif served > most:
                    tenants.append(tenant)
        return frozenset(tenants) if tenants else NO_TENANT

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None and len(self._accounts) >= MOST_TENANTS:
            floor = self._least()
            for old in [old for old in self._accounts.values() if not old.here and old.served <= floor]:
                del self._accounts[old.tenant]
            if len(self._accounts) >= MOST_TENANTS:
                tenant = ""
                account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant, self._least())
        return account

    def _least(self) -> float:
        return max(self._floor, self._line[0][0]) if self._line else self._floor

    def _charge(self, account: Account, tokens: float) -> None:
        del self._line[bisect_left(self._line, (account.served, account.tenant))]
        account.served = max(self._floor, account.served) + tokens
        insort(self._line, (account.served, account.tenant))
        self._floor = max(self._floor, self._line[-1][0] - SAVED)


NO_TENANT: frozenset[str] = frozenset()


def _expected(request: Request, account: Account) -> float:
    return min(account.output if request.guess is None else request.guess, request.limit)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class TenantQueues:
    """Waiting requests of each tenant by a key that never changes; the tenant served least goes first."""

    def __init__(self, accounts: TenantAccounts) -> None:
        self._accounts = accounts
        self._queues: dict[str, list[Key]] = {}
        self._of: dict[int, tuple[str, Key]] = {}

    def add(self, request: Request, key: Key) -> None:
        self.drop(request)
        tenant = self._accounts.name(request)
        self._of[request.id] = (tenant, key)
        insort(self._queues.setdefault(tenant, []), key)

    def drop(self, request: Request) -> None:
        place = self._of.pop(request.id, None)
        if place is None:
            return
        tenant, key = place
        keys = self._queues[tenant]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._queues[tenant]

    def ids(self, waiting: Mapping[int, Request]) -> Iterator[int]:
        """What comes first counts as served for what comes after it. No more tenants are read than needed."""
        if len(self._queues) == 1:
            for keys in self._queues.values():
                for key in keys:
                    yield int(key[-1])
            return
        behind = self._accounts.least_served()
        upcoming = self._next_of(behind)
        line: list[tuple[float, str]] = []  # a heap of the tenants that have had a turn or have it next
        places: dict[str, int] = {}
        while line or upcoming is not None:
            while upcoming is not None and (not line or upcoming[0] < line[0][0]):
                heappush(line, upcoming)
                upcoming = self._next_of(behind)
            served, tenant = line[0]
            place = places.get(tenant, 0)
            keys = self._queues[tenant]
            id = int(keys[place][-1])
            request = waiting.get(id)
            if request is not None:
                yield id
                served += self._accounts.price(request)
            places[tenant] = place + 1
            if place + 1 < len(keys):
                heapreplace(line, (served, tenant))
            else:
                heappop(line)

    def _next_of(self, behind: Iterator[tuple[float, str]]) -> tuple[float, str] | None:
        for served, tenant in behind:
            if tenant in self._queues:
                return (served, tenant)
        return None


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class LeastServed(KeyedOrder):
    """The tenant that was served least first, and of its requests the oldest."""

    def __init__(self) -> None:
        self.tenants = TenantAccounts()
        self._queues = TenantQueues(self.tenants)

    def add(self, request: Request) -> None:
        self.tenants.arrived(request)
        self._queues.add(request, (request.arrival, request.id))

    def drop(self, request: Request) -> None:
        self._queues.drop(request)

    def admitted(self, request: Request) -> None:
        self._queues.drop(request)
        self.tenants.admitted(request)

    def finished(self, request: Request) -> None:
        self._queues.drop(request)
        self.tenants.left(request)

    def _ids(self, view: View) -> Iterator[int]:
        return self._queues.ids(view.waiting)


ORDERS = ("arrival", "shortest", "priority", "deadline", "fair", "vtc")


def order_of(owner: str, name: str, ageing: float, promise: float, pace: float) -> PromptOrder:
    if not (isfinite(ageing) and ageing >= 0):
        raise InputError(f"{owner}: ageing={ageing} tokens per second; it must be 0 (none) or more")
    if not promise > 0:
        raise InputError(f"{owner}: first_token={promise} s; a promise must be above 0")
    if name == "arrival":
        return PromptOrder()
    if name == "shortest":
        return ShortestPrompt(ageing)
    if name == "priority":
        return ByPriority(ageing)
    if name == "deadline":
        return EarliestDeadline(promise, pace, ageing)
    if name in ("fair", "vtc"):
        return LeastServed()
    raise unknown(f"order of {owner}", name, ORDERS)


def begun(prompts: Iterable[Request], tokens: int) -> tuple[list[int], int]:
    """Those of which something runs in so many tokens, one after the other; and the tokens left over."""
    ids: list[int] = []
    for request in prompts:
        if tokens <= 0:
            break
        ids.append(request.id)
        tokens -= request.todo
    return ids, tokens


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
    if not 0 <= value < 1:
        raise InputError(f"{owner}: {name}={value}; it is a share of the KV, from 0 to below 1")
    return value
