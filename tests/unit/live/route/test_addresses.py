"""Limits of an address, with and without proxies before the router, and the queue share of a key."""

import asyncio
import json
from pathlib import Path

import pytest

from fake_engines import never, stream
from headgate.core.errors import InputError
from headgate.live.route.classes import new_key, read_keys
from headgate.live.route.config import OPEN, Addresses, checked, forwarded_for
from headgate.live.route.deliver.legs import MOST_ADDRESSES, TenantBounds, TenantLimits
from headgate.live.route.request import RefusedError
from router_world import routed, run, until

ENGINE = [{"url": "http://a:1"}]


@pytest.mark.parametrize(
    ("peer", "shown", "client"),
    [
        ("10.0.0.7", [], "10.0.0.7"),  # a proxy itself
        ("10.0.0.7", ["198.51.100.1"], "198.51.100.1"),
        ("::ffff:10.0.0.7", ["198.51.100.1"], "198.51.100.1"),
        ("10.0.0.7", ["6.6.6.6, 198.51.100.1, 10.1.1.1"], "198.51.100.1"),  # what a client wrote comes first
        ("10.0.0.7", ["6.6.6.6", "198.51.100.1"], "198.51.100.1"),
        ("10.0.0.7", ["198.51.100.1, nonsense"], "10.0.0.7"),
        ("10.0.0.7", ["10.1.1.1, 10.2.2.2"], "10.1.1.1"),  # all of them proxies: the first
        ("10.0.0.7", ["2001:db8:7::1"], "2001:db8:7::"),
        ("192.0.2.1", ["6.6.6.6"], "192.0.2.1"),  # no proxy of ours
        ("10.0.0.7", ["," * 5000 + "198.51.100.1"], "198.51.100.1"),
    ],
)
def test_only_trusted_proxies_name_the_client(peer: str, shown: list[str], client: str) -> None:
    assert forwarded_for((peer, 1), shown, ("10.0.0.0/8",)) == client
    assert forwarded_for((peer, 1), shown, ()) == forwarded_for((peer, 1), [], ())


def test_an_address_has_limits_whatever_keys_it_shows(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    key, line = new_key("alice")
    other, other_line = new_key("bob")
    (tmp_path / "keys").write_text(f"{line}\n{other_line}\n")

    async def work() -> None:
        front = {"proxies": ["127.0.0.1"], "access_log": str(log), "key_file": str(tmp_path / "keys")}
        async with routed(stream, front=front, addresses={"requests": 0.01}) as world:
            statuses = []
            for shown, address in ((key, "6.6.6.6"), (other, "6.6.6.6"), (other, "7.7.7.7")):
                headers = {"Authorization": f"Bearer {shown}", "X-Forwarded-For": address}
                answer = await world.ask(stream=True, headers=headers)
                statuses.append(answer.status)
                if answer.status == 429:
                    assert int(answer.headers["Retry-After"]) >= 1
            assert statuses == [200, 429, 200]
            assert world.counted("refused_total", reason="address-requests") == 1
            assert world.counted("tenant_refused_total", tenant="bob", reason="address-requests") == 1
            await world.settled()

    run(work())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["client"] for line in lines] == ["6.6.6.6", "6.6.6.6", "7.7.7.7"]
    assert lines[1]["fault"] == "address-requests" and lines[1]["key"] == "bob"


def test_tokens_of_an_address() -> None:
    async def work() -> None:
        async with routed(stream, front={"proxies": ["127.0.0.1"]}, addresses={"tokens": 10}) as world:
            one, other = ({"X-Forwarded-For": each} for each in ("6.6.6.6", "7.7.7.7"))
            assert [(await world.ask(stream=True, headers=one)).status for _ in range(2)] == [200, 429]
            assert world.counted("refused_total", reason="address-tokens") == 1
            assert (await world.ask(stream=True, headers=other)).status == 200
            await world.settled()

    run(work())


def test_requests_at_once_of_an_address() -> None:
    async def work() -> None:
        async with routed(never, front={"proxies": ["127.0.0.1"]}, addresses={"inflight": 1}) as world:
            one, other = ({"X-Forwarded-For": each} for each in ("6.6.6.6", "7.7.7.7"))
            inside = [asyncio.create_task(world.ask(stream=True, headers=one))]
            await until(lambda: len(world.engines[0].seen) == 1)
            assert (await world.ask(stream=True, headers=one)).status == 429
            assert world.counted("refused_total", reason="address-inflight") == 1
            inside.append(asyncio.create_task(world.ask(stream=True, headers=other)))
            await until(lambda: len(world.engines[0].seen) == 2)
            for each in inside:
                each.cancel()
            await world.settled()

    run(work())


def test_without_keys_addresses_share_the_queue_and_take_turns() -> None:
    async def work() -> None:
        front = {"proxies": ["127.0.0.1"]}
        limits, bounds = {"queue": 8}, {"queue": 0.25}
        async with routed(never, engine={"slots": 1}, front=front, limits=limits, addresses=bounds) as world:
            one, other = ({"X-Forwarded-For": each} for each in ("6.6.6.6", "7.7.7.7"))
            inside = [asyncio.create_task(world.ask(stream=True, headers=one)) for _ in range(4)]
            await until(lambda: len(world.app.gate.roster.waiting) == 2)  # a slot, its spare, two wait
            refused = await world.ask(stream=True, headers=one)
            assert refused.status == 429 and world.counted("refused_total", reason="address-queue") == 1
            inside.append(asyncio.create_task(world.ask(stream=True, headers=other)))
            await until(lambda: len(world.app.gate.roster.waiting) == 3)
            for each in inside:
                each.cancel()
            await world.settled()

    run(work())


def test_a_key_has_its_share_of_the_queue(tmp_path: Path) -> None:
    key, line = new_key("alice")
    (tmp_path / "keys").write_text(f"{line} queue=0.25\n")

    async def work() -> None:
        front, limits = {"key_file": str(tmp_path / "keys")}, {"queue": 8}
        async with routed(never, engine={"slots": 1}, front=front, limits=limits) as world:
            headers = {"Authorization": f"Bearer {key}"}
            inside = [asyncio.create_task(world.ask(stream=True, headers=headers)) for _ in range(4)]
            await until(lambda: len(world.app.gate.roster.waiting) == 2)
            assert (await world.ask(stream=True, headers=headers)).status == 429
            assert world.counted("refused_total", reason="tenant-queue") == 1
            for each in inside:
                each.cancel()
            await world.settled()

    run(work())


@pytest.mark.parametrize("word", ["queue=0", "queue=1.5", "queue=x", "queue=0.5 queue=0.5", "tokens=1.5"])
def test_wrong_words_of_a_key(tmp_path: Path, word: str) -> None:
    _, line = new_key("alice")
    (tmp_path / "keys").write_text(f"{line} {word}\n")
    with pytest.raises(InputError, match=r"\[queue=SHARE\]"):
        read_keys(tmp_path / "keys")


def test_an_open_service_has_bounds_of_its_own() -> None:
    def bounds(**front: object) -> Addresses:
        return checked({"front": front, "engines": ENGINE}).address_bounds

    assert bounds(host="0.0.0.0", open=True) == OPEN
    assert bounds() == bounds(host="0.0.0.0", open=True, key_file="keys") == Addresses()
    own = checked(
        {"front": {"host": "0.0.0.0", "open": True}, "addresses": {"inflight": 1}, "engines": ENGINE}
    )
    assert own.address_bounds == Addresses(inflight=1)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"front": {"proxies": ["10.0.0.0/99"]}}, "is not a network; write 10.0.0.0/8"),
        ({"front": {"processes": 2}}, "2 processes would each fill the engines; give store ="),
        ({"front": {"processes": 0}}, "processes"),
        ({"replicas": {"store": "http://a"}}, "write redis://HOST:6379"),
        ({"replicas": {"lease": 0.1}}, "lease"),
        ({"addresses": {"queue": 2}}, "queue"),
    ],
)
def test_mistakes(tables: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as error:
        checked({"engines": ENGINE, **tables})
    assert said in str(error.value) and "\n" not in str(error.value)


def test_accounts_of_addresses_are_bounded() -> None:
    limits = TenantLimits()
    limits.set({}, TenantBounds(), TenantBounds(requests=1.0))
    entered = 0
    for number in range(MOST_ADDRESSES + 500):
        try:
            with limits.inside("", "", 0.0, f"address {number}"):
                entered += 1
        except RefusedError as refused:
            assert refused.reason == "address-requests"
    assert entered == MOST_ADDRESSES + 1, "all later ones share one"
