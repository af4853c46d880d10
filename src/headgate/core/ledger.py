"""The one implementation of View: requests by state, kept by O(1) transitions.

Decodes that get a token in every step share one counter, the *tick*. A request stores the tick at
which it joined; its tokens are the difference. So a step touches no request: it moves the counter.
A plan without decodes leaves the counter still. Only requests that a plan leaves out by
name (`held`) have a count of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import inf
from typing import Any, Final

from headgate.core.errors import InputError
from headgate.core.request import NO_SLO, Identity, Slo
from headgate.core.view import Limits

NOT_ROLLING: Final = -1


class Deliveries:
    """What the coming steps of a decode deliver, where the engine speculates and this was drawn beforehand.

    `sums[i]` tokens after i steps since its prompt was done; while it takes step i it holds `blocks[i]` KV
    blocks (0: before the first). Both go one step beyond its end, which an asynchronous engine may run.
    """

    __slots__ = ("at", "blocks", "sums")

    def __init__(self, sums: list[int], blocks: list[int]) -> None:
        self.sums, self.blocks = sums, blocks
        self.at = 0  # steps it had taken when it last began to roll, or stopped


class Entry(Identity):
    """One request in the ledger; policies see it as a read-only `Request`."""

    __slots__ = (
        "_joined", "_last", "_ledger", "_tokens", "admission", "cached", "deliveries", "drawn", "end",
        "evictions", "hit", "loose", "queued", "todo", "wasted",
    )  # fmt: skip

    def __init__(
        self,
        ledger: Ledger,
        id: int,
        arrival: float,
        prompt: int,
        limit: int,
        kind: str = "",
        guess: int | None = None,
        priority: int = 0,
        slo: Slo = NO_SLO,
        tenant: str = "",
    ) -> None:
        Identity.__init__(self, id, arrival, prompt, limit, kind, guess, priority, slo, tenant)
        self._ledger = ledger
        self._joined = NOT_ROLLING
        self._tokens = 0
        self._last: float | None = None
        self.queued = arrival
        self.todo = prompt
        self.cached = 0  # prompt tokens whose KV was there when it was first admitted
        self.hit = 0  # while it waits: tokens of the prefix cache it counts on; `todo` is without them
        self.loose = 0  # of `hit`, tokens for which admission takes memory: no request holds their blocks yet
        self.evictions = 0
        self.wasted = 0
        self.admission = 0  # how many had been admitted before it
        self.end = NOT_ROLLING  # tick of its last token, where the driver knows it
        self.deliveries: Deliveries | None = None  # None: a token a step
        self.drawn = 0  # steps it took before its KV was dropped, whose draws are used up

    @property
    def room(self) -> int:
        return self.todo + self.loose

    @property
    def rolls(self) -> bool:
        return self._joined != NOT_ROLLING

    @property
    def ticked(self) -> bool:
        """Did it get a token with the newest tick?"""
        return self._joined != NOT_ROLLING and self._joined != self._ledger.tick

    @property
    def generated(self) -> int:
        if self._joined == NOT_ROLLING:
            return self._tokens
        if self.deliveries is not None:
            return self._tokens + self._gained(self.deliveries)
        return self._tokens + self._ledger.tick - self._joined

    def _gained(self, deliveries: Deliveries) -> int:
        sums, at = deliveries.sums, deliveries.at
        return sums[at + self._ledger.tick - self._joined] - sums[at]

    @property
    def taken(self) -> int:
        assert self.deliveries is not None
        rolled = 0 if self._joined == NOT_ROLLING else self._ledger.tick - self._joined
        return self.deliveries.at + rolled

    @property
    def burst(self) -> int:
        if self.deliveries is None:
            return 1
        sums, taken = self.deliveries.sums, self.taken
        return sums[taken] - sums[taken - 1] if taken else 1

    @property
    def last_token(self) -> float | None:
        if self._joined == NOT_ROLLING or self._joined == self._ledger.tick:
            return self._last
        return self._ledger.ticked

    @property
    def held_kv(self) -> int:
        """KV tokens it holds: all known tokens but those to prefill, and but the newest while it decodes."""
        if self._joined != NOT_ROLLING:
            if self.deliveries is not None:
                return self.prompt + self._tokens + self._gained(self.deliveries) - 1
            return self.prompt + self._tokens + self._ledger.tick - self._joined - 1
        known = self.prompt + self._tokens
        return known - 1 if self.id in self._ledger.decoding else known - self.todo - self.hit

    def expect(self, found: int, loose: int, shared: int, arrives: bool = False) -> bool:
        """While it waits: note what it need not compute; True: another number of tokens than before.

        `found` tokens are in the prefix cache, `loose` of them in blocks that no request holds. `shared` are
        those of a request before it: they will be there by its turn, but for its last token. Memory counts as
        it is now, except for one that `arrives`: by its turn the one before it holds what they share.
        """
        block, known = self._ledger.limits.block, self.todo + self.hit
        hit = max(found, min(shared, (known - 1) // block * block))
        loose = min(loose, max(0, found - shared)) if arrives else loose + hit - found
        if hit == self.hit and loose == self.loose:
            return False
        self.todo, self.hit, self.loose = known - hit, hit, loose
        if not self.evictions:
            self.cached = self.prompt + self.generated - self.todo  # with KV that came from elsewhere
        return True

    def __repr__(self) -> str:
        return (
            f"Request({self.id}, kind={self.kind!r}, prompt={self.prompt}, todo={self.todo}, "
            f"generated={self.generated}, evictions={self.evictions})"
        )


def entry_of(ledger: Ledger, id: int, arrival: float, known: tuple[Any, ...]) -> Entry:
    """From the fields after `arrival`, in the order of `Identity`: quicker than an argument list unpacked."""
    prompt, limit, kind, guess, priority, slo, tenant = known
    return Entry(ledger, id, arrival, prompt, limit, kind, guess, priority, slo, tenant)


class Ledger:
    """Live state of one engine, as policies read it. Drivers feed it transitions."""

    __slots__ = (
        "_fresh", "_retired", "admitted", "context", "decoding", "growth", "held", "kv_free", "kv_shared",
        "kv_total", "limits", "now", "past", "prefilling", "rolling", "tick", "ticked", "waiting",
    )  # fmt: skip

    def __init__(self, limits: Limits, kv_total: int) -> None:
        self.limits = limits
        self.now = 0.0
        self.kv_total = kv_total
        self.kv_free = kv_total
        self.kv_shared = 0
        self.waiting: OrderedDict[int, Entry] = OrderedDict()
        self.prefilling: dict[int, Entry] = {}
        self.decoding: dict[int, Entry] = {}
        self.held: dict[int, Entry] = {}  # decodes outside the rolling set
        self.admitted = 0  # how often a slot was given
        self.tick = 0  # steps in which the rolling set got a token
        self.ticked = 0.0  # when the newest tick ended
        self.rolling = 0  # decodes that share the tick
        self.context = 0  # KV tokens they hold
        self.growth: list[int] | None = None  # tokens that each tick brings; None: one for each of them
        self.past = 0  # ticks that `growth` has forgotten
        self._fresh: dict[int, Entry] = {}  # of those, the ones that joined since the newest tick
        self._retired: dict[int, Entry] = {}  # decodes that have all their tokens

    @property
    def oldest_token(self) -> float:
        """Looks at requests that do not share the newest tick, and at no others."""
        oldest = self.ticked if self.rolling > len(self._fresh) else inf
        for some in (self._fresh, self.held, self._retired):
            for entry in some.values():
                if entry._last is not None:
                    oldest = min(oldest, entry._last)
        return oldest

    def arrive(self, entry: Entry) -> None:
        entry._ledger = self
        self.waiting[entry.id] = entry

    def admit(self, entry: Entry) -> None:
        del self.waiting[entry.id]
        self.prefilling[entry.id] = entry
        entry.admission = self.admitted
        self.admitted += 1

    def join(self, entry: Entry, now: float, rolling: bool) -> None:
        """Its prompt is done and has brought one token; it decodes from now on."""
        del self.prefilling[entry.id]
        entry._tokens += 1
        entry._last = now
        self._decode(entry, rolling)

    def take_in(self, entry: Entry, rolling: bool) -> None:
        entry._ledger = self
        entry.admission = self.admitted
        self.admitted += 1
        self._decode(entry, rolling)

    def take_back(self, entry: Entry) -> None:
        """It comes from another engine without its KV, which must be computed again before all others'."""
        entry._ledger = self
        entry.hit = entry.loose = 0
        entry.wasted += entry.prompt + entry._tokens - 1
        self._wait_first(entry)

    def ticks(self, count: int, now: float) -> None:
        """The rolling set got a token in each of `count` steps, the last of which ended now."""
        if self.growth is None:
            self.context += count * self.rolling
        else:
            begin = self.tick - self.past
            for tokens in self.growth[begin : begin + count]:
                self.context += tokens
        self.tick += count
        self.ticked = now
        if count and self._fresh:
            self._fresh = {}

    def redate(self, seen: float, rolling: bool, those: Iterable[tuple[Entry, int]]) -> None:
        """Tokens that got their date when their step was composed are `seen` now.

        They are the `rolling` set's, where the newest tick is of that step, and those of requests that joined
        or left the set since then: each with its number of tokens, for it may have got another meanwhile.
        """
        if rolling:
            self.ticked = seen
        for entry, tokens in those:
            if entry.generated == tokens:
                entry._last = seen

    def hold(self, entry: Entry) -> None:
        self._stop(entry)
        self.held[entry.id] = entry

    def resume(self, entry: Entry) -> None:
        del self.held[entry.id]
        self._roll(entry)

    def retire(self, entry: Entry) -> None:
        self._stop(entry)
        self._retired[entry.id] = entry

    def recount(self, entry: Entry, tokens: int) -> None:
        """It has this many output tokens: a live engine may give several in a step, or take one back."""
        more = tokens - entry.generated
        if more:
            entry._tokens += more
            if entry._joined != NOT_ROLLING:
                self.context += more

    def take_token(self, entry: Entry, before: float) -> None:
        """It waits again, and its newest token was dropped; the one before it came at `before`."""
        entry._tokens -= 1
        entry.todo -= 1
        entry._last = before if entry._tokens else None

    def evict(self, entry: Entry) -> None:
        """Its KV is gone; all its tokens must be prefilled again, before those of all others."""
        entry.wasted += entry.held_kv
        self._remove_running(entry)
        self._wait_first(entry)

    def _wait_first(self, entry: Entry) -> None:
        entry.todo = entry.prompt + entry._tokens
        entry.evictions += 1
        self.waiting[entry.id] = entry
        self.waiting.move_to_end(entry.id, last=False)

    def leave(self, entry: Entry) -> None:
        if entry._joined != NOT_ROLLING:
            self._stop(entry)
            del self.decoding[entry.id]
        elif entry.id in self.waiting:
            del self.waiting[entry.id]
        else:
            self._remove_running(entry)

    def find(self, id: int) -> Entry | None:
        return self.waiting.get(id) or self.prefilling.get(id) or self.decoding.get(id)

    def known(self, id: int) -> Entry:
        return self.waiting.get(id) or self.prefilling.get(id) or self.decoding[id]

    def _remove_running(self, entry: Entry) -> None:
        if entry._joined != NOT_ROLLING:
            self._stop(entry)
        self.held.pop(entry.id, None)
        self._retired.pop(entry.id, None)
        self.prefilling.pop(entry.id, None)
        self.decoding.pop(entry.id, None)

    def _decode(self, entry: Entry, rolling: bool) -> None:
        self.decoding[entry.id] = entry
        if rolling:
            self._roll(entry)
        else:
            self.held[entry.id] = entry

    def _roll(self, entry: Entry) -> None:
        entry._joined = self.tick
        self._fresh[entry.id] = entry
        self.rolling += 1
        self.context += entry.prompt + entry._tokens - 1

    def _stop(self, entry: Entry) -> None:
        ran = self.tick - entry._joined
        if ran:
            if entry.deliveries is None:
                entry._tokens += ran
            else:
                entry._tokens += entry._gained(entry.deliveries)
                entry.deliveries.at += ran
            entry._last = self.ticked
        else:
            del self._fresh[entry.id]
        entry._joined = NOT_ROLLING
        self.rolling -= 1
        self.context -= entry.prompt + entry._tokens - 1


LEAST_STEPS = 32


class Watchdog:
    """Checks every `limit` seconds; a request without progress between two checks is starving.

    It watches every half-done prompt, every decode, and the head of the queue. A head that never moves is
    starving when another request was admitted meanwhile, or when none runs; while the same requests run on,
    the engine is just full. Detection takes one to two limits.

    Where the driver says how many `steps` have run, a look needs `LEAST_STEPS` since the last one: an engine
    that stands still (a suspended machine, a step of minutes) starves all, and no policy is to blame.
    """

    def __init__(self, limit: float) -> None:
        if not limit > 0:
            raise InputError(f"watchdog is {limit} s; give a time above 0")
        self.limit = limit
        self.next_look = limit
        self._seen: dict[int, tuple[int, int]] = {}
        self._steps = 0  # at the last look

    def forget(self, now: float) -> None:
        """The engine was paused, or another policy decides now: start again."""
        self._seen = {}
        self.next_look = now + self.limit

    def look(self, ledger: Ledger, now: float, steps: int | None = None) -> str | None:
        if steps is not None:
            if steps - self._steps < LEAST_STEPS:
                return None
            self._steps = steps
        self.next_look = now + self.limit
        watched = [*ledger.prefilling.values(), *ledger.decoding.values()]
        just_full = watched and all(request.id in self._seen for request in watched)
        if ledger.waiting and not just_full:
            watched.append(next(iter(ledger.waiting.values())))
        before, self._seen = self._seen, {r.id: (r.generated, r.todo) for r in watched}
        stuck = [id for id, progress in self._seen.items() if before.get(id) == progress]
        if not stuck:
            return None
        first = min(stuck)
        running = "half-prefilled" if first in ledger.prefilling else "held"
        where = "waiting" if first in ledger.waiting else running
        return f"request {first} ({where}) and {len(stuck) - 1} more made no progress for {self.limit:g} s"
