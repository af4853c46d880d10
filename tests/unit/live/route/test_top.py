"""`headgate top`: what it draws, what it prints for scripts, mistakes, lost connections, drain."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from fake_engines import stream
from headgate.cli.route import LOST, Frame, follow, view
from headgate.core.errors import InputError
from headgate.live.emulate import emulated
from headgate.live.route.view.counters import EngineView
from router_world import World, routed, run, until

MAIN = "from headgate.cli import main; main()"
CLASSES = [{"name": "chat", "match": {"header": "chat"}, "ttft": 60.0}]
ESCAPE = "\x1b[2J\x1b]0;owned\x07"


async def top(*words: str, answer: str = "") -> tuple[int, str, str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MAIN, "top", *words,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120"},
    )  # fmt: skip
    said, wrong = await child.communicate(answer.encode())
    return child.returncode or 0, said.decode(), wrong.decode()


def drawn(shown: dict[str, Any], width: int = 120, history: list[Any] | None = None, **more: Any) -> str:
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as text:
        console.print(view(Frame(shown, history or [], **more), "http://a:1"))
    return text.get()


async def served(world: World) -> dict[str, Any]:
    world.app.view.sample(world.app.now())
    words = {"x-headgate-class": "chat", "x-tenant": "alice"}
    await asyncio.gather(*(world.ask(headers=words, stream=True) for _ in range(4)))
    async with world.client.get(world.url + "/nowhere", headers={"x-request-id": "lost-1"}):
        pass
    return world.app.view.snapshot(world.app.now() + 1.0)


# -- drawing


def test_a_router_is_drawn_with_its_engines_classes_tenants_plan_and_errors() -> None:
    async def work() -> None:
        planned = {"name": "density-deep", "card": "linear-h200-qwen3-8b"}
        config = {"classes": CLASSES, "tenants": {"header": "x-tenant"}, "router": planned}
        async with routed(stream, stream, **config) as world:
            shown = await served(world)
            rows = [[float(n), 1.0, 0.0, 0.0, 5.0 * n, 1.0, 0.0, None, 0.1] for n in range(10)]
            text = drawn(shown, history=rows)
            lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
            assert (
                "router density-deep, 2 engines" in text
                and "● up" in text
                and "100 % of promises kept" in text
            )
            assert "plan" in text and "price" in text and "alice" in lines and "lost-1" in text
            assert "▁" in lines["tokens/s"] and "█" in lines["tokens/s"]
            assert "refused" not in lines  # nothing to draw
            assert LOST in drawn(shown, lost=LOST)

    run(work())


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_any_width_will_do(width: int) -> None:
    async def work() -> None:
        async with routed(stream, classes=CLASSES, tenants={"header": "x-tenant"}) as world:
            assert max(map(len, drawn(await served(world), width).splitlines())) <= width

    run(work())


def test_names_from_elsewhere_are_no_orders_to_the_terminal() -> None:
    shown = EngineView("http://a:1").snapshot(0.0)
    row = {"id": ESCAPE, "url": ESCAPE, "status": ESCAPE, "role": ESCAPE, "slots": 1, "running": 1,
           "waiting": 1, "kv": 0.5, "output": 1.0, "ttft": 0.1, "breaker": ESCAPE,
           "faults": {ESCAPE: 1}}  # fmt: skip
    error = {"time": 0.0, "id": ESCAPE, "status": 500, "outcome": ESCAPE, "fault": ESCAPE, "class": ESCAPE,
             "tenant": "[red]x[/red]"}  # fmt: skip
    named = {"name": ESCAPE, "waiting": 1, "kept": {ESCAPE: 0.5}, "why": {ESCAPE: 1}}
    shown |= {"name": ESCAPE, "notes": [ESCAPE], "engines": [row], "errors": [error], "classes": [named]}
    shown |= {"tenants": [{"name": ESCAPE}], "policy": {ESCAPE: 1.0}}
    text = drawn(shown)
    assert "\x1b" not in text and "\x07" not in text and "[red]x[/red]" in text


# -- for scripts


def test_once_prints_a_router_as_text_and_as_json() -> None:
    async def work() -> None:
        async with routed(stream, classes=CLASSES) as world:
            await served(world)
            code, said, wrong = await top(world.admin.removeprefix("http://"), "--once", "--json")
            assert code == 0, wrong
            shown = json.loads(said)
            assert shown["headgate"] == 1 and shown["kind"] == "router" and len(shown["engines"]) == 1
            code, said, _ = await top(world.admin, "--once")
            assert code == 0 and "● up" in said and "lost-1" in said

    run(work())


def test_once_reads_an_engine_twice_for_its_rates() -> None:
    async def work() -> None:
        async with emulated(engines=1, speed=20.0, slots=4, model="m") as fleet:
            code, said, wrong = await top(fleet[0], "--once", "--json")
            assert code == 0, wrong
            shown = json.loads(said)
            assert (
                shown["kind"] == "engine"
                and shown["over_s"][0] > 0.5
                and shown["engines"][0]["url"] == fleet[0]
            )

    run(work())


def test_what_is_neither_a_router_nor_an_engine_is_one_line() -> None:
    async def work() -> None:
        async def other(request: web.Request) -> web.Response:
            return web.Response(text="up 1\n")

        site = web.Application()
        site.router.add_get("/metrics", other)
        runner = web.AppRunner(site)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        nowhere = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with routed(stream) as world:
            for url, words in (
                (nowhere, "neither a router's admin address nor an engine"),
                (world.url, "give the address of its --admin"),
                ("http://127.0.0.1:1", "cannot be reached: Connection refused"),
                ("http://[::bad", "cannot be reached"),
            ):
                code, _, wrong = await top(url, "--once")
                assert code == 2 and words in wrong and wrong.count("\n") == 1, wrong
            code, _, wrong = await top(world.admin)
            assert code == 2 and "no terminal; give --once" in wrong
            code, _, wrong = await top(world.admin, "--page", "127.0.0.1:0")
            assert code == 2 and "open it in a browser" in wrong
        await runner.cleanup()

    run(work())


# -- a connection that is lost


def test_another_version_of_the_view_is_one_line() -> None:
    async def frames() -> AsyncIterator[Frame]:
        raise InputError("another version")
        yield

    async def work() -> None:
        with pytest.raises(InputError, match="another version"):
            await anext(follow(frames))

    run(work())


def test_a_lost_router_is_found_again() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            port = world.app.admin_port
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", MAIN, "top", world.admin, "--json",
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=1 << 20,
            )  # fmt: skip
            assert child.stdout is not None and child.stderr is not None
            assert json.loads(await child.stdout.readline())["kind"] == "router"
        assert LOST.encode() in await child.stderr.readline()
        async with routed(stream, stream, front={"admin": f"127.0.0.1:{port}"}):
            while len(json.loads(await child.stdout.readline())["engines"]) != 2:
                pass
            child.send_signal(signal.SIGINT)
            await child.stdout.read()
            assert await child.wait() == 0
            assert b"Traceback" not in await child.stderr.read()

    run(work())


def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            ours, theirs = pty.openpty()
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", MAIN, "top", world.admin, stdin=theirs, stdout=theirs, stderr=theirs,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
            )  # fmt: skip
            os.close(theirs)
            os.set_blocking(ours, False)
            seen = bytearray()

            def read() -> bytes:
                try:
                    seen.extend(os.read(ours, 1 << 16))
                except BlockingIOError:
                    pass
                except OSError:  # the other side is closed
                    pass
                return bytes(seen)

            await until(lambda: b"router least-loaded" in read() and b"engines" in read())
            assert b"\x1b[?1049h" in seen  # a screen of its own
            child.send_signal(signal.SIGINT)
            await child.wait()
            read()
            assert child.returncode == 0 and b"\x1b[?1049l" in seen and b"\x1b[?25h" in seen
            assert b"Traceback" not in seen
            os.close(ours)

    run(work())


# -- drain


def test_drain_asks_first() -> None:
    async def work() -> None:
        async with routed(stream, stream) as world:
            engine = world.app.upstreams[1]
            code, said, _ = await top(world.admin, "--drain", "1", answer="n\n")
            assert code != 0 and f"drain engine 1 ({engine.url}, which has 0 requests)?" in said
            assert not engine.draining
            code, said, _ = await top(world.admin, "--drain", "1", answer="y\n")
            assert code == 0 and "engine 1: draining" in said and engine.draining
            code, said, _ = await top(world.admin, "--undrain", "1", "--yes")
            assert code == 0 and "engine 1: up" in said and not engine.draining
            code, _, wrong = await top(world.admin, "--drain", "7", "--yes")
            assert code == 2 and "no engine 7" in wrong

    run(work())


def test_an_engine_has_the_page_too() -> None:
    async def work() -> None:
        async with emulated(engines=1, speed=20.0, slots=4, model="m") as fleet, routed(stream) as world:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                MAIN,
                "top",
                fleet[0],
                "--page",
                "127.0.0.1:0",
                stdout=asyncio.subprocess.PIPE,
            )
            assert child.stdout is not None
            page = (await child.stdout.readline()).decode().split()[-1]
            async with world.client.get(page) as answer:
                assert "script-src 'sha256-" in answer.headers["Content-Security-Policy"]
            async with world.client.get(page + "events") as answer:
                await answer.content.readuntil(b"event: snapshot\n")
                shown = json.loads((await answer.content.readline()).removeprefix(b"data: "))
                assert shown["kind"] == "engine"
            async with world.client.get(page, headers={"Host": "evil.example"}) as answer:
                assert answer.status == 403
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0

    run(work())
