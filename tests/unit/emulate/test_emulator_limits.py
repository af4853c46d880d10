"""Nothing grows without bound: queues, connections, clients that hang up, a drain."""

import asyncio
import os
import random
import socket

import aiohttp
import pytest
from calls_of_emulator import FAST, SMALL, events_of, post, run, session, stream, text_of, until

from headgate.live.emulate import answer, chat_answer, emulated
from headgate.live.emulate import api as answers

LONG = {"prompt": "a long one", "max_tokens": 4000, "ignore_eos": True}
HANG_UP = 0.3


def test_a_full_queue_answers_503_as_vllm_does():
    async def main():
        words = FAST | {"slots": 2, "max_queued": 3, "speed": 1.0}
        async with emulated(**words) as urls, session() as client:
            tasks = [asyncio.create_task(post(client, urls[0], LONG)) for _ in range(5)]
            await until(lambda: urls.engines[0].running + urls.engines[0].waiting == 5)
            status, told = await post(client, urls[0], LONG)
            assert status == 503 and told["error"]["type"] == "Service Unavailable"
            assert "Retry-After" not in told
            assert urls.engines[0].tally.rejected["max_num_queued_reqs"] == 1
            for task in tasks:
                task.cancel()
            await until(lambda: urls.at_rest)

    run(main())


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_requests_and_connections_beyond_the_limit_get_503(loops):
    async def main():
        async with emulated(**SMALL, max_requests=2, max_connections=4) as urls, session() as client:
            tasks = [asyncio.create_task(post(client, urls[0], LONG)) for _ in range(2)]
            await until(lambda: urls.ports[0].place.inside == 2)
            status, _ = await post(client, urls[0], LONG)
            assert status == 503
            host, port = urls[0].removeprefix("http://").split(":")
            held = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
            said = await asyncio.gather(*(asyncio.wait_for(reader.read(), 60) for reader, _ in held[-4:]))
            assert all(b"503 Service Unavailable" in each for each in said)
            for _, writer in held:
                writer.close()
            for task in tasks:
                task.cancel()
            await until(lambda: urls.at_rest)

    run(main(), pytest.importorskip(loops))


@pytest.mark.parametrize(("clients", "asynchronous"), [(500, False), (150, True)])
def test_five_hundred_clients_of_whom_some_hang_up(clients, asynchronous):
    """At random phases: before the answer, in the queue, in the middle. Slots and KV return to zero."""
    chance = random.Random(7)

    async def one(client, url, number):
        prompt, length = f"client {number} " * chance.randint(1, 40), chance.randint(1, 60)
        body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True}
        if chance.random() >= HANG_UP:
            if chance.random() < 0.5:
                status, told = await post(client, url, body)
                assert status == 200 and told["choices"][0]["text"] == answer(prompt, length)
            else:
                assert text_of(await stream(client, url, body)) == answer(prompt, length)
            return 1
        events = chance.randint(0, 5)
        body |= {"stream": chance.random() < 0.7, "max_tokens": 4000}
        call = client.post(url + "/v1/completions", json=body)
        if not events or not body["stream"]:
            task = asyncio.ensure_future(call)
            await asyncio.sleep(chance.random() * 0.2)
            task.cancel()
            (told,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(told, BaseException):
                told.close()  # the head had come already
            return 0
        async with call as told:
            while events > 0:
                events -= (await told.content.readany()).count(b"data: ")
            told.close()
        return 0

    async def main():
        words = FAST | {"asynchronous": asynchronous, "kv_tokens": 12_000, "policy": "eb+", "engines": 2}
        async with emulated(**words) as urls, session() as client:
            found = await asyncio.gather(
                *(one(client, urls[number % 2], number) for number in range(clients))
            )
            await until(lambda: urls.at_rest, "slots and KV never came back")
            assert 0.6 * clients <= sum(found) < 0.8 * clients
            for port in urls.ports:
                assert port.place.inside == 0
                engine = port.place.engines[0]
                assert not engine.streams.jobs and not engine._lengths and not engine._outside
                assert engine.tally.ended_by["length"] + engine.tally.ended_by["abort"] > 0

    run(main())


def test_draining():
    async def main():
        async with emulated(**FAST) as urls, session() as client:
            task = asyncio.create_task(stream(client, urls[0], LONG | {"max_tokens": 300}))
            await until(lambda: urls.engines[0].running == 1)
            drained = asyncio.create_task(urls.drain(600))
            await until(lambda: urls.ports[0].place.draining)
            status, told = await post(client, urls[0], LONG)
            choice = told["choices"][0]
            assert (status, choice["text"], choice["finish_reason"]) == (200, "", "abort")
            events = await stream(client, urls[0], LONG)
            assert text_of(events) == "" and events[-1]["choices"][0]["finish_reason"] == "abort"
            async with client.get(urls[0] + "/health") as health:
                assert health.status == 200
            assert text_of(await task) == answer(LONG["prompt"], 300)
            assert await drained

    run(main())


def test_a_drain_has_an_end():
    async def main():
        async with emulated(**SMALL) as urls, session() as client:
            task = asyncio.create_task(stream(client, urls[0], LONG))
            await until(lambda: urls.engines[0].running == 1)
            assert not await urls.drain(0.05)
            task.cancel()

    run(main())


def test_bodies_that_are_read_at_once_are_bounded():
    async def main():
        async with emulated(**FAST, max_bytes=100_000) as urls, session() as client:
            status, _ = await post(client, urls[0], {"prompt": "x" * 120_000})
            assert status == 503 and urls.ports[0].place.bytes == 0
            status, _ = await post(client, urls[0], {"prompt": "x" * 20_000, "max_tokens": 1})
            assert status == 200 and urls.ports[0].place.bytes == 0

    run(main())


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_slow_reader_gets_fewer_events_with_more_text_and_nothing_is_lost(loops, chat, monkeypatch):
    """Tokens go to the socket itself until it is full, then through the transport, in order."""

    count, begin = 2000, answers.StreamedAnswer.__init__

    def narrow(answer, *given):
        begin(answer, *given)
        with socket.socket(fileno=os.dup(answer._file)) as twin:
            twin.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)

    monkeypatch.setattr(answers.StreamedAnswer, "__init__", narrow)
    monkeypatch.setattr(answers, "FULL", 1 << 14)

    async def main():
        async with (
            emulated(**FAST | {"speed": 1e5}) as urls,
            aiohttp.ClientSession(read_bufsize=1024) as client,
        ):
            path = "/v1/chat/completions" if chat else "/v1/completions"
            said = [{"role": "user", "content": "slow"}]
            asked = {"messages": said} if chat else {"prompt": "slow"}
            body = asked | {"max_tokens": count, "ignore_eos": True, "stream": True}
            async with client.post(urls[0] + path, json=body) as told:
                await until(lambda: urls.engines[0].tally.ended_by["length"] == 1)  # made, and hardly read
                events = events_of(await told.text())
            expected = chat_answer(said, count) if chat else answer("slow", count)
            assert text_of(events) == expected
            assert 100 < len(events) < count - 100

    run(main(), pytest.importorskip(loops))
