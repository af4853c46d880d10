"""Several routers before the same engines, with a real Redis between them."""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.redis_server import RedisServer
from fake_engines import Call, FakeEngine, stream
from headgate.core.errors import InputError
from headgate.live.route.classes import new_key
from headgate.live.route.config import checked
from headgate.live.route.deliver.legs import Allowance, TenantBounds, TenantUse
from headgate.live.route.server import RouterApp
from router_world import CALM, World, merged, run, until

pytest.importorskip("redis")
MAIN = "from headgate.cli import main; main()"
CARD = "cal-h200-qwen3-8b"


class Counted:
    """An engine's script that counts what runs at once, and holds it until it is told."""

    def __init__(self) -> None:
        self.running = self.most = self.seen = 0
        self.hold = asyncio.Event()
        self.seconds = 0.0

    async def __call__(self, call: Call) -> None:
        self.running += 1
        self.seen += 1
        self.most = max(self.most, self.running)
        try:
            await self.hold.wait() if not self.seconds else await asyncio.sleep(self.seconds)
            await stream(call)
        finally:
            self.running -= 1


@asynccontextmanager
async def fleet(
    store: RedisServer, routers: int, *scripts: Any, slots: int = 16, **config: Any
) -> AsyncIterator[list[World]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(script)) for script in scripts]
        listed = [{"url": each.url, "slots": slots} for each in engines]
        shared = {"replicas": {"store": store.url, "lease": 1.0}}
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        )
        given = checked(merged(CALM, {"engines": listed}, shared, config))
        apps = [RouterApp(given, lambda: given) for _ in range(routers)]
        for app in apps:
            stack.push_async_callback(app.stop)
        await asyncio.gather(*(app.start() for app in apps))
        yield [World(app, client, engines) for app in apps]


def held(worlds: list[World], engine: int = 0) -> list[int]:
    return [world.app.replicas.held(world.app.upstreams[engine]) for world in worlds]


def test_a_busy_router_takes_what_an_idle_one_holds_and_no_engine_exceeds_its_slots() -> None:
    async def work() -> None:
        script = Counted()
        with RedisServer() as store:
            async with fleet(store, 2, script, router={"name": "token-bucket", "card": CARD}) as (one, other):
                await until(lambda: held([one, other]) == [8, 8])
                asked = [asyncio.create_task(one.stream()) for _ in range(15)]
                await until(lambda: script.running == 15)
                assert held([one, other])[1] >= 1, "a router always has a slot"
                asked += [asyncio.create_task(other.stream()) for _ in range(15)]
                await asyncio.sleep(0.5)
                assert script.running == 16 and sum(held([one, other])) <= 16
                script.seconds = 0.01
                script.hold.set()
                answers = await asyncio.gather(*asked)
                assert {answer.status for answer in answers} == {200}
                assert script.most == 16
                for world in (one, other):
                    await world.settled()

    run(work())


def test_a_lost_store_changes_nothing_and_comes_back_without_a_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        script = Counted()
        with RedisServer() as store:
            async with fleet(store, 2, script, router={"name": "token-bucket", "card": CARD}) as (one, other):
                await until(lambda: held([one, other]) == [8, 8])
                asked = [asyncio.create_task(one.stream()) for _ in range(12)]
                await until(lambda: script.running == 12)
                before = held([one, other])
                row = one.app.view.snapshot(one.app.now())["engines"][0]
                assert (row["lease"], row["ours"], row["peers"]) == (before[0], 12, 0)
                store.kill()
                await until(lambda: not (one.app.replicas.up or other.app.replicas.up))
                assert any("store is lost" in note for note in one.app.view.snapshot(one.app.now())["notes"])
                await asyncio.sleep(1.5)  # more than a lease
                assert held([one, other]) == before
                asked += [asyncio.create_task(other.stream()) for _ in range(12)]
                await asyncio.sleep(0.3)
                assert script.running == 12 + before[1] and len(other.app.gate.tickets) == 12
                async with one.client.get(one.admin + "/metrics") as metrics:
                    assert "headgate_store_up 0.0" in await metrics.text()
                script.hold.set()
                answers = await asyncio.gather(*asked)
                assert {answer.status for answer in answers} == {200}, "nothing that was admitted is refused"
                store.start()  # and has forgotten everything
                await until(lambda: one.app.replicas.up and other.app.replicas.up)
                script.hold.clear()
                asked = [asyncio.create_task(one.stream()) for _ in range(20)]
                asked += [asyncio.create_task(other.stream()) for _ in range(20)]
                await until(lambda: script.running == 16)
                await until(lambda: sum(held([one, other])) == 16)
                script.hold.set()
                assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
                assert script.most == 16
                lost = [each.message for each in caplog.records if "store is" in each.message]
                assert len(lost) == 4 and sum("is lost" in line for line in lost) == 2, lost

    run(work())


def test_a_router_without_its_store_does_not_start() -> None:
    async def work() -> None:
        with RedisServer() as store:
            store.kill()
            with pytest.raises(InputError, match=r"replicas\.store cannot be used"):
                async with fleet(store, 1, stream):
                    pass

    run(work())


def test_limits_of_keys_hold_for_all_routers_together(tmp_path: Path) -> None:
    key, line = new_key("alice")
    slow, slow_line = new_key("slow")
    big, big_line = new_key("big")
    file = tmp_path / "keys"
    file.write_text(f"{line} inflight=3\n{slow_line} requests=0.01\n{big_line} tokens=30\n")
    alice, once, tokens = ({"Authorization": f"Bearer {each}"} for each in (key, slow, big))

    async def work() -> None:
        script = Counted()
        with RedisServer() as store:
            async with fleet(store, 2, script, front={"key_file": str(file)}) as worlds:
                one, other = worlds
                asked = [asyncio.create_task(one.ask(stream=True, headers=alice)) for _ in range(2)]
                await until(lambda: script.running == 2)
                asked.append(asyncio.create_task(other.ask(stream=True, headers=alice)))
                await until(lambda: script.running == 3)
                for world in worlds:
                    refused = await world.ask(stream=True, headers=alice)
                    assert refused.status == 429 and refused.headers["Retry-After"] == "1"
                    assert world.counted("refused_total", reason="tenant-inflight") == 1
                    labels = {"tenant": "alice", "reason": "tenant-inflight"}
                    assert world.counted("tenant_refused_total", **labels) == 1
                script.hold.set()
                assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
                assert (await other.ask(stream=True, headers=alice)).status == 200, "places move at once"
                statuses = [
                    (await world.ask(stream=True, headers=once)).status for world in (*worlds, *worlds)
                ]
                assert statuses == [200, 429, 429, 429]
                used = [await world.ask(stream=True, headers=tokens, max_tokens=400) for world in worlds * 4]
                assert 200 in {each.status for each in used} and used[-1].status == 429
                served = sum(each.status == 200 for each in used)
                assert 1 <= served <= 4, "eight tokens each, thirty a minute at both routers together"
                for world in worlds:
                    await world.settled()

    run(work())


def test_what_was_spent_counts_once_where_the_answer_of_the_store_is_lost() -> None:
    async def work() -> None:
        with RedisServer() as store:
            async with fleet(store, 1, stream) as (world,):
                replicas, bucket = world.app.replicas, Allowance(600, name="tokens x")
                await replicas.ready((), bucket)
                replicas._task.cancel()
                script = replicas._script

                async def lost(**about: Any) -> None:
                    await script(**about)
                    raise TimeoutError

                for spent, left in ((400, 200), (-300, 500), (100, 400)):
                    bucket.use(spent, world.app.now())
                    replicas._script = lost
                    for _ in range(2):
                        with pytest.raises(TimeoutError):
                            await replicas._exchange()
                    replicas._script = script
                    await replicas._exchange()
                    assert left <= bucket.level(world.app.now()) < left + 50, "10 a second flow in"
                keys = await replicas._client.keys("*")
                rows = await replicas._client.hvals("{headgate}:rows")
                assert b"127.0.0.1" not in b" ".join([*keys, *rows]), "the store holds no names"

    run(work())


def test_a_request_at_the_bound_of_its_key_is_refused_without_an_exchange() -> None:
    async def work() -> None:
        with RedisServer() as store:
            async with fleet(store, 1, stream) as (world,):
                replicas, use = world.app.replicas, TenantUse(TenantBounds(inflight=2), "x")
                assert replicas._lacks_place(use)
                await until(lambda: use.lease)
                use.inflight = use.lease = 2
                assert not replicas._lacks_place(use)

    run(work())


def test_accounts_beyond_a_number_have_an_equal_share_at_each_router(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        with RedisServer() as store:
            async with fleet(store, 2, stream) as (world, _):
                replicas, now = world.app.replicas, world.app.now()
                await until(lambda: replicas.routers == 2)
                monkeypatch.setattr("headgate.live.route.replicas.MOST_SHARED", 0)
                use = TenantUse(TenantBounds(tokens=600, inflight=4), "x")
                assert use.tokens is not None
                await replicas.ready([("tenant", use)])
                assert use.bound == 2 and use.tokens.level(now) == 300 and not replicas._places
                use.tokens.use(200, now)
                await replicas.ready([("tenant", use)])
                assert 100 <= use.tokens.level(now) < 110 and use.tokens.spent == 0, "not filled up again"

    run(work())


# -- processes


@asynccontextmanager
async def command(file: Path, *words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """`headgate route` in a process of its own, and what it says."""
    said: list[str] = []
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MAIN, "route", "--config", str(file), *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip

    async def read() -> None:
        async for line in child.stdout:
            said.append(line.decode())

    reading = asyncio.create_task(read())
    try:
        yield child, said
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
        await reading


def listening(said: list[str]) -> list[str]:
    return [line.split("listening on ")[1].split(",")[0] for line in said if "listening on " in line]


async def streams(url: str, many: int, until_told: asyncio.Event) -> Counter[str]:
    """So many clients, each with one stream after the other on a connection that it keeps."""
    ends: Counter[str] = Counter()

    async def client(session: aiohttp.ClientSession) -> None:
        while not until_told.is_set():
            body = {"model": "m", "prompt": "x", "stream": True}
            try:
                async with session.post(url + "/v1/completions", json=body) as answer:
                    text = await answer.read()
                whole = text.endswith(b"data: [DONE]\n\n")
                ends["whole" if answer.status == 200 and whole else f"{answer.status} {text[-80:]!r}"] += 1
            except aiohttp.ClientError as error:
                ends[repr(error)] += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(many)))
    return ends


def test_a_rolling_restart_loses_no_request(tmp_path: Path) -> None:
    async def work() -> None:
        script = Counted()
        script.seconds = 0.05
        file = tmp_path / "fleet.toml"
        with RedisServer() as store:
            async with FakeEngine(script) as engine:
                file.write_text(
                    f'[front]\nport = 0\nadmin = "127.0.0.1:0"\nprocesses = 2\nkeep_alive = "2s"\n'
                    f'access_log = "{tmp_path}/access.jsonl"\n'
                    f'[replicas]\nstore = "{store.url}"\n[health]\ntimeout = "30s"\nfails = 1000\n'
                    f'[[engines]]\nurl = "{engine.url}"\nslots = 15\n'  # and one that may wait there
                )
                async with command(file) as (parent, said):
                    await until(lambda: len(listening(said)) == 2)
                    (url,) = set(listening(said))
                    stop = asyncio.Event()
                    load = asyncio.create_task(streams(url, 24, stop))
                    await until(lambda: script.seen > 50)
                    parent.send_signal(signal.SIGUSR2)
                    await until(lambda: "2 processes were replaced" in "".join(said))
                    seen = script.seen
                    await until(lambda: script.seen > seen + 100)
                    stop.set()
                    ends = await load
                    assert set(ends) == {"whole"}, ends
                    assert script.most <= 16
                    assert len(listening(said)) == 4
                    parent.terminate()
                    assert await parent.wait() == 0, said
        lines = [json.loads(line) for line in (tmp_path / "access.jsonl").read_text().splitlines()]
        assert len(lines) == ends["whole"] and {line["outcome"] for line in lines} == {"ok"}

    run(work())


def test_a_killed_process_is_started_again_and_its_slots_come_free(tmp_path: Path) -> None:
    async def work() -> None:
        script = Counted()
        file = tmp_path / "fleet.toml"
        with RedisServer() as store:
            async with FakeEngine(script) as engine:
                file.write_text(
                    f'[front]\nport = 0\nadmin = "127.0.0.1:0"\nprocesses = 2\ndrain_delay = "0s"\n'
                    f'[replicas]\nstore = "{store.url}"\nlease = "1s"\n'
                    f'[health]\nevery = "100ms"\ntimeout = "30s"\nfails = 1000\n'
                    f'[[engines]]\nurl = "{engine.url}"\nslots = 15\n'  # and one that may wait there
                )
                async with command(file) as (parent, said):
                    await until(lambda: len(listening(said)) == 2)
                    (url,) = set(listening(said))
                    stop = asyncio.Event()
                    load = asyncio.create_task(streams(url, 40, stop))
                    await until(lambda: script.running == 16)
                    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
                    os.kill(int(children[0]), signal.SIGKILL)
                    await until(lambda: any("it is started again" in line for line in said))
                    await until(lambda: len(listening(said)) == 3)
                    await until(lambda: script.running == 16)
                    script.seconds = 0.01
                    script.hold.set()
                    seen = script.seen
                    await until(lambda: script.seen > seen + 200)
                    stop.set()
                    ends = await load
                    assert ends["whole"] > 100 and sum(ends.values()) - ends["whole"] <= 40
                    assert script.most <= 16

    run(work())
