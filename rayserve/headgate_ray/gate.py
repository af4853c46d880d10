"""One gate for all routers of a Ray Serve deployment: what the gate actor does, without a word of Ray.

Each router is a client: it joins with the replicas it sees, tells what happens to its requests, and hears
where they go, in the answer to a call or by waiting for `news`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.core.request import NO_SLO, Slo
from headgate.live.route.config import GateConfig
from headgate.live.route.gate.gate import EngineState, Gate, Refused, Ticket, TicketState
from headgate.live.route.gate.policy import LivePolicy, live_router
from headgate.methods.balance.balance import LeastLoaded
from headgate.methods.balance.prefix import KnowsPrefixes
from headgate.settings_base import Count, Seconds, checked

log = logging.getLogger("headgate.route")
LEASE = 10.0  # seconds after which a silent client is forgotten, with all it had
GRACE = 5.0  # seconds a new gate waits for the clients of the last one before it uses their share


class Placement(NamedTuple):
    key: int
    replica: str
    status: int = 200
    reason: str = ""
    retry_after: int = 0


Counts = Mapping[str, int]  # by the name of a replica
Event = tuple[Any, ...]  # a verb and what it is about; see `SharedGate.tell`
Heard = tuple[list[Placement], int, bool]  # and how many clients there are, and whether any request waits


class Client:
    def __init__(self, slots: Counts, busy: Counts) -> None:
        self.slots = dict(slots)
        self.busy = Counter(busy)  # requests that another gate has placed
        self.tickets: dict[int, Ticket] = {}
        self.requests: dict[int, str] = {}
        self.waits: dict[int, asyncio.Task[None]] = {}
        self.answers: list[Placement] = []
        self.deliver: Callable[[list[Placement]], None] | None = None  # in the same process: at once
        self.wake = asyncio.Event()
        self.heard = time.monotonic()

    def say(self, answer: Placement) -> None:
        if self.deliver is not None:
            self.deliver([answer])
            return
        self.answers.append(answer)
        self.wake.set()

    def refuse(self, key: int, refused: Refused) -> None:
        self.say(Placement(key, "", refused.status, refused.reason, refused.retry_after))

    def take(self) -> list[Placement]:
        answers, self.answers = self.answers, []
        self.wake.clear()
        return answers


class SharedGate:
    """A replica takes `share` of its slots from here: all, unless this gate stands in for a lost one.
    Replicas are those that any client sees and none has found dead.
    """

    def __init__(self, given: dict[str, Any], share: float = 1.0) -> None:
        self.config = RayConfig.model_validate(given)
        self.share = share
        self._deployed = 0.0  # when the router was made whose settings these are
        self.clients: dict[str, Client] = {}
        self.numbers: dict[str, int] = {}  # of replicas that take requests
        self.names: dict[int, str] = {}  # retired ones included, until their number is given anew
        self._dead: set[str] = set()
        self._tickets: dict[str, Ticket] = {}  # by Ray's internal request id
        self._gate: Gate | None = None
        self._slos: dict[str, Slo] = {}  # of its classes
        self._born = self._swept = time.monotonic()
        self._expected = 1

    @property
    def gate(self) -> Gate:
        """Made when the first client joins: some policies plan for a number of engines."""
        if self._gate is None:
            config, engines = self.config, len(self._seen()) or 1
            try:
                router = LivePolicy(config, engines).router
            except InputError as error:
                log.error("%s; least-loaded serves instead", error)
                router = LeastLoaded(engines)
            self._gate = Gate(router, config.kinds, limits=config.class_limits)
            self._slos = {each.name: each.slo for each in (*config.classes, config.default)}
        return self._gate

    # -- clients

    async def join(
        self, name: str, slots: Counts, busy: Counts, clients: int, given: dict[str, Any], deployed: float
    ) -> int:
        """What the router had here is gone. The settings of the youngest hold: an application deployed anew
        may find its predecessor's gate; all routers then join again.
        """
        if deployed > self._deployed:
            self._deployed = deployed
            config = RayConfig.model_validate(given)
            if config != self.config:
                clients = max(clients, len({*self.clients, name}))
                for known in [*self.clients]:
                    self.forget(known)
                self.config, self._gate, self.numbers, self.names = config, None, {}, {}
                self._born, self._expected = time.monotonic(), 1
        return self.enter(name, slots, busy, clients)

    def enter(self, name: str, slots: Counts, busy: Counts, clients: int = 1) -> int:
        self.forget(name)
        self.clients[name] = Client(slots, busy)
        if clients > self._expected:
            self._expected = clients
            asyncio.get_running_loop().call_later(GRACE, self._arrange)
        self._arrange()
        return len(self.clients)

    def forget(self, name: str) -> None:
        if (own := self.clients.pop(name, None)) is None:
            return
        for key in [*own.tickets]:
            self._end(own, key, End.ABORTED)
        own.wake.set()
        self._arrange()

    async def tell(self, name: str, events: Sequence[Event]) -> Heard | None:
        """Events of one router in their order; None: it is not known (any more) and must join.

        `arrive, key, request, class, prompt, limit, priority`; `end, key`; `back, key` (its replica could not
        take it); `freed, replica` (a request placed by another gate has ended); `replicas, slots by name`;
        `dead, replica`.
        """
        if not self.book(name, events):
            return None
        self.gate.settle()
        await asyncio.sleep(0)  # requests that were placed by it say so
        return self._heard(self.clients[name])

    async def news(self, name: str, seconds: float) -> Heard | None:
        if (own := self._known(name)) is None:
            return None
        if not own.answers:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await own.wake.wait()
        own.heard = time.monotonic()
        return self._heard(own) if self.clients.get(name) is own else None

    def _heard(self, own: Client) -> Heard:
        return own.take(), len(self.clients), bool(self.gate.roster.waiting)

    def book(self, name: str, events: Sequence[Event]) -> bool:
        if (own := self._known(name)) is None:
            return False
        for verb, *about in events:
            if verb in ("arrive", "end", "back"):
                getattr(self, f"_{verb}")(own, *about)
                continue
            (told,) = about
            if verb == "freed":
                own.busy[told] -= 1
            elif verb == "replicas":
                own.slots = dict(told)
            elif verb == "dead":
                self._dead.add(told)
            else:
                raise KeyError(verb)
            self._arrange()
        return True

    def first_tokens(self, requests: Sequence[str]) -> None:
        for request in requests:
            if request in self._tickets:
                self.gate.first_token(self._tickets[request])

    def books(self) -> dict[str, Any]:
        books = self.gate.books()
        books["engines"] = {self.names[id]: about for id, about in books["engines"].items()}
        busy = sum((each.busy for each in self.clients.values()), Counter[str]())
        routers = {name: len(own.tickets) for name, own in self.clients.items()}
        return {**books, "routers": routers, "busy": dict(busy), "faults": self.gate.check()}

    def _known(self, name: str) -> Client | None:
        now = time.monotonic()
        if now - self._swept > LEASE / 4:
            self._swept = now
            for other in [each for each, own in self.clients.items() if now - own.heard > LEASE]:
                self.forget(other)
        if (own := self.clients.get(name)) is not None:
            own.heard = now
        return own

    # -- requests

    def _arrive(
        self, own: Client, key: int, request: str, kind: str, prompt: int, limit: int, priority: int
    ) -> None:
        try:
            gate, slo = self.gate, self._slos.get(kind, NO_SLO)
            ticket = gate.arrive(kind, prompt, limit, priority=priority, slo=slo, whole=True)
        except Refused as refused:
            own.refuse(key, refused)
            return
        own.tickets[key], own.requests[key] = ticket, request
        self._tickets[request] = ticket
        self._place(own, key, ticket)

    def _place(self, own: Client, key: int, ticket: Ticket) -> None:
        if ticket.answer is None or isinstance(ticket.answer, Refused):
            own.waits[key] = asyncio.get_running_loop().create_task(self._wait(own, key, ticket))
        else:
            placed, ticket.answer = ticket.answer, None
            own.say(Placement(key, self.names[placed.replica]))

    async def _wait(self, own: Client, key: int, ticket: Ticket) -> None:
        try:
            move = await self.gate.place(ticket)
        except Refused as refused:
            own.tickets.pop(key, None)
            self._tickets.pop(own.requests.pop(key, ""), None)
            own.refuse(key, refused)
        else:
            own.say(Placement(key, self.names[move.replica]))
        finally:
            own.waits.pop(key, None)

    def _end(self, own: Client, key: int, how: End = End.STOPPED) -> None:
        if (ticket := own.tickets.pop(key, None)) is None:
            return
        self._tickets.pop(own.requests.pop(key), None)
        if (task := own.waits.pop(key, None)) is not None:
            task.cancel()
        self.gate.end(ticket, how)

    def _back(self, own: Client, key: int) -> None:
        ticket = own.tickets.get(key)
        if ticket is None or ticket.state is TicketState.QUEUED:
            return
        self.gate.back(ticket)
        self.gate.settle()
        self._place(own, key, ticket)

    # -- replicas

    def _seen(self) -> dict[str, int]:
        listed = {name: slots for own in self.clients.values() for name, slots in own.slots.items()}
        self._dead &= listed.keys()
        return {name: slots for name, slots in listed.items() if name not in self._dead}

    def _arrange(self) -> None:
        seen, gate = self._seen(), self.gate
        for name in [each for each in self.numbers if each not in seen]:
            gate.retire(self.numbers.pop(name))
        waiting = self._born + GRACE > time.monotonic() and len(self.clients) < self._expected
        share = len(self.clients) / self._expected if waiting else self.share
        for name, most in seen.items():
            taken = sum(max(0, own.busy[name]) for own in self.clients.values())
            slots = min(self.config.slots or most, most)
            left = max(0, max(1, int(slots * share)) - taken)
            if name not in self.numbers:
                state = EngineState(slots, min(self.config.prompts_at_once or slots, slots))
                state.most = left
                self.numbers[name] = gate.add_engine(state)
                self.names[self.numbers[name]] = name
                continue
            state = gate.desk.engines[self.numbers[name]]
            if (state.slots, state.most) != (slots, left):
                gate.set_engine(self.numbers[name], slots=slots, most=left)


# -- `request_router_kwargs`

SLOTS = 256  # of a replica, for a first plan, where it is not known


class RayConfig(GateConfig):
    """Router, classes and queues as in the file of `headgate route`, and what is Ray's own.

    `prompts_at_once` is for deployments that tell the gate of first tokens (`router.Reports`). Without
    it a replica may have all its slots in prompts, because nothing would say that one is done.
    """

    slots: Count | None = None  # requests a replica serves at once (default: its max_ongoing_requests)
    prompts_at_once: Count | None = None
    gate: Literal["shared", "local"] = "shared"  # one for all proxies, or one in each
    timeout: Seconds = 2.0  # a gate actor that is silent for so long is lost

    @property
    def fewest_slots(self) -> int:
        return self.slots or SLOTS


def ray_config(given: dict[str, Any]) -> RayConfig:
    config = checked(RayConfig, given, "request_router_kwargs: ")
    for each in config.classes:
        if each.match.key:
            raise InputError(
                f"request_router_kwargs: class {each.name}: Ray has no keys; match by header, model, "
                "field or prompt"
            )
    if isinstance(live_router(config, 1), KnowsPrefixes):
        raise InputError(
            f"request_router_kwargs: router {config.router.name} reads prompts, which no router in Ray sees; "
            "choose affinity or least-loaded"
        )
    return config
