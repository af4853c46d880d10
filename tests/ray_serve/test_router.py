"""HeadgateRouter before eight emulated engines: two callers and an HTTP proxy, each with its own router."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

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
LONG = 800  # tokens: some seconds in which all seats are taken
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


@pytest.fixture(scope="module")
def fleet(served):
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
    handle = serve.run(deployment.bind(1.0), name=APP, route_prefix="/")
    callers = [ray.remote(num_cpus=0, max_concurrency=1000)(Caller).remote(APP) for _ in range(2)]
    ray.get([each.ask.remote(0, 2) for each in callers])
    until(lambda: books()["clients"] >= 2, "both callers have joined")
    yield handle, callers
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
    _, callers = fleet
    answers = ray.get([each.load.remote(100, 40) for each in callers])
    assert [set(each) for each in answers] == [{"40"}, {"40"}]
    assert max(each["most"] for each in pids().values()) <= SEATS
    settled()


def test_an_urgent_request_overtakes_those_that_wait(fleet):
    _, (one, _) = fleet
    slow = [one.ask.remote(number, 100) for number in range(150)]
    until(lambda: books()["queued"]["default"] > 100, "more wait than Ray itself would look at")
    urgent = one.ask.remote(999, 2, "urgent")
    assert ray.get(urgent) == "2"
    done, _ = ray.wait(slow, num_returns=len(slow), timeout=0)
    assert len(done) < 100
    assert set(ray.get(slow)) == {"100"}
    most = [each["most"] for each in pids().values()]
    assert max(most) == SEATS  # the engines were full, and no fuller
    settled()


def test_a_class_whose_queue_is_full_is_refused(fleet):
    _, (one, _) = fleet
    slow = [one.ask.remote(number, LONG) for number in range(ENGINES * SEATS)]
    until(
        lambda: sum(e["prompts"] + e["decodes"] for e in books()["engines"].values()) == ENGINES * SEATS,
        "full",
    )
    answers = ray.get([one.ask.remote(number, 2, "bulk") for number in range(6)])
    assert sorted(answers) == ["2", "2", *4 * [BackPressureError.__name__]]
    assert set(ray.get(slow)) == {str(LONG)}
    settled()


def test_http_gets_429_with_retry_after(fleet, served):
    url = f"http://127.0.0.1:{served}/?output="
    assert requests.get(url + "3", timeout=PATIENCE).json() == {"made": 3}
    _, (one, _) = fleet
    slow = [one.ask.remote(number, LONG) for number in range(ENGINES * SEATS)]
    until(
        lambda: sum(e["prompts"] + e["decodes"] for e in books()["engines"].values()) == ENGINES * SEATS,
        "full",
    )
    with ThreadPoolExecutor(4) as threads:
        headers = {"x-headgate-class": "web"}
        found = [*threads.map(lambda _: requests.get(url + "2", headers=headers, timeout=PATIENCE), range(4))]
    assert sorted(each.status_code for each in found) == [200, 429, 429, 429]
    assert all(int(each.headers["retry-after"]) >= 1 for each in found if each.status_code == 429)
    assert set(ray.get(slow)) == {str(LONG)}
    settled()


def test_cancelled_requests_hold_nothing(fleet):
    handle, (one, _) = fleet
    slow = [one.ask.remote(number, 60) for number in range(ENGINES * SEATS)]
    until(
        lambda: sum(e["prompts"] + e["decodes"] for e in books()["engines"].values()) == ENGINES * SEATS,
        "full",
    )

    async def cancel():
        streams = [handle.options(method_name="generate", stream=True).remote(n, 20, 60) for n in range(30)]
        await asyncio.sleep(0.3)
        for each in streams[:15]:
            each.cancel()
        await asyncio.sleep(1.5)  # some of the others run by now
        for each in streams[15:]:
            each.cancel()

    asyncio.run(cancel())
    assert set(ray.get(slow)) == {"60"}
    settled()


def test_the_gate_actor_is_killed_under_load(fleet):
    _, callers = fleet
    before = gate()._actor_id
    loads = [each.load.remote(150, 20) for each in callers]
    until(
        lambda: sum(e["prompts"] + e["decodes"] for e in books()["engines"].values()) > ENGINES, "under load"
    )
    ray.kill(gate())
    assert [set(each) for each in ray.get(loads)] == [{"20"}, {"20"}]  # nothing is lost
    until(lambda: books()["clients"] >= 2, "the routers share a gate again")
    assert gate()._actor_id != before
    assert all(each["most"] <= 2 * SEATS for each in pids().values())  # Ray's own limit held meanwhile
    settled()


def test_a_replica_is_killed_under_load(fleet):
    """Ray's guarantee: a request that a replica has accepted fails with it, every other one is served."""
    _, callers = fleet
    victim = next(iter(pids()))
    loads = [each.load.remote(150, 40) for each in callers]
    until(
        lambda: sum(e["prompts"] + e["decodes"] for e in books()["engines"].values()) > ENGINES, "under load"
    )
    os.kill(victim, signal.SIGKILL)
    answers = [each for load in ray.get(loads) for each in load]
    lost = [each for each in answers if each != "40"]
    assert len(answers) == 300
    assert len(lost) <= SEATS, lost
    assert set(lost) <= {"ActorDiedError", "RayActorError", "RayTaskError", "ActorUnavailableError"}, lost
    until(lambda: len(books().get("engines", {})) == ENGINES, "another replica has come")
    assert victim not in pids()
    settled()
