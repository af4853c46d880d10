"""What the gate costs a request, by router and number of engines: `python -m benchmarks.gate [--quick]`.
Other sizes: `python -m benchmarks.gate 10 100 1000`.

CPU of one core in a full fleet, the best of three tries: arrival, place, first token or hand-over, second
place, end, and the questions to the router, as in a live router but without HTTP and without a wait. Every
engine is kept about half full. On a shared machine compare the columns of one run.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from headgate.core.fleet import Move, RoutePolicy, Stage
from headgate.core.policy import End
from headgate.experiment.fleet import make_router
from headgate.live.route.gate.gate import ClassLimits, EngineState, Gate, Refused, Ticket, TicketState
from headgate.methods.fluid.flows import EnginePace, Flow, Instance, TokenPrices
from headgate.methods.fluid.online import Online, assumed, instance_of
from headgate.methods.fluid.planner import plan_fluid

ENGINES = (4, 50, 500)
ROUTERS = (
    "least-loaded",
    "power-of-two",
    "split",
    "gate-and-route+",
    "token-bucket",
    "density-deep",
    "online",
)
SLOTS, PROMPTS = 16, 4
REQUESTS = 10_000
TRIES = 3
VISITS = 8  # things that may happen to other requests between two arrivals
CLASSES = 8
SECONDS = 0.0005  # between two arrivals, on the gate's clock


class Loop:
    """Callbacks of one turn; timers are never due."""

    def __init__(self) -> None:
        self.now = 0.0
        self.soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object], /) -> None:
        """Run it with the others."""
        self.soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Any:
        """Nothing waits that long."""
        return self

    def cancel(self) -> None:
        """A timer that is not there."""

    def turn(self) -> None:
        """One turn."""
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()


def instance(engines: int) -> Instance:
    """Eight classes, a little more than can be served."""
    rng = np.random.default_rng(0)
    sizes = rng.uniform(100, 1500, (CLASSES, 2)).tolist()
    flows = tuple(Flow(f"c{n}", p, d, 0.15, 0.1) for n, (p, d) in enumerate(sizes))
    return Instance(flows, EnginePace(SLOTS, 256, 0.0174, 6.2e-5, 45.45), TokenPrices(0.1, 0.2))


def router(name: str, engines: int) -> RoutePolicy:
    settings = {"prefill": engines // 2} if name == "split" else {}
    return make_router(name, plan_fluid(instance(engines)), engines, 0, settings)


def served(gate: Gate, loop: Loop, requests: int, inside: int, running: deque[Ticket]) -> int:
    """So many requests come, about `inside` are there at a time; how many were served."""
    kinds, done = [f"c{n}" for n in range(CLASSES)], 0
    for number in range(requests):
        loop.now += SECONDS
        try:
            running.append(gate.arrive(kinds[number % CLASSES], 200, 500))
        except Refused:
            continue
        for _ in range(VISITS):
            if len(running) < inside:
                break
            done += _advance(gate, running.popleft(), running, len(running) > 2 * inside)
        loop.turn()
    return done


def _advance(gate: Gate, ticket: Ticket, running: deque[Ticket], crowded: bool) -> bool:
    """The next thing that happens to one request; True: it is done."""
    answer, ticket.answer = ticket.answer, None
    if ticket.state is TicketState.DECODING:
        gate.end(ticket, End.STOPPED, 200)
        return True
    if ticket.state is TicketState.GONE:
        return False
    if ticket.state is TicketState.PREFILLING:
        whole = not isinstance(answer, Move) or answer.stage is Stage.WHOLE
        (gate.first_token if whole else gate.parted)(ticket)
    elif crowded:  # those who still wait then hang up
        gate.end(ticket, End.ABORTED)
        return False
    running.append(ticket)
    return False


def _gate(name: str, engines: int, loop: Loop) -> Gate:
    kinds = [f"c{n}" for n in range(CLASSES)]
    limits = {kind: ClassLimits(10**6, 10**6) for kind in kinds}
    states = [EngineState(SLOTS, PROMPTS) for _ in range(engines)]
    return Gate(router(name, engines), kinds, states, limits=limits, clock=lambda: loop.now, loop=loop)


def cost(name: str, engines: int, requests: int) -> float:
    """Microseconds of CPU a served request, the best of some tries."""
    best = float("inf")
    for _ in range(TRIES):
        loop = Loop()
        gate = _gate(name, engines, loop)
        inside, running = engines * SLOTS // 2, deque[Ticket]()
        served(gate, loop, 2 * inside, inside, running)  # fill the fleet: what is inside is not yet served
        gc.collect()
        began = time.process_time()
        done = served(gate, loop, requests, inside, running)
        best = min(best, (time.process_time() - began) / max(done, 1))
        assert not gate.check() and gate.fallen is None, gate.books()
    return 1e6 * best


def replan() -> tuple[float, float]:
    """Milliseconds of a plan again with eight classes, and of a whole look with 2,000 requests inside."""
    start = instance(50)
    rng = np.random.default_rng(1)
    seen = assumed(start, 50)
    drawn = [
        instance_of(start, {k: s._replace(rate=s.rate * rng.uniform(0.9, 1.1)) for k, s in seen.items()}, 50)
        for _ in range(100)
    ]
    plan_fluid(start)
    began = time.process_time()
    for each in drawn:
        plan_fluid(each)
    again = (time.process_time() - began) / len(drawn)
    loop = Loop()
    gate = _gate("online", 200, loop)
    online = gate.router
    assert isinstance(online, Online)
    for number in range(2000):
        loop.now += 0.01
        ticket = gate.arrive(f"c{number % CLASSES}", 200, 500)
        loop.turn()
        if ticket.state is TicketState.PREFILLING:
            gate.parted(ticket)
        loop.turn()
    gc.collect()
    looks = []
    for _ in range(15):
        loop.now += 11.0
        gate.roster.now = loop.now
        began = time.process_time()
        online._next = 0.0
        online.route(gate.roster)
        looks.append(time.process_time() - began)
    return 1000 * again, 1000 * sorted(looks)[len(looks) // 2]


def main(arguments: list[str]) -> None:
    requests = REQUESTS // (10 if "--quick" in arguments else 1)
    sizes = tuple(int(each) for each in arguments if each.isdigit()) or ENGINES
    print("| router | " + " | ".join(f"{n} engines, us" for n in sizes) + " | largest / smallest fleet |")
    print("|---" * (len(sizes) + 2) + "|")
    for name in ROUTERS:
        found = [cost(name, engines, requests) for engines in sizes]
        cells = " | ".join(f"{each:.1f}" for each in found)
        print(f"| `{name}` | {cells} | {found[-1] / found[0]:.2f} |", flush=True)
    again, look = replan()
    print(
        f"\nA plan again with {CLASSES} classes: {again:.2f} ms; a look of `online` with 2,000 "
        f"requests inside and 200 engines: {look:.2f} ms."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
