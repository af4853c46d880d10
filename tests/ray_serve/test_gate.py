"""The gate that all routers of a Ray Serve deployment share, and its loss; no Ray needed."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from headgate.core.errors import InputError
from headgate.live.route.classes import Classes
from headgate.live.route.gate.queue import Refused
from headgate_ray import gate as ray_gate
from headgate_ray import wire as ray_client
from headgate_ray.gate import SharedGate, ray_config
from headgate_ray.wire import GateClient, GateServer, WiredGate, described
from router_world import run, until

TWO = {"a": 2, "b": 2}
ABOUT = ("request", "default", 10, 10, 0)


class Wire:
    """A shared gate in another process: calls take a turn of the loop, and it may be killed."""

    def __init__(self, config):
        self.config, self.gate, self.dead, self.calls = config, None, True, 0
        self.stopped = asyncio.Event()  # once it is set: it is there and never answers

    def begin(self):
        self.gate, self.dead = SharedGate(self.config.model_dump(mode="json")), False

    async def connect(self):
        await asyncio.sleep(0)
        if self.dead:
            raise ConnectionError("no actor")
        return self

    def close(self): ...

    def __getattr__(self, name):
        async def call(*about):
            self.calls += 1
            await asyncio.sleep(0)
            if self.dead:
                raise ConnectionError("the actor died")
            if self.stopped.is_set():
                await asyncio.Event().wait()
            answer = await getattr(self.gate, name)(*about)
            if self.dead:
                raise ConnectionError("the actor died")
            return answer

        return call


async def clients(wire, number, slots=TWO):
    found = [GateClient(wire.config, f"router {each}", wire.connect) for each in range(number)]
    for each in found:
        each.set_replicas(slots)
    await until(lambda: len(wire.gate.clients) == number and all(each._remote for each in found))
    return found


def shared(**given):
    wire = Wire(ray_config(given))
    wire.begin()
    return wire


def loads(*routers):
    """Requests on each replica, as the routers know it: the truth."""
    found = dict.fromkeys(TWO, 0)
    for router in routers:
        for entry in router.entries.values():
            if entry.replica:
                found[entry.replica] += 1
    return found


def test_two_routers_together_admit_no_more_than_the_slots():
    async def work():
        wire = shared()
        one, two = await clients(wire, 2)
        waits = [asyncio.create_task(each.place(ABOUT)) for _ in range(5) for each in (one, two)]
        await until(lambda: sum(loads(one, two).values()) == 4)
        assert loads(one, two) == TWO
        assert wire.gate.books()["queued"] == {"default": 6}
        done = 0
        while done < 10:  # each that ends lets one in
            await until(lambda: any(each.done() for each in waits))
            entry = next(each for each in waits if each.done())
            waits.remove(entry)
            (
                one
                if entry.result().key in one.entries and one.entries[entry.result().key] is entry.result()
                else two
            ).end(entry.result())
            done += 1
            assert max(loads(one, two).values()) <= 2
        await until(lambda: wire.gate.books()["counts"]["moved"] == 10)
        await until(lambda: not wire.gate.gate.tickets)
        assert wire.gate.books()["faults"] == []
        for each in (one, two):
            await each.close()

    run(work())


def test_the_largest_weight_goes_first_and_background_last():
    classes = [{"name": "batch", "background": True}, {"name": "gold", "ttft": 1.0, "weight": 10.0}]

    async def work():
        wire = shared(classes=classes)
        (one,) = await clients(wire, 1, {"a": 4})  # one engine: requests wait for the one they were given
        held = [await one.place(ABOUT) for _ in range(4)]
        placed, waits = [], []

        async def wait(kind):
            await one.place(("request " + kind, kind, 10, 10, 0))
            placed.append(kind)

        for kind in ("batch", "default", "gold"):
            waits.append(asyncio.create_task(wait(kind)))
            await until(lambda: sum(wire.gate.books()["queued"].values()) == len(waits))
        for entry in held[:3]:
            before = len(placed)
            one.end(entry)
            while len(placed) == before:
                await asyncio.sleep(0)
        assert placed == ["gold", "default", "batch"]
        await one.close()

    run(work())


def test_a_cancelled_wait_holds_nothing():
    async def work():
        wire = shared()
        (one,) = await clients(wire, 1)
        held = [await one.place(ABOUT) for _ in range(4)]
        waits = [asyncio.create_task(one.place(ABOUT)) for _ in range(3)]
        await until(lambda: wire.gate.books()["queued"]["default"] == 3)
        for each in waits:
            each.cancel()
        await until(lambda: wire.gate.books()["queued"]["default"] == 0)
        for entry in held:
            one.end(entry)
            one.end(entry)  # told twice
        await until(lambda: not wire.gate.gate.tickets)
        assert wire.gate.books()["counts"]["ended_twice"] == 0
        await one.close()

    run(work())


def test_events_go_together_while_a_call_is_under_way():
    async def work():
        wire = shared()
        (one,) = await clients(wire, 1, {"a": 100})
        before = wire.calls
        await asyncio.gather(*(one.place(ABOUT) for _ in range(100)))
        assert wire.calls - before < 10
        await one.close()

    run(work())


def test_a_full_queue_is_refused_by_class():
    async def work():
        wire = shared(classes=[{"name": "bulk", "queue": 1}], limits={"queue": 3})
        (one,) = await clients(wire, 1, {"a": 1})
        await one.place(ABOUT)
        waits = [asyncio.create_task(one.place(("r", "bulk", 1, 1, 0)))]
        await until(lambda: wire.gate.books()["queued"]["bulk"] == 1)
        with pytest.raises(Refused) as refused:
            await one.place(("r", "bulk", 1, 1, 0))
        assert refused.value.status == 429
        assert refused.value.retry_after >= 1
        waits.append(asyncio.create_task(one.place(ABOUT)))
        await until(lambda: wire.gate.books()["queued"]["default"] == 1)
        for each in waits:
            each.cancel()
        await one.close()

    run(work())


def test_when_the_shared_gate_dies_each_router_takes_its_share_and_comes_back(monkeypatch):
    monkeypatch.setattr(ray_client, "AGAIN", 0.02)
    monkeypatch.setattr(ray_client, "RARELY", 0.02)
    monkeypatch.setattr(ray_gate, "GRACE", 0.2)

    async def work():
        wire = shared()
        one, two = await clients(wire, 2)
        placed = [await one.place(ABOUT) for _ in range(3)]
        waits = [asyncio.create_task(each.place(ABOUT)) for _ in range(3) for each in (one, two)]
        await until(lambda: sum(wire.gate.books()["queued"].values()) == 5)
        wire.dead = True
        await until(lambda: one.local and two.local)
        assert (one.lost, two.lost) == (1, 1)
        # each takes 1 of the 2 slots of a replica; what one had above its share stays until it ends
        assert loads(two) == {"a": 1, "b": 1}
        assert loads(one) == TWO
        for entry in placed:
            one.end(entry)
        await until(lambda: loads(one) == {"a": 1, "b": 1})
        assert loads(one, two) == TWO
        wire.begin()
        await until(lambda: len(wire.gate.clients) == 2 and one._remote and two._remote)
        seen = 0
        while waits:
            assert max(loads(one, two).values()) <= 2
            for each in [each for each in waits if each.done()]:
                waits.remove(each)
                entry = each.result()
                (one if one.entries.get(entry.key) is entry else two).end(entry)
                seen += 1
            await asyncio.sleep(0.001)
        assert seen == 6
        await until(lambda: not wire.gate.gate.tickets and not +sum_busy(wire.gate))
        assert wire.gate.books()["faults"] == []
        for each in (one, two):
            await each.close()

    run(work())


def test_over_a_socket():
    """The same through the wire; another secret is not let in, and a gate that ends is noticed."""

    async def work():
        config = ray_config({})
        gate = SharedGate(config.model_dump(mode="json"))
        server = GateServer(gate, "secret")
        port = await server.start("127.0.0.1")
        stranger = await WiredGate.open("127.0.0.1", port, "sicret")
        with pytest.raises(ConnectionError):
            await stranger.join("stranger", TWO, {}, 1, {}, 0.0)
        one = GateClient(config, "one", lambda: WiredGate.open("127.0.0.1", port, "secret"))
        one.set_replicas(TWO)
        entries = await asyncio.gather(*(one.place(ABOUT) for _ in range(4)))
        assert gate.clients.keys() == {"one"}
        waiting = asyncio.create_task(one.place(ABOUT))
        await until(lambda: gate.books()["queued"]["default"] == 1)
        one.end(entries[0])
        assert (await waiting).replica == entries[0].replica
        one._remote._writer.transport.abort()
        await until(lambda: one.lost == 1)
        await until(lambda: one._remote is not None)  # it found its way back
        assert gate.books()["busy"] == {name: 2 for name in TWO}
        await one.close()
        await server.stop()

    run(work())


def test_a_shared_gate_that_hangs_holds_nobody_up_and_is_asked_again():
    async def work():
        wire = shared(timeout="100ms")
        (one,) = await clients(wire, 1)
        wire.stopped.set()
        assert (await one.place(ABOUT)).replica
        wire.stopped.clear()
        await until(lambda: one._remote is not None and one.local is None)
        assert (await one.place(ABOUT)).replica
        await one.close()

    run(work())


def test_the_settings_of_the_youngest_router_hold():
    """An application that is deployed anew finds the gate of its predecessor, with routers of both."""

    async def work():
        wire = shared(slots=2)
        old = [GateClient(wire.config, f"old {each}", wire.connect, 1.0) for each in range(2)]
        for each in old:
            each.set_replicas({"a": 9})
        placed = [await old[0].place(ABOUT) for _ in range(2)]
        waiting = asyncio.create_task(old[1].place(ABOUT))
        await until(lambda: wire.gate.books()["queued"]["default"] == 1)
        new = GateClient(ray_config({"slots": 4}), "new", wire.connect, 2.0)
        new.set_replicas({"a": 9})
        await until(lambda: len(wire.gate.clients) == 3 and wire.gate.config.slots == 4)
        assert (await waiting).replica == "a"  # a third place
        more = [asyncio.create_task(new.place(ABOUT)) for _ in range(2)]
        await until(lambda: wire.gate.books()["queued"]["default"] == 1)
        assert loads_of("a", *old, new) == 4
        assert wire.gate.config.slots == 4  # those of the old ones, who joined again, do not count
        for entry in placed:
            old[0].end(entry)
        await asyncio.gather(*more)
        for each in (*old, new):
            await each.close()

    run(work())


def loads_of(replica, *routers):
    return sum(entry.replica == replica for router in routers for entry in router.entries.values())


def test_a_policy_that_cannot_be_made_any_more_hangs_nobody(tmp_path):
    """Its file was there when the router was made, and is gone when a gate of its own is needed."""
    file = tmp_path / "mine.py"
    file.write_text("from headgate.methods.balance.balance import LeastLoaded as L\nclass Mine(L): ...\n")

    async def work():
        wire = shared(router={"name": f"{file}:Mine"})
        (one,) = await clients(wire, 1)
        await one.place(ABOUT)
        assert type(wire.gate.gate.router).__name__ == "Mine"
        file.unlink()
        wire.dead = True
        await asyncio.wait_for(one.place(ABOUT), 30)
        await one.close()

    run(work())


def sum_busy(gate):
    return sum((each.busy for each in gate.clients.values()), ray_gate.Counter())


def test_a_router_that_falls_silent_is_forgotten(monkeypatch):
    monkeypatch.setattr(ray_gate, "LEASE", 0.2)

    async def work():
        wire = shared()
        one, two = await clients(wire, 2)
        for _ in range(4):
            await one.place(ABOUT)
        waiting = asyncio.create_task(two.place(ABOUT))
        await one.close()  # its process has died
        monkeypatch.setattr(ray_client, "NEWS", 0.05)
        await asyncio.sleep(0.3)
        two.set_replicas({**TWO, "c": 0 + 1})
        assert await waiting
        await until(lambda: "router 0" not in wire.gate.clients)
        await two.close()

    run(work())


async def life(router, chance, served):
    """One request: placed, perhaps rejected and placed again, served, ended; or refused; or cancelled."""
    with suppress(Refused):
        entry = await router.place(("r", chance.choice(("default", "bulk")), 1, 1, 0))
        try:
            while chance.random() < 0.2:
                await asyncio.sleep(0)
                await router.again(entry)
            await asyncio.sleep(chance.random() * 0.005)
            served.append(entry.replica)
        finally:
            router.end(entry)


async def many_lives(seed):
    chance = random.Random(seed)
    wire = shared(classes=[{"name": "bulk"}])
    routers = await clients(wire, 3, {"a": 3, "b": 4})

    def lose():
        wire.dead = True

    def replicas(slots):
        for each in routers:
            each.set_replicas(slots)

    happens = {60: lose, 80: wire.begin, 140: lose, 160: wire.begin}
    happens |= {100: lambda: replicas({"b": 4, "c": 2}), 120: lambda: routers[0].dead("b")}
    happens |= {130: lambda: replicas({"c": 2, "d": 3})}
    served, tasks = [], []
    for number in range(200):
        tasks.append(asyncio.create_task(life(chance.choice(routers), chance, served)))
        if chance.random() < 0.1:
            chance.choice(tasks).cancel()
        happens.get(number, lambda: None)()
        await asyncio.sleep(0.001)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [each for each in ended if isinstance(each, Exception)]
    assert len(served) >= sum(not each.cancelled() for each in tasks)
    assert all(not each.entries for each in routers)
    await until(lambda: wire.gate._gate and not wire.gate.gate.tickets and not +sum_busy(wire.gate))
    assert wire.gate.books()["faults"] == []
    for each in routers:
        await each.close()


def test_random_events_keep_the_books(monkeypatch):
    """Arrivals, ends, cancels, replicas that reject, die and come, and gates that die: nothing is lost."""
    monkeypatch.setattr(ray_client, "AGAIN", 0.005)
    monkeypatch.setattr(ray_client, "RARELY", 0.005)
    monkeypatch.setattr(ray_gate, "GRACE", 0.05)
    for seed in range(3):
        run(many_lives(seed))


CLASSES = [
    {"name": "urgent", "priority": 5, "match": {"header": "urgent"}},
    {"name": "big", "match": {"prompt": (1000, 10**6)}},
]


class Http:
    def __init__(self, *headers):
        self.asgi_scope = {"headers": [(name.encode(), value.encode()) for name, value in headers]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ("default", 1)),
        ((7, object()), ("default", 1)),
        ((Http(("X-Headgate-Class", "urgent"), ("content-length", "400")),), ("urgent", 100)),
        ((Http(("content-length", "9" * 40)),), ("default", 1)),
        (({"prompt": "x" * 4000, "max_tokens": 9},), ("big", 1000)),
        (({"prompt": [1, 2, 3]},), ("default", 3)),
        (({"messages": [{"content": "x" * 40}, {"content": ["image"]}, 5]},), ("default", 10)),
        (({"messages": "text", "max_tokens": -1, "metadata": 3},), ("default", 1)),
    ],
)
def test_what_a_request_shows_of_itself(arguments, expected):
    config = ray_config({"classes": CLASSES})
    assert described(Classes(config), arguments, "")[:2] == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slot": 3}, "unknown field 'slot'; did you mean 'slots'?"),
        ({"router": {"name": "least-loded"}}, "did you mean 'least-loaded'?"),
        ({"gate": "none"}, "gate"),
        ({"router": {"name": "prefix-aware"}}, "reads prompts"),
        ({"router": {"name": "density-deep"}}, "give --card"),
        ({"classes": [{"name": "chat", "match": {"key": "web"}}]}, "Ray has no keys"),
    ],
)
def test_a_mistake_in_the_kwargs_is_one_line(given, said):
    with pytest.raises(InputError) as error:
        ray_config(given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
