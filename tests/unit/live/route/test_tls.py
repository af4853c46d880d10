"""TLS towards clients and engines, with certificates on both sides."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import uvloop

from fake_engines import FakeEngine, stream
from headgate.core.errors import InputError
from router_world import PATIENCE, routed, run, until

FOLDER = Path(__file__).parents[3] / "data" / "tls"  # signed by itself, for localhost, made for these tests
CERT, KEY = str(FOLDER / "cert.pem"), str(FOLDER / "key.pem")
TRUSTING = ssl.create_default_context(cafile=CERT)
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def test_clients_must_show_a_certificate_where_asked() -> None:
    async def work() -> None:
        async with routed(stream, front={"tls_cert": CERT, "tls_key": KEY, "client_ca": CERT}) as world:
            url = f"https://127.0.0.1:{world.app.port}/v1/completions"
            trusting = ssl.create_default_context(cafile=CERT)
            with pytest.raises(aiohttp.ClientError):
                async with world.client.post(url, json={"prompt": "x"}, ssl=trusting):
                    pass
            trusting.load_cert_chain(CERT, KEY)
            async with world.client.post(url, json={"prompt": "x"}, ssl=trusting) as answer:
                assert answer.status == 200
            await world.settled()

    run(work())


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_handshakes_count_as_connections_and_have_a_clock(make_loop: LoopFactory) -> None:
    async def work() -> None:
        front = {"tls_cert": CERT, "tls_key": KEY, "connections": 3, "head_timeout": 0.5}
        async with routed(stream, front=front) as world:
            server = world.app.server
            pairs = [await asyncio.open_connection("127.0.0.1", world.app.port) for _ in range(6)]
            await until(lambda: server.refused >= 3)
            assert server.open.held <= 3
            await until(lambda: server.refused == 6 and not server.open.held)  # none of them said anything
            for reader, writer in pairs:
                assert await reader.read() == b""
                writer.close()
            half = await asyncio.open_connection("127.0.0.1", world.app.port)
            half[1].write(b"no TLS at all\r\n\r\n")
            await half[0].read()
            half[1].close()
            silent = await asyncio.open_connection("127.0.0.1", world.app.port, ssl=TRUSTING)
            await silent[0].read()  # a handshake, and no request
            silent[1].close()
            await until(lambda: not server.open.held)
            url = f"https://127.0.0.1:{world.app.port}/v1/completions"
            for _ in range(20):
                async with world.client.post(
                    url, json={"prompt": "x"}, ssl=TRUSTING, headers={"Connection": "close"}
                ) as answer:
                    assert answer.status == 200
            await until(lambda: not server.open.held)
            await world.settled()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(asyncio.wait_for(work(), 2 * PATIENCE))


class SecureEngine(FakeEngine):
    """An engine that speaks TLS and wants a certificate."""

    async def __aenter__(self) -> "SecureEngine":
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=CERT)
        context.load_cert_chain(CERT, KEY)
        context.verify_mode = ssl.CERT_REQUIRED
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context, limit=1 << 22)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self


def test_engines_are_verified_and_shown_our_certificate() -> None:
    async def work() -> None:
        async with SecureEngine() as engine:
            front = {"engine_ca": CERT, "engine_cert": CERT, "engine_cert_key": KEY}
            async with routed(urls=[engine.url], front=front) as world:
                assert (await world.stream()).status == 200
                await world.settled()
            async with routed(urls=[engine.url]) as world:  # not signed by an authority we know
                assert (await world.stream()).status == 503
                assert engine.seen[1:] == []

    run(work())


def test_an_engine_whose_certificate_is_unknown_is_a_failure_and_another_answers() -> None:
    async def work() -> None:
        async with (
            SecureEngine() as secure,
            FakeEngine(stream) as good,
            routed(urls=[secure.url, good.url]) as world,
        ):
            bad = world.app.upstreams[0]
            bad.healthy = True  # as if it had changed its certificate since it was probed
            world.app.set_room(bad)
            answer = await world.stream()
            assert answer.status == 200 and answer.headers["x-headgate-tries"] == "2"
            assert world.counted("retries_total", fault="connect") == 1 and bad.breaker._row == 1
            assert secure.seen == []
            await world.settled()

    run(work())


def test_missing_files_are_said(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(InputError, match="TLS of the front"):
            async with routed(stream, front={"tls_cert": str(tmp_path / "no"), "tls_key": KEY}):
                pass

    run(work())
