"""Routers: what one may read of a fleet (Fleet, Replica, Place), and what it answers (Routing, Move)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from math import inf
from typing import Final, NamedTuple, Protocol

from headgate.core.policy import End
from headgate.core.request import Request

ANY, MIXED, SOLO, PREFILL, DECODE = "any", "mixed", "solo", "prefill", "decode"
ROLES = (ANY, MIXED, SOLO, PREFILL, DECODE)
ENDLESS = 2**62


class Stage(Enum):
    """How much of a request a place is for.

    Examples:
        >>> from headgate import Move, Stage
        >>> Move(3, 0, Stage.PREFILL)  # request 3: its prompt on engine 0, its output elsewhere
        Move(request=3, replica=0, stage=<Stage.PREFILL: 'prefill'>)
    """

    WHOLE = "whole"  # prompt and output on the same engine
    PREFILL = "prefill"  # the prompt only; the request then comes back for a DECODE place
    DECODE = "decode"  # the output; its KV follows it there


class Move(NamedTuple):
    """One request goes to one engine.

    Examples:
        >>> from headgate import Move
        >>> Move(3, 0).stage.value  # request 3 to engine 0, prompt and output
        'whole'
    """

    request: int
    replica: int
    stage: Stage = Stage.WHOLE


class Routing(NamedTuple):
    """What happens now. Requests not named stay where they are.

    Examples:
        >>> from headgate import Move, Routing
        >>> Routing((Move(3, 0), Move(4, 1)), reject=(5,)).wake  # never asked again without an event
        inf
    """

    moves: tuple[Move, ...] = ()  # in this order
    reject: tuple[int, ...] = ()  # of those that wait for their prompt: turned away
    wake: float = inf  # ask again at this time at the latest
    roles: tuple[tuple[int, str], ...] = ()  # engines that change their role before anything moves


STAY: Final = Routing()


class Room(NamedTuple):
    """How much an engine of some role takes at once; the router may not ask for more."""

    prompts: int  # in service
    decodes: int
    total: int  # both together


CLOSED: Final = Room(0, 0, 0)  # an engine that is down or drained; requests inside it stay counted


def room(role: str, slots: int) -> Room:
    """The room of a role on an engine with so many slots, one prompt in service at a time.

    A mixed engine keeps a slot for a prompt; any other role fills its slots as they come.
    """
    if role == MIXED:
        return Room(1, slots - 1, slots)
    if role == PREFILL:
        return Room(1, 0, 1)
    return Room(0 if role in (SOLO, DECODE) else 1, slots, slots)


def endless(role: str) -> Room:
    """The room of a role on an engine with a queue of its own, which takes whatever it is sent."""
    return Room(0 if role in (SOLO, DECODE) else ENDLESS, 0 if role == PREFILL else ENDLESS, ENDLESS)


class Place(Protocol):
    """Where a request is that was sent to an engine and has not left the fleet."""

    @property
    def request(self) -> Request: ...  # the request itself
    @property
    def replica(self) -> int: ...  # the engine that works on it, or holds its KV while it is in handoff
    @property
    def stage(self) -> Stage: ...  # what it was last sent for
    @property
    def decoding(self) -> bool: ...  # whether its prompt is done and its output has a decode slot


class Replica(Protocol):
    """One engine as the router knows it; live in simulation, a little stale in life."""

    @property
    def id(self) -> int: ...  # 0, 1, 2, ...
    @property
    def role(self) -> str: ...  # one of ROLES
    @property
    def room(self) -> Room: ...  # what it takes at once; CLOSED while it is down or drained
    @property
    def prefilling(self) -> Mapping[str, int]: ...  # prompts in service, by kind
    @property
    def decoding(self) -> Mapping[str, int]: ...  # outputs in service, by kind
    @property
    def waiting(self) -> int: ...  # sent there, not started
    @property
    def load(self) -> int: ...  # requests sent there that have not left it
    @property
    def idle(self) -> bool: ...  # whether it may be sent a prompt now
    @property
    def slots(self) -> int: ...  # decodes it may still take
    @property
    def kv_free(self) -> int: ...  # tokens
    def cached(self, request: Request) -> int: ...  # prompt tokens in its prefix cache; 0 if unknown


class Fleet(Protocol):
    """Live and read-only. Look-ups are O(1), whatever the number of engines; only iterating costs.

    Attributes:
        now: Seconds since the run began.
        queues: Requests that wait for their prompt, by kind, in order of arrival. Every kind has its queue.
        handoff: Prompt done, no decode place yet; in the order they came.
        places: Requests that were sent to an engine and have not left, those of `handoff` included.
        replicas: All engines, by number.
        prefilling: Prompts in service in the whole fleet, by kind.
        idle: Engines that can start a prompt now, by role, in no order that means anything.
        open: Engines that can take a decode now, by role.
        free_slots: Decodes that all engines together can still take.

    Examples:
        >>> import headgate
        >>> class ShortestQueue(headgate.RoutePolicy):
        ...     sends_at_once = True
        ...     def route(self, fleet):
        ...         waiting = [id for queue in fleet.queues.values() for id in queue]
        ...         if not waiting:
        ...             return headgate.Routing()
        ...         to = min(fleet.replicas, key=lambda replica: replica.load)
        ...         return headgate.Routing((headgate.Move(waiting[0], to.id),))
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=8)
        >>> requests = headgate.Workload.of([100] * 6, [20] * 6)
        >>> run = headgate.simulate_fleet(engine, "mixed", ShortestQueue(), requests, engines=2)
        >>> run.requests["replica"].tolist()
        [0, 1, 0, 1, 0, 1]
    """

    @property
    def now(self) -> float: ...
    @property
    def queues(self) -> Mapping[str, Mapping[int, Request]]: ...
    @property
    def handoff(self) -> Mapping[int, Request]: ...
    @property
    def places(self) -> Mapping[int, Place]: ...
    @property
    def replicas(self) -> Sequence[Replica]: ...
    @property
    def prefilling(self) -> Mapping[str, int]: ...
    @property
    def idle(self) -> Mapping[str, Sequence[int]]: ...
    @property
    def open(self) -> Mapping[str, Sequence[int]]: ...
    @property
    def free_slots(self) -> int: ...

    def catch_up(self) -> None:
        """Call it before you read `Request.generated` of requests on engines: simulated ones count late."""


class FleetObserver:
    """Hooks for what happens in a fleet. All optional, all cheap, none sees the fleet."""

    def arrived(self, request: Request, now: float) -> None:
        """It joined the queue of its kind."""

    def moved(self, request: Request, move: Move, now: float) -> None:
        """It was sent there; the engine works on it."""

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        """Its prompt is done; if it was sent for that alone, it now waits for a decode place.

        Not called for one that was sent for its prompt alone and has no second token to wait for.
        """

    def finished(self, request: Request, replica: int, now: float) -> None:
        """Its last token came."""

    def left(self, request: Request, now: float, how: End) -> None:
        """It went away unserved: gave up, hung up or was turned away."""

    def returned(self, request: Request, now: float) -> None:
        """Its engine failed it, or its KV is lost: it is at the head of the queue of its kind again."""


class RoutePolicy(FleetObserver, ABC):
    """Decides which engine serves which request.

    Examples:
        >>> import headgate
        >>> class ToTheFirst(headgate.RoutePolicy):
        ...     sends_at_once = True
        ...     def route(self, fleet):
        ...         waiting = [id for queue in fleet.queues.values() for id in queue]
        ...         return headgate.Routing(tuple(headgate.Move(id, 0) for id in waiting))
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=8)
        >>> requests = headgate.Workload.of([100] * 4, [20] * 4)
        >>> run = headgate.simulate_fleet(engine, "mixed", ToTheFirst(), requests, engines=2)
        >>> run.requests["replica"].tolist()
        [0, 0, 0, 0]

    Reads no clock and does no I/O; one that needs chance is given a function that draws from [0, 1). Asked
    after every event of the fleet, and again after its own moves, until it makes no move. The hooks may only
    listen; what the driver did with a move comes back as `moved`.

    Numbers of engines are not reused while a request is on one, and a fleet may grow. A request that is sent
    WHOLE although the router said PREFILL (the driver may know that it cannot be split) is told as such.
    """

    sends_at_once = False  # does it send on without a free place, where engines have queues of their own?
    hands_over = False  # does it find decode places for requests in `handoff`?
    reads_contents = False  # does it want to know what prompts share? A live router then hashes them

    def roles(self, engines: int) -> tuple[str, ...]:
        """The role each engine should have."""
        return (ANY,) * engines

    @abstractmethod
    def route(self, fleet: Fleet) -> Routing:
        """Which requests move to which engines now."""

    def returned(self, request: Request, now: float) -> None:
        """As if it had left and come again; `prompt` and other estimates may have changed."""
        self.left(request, now, End.ABORTED)
        self.arrived(request, now)

    def passed_over(self, request: Request, now: float) -> None:
        """The driver sent another one of its class in its place, as `moved` told; it waits on."""
        self.returned(request, now)

    def adopt(self, fleet: Fleet, before: RoutePolicy | None = None) -> None:
        """Take over a running fleet: hear of everything in it as if it had just happened.

        `before` is the router that decided until now, where there was one. Routers that choose an engine at
        arrival must not choose again for a request that has one, so they override this.
        """
        now, places, handoff = fleet.now, fleet.places, fleet.handoff
        for place in places.values():
            self.arrived(place.request, now)
        for queue in fleet.queues.values():
            for request in queue.values():
                self.arrived(request, now)
        for id, place in places.items():
            self.moved(place.request, Move(id, place.replica, place.stage), now)
            if id in handoff or (place.decoding and place.stage is Stage.WHOLE):
                self.prefilled(place.request, place.replica, now)

    def ahead(self, requests: int) -> list[int] | None:
        """The engines of so many requests, where nothing that happens meanwhile changes the choice.

        A simulation may then ask for no routing and tell of nothing. None: it depends.
        """
        return None

    def engines_changed(self, fleet: Fleet) -> None:
        """Engines came, went, or have another role or room; by its own wish or not."""

    def gauges(self) -> Mapping[str, float]:
        return {}
