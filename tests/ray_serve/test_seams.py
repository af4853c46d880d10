"""What HeadgateRouter uses of Ray beyond its documentation: it must be there and mean the same."""

from __future__ import annotations

import asyncio
import inspect

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray installs it")

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
    RequestProtocol,
)
from ray.serve._private.proxy_request_response import ASGIProxyRequest
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, RequestRouter

from conftest import PATIENCE
from headgate.core.errors import InputError
from headgate_ray.router import SLOTS, HeadgateRouter, router_config

DEPLOYMENT = DeploymentID("d", "a")
METHODS = {
    "_choose_replica_for_request": ["self", "pending_request", "is_retry"],
    "_record_queue_wait_time": ["self", "pending_request"],
    "_remove_pending_request_from_indices": ["self", "pending_request"],
    "on_request_completed": ["self", "replica_id", "internal_request_id"],
    "on_replica_actor_died": ["self", "replica_id"],
    "update_replicas": ["self", "replicas"],
}
ATTRIBUTES = (
    "_deployment_id",
    "_handle_source",
    "_pending_requests_by_id",
    "_pending_requests_to_fulfill",
    "_pending_requests_to_route",
    "_routing_task_by_pending_request_future",
)


class Replica:
    """As much of a running replica as a router touches."""

    def __init__(self, name, most=2):
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.max_ongoing_requests, self.routing_stats, self.queue = most, {}, 0

    async def get_queue_len(self, *, deadline_s):
        return self.queue

    def push_proxy_handle(self, handle): ...


def router(**kwargs):
    made = HeadgateRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    made.initialize_state(**{"gate": "local", **kwargs})
    return made


def request(number, id=None):
    return PendingRequest(args=[], kwargs={}, metadata=RequestMetadata(str(number), id or f"id{number}"))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(("name", "arguments"), METHODS.items())
def test_methods(name, arguments):
    assert [*inspect.signature(getattr(RequestRouter, name)).parameters] == arguments


def test_attributes():
    made = router()
    assert [each for each in ATTRIBUTES if not hasattr(made, each)] == []


def test_everybody_is_looked_at_and_every_place_is_given_back(cluster):
    """More wait than Ray's own window of 2 x replicas; each gets its replica, cancels hold nothing."""

    async def work():
        made = router()
        made.update_replicas([Replica("a"), Replica("b")])
        waits = [asyncio.create_task(made._choose_replica_for_request(request(n))) for n in range(40)]
        await until(lambda: sum(each.done() for each in waits) == 4 and made.curr_num_routing_tasks == 36)
        for each in waits[20:30]:
            each.cancel()
        done = 0
        while done < 30:
            for number, each in enumerate(waits):
                if each is not None and each.done():
                    waits[number] = None
                    if not each.cancelled():
                        done += 1
                        made.on_request_completed(each.result().replica_id, f"id{number}")
            await asyncio.sleep(0.005)
        await until(lambda: not (made._held or made._gate.entries or made._pending_requests_by_id))
        assert made._gate.local.books()["counts"]["ended_twice"] == 0
        await made._gate.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


def test_calls_that_share_an_id_are_kept_apart(cluster):
    async def work():
        made = router()
        made.update_replicas([Replica("a", 1), Replica("b", 1)])
        asked = [made._choose_replica_for_request(request(n, "same")) for n in range(2)]
        one, two = await asyncio.gather(*asked)
        assert one.replica_id != two.replica_id
        made.on_request_completed(one.replica_id, "same")
        made.on_request_completed(two.replica_id, "same")
        await until(lambda: not made._gate.entries)
        await made._gate.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


def test_a_rejected_request_goes_elsewhere_and_its_first_end_counts_for_nothing(cluster):
    async def work():
        made = router()
        made.update_replicas([Replica("a", 1), Replica("b", 1)])
        asked = request(1)
        first = await made._choose_replica_for_request(asked)
        second = await made._choose_replica_for_request(asked, is_retry=True)
        assert second.replica_id != first.replica_id
        made.on_request_completed(first.replica_id, "id1")  # the rejected attempt ends late
        await until(lambda: not made._owed)
        assert len(made._gate.entries) == 1
        made.on_request_completed(second.replica_id, "id1")
        await until(lambda: not (made._gate.entries or made._held or made._owed))
        await made._gate.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


def test_a_gate_that_raises_hangs_nobody(cluster, monkeypatch):
    async def work():
        made = router()
        made.update_replicas([Replica("a"), Replica("b")])
        monkeypatch.setattr(made._gate, "place", None)  # calling it raises
        found = await made._choose_replica_for_request(request(1))
        assert found in made.curr_replicas.values()
        await made._gate.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


BAD_POLICY = """
from headgate.methods.balance.balance import LeastLoaded
class Bad(LeastLoaded):
    def route(self, view):
        raise ValueError("mine")
"""


def test_an_exception_in_a_users_policy_hangs_nobody(cluster, tmp_path):
    """Its gate disables it, and least-loaded goes on."""
    (tmp_path / "bad.py").write_text(BAD_POLICY)

    async def work():
        made = router(router={"name": f"{tmp_path}/bad.py:Bad"})
        made.update_replicas([Replica("a", 1), Replica("b", 1)])
        one = await made._choose_replica_for_request(request(1))
        two = await made._choose_replica_for_request(request(2))
        assert one.replica_id != two.replica_id
        assert "mine" in made._gate.local.gate.fallen
        await made._gate.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


def test_without_replicas_requests_wait_and_are_served_by_the_first_that_comes(cluster):
    """As with scaling from zero; also those that the gate held when the last replica died."""

    async def work():
        made = router()
        made.update_replicas([])
        early = [asyncio.create_task(made._choose_replica_for_request(request(n))) for n in range(3)]
        await asyncio.sleep(0.05)
        assert not any(each.done() for each in early)
        made.update_replicas([Replica("a", 2)])
        await until(lambda: sum(each.done() for each in early) == 2)  # the third waits in the gate
        made.on_replica_actor_died(ReplicaID("a", DEPLOYMENT))
        made.update_replicas([])
        await asyncio.sleep(0.05)
        made.update_replicas([Replica("b", 1)])
        await until(lambda: all(each.done() for each in early))
        assert [each.result().replica_id.unique_id for each in early] == ["a", "a", "b"]
        await made._gate.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


class Silent(Replica):
    """It never says how many requests it has."""

    async def get_queue_len(self, *, deadline_s):
        await asyncio.Event().wait()


def test_a_replica_that_never_answers_holds_nobody_up(cluster):
    """Nor do stats that are nonsense."""

    async def work():
        made = router()
        silent = Silent("a", 3)
        for nonsense in ("many", None, -5, 10**9, True, [2]):
            silent.routing_stats = {SLOTS: nonsense}
            made.update_replicas([silent])
            assert made._gate._slots == {"a": 3 if nonsense is not True else 1}
        for number in range(3):
            await made._choose_replica_for_request(request(number))
        await made._gate.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


@pytest.mark.parametrize(
    "argument", [{"headers": 5}, {"metadata": {"class": {}}}, {"messages": [None]}, {"model": ["x"]}]
)
def test_a_request_that_cannot_be_read_does_not_pass_the_gate_by(cluster, argument):
    async def work():
        made = router(classes=[{"name": "urgent", "match": {"field": "urgent"}}])
        made.update_replicas([Replica("a", 1)])
        await made._choose_replica_for_request(request(1))
        asked = request(2)
        asked.args.append(argument)
        waiting = asyncio.create_task(made._choose_replica_for_request(asked))
        await until(lambda: made._gate.local.books()["queued"]["default"] == 1)
        waiting.cancel()
        await made._gate.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


def test_keywords_of_a_call_name_its_class(cluster):
    async def work():
        made = router(classes=[{"name": "urgent", "match": {"field": "urgent"}}])
        asked = request(1)
        asked.kwargs.update(prompt="x" * 400, max_tokens=7, metadata={"class": "urgent"})
        assert made._about(asked) == ("urgent", 100, 7, 0)

    asyncio.run(work())


def test_headers_of_an_http_request_name_its_class(cluster):
    """A proxy hands its request over as bytes; bytes of any other caller are never unpickled."""

    async def work():
        made = router(classes=[{"name": "web", "match": {"header": "web"}}])
        headers = [(b"X-Headgate-Class", b"web"), (b"content-length", b"400")]
        asked = request(1)
        asked.args.append(ASGIProxyRequest({"headers": headers}, None, None).serialized_replica_arg("proxy"))
        assert made._about(asked)[:2] == ("default", 1)
        asked.metadata._request_protocol = RequestProtocol.HTTP
        assert made._about(asked)[:2] == ("web", 100)

    asyncio.run(work())


def test_direct_streaming_takes_no_place(cluster):
    """Ray asks for a replica without a request that would end."""

    async def work():
        made = router()
        made.update_replicas([Replica("a", 1)])
        for number in range(3):
            ((chosen,),) = await made.choose_replicas([*made.curr_replicas.values()], request(number))
            assert chosen.replica_id.unique_id == "a"
        assert not made._gate.entries
        await made._gate.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


def test_a_refusal_is_back_pressure(cluster):
    async def work():
        made = router(limits={"queue": 1})
        made.update_replicas([Replica("a", 1)])
        await made._choose_replica_for_request(request(1))
        waiting = asyncio.create_task(made._choose_replica_for_request(request(2)))
        await until(lambda: made._gate.local.books()["queued"]["default"] == 1)
        with pytest.raises(BackPressureError) as refused:
            await made._choose_replica_for_request(request(3))
        assert refused.value.status_code == 429
        assert refused.value.retry_after_s >= 1
        waiting.cancel()
        await made._gate.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


def test_without_a_replica_for_too_long_it_is_503(cluster):
    async def work():
        made = router(limits={"queue_ttl": "100ms"})
        made.update_replicas([Replica("a", 1)])
        made._gate.dead("a")  # another router has found it dead, Ray has not yet
        with pytest.raises(BackPressureError) as refused:
            await made._choose_replica_for_request(request(1))
        assert refused.value.status_code == 503
        await made._gate.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


def test_bad_kwargs_are_refused_before_the_deployment_and_serve_after_it(cluster):
    with pytest.raises(InputError, match="did you mean 'slots'"):
        router_config(slot=3)
    with pytest.raises(InputError, match="did you mean 'least-loaded'"):
        router_config(router={"name": "least-loded"})
    for wrong in ({"slot": 3}, {"router": {"name": "least-loded"}}, {"router": 5}, {"limits": {"queue": -1}}):
        assert router(**wrong)._config.router.name == "least-loaded"
