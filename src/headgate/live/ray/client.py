"""A router's side of the shared gate: many events in one call, and a gate of its own while that is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from headgate.core.errors import one_line
from headgate.live.ray.gate import Counts, Event, Heard, Placement, RayConfig, SharedGate
from headgate.live.route.gate.queue import Refused

log = logging.getLogger("headgate.route")
LATER = ("end", "freed")  # told at once only while requests wait for a place
SOON = 0.01  # seconds until it is told anyway
NEWS = 2.0  # seconds a question for news is held
AGAIN = 0.5  # seconds between two attempts to reach the shared gate, at first
RARELY = 4.0  # at most: below the time for which a new gate waits for the others (`ray_gate.GRACE`)
FIRST = 30.0  # seconds for its first start, in which a process is begun


class LeftCluster(Exception):  # noqa: N818  (news, not a fault)
    """This process has left the cluster: there will be no shared gate any more."""


class Remote(Protocol):
    """A shared gate in another process: as `SharedGate`, and `close` when it is not asked any more."""

    async def join(
        self, name: str, slots: Counts, busy: Counts, clients: int, given: dict[str, Any], deployed: float
    ) -> int: ...
    async def tell(self, name: str, events: Sequence[Event]) -> Heard | None: ...
    async def news(self, name: str, seconds: float) -> Heard | None: ...
    def close(self) -> None: ...


Connect = Callable[[], Awaitable[Remote]]


class ClientRequest:
    """One request of this router, from its arrival to its end."""

    __slots__ = ("about", "answer", "key", "placed_in", "replica")

    def __init__(self, key: int, about: tuple[str, str, int, int, int]) -> None:
        self.key, self.about = key, about  # request, class, prompt, limit, priority
        self.replica = ""  # where it is; empty: it waits
        self.placed_in = -1  # which gate placed it, by `GateClient.term`
        self.answer: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()


class GateClient:
    """Asks the shared gate where requests go. Used from one event loop.

    When the shared gate is lost, a gate in this process takes over at once: requests that waited wait there,
    and each replica takes the share of its slots that falls to this router, so that all routers together
    admit no more than before. Once there is a shared gate again, everything moves back.
    """

    def __init__(self, config: RayConfig, name: str, connect: Connect | None, deployed: float = 0.0) -> None:
        self.config, self.name, self._connect, self._deployed = config, name, connect, deployed
        self.entries: dict[int, ClientRequest] = {}
        self.term = 0  # counts the gates that were asked
        self.lost = 0  # times the shared gate was lost
        self.local: SharedGate | None = None
        self._remote: Remote | None = None
        self._clients = 1
        self._slots: dict[str, int] = {}
        self._outbox: list[Event] = []
        self._telling, self._number = False, 0
        self._others_wait = self._later = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False

    def set_replicas(self, slots: Counts) -> None:
        if slots == self._slots and self._started:
            return
        self._slots = dict(slots)
        if not self._started:
            self._started = True
            if self._connect is None:
                self._stand_in()
            else:
                self._run(self._reach(FIRST))
            return
        self._say("replicas", self._slots)

    def dead(self, replica: str) -> None:
        self._slots.pop(replica, None)
        self._say("dead", replica)

    async def place(self, about: tuple[str, str, int, int, int]) -> ClientRequest:
        """A request (its id, class, prompt, limit, priority) waits for a replica. Raises Refused.

        When the wait is cancelled the request is gone from the gate.
        """
        self._number += 1
        entry = self.entries[self._number] = ClientRequest(self._number, about)
        self._say("arrive", entry.key, *about)
        return await self._answered(entry)

    async def again(self, entry: ClientRequest) -> ClientRequest:
        """Its replica could not take it: it waits for another one."""
        entry.answer = asyncio.get_running_loop().create_future()
        before, entry.replica = entry.replica, ""
        if entry.placed_in == self.term:
            self._say("back", entry.key)
        else:
            self._say("freed", before)
            self._say("arrive", entry.key, *entry.about)
        return await self._answered(entry)

    def end(self, entry: ClientRequest) -> None:
        """It has ended, wherever it was. Told again it does nothing."""
        if self.entries.pop(entry.key, None) is None:
            return
        if entry.replica and entry.placed_in != self.term:
            self._say("freed", entry.replica)
        else:
            self._say("end", entry.key)

    async def _answered(self, entry: ClientRequest) -> ClientRequest:
        try:
            answer = await entry.answer
        except asyncio.CancelledError:
            self.end(entry)
            raise
        if not answer.replica:
            self.entries.pop(entry.key, None)
            raise Refused(answer.status, answer.reason, answer.retry_after)
        return entry

    # -- telling and hearing

    def _say(self, *event: Any) -> None:
        if self.local is not None:
            self.local.book(self.name, (event,))
            return
        self._outbox.append(event)
        if event[0] in LATER and not self._others_wait:
            if not self._later:
                self._later = True
                asyncio.get_running_loop().call_later(SOON, self._send)
        else:
            self._send()

    def _send(self) -> None:
        self._later = False
        if self._remote is not None and self._outbox and not self._telling:  # else: with the next call
            self._telling = True
            self._run(self._flush(self._remote, self.term))

    def _hear(self, answers: list[Placement]) -> None:
        for answer in answers:
            entry = self.entries.get(answer.key)
            if entry is not None and not entry.answer.done():  # else: cancelled, and its end was told
                entry.replica, entry.placed_in = answer.replica, self.term
                entry.answer.set_result(answer)

    async def _flush(self, remote: Remote, term: int) -> None:
        while self._outbox and term == self.term:
            events, self._outbox = self._outbox, []
            await self._ask(remote.tell(self.name, events), self.config.timeout, term)
        if term == self.term:
            self._telling = False

    async def _listen(self, remote: Remote, term: int) -> None:
        """What is decided without a call of ours; it also says that this router lives."""
        while term == self.term:
            await self._ask(remote.news(self.name, NEWS), NEWS + self.config.timeout, term)

    async def _ask(self, call: Awaitable[Heard | None], seconds: float, term: int) -> None:
        try:
            async with asyncio.timeout(seconds):
                heard = await call
        except Exception as error:
            if term == self.term:
                self._lose(one_line(error))
            return
        if term != self.term:
            return
        if heard is None:
            self._lose("it does not know this router any more")
            return
        answers, self._clients, self._others_wait = heard
        self._hear(answers)

    # -- losing and finding the shared gate

    def _lose(self, why: str) -> None:
        self.lost += 1
        log.warning("the shared gate is lost, this router gates alone for now: %s", why)
        self._stand_in()
        self._run(self._reach())

    def _next_term(self) -> Counter[str]:
        """Another gate is asked: requests that wait come anew, those that are placed are `busy`."""
        self.term += 1
        self._telling = False
        if self.local is not None:
            self.local.forget(self.name)
            self.local = None
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        waiting = [entry for entry in self.entries.values() if not entry.replica]
        self._outbox = [("arrive", entry.key, *entry.about) for entry in waiting]
        return Counter(entry.replica for entry in self.entries.values() if entry.replica)

    def _stand_in(self) -> None:
        busy = self._next_term()
        share = 1.0 if self._connect is None else 1 / max(1, self._clients)
        gate = SharedGate(self.config.model_dump(), share)
        gate.enter(self.name, self._slots, busy)
        gate.clients[self.name].deliver = self._hear
        self.local, events = gate, self._outbox
        self._outbox = []
        gate.book(self.name, events)

    async def _reach(self, seconds: float = 0.0) -> None:
        assert self._connect is not None
        pause = AGAIN
        while True:
            try:
                async with asyncio.timeout(seconds or FIRST):
                    remote = await self._connect()
            except LeftCluster:
                return
            except Exception as error:
                log.warning("no shared gate: %s", one_line(error))
            else:
                if await self._move_to(remote):
                    return
            if self.local is None:
                self._stand_in()
            await asyncio.sleep(pause)
            pause = min(2 * pause, RARELY)

    async def _move_to(self, remote: Remote) -> bool:
        busy = self._next_term()
        term, given = self.term, self.config.model_dump(mode="json")
        try:
            async with asyncio.timeout(self.config.timeout):
                self._clients = await remote.join(
                    self.name, dict(self._slots), busy, self._clients, given, self._deployed
                )
        except Exception as error:
            log.warning("the shared gate does not answer: %s", one_line(error))
            remote.close()
            return False
        self._remote = remote
        self._run(self._listen(remote, term))
        self._send()
        return True

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self._next_term()
        for task in [*self._tasks]:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
