"""Two and four routers earn what one earns: real gates, plans, leases and Redis, in virtual time."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.redis_server import RedisServer
from headgate.core.fleet import Stage
from headgate.core.policy import End
from headgate.live.route import replicas
from headgate.live.route.config import Config, EngineAt, checked
from headgate.live.route.engines import Upstream
from headgate.live.route.gate.gate import EngineState, Gate, Refused, Ticket
from headgate.live.route.gate.policy import LivePolicy
from headgate.live.route.gate.queue import UNBOUNDED
from headgate.live.route.replicas import SETTLING, ReplicaStore

pytest.importorskip("redis")
ENGINES, SLOTS, RATE = 8, 64, 30.0  # requests a second, beyond what the engines can serve
PROMPTS, OUTPUTS, SHARES = (
    {"chat": 256, "batch": 2048},
    {"chat": 60, "batch": 90},
    {"chat": 0.7, "batch": 0.3},
)
PROMPT_SPEED, OUTPUT_SPEED = 20_000.0, 3.0  # tokens a second, of a prompt and of one request's output
WARM, SECONDS, EVERY = 40.0, 60.0, 0.1


class Virtual:
    """Time that passes only from one event to the next; as much of a loop as a gate needs."""

    def __init__(self) -> None:
        self.now, self._number = 0.0, count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def call_soon(self, callback: Callable[[], object]) -> Any:
        return self.call_later(0.0, callback)

    def call_later(self, delay: float, callback: Callable[[], object]) -> Any:
        handle = SimpleNamespace(cancelled=False)
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        event = self.now + delay, next(self._number), lambda: handle.cancelled or callback()
        heappush(self._events, event)
        return handle

    def run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, callback = heappop(self._events)
            callback()
        self.now = end


class World:
    """Engines that serve a request in a time of its own, and what they have earned."""

    def __init__(self, loop: Virtual) -> None:
        self.loop, self.running, self.most = loop, Counter[int](), 0
        self.served: Counter[str] = Counter()

    def enter(self, engine: int, seconds: float, then: Callable[[], object]) -> None:
        self.running[engine] += 1
        self.most = max(self.most, self.running[engine])

        def leave() -> None:
            self.running[engine] -= 1
            then()

        self.loop.call_later(seconds, leave)


class OneRouter:
    """A gate with its policy, and as much of a router as its leases need."""

    leaving = False

    def __init__(self, config: Config, world: World, store: str | None) -> None:
        self.world, self.now = world, lambda: world.loop.now
        self.policy = LivePolicy(config, ENGINES)
        self.gate = Gate(
            self.policy.router, config.kinds, limits=config.class_limits, clock=self.now, loop=world.loop
        )
        self.upstreams: dict[int, Upstream] = {}
        for spec in config.engines:
            prompts = self.policy.prompts_at_once(spec.slots)
            engine = Upstream(self.gate.add_engine(EngineState(spec.slots, prompts)), spec, healthy=True)
            self.upstreams[engine.id] = engine
        self.replicas = None
        if store is not None:
            given = checked({"engines": [{"url": "http://a"}], "replicas": {"store": store, "lease": 300.0}})
            self.replicas = ReplicaStore(given.replicas, self)  # type: ignore[arg-type]

    def room_of(self, upstream: Upstream) -> tuple[int, int]:
        prompts = self.policy.prompts_at_once(SLOTS)
        assert self.replicas is not None
        return self.replicas.room(upstream, UNBOUNDED, prompts)

    def arrive(self, kind: str) -> None:
        try:
            ticket = self.gate.arrive(kind, PROMPTS[kind], OUTPUTS[kind])
        except Refused:
            return
        self._look(ticket)

    def _look(self, ticket: Ticket) -> None:
        """A handler that waits for its place, without a task: it is told by `tell`."""
        if ticket.answer is None:
            ticket.waiter = SimpleNamespace(done=lambda: False, set_result=lambda _: self._placed(ticket))
        else:
            self._placed(ticket)

    def _placed(self, ticket: Ticket) -> None:
        move, ticket.answer, ticket.waiter = ticket.answer, None, None
        if isinstance(move, Refused) or move is None:
            return
        prompt, output = PROMPTS[ticket.kind] / PROMPT_SPEED, OUTPUTS[ticket.kind] / OUTPUT_SPEED

        def done() -> None:
            self.gate.end(ticket, End.STOPPED, OUTPUTS[ticket.kind])
            self.world.served[ticket.kind] += 1

        def parted() -> None:
            self.gate.parted(ticket)
            self._look(ticket)

        if move.stage is Stage.PREFILL:
            self.world.enter(move.replica, prompt, parted)
            return
        if move.stage is Stage.WHOLE:
            self.world.loop.call_later(prompt, lambda: self.gate.first_token(ticket))
            output += prompt
        self.world.enter(move.replica, output, done)


def fleet(name: str) -> Config:
    return checked(
        {
            "router": {"name": name, "card": "cal-h200-qwen3-8b"},
            "limits": {"queue_ttl": 10.0},
            "classes": [
                {"name": kind, "prompt": PROMPTS[kind], "output": OUTPUTS[kind], "rate": RATE * SHARES[kind]}
                for kind in PROMPTS
            ],
            "engines": [EngineAt(url=f"http://engine{n}", slots=SLOTS).model_dump() for n in range(ENGINES)],
        }
    )


async def earned(routers: int, name: str, store: str | None) -> tuple[float, int]:
    """Revenue a second, and the most requests that any engine had."""
    loop = Virtual()
    world, draw = World(loop), random.Random(7)
    apps = [OneRouter(fleet(name), world, store) for _ in range(routers)]
    stores = [app.replicas for app in apps if app.replicas is not None]

    def arrive() -> None:
        draw.choice(apps).arrive("chat" if draw.random() < SHARES["chat"] else "batch")
        loop.call_later(draw.expovariate(RATE), arrive)

    for each in stores:
        await each._exchange()
        await asyncio.sleep(SETTLING / len(stores))  # of the store's own clock
    loop.call_soon(arrive)
    while loop.now < WARM + SECONDS:
        if abs(loop.now - WARM) < EVERY / 2:
            world.served.clear()
        for app in apps:
            loop.run_until(loop.now + EVERY / routers)
            if app.replicas is not None:
                await app.replicas._exchange()
    for app in apps:
        assert app.gate.check() == [] and app.gate.fallen is None
    for each in stores:
        await each._client.aclose()
    revenue = sum(many * (PROMPTS[kind] + 2 * OUTPUTS[kind]) for kind, many in world.served.items())
    return revenue / SECONDS, world.most


@pytest.mark.parametrize("name", ["density-deep", "gate-and-route+"])
def test_two_and_four_routers_earn_what_one_earns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "TIMEOUT", 60.0)  # seconds: this machine may be busy

    async def work() -> None:
        alone, most = await earned(1, name, None)
        spare = SLOTS // 16 if name == "density-deep" else 0
        assert most <= SLOTS + spare
        for routers in (2, 4):
            with RedisServer() as store:
                together, most = await earned(routers, name, store.url)
            print(
                name, routers, f"{together:.0f} of {alone:.0f}, {100 * together / alone:.1f} %, most {most}"
            )
            assert most <= SLOTS + spare
            assert together >= 0.97 * alone, (together, alone)

    asyncio.run(work())
