"""HeadgateRouter before eight emulated engines: two HTTP proxies and two callers, each with its own router.

No test here depends on how fast anything is: engines hold their requests until they are released, and what is
waited for is bound to come.
"""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray installs it")

import ray
import requests
from emulated import HELD, SLOTS, Caller, Engine
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError

from conftest import PATIENCE, QUIET, until
from headgate_ray.router import NAMESPACE, PATH, gate_name

ENGINES = 8
ALL = ENGINES * SLOTS
ROUTERS = 4  # two proxies, two callers
APP = "fleet"
KWARGS = {
    "router": {"name": "density-deep", "order": ["urgent", "default"], "card": "cal-h200-qwen3-8b"},
    "classes": [
        {"name": "urgent", "match": {"field": "urgent"}},
        {"name": "bulk", "match": {"field": "bulk"}, "queue": 2},
        {"name": "web", "match": {"header": "web"}, "queue": 1},
    ],
    "limits": {"queue": 1000, "queue_ttl": "20min"},
    "timeout": "20s",  # a busy machine is no dead gate
}


class Fleet(NamedTuple):
    """Handle, callers and the folder by which engines are held."""

    handle: Any
    callers: list[Any]
    folder: Path
    url: str

    def fill(self, tokens: int) -> list[Any]:
        """Requests 0, 1, 2, ... of the first caller, which take every slot until `release`."""
        self.hold()
        slow = [self.callers[0].ask.remote(number, tokens) for number in range(ALL)]
        until(lambda: inside() == ALL, books)
        return slow

    def hold(self) -> None:
        (self.folder / HELD).touch()

    def let(self, number: int) -> None:
        """One request may go on."""
        (self.folder / str(number)).touch()

    def release(self) -> None:
        (self.folder / HELD).unlink(missing_ok=True)
        for each in self.folder.glob("*[0-9]"):
            each.unlink()

    @contextmanager
    def asked_over_http(self, requests_: int, tokens: int, **headers: str):
        """So many answers under way at once; at the end all engines are released, whatever has failed."""
        with ThreadPoolExecutor(requests_) as threads:
            words = {"headers": headers, "timeout": PATIENCE}
            asked = [threads.submit(requests.get, f"{self.url}{tokens}", **words) for _ in range(requests_)]
            try:
                yield asked
            finally:
                self.release()

    @property
    def most(self) -> dict[int, int]:
        """Requests that each engine ever had at once, by process; dead ones included."""
        return {int(each.stem): int(each.read_text()) for each in self.folder.glob("*.most")}


@pytest.fixture(scope="module")
def deployed(served, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    deployment = serve.deployment(
        name="Engine",
        num_replicas=ENGINES,
        max_ongoing_requests=2 * SLOTS,  # Ray itself would let in twice as many as the gate
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
        health_check_period_s=1.0,
        health_check_timeout_s=PATIENCE,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=1.0,
        request_router_config=RequestRouterConfig(
            request_router_class=PATH, request_router_kwargs=KWARGS, request_routing_stats_period_s=1.0
        ),
    )(Engine)
    handle = serve.run(deployment.bind(1.0, str(folder)), name=APP, route_prefix="/")
    callers = [ray.remote(num_cpus=0, max_concurrency=1000)(Caller).remote(APP) for _ in range(2)]
    assert ray.get([each.ask.remote(0, 2) for each in callers]) == ["2", "2"]
    until(lambda: len(routers()) >= ROUTERS, lambda: f"all routers have joined: {books()}")
    until(lambda: rooms() == ENGINES * [SLOTS], lambda: f"every engine has said its slots: {books()}")
    yield Fleet(handle, callers, folder, f"http://127.0.0.1:{served}/?output=")
    for each in callers:
        ray.kill(each)
    serve.delete(APP)


@pytest.fixture
def fleet(deployed):
    yield deployed
    deployed.release()  # whatever failed
    settled()


def gate():
    return ray.get_actor(gate_name(APP, "Engine"), namespace=NAMESPACE)


def gate_id():
    """Which gate it is now; None while there is none."""
    try:
        return gate()._actor_id
    except ValueError:
        return None


def kill_gate():
    """Kill it and wait until another one has all routers; the old one answers for a while yet."""
    before = gate_id()
    ray.kill(gate())
    until(lambda: gate_id() not in (None, before), "another gate has come")
    until(lambda: len(routers()) >= ROUTERS, lambda: f"they share it: {books()}")


def books():
    try:
        return ray.get(gate().books.remote())
    except (ValueError, ray.exceptions.RayActorError):
        return {}


def routers():
    """Those that share the gate, with the number of their requests in it."""
    return books().get("routers", {})


def engines():
    """Names of the replicas that the gate knows."""
    return {*books().get("engines", {})}


def decodes():
    return sum(each["decodes"] for each in books().get("engines", {}).values())


def rooms():
    """Requests that each engine may have; it says so itself, by `record_routing_stats`."""
    return [each["room"][2] for each in books().get("engines", {}).values()]


def queued():
    return books().get("queued", {})


def inside():
    """Requests that this gate, or one before it, has placed and that have not ended."""
    now = books()
    placed = sum(each["prompts"] + each["decodes"] for each in now.get("engines", {}).values())
    return placed + sum(now.get("busy", {}).values())


def settled():
    until(lambda: "queued" in books() and not inside() and not any(queued().values()), books)
    assert books()["faults"] == []


def test_two_proxies_and_a_caller_share_one_gate_and_never_exceed_its_slots(fleet):
    slow = fleet.fill(20)
    with fleet.asked_over_http(40, 3) as asked:
        until(lambda: queued()["default"] == 40, books)
        proxies = [held for name, held in routers().items() if name.startswith("proxy")]
        assert len(proxies) == 2 and min(proxies) > 0, routers()
        loads = [each.load.remote(60, 20) for each in fleet.callers]  # and all of them at once
    assert {each.result().json()["made"] for each in asked} == {3}
    assert set(ray.get(slow)) == {"20"}
    assert [set(each) for each in ray.get(loads)] == [{"20"}, {"20"}]
    assert [*fleet.most.values()] == ENGINES * [SLOTS]  # the engines were full, and no fuller


def test_an_urgent_request_overtakes_those_that_wait(fleet):
    """It is served while 181 others, more than Ray's window of 16, wait for places or hold them."""
    slow = fleet.fill(20)
    slow += [fleet.callers[0].ask.remote(1000 + number, 20) for number in range(150)]
    until(lambda: queued()["default"] == 150, books)
    fleet.let(999)
    urgent = fleet.callers[0].ask.remote(999, 2, "urgent")
    until(lambda: queued()["urgent"] == 1, books)
    fleet.let(0)  # one place falls free
    assert ray.get(urgent, timeout=PATIENCE) == "2"
    assert queued()["default"] >= 149  # one of them has its place by now
    fleet.release()
    assert set(ray.get(slow)) == {"20"}
    assert max(fleet.most.values()) == SLOTS


def test_a_class_whose_queue_is_full_is_refused(fleet):
    slow = fleet.fill(4)
    asked = [fleet.callers[0].ask.remote(number, 2, "bulk") for number in range(6)]
    refused, waiting = ray.wait(asked, num_returns=4, timeout=PATIENCE)
    assert ray.get(refused) == 4 * [BackPressureError.__name__]
    fleet.release()
    assert ray.get(waiting) == ["2", "2"]
    assert set(ray.get(slow)) == {"4"}


def test_http_gets_429_with_retry_after(fleet):
    slow = fleet.fill(4)
    with fleet.asked_over_http(4, 2, **{"x-headgate-class": "web"}) as asked:
        until(lambda: sum(each.done() for each in asked) == 3, books)
        refused = [each.result() for each in asked if each.done()]
    assert [each.status_code for each in refused] == 3 * [429]
    assert all(int(each.headers["retry-after"]) >= 1 for each in refused)
    assert sorted(each.result().status_code for each in asked) == [200, 429, 429, 429]
    assert set(ray.get(slow)) == {"4"}


def test_cancelled_requests_hold_nothing(fleet):
    """Some are cancelled while they wait for a place, the others while they are served."""
    slow = fleet.fill(4)
    generate = fleet.handle.options(method_name="generate", stream=True)

    async def cancel():
        streams = [generate.remote(2000 + number, 20, 100_000) for number in range(30)]
        while queued()["default"] < 30:
            await asyncio.sleep(0.05)
        for each in streams[:15]:
            each.cancel()
        while queued()["default"] > 15:
            await asyncio.sleep(0.05)
        fleet.release()
        for each in streams[15:]:
            assert await anext(each)  # it has begun, and would go on for ever
        while decodes() < 15:  # the replicas have told the gate of their first tokens
            await asyncio.sleep(0.05)
        for each in streams[15:]:
            each.cancel()

    asyncio.run(asyncio.wait_for(cancel(), PATIENCE))
    assert set(ray.get(slow)) == {"4"}
    settled()


def test_the_gate_actor_is_killed_under_load(fleet):
    """Once while the engines are full and requests wait, and once while they flow. Nothing is lost."""
    slow = fleet.fill(20)
    waiting = [fleet.callers[1].ask.remote(number, 20) for number in range(ALL, ALL + 40)]
    until(lambda: queued()["default"] == 40, books)
    kill_gate()
    until(lambda: inside() >= ALL, lambda: f"it knows of what the last one placed: {books()}")
    assert set(fleet.most.values()) <= {*range(2 * SLOTS + 1)}  # Ray's own limit held meanwhile
    loads = [each.load.remote(100, 20) for each in fleet.callers]
    fleet.release()
    kill_gate()
    assert set(ray.get(slow + waiting)) == {"20"}
    assert [set(each) for each in ray.get(loads)] == [{"20"}, {"20"}]


def test_a_replica_is_killed_under_load(fleet):
    """Ray's guarantee: a request that a replica has accepted fails with it, every other one is served."""
    before, known = {*fleet.most}, engines()
    slow = fleet.fill(20)
    waiting = [fleet.callers[1].ask.remote(number, 20) for number in range(ALL, ALL + 40)]
    until(lambda: queued()["default"] == 40, books)
    alive = [pid for pid in before if Path("/proc", str(pid)).exists()]
    os.kill(alive[0], signal.SIGKILL)
    lost, _ = ray.wait(slow, num_returns=SLOTS, timeout=PATIENCE)
    assert set(ray.get(lost)) <= {"ActorDiedError", "RayActorError", "ActorUnavailableError"}
    fleet.release()
    answers = ray.get(slow + waiting)
    assert sum(each != "20" for each in answers) == SLOTS, answers  # those, and no others
    until(lambda: len({*fleet.most} - before) == 1, "another replica has come")
    until(
        lambda: len(engines() & known) == ENGINES - 1, lambda: f"the gate knows that one is gone: {books()}"
    )
    until(lambda: rooms() == ENGINES * [SLOTS], lambda: f"and that another one is there: {books()}")
