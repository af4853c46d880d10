"""Several routers before the same engines: slots and limits are leased through Redis or Valkey.

Every router decides within its leases, in memory. Ten times a second while it has requests it tells the store
what it holds, runs and needs, and learns what it may have. A lease grows only by slots that no other router
holds. It shrinks before the store hears of it, by what others lack, and never below what runs, so the leases
of an engine never exceed its slots. What was spent of a bucket is told as a sum, so an exchange whose answer
is lost counts once. A router that the store has not heard of for a lease (5 s) is gone; what still runs there
is taken off its slots as `foreign`. Without the store every router keeps its leases; a store that has
forgotten everything grants nothing for 2 s, until all have told it what they hold.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headgate.core.errors import InputError
from headgate.live.route.config import Replicas
from headgate.live.route.deliver.legs import Allowance, TenantUse
from headgate.live.route.engines import Upstream
from headgate.live.route.gate.queue import live_room
from headgate.live.route.observe import clean
from headgate.live.tasks import end_all, why
from headgate.methods.fluid.online import Online

if TYPE_CHECKING:
    from headgate.live.route.server import RouterApp

log = logging.getLogger("headgate.route")
BUSY, IDLE = 0.1, 0.25  # seconds between two exchanges, with and without requests inside
SOONEST = 0.01  # seconds between two exchanges that requests ask for
TIMEOUT = 1.0  # seconds for an exchange
SETTLING = 2.0  # seconds in which a new store grants nothing: longer than any router needs to come back
LOOKS = (0.0, 0.05, 0.05, 0.05)  # seconds before each exchange that a request asks for before it is refused
STALE = 1.0  # seconds after which an account is compared before a request counts on it
FEW = 32  # requests at once for each router: none of fewer are leased ahead
MOST_SHARED = 256  # accounts of either kind: exchanges cost the store in proportion, and clients choose names
AT_REST = 5.0  # seconds without use after which an account is given up
SMOOTHING = 0.02  # of the newest share of the engines in the one that plans are made for
SPARE_SLOTS, SPARE_PLACES = 1.0, 0.5  # share of what is not needed that is leased ahead


@dataclass
class SlotLease:
    held: int = 0
    give: int = 0  # that others lack


@lru_cache(maxsize=16384)
def _hashed(name: str) -> str:
    """Names of keys, tenants, addresses and engines do not reach the store."""
    return sha256(name.encode()).hexdigest()[:24]


def _why(error: Exception) -> str:
    return clean(why(error)) if str(error) else f"no answer within {TIMEOUT:g} s"


def _is_full(shared: Mapping[str, object], name: str) -> bool:
    return name not in shared and len(shared) >= MOST_SHARED


class ReplicaStore:
    def __init__(self, settings: Replicas, app: RouterApp) -> None:
        try:
            import redis.asyncio as redis
        except ImportError:
            raise InputError(
                'replicas.store needs package redis; pip install "headgate[redis]", in a clone ".[redis]"'
            ) from None
        self._failures = (redis.RedisError, OSError, TimeoutError, ValueError)
        self.settings, self.app = settings, app
        self.id = secrets.token_hex(8)
        self.up = False
        self.routers = 1  # last seen
        self.exchanges = self.losses = 0
        self.took = 0.0  # seconds of the last exchange
        self._leases: dict[str, SlotLease] = {}  # by URL
        self._buckets: dict[str, Allowance] = {}  # those that are in use, by name
        self._places: dict[str, TenantUse] = {}
        self._number, self._kick = 0, asyncio.Event()
        self._asking: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        password = None if settings.password_env is None else os.environ.get(settings.password_env)
        if settings.password_env is not None and not password:
            raise InputError(f"environment variable {settings.password_env} is not set; set it")
        given: dict[str, Any] = {"password": password} if password else {}
        try:
            self._client = redis.Redis.from_url(
                settings.store or "",
                socket_timeout=TIMEOUT,
                socket_connect_timeout=TIMEOUT,
                retry=None,
                **given,
            )
        except ValueError as error:
            raise InputError(f"replicas.store: {error}; check it") from None
        script = Path(__file__).with_name("exchange.lua").read_text(encoding="utf-8")
        self._script = self._client.register_script(script)
        self._prefix = "{" + settings.name + "}"

    async def start(self) -> None:
        """Wait for the first leases. A router that cannot reach its store does not know its share."""
        try:
            await self._exchange()
            until = self.app.now() + SETTLING + BUSY
            while not any(lease.held for lease in self._leases.values()) and self.app.now() < until:
                await asyncio.sleep(BUSY)
                await self._exchange()
        except (*self._failures, TypeError) as error:  # the latter: an option of the URL that redis lacks
            await self._client.aclose()
            raise InputError(f"replicas.store cannot be used, {_why(error)}; check it") from None
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Nothing runs here any more: the others need not wait for the end of the lease."""
        if self._task is not None:
            await end_all([self._task])
            with suppress(*self._failures):
                await self._client.hdel(f"{self._prefix}:rows", self.id)
            await self._client.aclose()

    def room(self, upstream: Upstream, most: int, prompts: int) -> tuple[int, int]:
        pool, held = self._pool(upstream), self.held(upstream)
        return min(most, held), max(1, round(prompts * held / pool)) if held < pool else prompts

    async def ready(
        self, uses: Iterable[tuple[str, TenantUse]], *buckets: Allowance, tokens: float = 1.0
    ) -> None:
        """Others may hold what these need and use it no more: they tell within a tenth of a second."""
        counts = [use for _, use in uses]
        all_buckets = [(each, tokens) for each in buckets]
        for use in counts:
            all_buckets += [(each, 1.0) for each in (use.requests, use.tokens) if each is not None]
        for wait in LOOKS:
            now = self.app.now()
            lacking = [self._lacks_place(use) for use in counts if use.most is not None]
            lacking += [self._lacks(bucket, needs, now) for bucket, needs in all_buckets]
            if not any(lacking) or not self.up or (wait and self.routers == 1):
                return
            await asyncio.sleep(wait)
            done = asyncio.get_running_loop().create_future()
            self._asking.append(done)
            self._kick.set()
            await done

    def _lacks_place(self, use: TenantUse) -> bool:
        if self._places.get(use.name) is not use:
            use.lease = max(1, (use.most or 0) // self.routers)
            if _is_full(self._places, use.name):
                return False
            self._places[use.name] = use
            use.lease = 0 if self.up else use.lease
        lacks = use.lease is not None and use.lease <= use.inflight < (use.most or 0)  # else none has more
        use.wanted += lacks
        return lacks

    def _lacks(self, bucket: Allowance, tokens: float, now: float) -> bool:
        if self._buckets.get(bucket.name) is not bucket:
            full = _is_full(self._buckets, bucket.name)
            if (full or not self.up) and (not bucket.alone or bucket.compared == -inf):
                bucket.compare(bucket.most / self.routers, 1 / self.routers, now)
                bucket.alone = True
            if full:
                bucket.spent = 0.0  # no other router hears of it
                return False
            self._buckets[bucket.name] = bucket
        bucket.used_at = now
        short = min(tokens, bucket.full) - bucket.level(now)
        stale = now - bucket.compared > STALE
        lacks = stale or (short > 0 and short <= bucket.elsewhere)
        bucket.wanted += tokens * lacks
        return lacks

    async def _run(self) -> None:
        while True:
            began = self.app.now()
            try:
                busy = self.app.gate.tickets or self._places or self._buckets
                async with asyncio.timeout(BUSY if busy else IDLE):
                    await self._kick.wait()
                await asyncio.sleep(max(SOONEST, self.took) - (self.app.now() - began))
            except TimeoutError:
                pass
            self._kick.clear()
            asking, self._asking, was_up = self._asking, [], self.up
            try:
                await self._exchange()
                if not was_up:
                    log.warning("the store is back: slots and limits are shared again")
            except self._failures as error:
                if self.up:
                    self.up, self.losses = False, self.losses + 1
                    log.error("the store is lost, leases stay as they are: %s", _why(error))
            except Exception:
                log.exception("an exchange with the store failed")
            for done in asking:
                if not done.done():
                    done.set_result(None)

    async def _exchange(self) -> None:
        began = self.app.now()
        engines = [each for each in self.app.upstreams.values() if not each.retired]
        leases = self._told_slots(engines)
        places = self._told_places(began)
        leases += [told for _, told in places]
        buckets = self._told_buckets(began)
        told = json.dumps({"leases": leases, "buckets": [row for *_, row in buckets]}, separators=(",", ":"))
        self._number += 1
        keys = [f"{self._prefix}:rows", *(f"{self._prefix}:level:{row[0]}" for *_, row in buckets)]
        lease, settling = int(1000 * self.settings.lease), int(1000 * SETTLING)
        try:
            async with asyncio.timeout(TIMEOUT):
                answer = await self._script(keys=keys, args=[self.id, self._number, lease, settling, told])
            if len(answer) != 1 + 3 * (len(leases) + len(buckets)):
                raise ValueError("its answer is not one of ours")
        except BaseException:
            for bucket, spent, _ in buckets:
                bucket.spent += spent
                bucket.alone = True
            raise
        now = self.app.now()
        self.up, self.exchanges, self.took = True, self.exchanges + 1, now - began
        self.routers = int(answer[0])
        rows = [tuple(map(int, answer[at : at + 3])) for at in range(1, 1 + 3 * len(leases), 3)]
        for upstream, (held, give, running) in zip(engines, rows, strict=False):
            lease_here = self._leases[upstream.url]
            lease_here.held, lease_here.give, upstream.peers = held, give, running
        for (use, _), (held, give, _) in zip(places, rows[len(engines) :], strict=True):
            use.lease, use.give, use.wanted = held, give, 0
        levels = answer[1 + 3 * len(leases) :]
        for number, (bucket, spent, _) in enumerate(buckets):
            bucket.told += spent
            part, level, many = levels[3 * number : 3 * number + 3]
            bucket.elsewhere = float(level) - float(part)
            bucket.compare(float(part), 1 / int(many), now)
        self._apply(engines)

    def _told_slots(self, engines: Sequence[Upstream]) -> list[list[Any]]:
        app, now = self.app, self.app.now()
        pools = {each.url: self._pool(each) for each in engines}
        able = {each.url for each in engines if each.up(now)}
        places = sum(pools[url] for url in able) or 1
        waiting = len(app.gate.roster.waiting) + len(app.gate.roster.handoff)
        self._leases = {each.url: self._leases.get(each.url, SlotLease()) for each in engines}
        told: list[list[Any]] = []
        leaving = app.leaving
        for each in engines:
            url, lease = each.url, self._leases[each.url]
            load = app.gate.roster.replicas[each.id].load
            need = load + (ceil(waiting * pools[url] / places) if url in able else 0)
            give = lease.held - need if leaving else lease.give
            lease.held, lease.give = max(load, lease.held - max(0, give)), 0
            spare = 0.0 if leaving or url not in able else SPARE_SLOTS
            told.append([_hashed(f"engine {url}"), pools[url], lease.held, need, max(load, each.legs), spare])
        self._apply(engines)  # before the store hears of it
        return told

    def _told_places(self, now: float) -> list[tuple[TenantUse, list[Any]]]:
        told: list[tuple[TenantUse, list[Any]]] = []
        for name, use in [*self._places.items()]:
            if not use.inflight and not use.wanted and now - use.used_at > AT_REST:
                del self._places[name]  # its lease ends with it: the next request asks anew
                use.lease = 0
                continue
            most, need = use.most or 0, use.inflight + use.wanted
            few = most < FEW * self.routers  # none may be idle at one router while another lacks it
            use.lease = max(use.inflight, 0 if few else min(use.lease or 0, most) - use.give)
            spare = 0.0 if few else SPARE_PLACES
            told.append((use, [_hashed(name), most, use.lease, need, use.inflight, spare]))
        return told

    def _told_buckets(self, now: float) -> list[tuple[Allowance, float, list[Any]]]:
        told: list[tuple[Allowance, float, list[Any]]] = []
        for name, bucket in [*self._buckets.items()]:
            spent, bucket.spent = bucket.spent, 0.0
            wanted, bucket.wanted = bucket.wanted, 0.0
            active = bool(spent) or now - bucket.used_at <= AT_REST
            if not active and bucket.rests(now):
                del self._buckets[name]
                continue
            row = [_hashed(name), bucket.per_minute / 60_000, bucket.most, spent, wanted, active, bucket.told]
            told.append((bucket, spent, row))
        return told

    def _apply(self, engines: Sequence[Upstream]) -> None:
        app = self.app
        app.gate.set_rooms({each.id: app.room_of(each) for each in engines})
        held = sum(self._leases[each.url].held for each in engines)
        pool = sum(self._pool(each) for each in engines)
        router = app.policy.router
        if isinstance(router, Online) and held and pool:
            newest = min(1.0, held / pool)
            router.share += SMOOTHING * (newest - router.share)
            if self.routers == 1:
                router.share = 1.0

    def _pool(self, upstream: Upstream) -> int:
        slots = upstream.spec.slots
        if upstream.foreign:
            return max(1, slots - upstream.foreign)
        return live_room("any", slots, 1, self.app.gate.router.sends_at_once).total

    def gauges(self) -> dict[str, float]:
        return {
            "store_up": float(self.up),
            "store_losses": float(self.losses),
            "store_exchange_seconds": self.took,
            "routers": float(self.routers),
        }

    def held(self, upstream: Upstream) -> int:
        return self._leases[upstream.url].held if upstream.url in self._leases else 0
