"""Connections that send nothing are closed, and connections that end leave nothing behind."""

import asyncio
import gc

import pytest
from aiohttp.web_protocol import RequestHandler
from calls_of_emulator import FAST, run, until

from headgate.live.emulate import emulated
from headgate.live.emulate import server as silent

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def connected(urls):
    host, port = urls[0].removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def handlers():
    gc.collect()
    return sum(isinstance(each, RequestHandler) for each in gc.get_objects())


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
@pytest.mark.parametrize("asks", [True, False])
def test_a_connection_that_ends_is_forgotten_before_its_time(loops, asks, monkeypatch):
    monkeypatch.setattr(silent, "PATIENCE", 1e6)

    async def main():
        async with emulated(**FAST) as urls:
            before = handlers()
            for _ in range(20):
                reader, writer = await connected(urls)
                if asks:
                    writer.write(HEALTH)
                    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
                writer.close()
                await writer.wait_closed()
            await until(lambda: handlers() == before, "handlers of closed connections stay", 30.0)

    run(main(), pytest.importorskip(loops))


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_a_connection_without_a_request_is_closed_and_one_with_a_request_is_not(loops, monkeypatch):
    monkeypatch.setattr(silent, "PATIENCE", 0.2)

    async def main():
        async with emulated(**FAST) as urls:
            reader, writer = await connected(urls)
            writer.write(HEALTH)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            quiet, other = await connected(urls)
            assert await quiet.read() == b""
            writer.write(HEALTH)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            writer.close()
            other.close()

    run(main(), pytest.importorskip(loops))
