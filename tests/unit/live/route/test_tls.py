"""TLS towards clients and engines, with certificates on both sides."""

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest

from fake_engines import FakeEngine, stream
from headgate.core.errors import InputError
from router_world import routed, run

FOLDER = Path(__file__).parents[3] / "data" / "tls"  # signed by itself, for localhost, made for these tests
CERT, KEY = str(FOLDER / "cert.pem"), str(FOLDER / "key.pem")


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
