"""HeadgateRouter before eight emulated engines: two callers and an HTTP proxy, each with its own router."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray installs it")

import ray
import requests
from emulated import SEATS, Caller, Engine
from ray import serve
from ray.serve.exceptions import BackPressureError

from conftest import QUIET
from headgate.live.route.ray import NAMESPACE, gate_name, router_config

ENGINES = 8
PATIENCE = 60.0  # seconds
APP = "fleet"
KWARGS = {
    "router": {"name": "density-deep", "order": ["urgent", "default"], "card": "cal-h200-qwen3-8b"},
    "classes": [
        {"name": "urgent", "match": {"field": "urgent"}},
        {"name": "bulk", "match": {"field": "bulk"}, "queue": 2},
        {"name": "web", "match": {"header": "web"}, "queue": 1},
    ],
    "limits": {"queue": 1000, "queue_ttl": "120s"},
    "seats": SEATS,
}


def until(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


class Fleet(NamedTuple):
    """Handle and callers; while the file `held` is there, requests keep their seats and get nothing."""

    handle: Any
    callers: list[Any]
    held: Path

    def fill(self, tokens: int) -> list[Any]:
        """Requests that take every seat until `release`."""
        self.held.touch()
        slow = [self.callers[0].ask.remote(number, tokens) for number in range(ENGINES * SEATS)]
        until(lambda: inside() == ENGINES * SEATS, "full")
        return slow

    def release(self) -> None:
        self.held.unlink()


@pytest.fixture(scope="module")
def fleet(served, tmp_path_factory):
    held = tmp_path_factory.mktemp("engines") / "held"
    deployment = serve.deployment(
        name="Engine",
        num_replicas=ENGINES,
        max_ongoing_requests=2 * SEATS,  # Ray itself would let in twice as many as the gate
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
        health_check_period_s=1.0,
        health_check_timeout_s=60.0,
        request_router_config=router_config(**KWARGS),
    )(Engine)
    handle = serve.run(deployment.bind(1.0, str(held)), name=APP, route_prefix="/")
    callers = [ray.remote(num_cpus=0, max_concurrency=1000)(Caller).remote(APP) for _ in range(2)]
    ray.get([each.ask.remote(0, 2) for each in callers])
    until(lambda: books()["clients"] >= 2, "both callers have joined")
    yield Fleet(handle, callers, held)
    for each in callers:
        ray.kill(each)
    serve.delete(APP)


def gate():
    return ray.get_actor(gate_name(APP, "Engine"), namespace=NAMESPACE)


def books():
    try:
        return ray.get(gate().books.remote())
    except (ValueError, ray.exceptions.RayActorError):
        return {"clients": 0}


def inside():
    """Requests that the gate has placed and that have not ended."""
    return sum(each["prompts"] + each["decodes"] for each in books().get("engines", {}).values())


def pids():
    """Of all replicas, by asking until every one has answered."""
    handle, found = serve.get_app_handle(APP), {}

    async def ask():
        end = time.monotonic() + PATIENCE
        while len(found) < ENGINES and time.monotonic() < end:
            for about in await asyncio.gather(*(handle.about.remote() for _ in range(3 * ENGINES))):
                found[about["pid"]] = about

    asyncio.run(ask())
    assert len(found) == ENGINES
    return found


def settled():
    def empty():
        now = books()
        held = sum(each["prompts"] + each["decodes"] for each in now.get("engines", {}).values())
        return (
            "queued" in now and not held and not any(now["queued"].values()) and not any(now["busy"].values())
        )

    until(empty, f"the books are empty: {books()}")
    assert books()["faults"] == []


def test_routers_share_one_gate_and_never_exceed_its_seats(fleet):
    answers = ray.get([each.load.remote(100, 40) for each in fleet.callers])
    assert [set(each) for each in answers] == [{"40"}, {"40"}]
    assert max(each["most"] for each in pids().values()) <= SEATS
    settled()


def test_an_urgent_request_overtakes_those_that_wait(fleet):
    one = fleet.callers[0]
    slow = fleet.fill(20)
    slow += [one.ask.remote(number, 20) for number in range(150)]
    until(lambda: books()["queued"]["default"] == 150, "more wait than Ray itself would look at")
    urgent = one.ask.remote(999, 2, "urgent")
    time.sleep(1.0)  # it stands behind them
    fleet.release()
    assert ray.get(urgent) == "2"
    done, _ = ray.wait(slow, num_returns=len(slow), timeout=0)
    assert len(done) < len(slow) / 2
    assert set(ray.get(slow)) == {"20"}
    assert max(each["most"] for each in pids().values()) == SEATS  # the engines were full, and no fuller
    settled()


def test_a_class_whose_queue_is_full_is_refused(fleet):
    slow = fleet.fill(4)
    asked = [fleet.callers[0].ask.remote(number, 2, "bulk") for number in range(6)]
    refused, waiting = ray.wait(asked, num_returns=4, timeout=PATIENCE)
    assert ray.get(refused) == 4 * [BackPressureError.__name__]
    fleet.release()
    assert ray.get(waiting) == ["2", "2"]
    assert set(ray.get(slow)) == {"4"}
    settled()


def test_http_gets_429_with_retry_after(fleet, served):
    url = f"http://127.0.0.1:{served}/?output="
    assert requests.get(url + "3", timeout=PATIENCE).json() == {"made": 3}
    slow = fleet.fill(4)
    headers = {"x-headgate-class": "web"}
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(requests.get, url + "2", headers=headers, timeout=PATIENCE) for _ in range(4)]
        until(lambda: sum(each.done() for each in asked) == 3, "one waits, three are refused")
        refused = [each.result() for each in asked if each.done()]
        fleet.release()
    assert [each.status_code for each in refused] == 3 * [429]
    assert all(int(each.headers["retry-after"]) >= 1 for each in refused)
    assert sorted(each.result().status_code for each in asked) == [200, 429, 429, 429]
    assert set(ray.get(slow)) == {"4"}
    settled()


def test_cancelled_requests_hold_nothing(fleet):
    slow = fleet.fill(60)
    generate = fleet.handle.options(method_name="generate", stream=True)

    async def cancel():
        streams = [generate.remote(number, 20, 60) for number in range(30)]
        await asyncio.sleep(0.3)
        for each in streams[:15]:
            each.cancel()
        fleet.release()
        await asyncio.sleep(1.5)  # some of the others run by now
        for each in streams[15:]:
            each.cancel()

    asyncio.run(cancel())
    assert set(ray.get(slow)) == {"60"}
    settled()


def test_the_gate_actor_is_killed_under_load(fleet):
    callers = fleet.callers
    before = gate()._actor_id
    loads = [each.load.remote(150, 20) for each in callers]
    until(lambda: inside() > ENGINES, "under load")
    ray.kill(gate())
    assert [set(each) for each in ray.get(loads)] == [{"20"}, {"20"}]  # nothing is lost
    until(lambda: books()["clients"] >= 2, "the routers share a gate again")
    assert gate()._actor_id != before
    assert all(each["most"] <= 2 * SEATS for each in pids().values())  # Ray's own limit held meanwhile
    settled()


def test_a_replica_is_killed_under_load(fleet):
    """Ray's guarantee: a request that a replica has accepted fails with it, every other one is served."""
    callers = fleet.callers
    victim = next(iter(pids()))
    loads = [each.load.remote(150, 40) for each in callers]
    until(lambda: inside() > ENGINES, "under load")
    os.kill(victim, signal.SIGKILL)
    answers = [each for load in ray.get(loads) for each in load]
    lost = [each for each in answers if each != "40"]
    assert len(answers) == 300
    assert len(lost) <= SEATS, lost
    assert set(lost) <= {"ActorDiedError", "RayActorError", "RayTaskError", "ActorUnavailableError"}, lost
    until(lambda: len(books().get("engines", {})) == ENGINES, "another replica has come")
    assert victim not in pids()
    settled()
