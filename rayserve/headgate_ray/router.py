"""headgate in Ray Serve: any `RoutePolicy` as the request router of a deployment.

Set `request_router_class="headgate_ray.router:HeadgateRouter"` and, as JSON, what `RayConfig` declares.
Tried with Ray 2.60; tests/ray_serve/test_seams.py names the private attributes of Ray that are used here.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_serve_request_context
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from headgate.core.errors import InputError, one_line
from headgate.live.route.classes import Classes
from headgate.live.route.gate.queue import Refused
from headgate_ray.gate import RayConfig, SharedGate, ray_config
from headgate_ray.wire import ClientRequest, GateClient, GateServer, LeftCluster, WiredGate, described

log = logging.getLogger("ray.serve")
NAMESPACE = "headgate"
SLOTS = "headgate_slots"  # among a replica's routing stats
PATH = "headgate_ray.router:HeadgateRouter"
PAUSE, LONGEST_PAUSE = 0.005, 0.5  # seconds before a request that was rejected is placed again
IDLE = 60.0  # seconds between two looks of a gate actor whether it has routers
MANY = 100_000  # requests that are routed at the same time
SLACK = 64  # requests that were placed and stand in Ray's queue, before they are dropped from it


def router_config(**kwargs: Any) -> RequestRouterConfig:
    ray_config(kwargs)
    return RequestRouterConfig(request_router_class=PATH, request_router_kwargs=kwargs)


class HeadgateRouter(RequestRouter):
    """Requests of a deployment wait in a gate until its policy finds them a replica.

    A request that the gate refuses fails with BackPressureError (429 or 503, with Retry-After). Whatever
    else goes wrong here, the request goes to the replica with the fewest requests: Ray would let it hang.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Ray waits for ever for a router that cannot be made: a mistake is logged, least-loaded serves."""
        deployed = time.time()
        try:
            self._config = ray_config(kwargs)
        except InputError as error:
            log.error("%s; least-loaded serves instead", error)
            self._config, deployed = RayConfig(), 0.0  # settings of any other router are better
        self._classes = Classes(self._config)
        shared = self._config.gate == "shared"
        name = f"{self._handle_source.value.lower()}-{uuid.uuid4().hex}"
        self._gate = GateClient(self._config, name, self._connect if shared else None, deployed)
        self._held: dict[str, list[_Held]] = {}  # by internal request id, which calls may share
        self._owed: Counter[tuple[str, str]] = Counter()  # ends of attempts that were given up
        self._by_name: dict[str, RunningReplica] = {}

    async def _connect(self) -> WiredGate:
        name = gate_name(self._deployment_id.app_name, self._deployment_id.name)
        loop = asyncio.get_running_loop()
        if not ray.is_initialized():  # Ray would start a cluster of its own
            raise LeftCluster
        actor = await loop.run_in_executor(None, gate_actor, name, self._config)
        return await WiredGate.open(*await actor.address.remote())

    @property
    def max_num_routing_tasks(self) -> int:
        """All of them: Ray's own limit hides an urgent request behind those that wait here."""
        return MANY

    @property
    def target_num_routing_tasks(self) -> int:
        """One for each request that waits. Ray's own count holds those that were placed, too."""
        waiting = len(self._routing_task_by_pending_request_future) + len(self._pending_requests_to_route)
        return min(waiting, self.max_num_routing_tasks)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._by_name = {each.replica_id.unique_id: each for each in replicas}
        self._gate.set_replicas({name: _slots(each) for name, each in self._by_name.items()})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._event_loop.call_soon_threadsafe(self._died, replica_id.unique_id)

    def _died(self, name: str) -> None:
        self._by_name.pop(name, None)
        self._gate.dead(name)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The request's future is set here: Ray finds requests by an id that several calls may share."""
        if pending_request is None or (
            not pending_request.future.done()
            and pending_request.future not in self._routing_task_by_pending_request_future
        ):  # direct streaming: its end is not told, so no gate can count it
            return [self._least_loaded()]
        if pending_request.future.done():
            return [candidate_replicas[:1]]
        try:
            chosen = await self._placed(pending_request)
        except Refused as refused:
            queue, retry_after = self._config.limits.queue, float(refused.retry_after)
            waiting = len(self._pending_requests_by_id)
            self._settle(pending_request, BackPressureError(waiting, queue, refused.status, retry_after))
            return [candidate_replicas[:1]]
        except Exception as error:
            log.error("the gate failed, the least loaded replica serves: %s", one_line(error))
            self._let_go(pending_request)
            chosen = self._least_loaded()
        if not chosen:  # no replica is left; Ray waits for one
            pending_request.routing_context.should_backoff = True
            return []
        self._settle(pending_request, chosen[0])
        return [chosen]

    async def _placed(self, request: PendingRequest) -> list[RunningReplica]:
        if (held := self._find(request)) is None:
            id = request.metadata.internal_request_id
            held = _Held(request, await self._gate.place((id, *self._about(request))))
            self._held.setdefault(id, []).append(held)
        else:  # its replica rejected it or died; that attempt ends later, and must not end this one
            if held.future is not request.future:
                self._owed[request.metadata.internal_request_id, held.entry.replica] += 1
            await self._place_again(held)
        while self._by_name and held.entry.replica not in self._by_name:  # only another router knows it yet
            await self._place_again(held)
        if not self._by_name:
            self._let_go(request)
            return []
        held.future = request.future
        return [self._by_name[held.entry.replica]]

    def _about(self, request: PendingRequest) -> tuple[str, int, int, int]:
        """A request that cannot be read is one of the default class; it must not pass the gate by."""
        arguments, metadata = (*request.args, request.kwargs, *request.kwargs.values()), request.metadata
        try:
            if metadata.is_http_request:  # pickled by the proxy in this very process
                arguments = tuple(pickle.loads(each) for each in request.args)
            return described(self._classes, arguments, metadata.multiplexed_model_id)
        except Exception as error:
            log.warning("a request of the default class, because it cannot be read: %s", one_line(error))
            return described(self._classes, (), "")

    async def _place_again(self, held: _Held) -> None:
        await asyncio.sleep(min(PAUSE * 2**held.tries, LONGEST_PAUSE))
        held.tries = min(held.tries + 1, 16)
        await self._gate.again(held.entry)

    def _settle(self, request: PendingRequest, what: RunningReplica | BackPressureError) -> None:
        if not request.future.done():
            self._record_queue_wait_time(request)
            self._remove_pending_request_from_indices(request)
            if isinstance(what, BackPressureError):
                request.future.set_exception(what)
            else:
                request.future.set_result(what)
        queue = self._pending_requests_to_fulfill  # bodies of placed requests behind one that waits long
        if len(queue) > 2 * self.target_num_routing_tasks + SLACK:
            waiting = [each for each in queue if not each.future.done()]
            queue.clear()
            queue.extend(waiting)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """A request that is cancelled between its place and its sending is never said to have ended."""
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._let_go(pending_request)
            raise

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Its place is free. Ray calls this from threads of its own, too."""
        self._event_loop.call_soon_threadsafe(self._completed, replica_id.unique_id, internal_request_id)

    def _completed(self, replica: str, id: str) -> None:
        if self._owed[id, replica] > 0:
            self._owed[id, replica] -= 1
        else:
            held = next((each for each in self._held.get(id, ()) if each.entry.replica == replica), None)
            if held is not None:
                self._let_go(held.request)
        if self._owed[id, replica] == 0:
            del self._owed[id, replica]

    def _find(self, request: PendingRequest) -> _Held | None:
        held = self._held.get(request.metadata.internal_request_id, ())
        return next((each for each in held if each.request is request), None)

    def _let_go(self, request: PendingRequest) -> None:
        if (held := self._find(request)) is None:
            return
        id = request.metadata.internal_request_id
        self._held[id].remove(held)
        if not self._held[id]:
            del self._held[id]
        self._gate.end(held.entry)

    def _least_loaded(self) -> list[RunningReplica]:
        cache = self.replica_queue_len_cache
        replicas = [*self.curr_replicas.values()]
        return [min(replicas, key=lambda each: cache.get(each.replica_id) or 0)] if replicas else []


class _Held:
    """A request that has a place, and the future that Ray waits for: another one means another attempt."""

    __slots__ = ("entry", "future", "request", "tries")

    def __init__(self, request: PendingRequest, entry: ClientRequest) -> None:
        self.request, self.entry, self.future, self.tries = request, entry, request.future, 0


def _slots(replica: RunningReplica) -> int:
    slots = replica.routing_stats.get(SLOTS, 0)
    most: int = replica.max_ongoing_requests
    return min(slots, most) if isinstance(slots, int) and slots > 0 else most


class GateActor(SharedGate):
    _address: tuple[str, int, str] | None = None

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        with suppress(InputError):  # solvers take seconds to import: before any router waits for an answer
            ray_config(given)

    async def address(self) -> tuple[str, int, str]:
        if self._address is None:
            secret, host = uuid.uuid4().hex, ray.util.get_node_ip_address()
            self._server = GateServer(self, secret)
            self._address = host, await self._server.start(host), secret
            self._watch = asyncio.get_running_loop().create_task(self._end_when_idle())
        return self._address

    async def _end_when_idle(self) -> None:
        me = ray.get_runtime_context().current_actor
        while True:
            await asyncio.sleep(IDLE)
            self._known("")  # forgets routers that are silent
            if not self.clients:
                ray.kill(me)


def gate_name(app: str, deployment: str) -> str:
    return f"gate:{app}:{deployment}"


def gate_actor(name: str, config: RayConfig) -> Any:
    made = ray.remote(num_cpus=0, max_concurrency=10_000, max_restarts=0)(GateActor)
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    return made.options(**options).remote(config.model_dump(mode="json"))


# -- what a replica tells: slots, prompts that are done

Item = TypeVar("Item")
GATHER = 0.005  # seconds in which first tokens are gathered for one call
FOUND = 5.0  # seconds for which a gate actor that was found is used


class Reports:
    """Mixin for the class of a deployment with HeadgateRouter.

    Set `slots` to what the engine takes at once, and pass every answer through `reported`: policies that
    keep prompts and decodes apart (gate-and-route, density-first with `prompts_at_once`) need to know when
    a prompt is done.
    """

    slots: int = 0  # 0: as many as Ray's max_ongoing_requests
    _done: list[str]
    _gate: Any = None
    _found_until = 0.0

    def record_routing_stats(self) -> dict[str, Any]:
        return {SLOTS: self.slots} if self.slots else {}

    async def reported(self, stream: AsyncIterator[Item]) -> AsyncIterator[Item]:
        told = False
        async for item in stream:
            if not told:
                told = True
                self._first_token(_get_serve_request_context()._internal_request_id)
            yield item

    def _first_token(self, request: str) -> None:
        if not getattr(self, "_done", None):
            self._done = []
            asyncio.get_running_loop().call_later(GATHER, self._tell)
        self._done.append(request)

    def _tell(self) -> None:
        done, self._done = self._done, []
        asyncio.get_running_loop().run_in_executor(None, self._send, done)  # Ray's look-up may block

    def _send(self, done: list[str]) -> None:
        if time.monotonic() > self._found_until:
            context = serve.get_replica_context()
            try:
                self._gate = ray.get_actor(gate_name(context.app_name, context.deployment), NAMESPACE)
            except ValueError:  # no shared gate just now: the gates of the routers do without
                return
            self._found_until = time.monotonic() + FOUND
        self._gate.first_tokens.remote(done)
