"""The page on a router's admin address in a real browser: engines are overloaded, killed and drained."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headgate.live.emulate import emulated
from headgate.live.route.config import checked
from headgate.live.route.server import RouterApp

PATIENCE = 120_000  # milliseconds
HOSTILE = "<img src=x onerror=alert(1)>"
CARD = "cal-h200-qwen3-8b"
CLASSES = [
    {"name": "chat", "match": {"header": "chat"}, "rate": 8, "queue": 4, "ttft": 2.0},
    {"name": "batch", "match": {"header": "batch"}, "rate": 2, "queue": 4},
]


class LiveWorld:
    """A router, three engines and clients, in a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wait(self._start())

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE / 1000)

    async def _start(self) -> None:
        self._emulated = emulated(engines=3, card=CARD, slots=4, speed=0.5, model="m")
        self.fleet = await self._emulated.__aenter__()
        given = {
            "front": {"port": 0, "admin": "127.0.0.1:0"},
            "router": {"name": "density-deep", "card": CARD},
            "classes": CLASSES,
            "tenants": {"header": "x-tenant"},
            "engines": [{"url": url, "slots": 4} for url in self.fleet],
            "health": {"every": 0.2, "fails": 2},
        }
        self.app = RouterApp(checked(given))
        await self.app.start()
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self.url = f"http://127.0.0.1:{self.app.admin_port}/"

    async def _ask(self, tokens: int, id: str, tenant: str) -> None:
        body = {"prompt": "word " * 50, "stream": True, "max_tokens": tokens, "ignore_eos": True}
        headers = {"x-headgate-class": "chat", "x-tenant": tenant, "x-request-id": id}
        url = f"http://127.0.0.1:{self.app.port}/v1/completions"
        async with self._client.post(url, json=body, headers=headers) as answer:
            await answer.read()

    def send(self, many: int, tokens: int, name: str = "r", tenant: str = "alice") -> None:
        async def begin() -> None:
            for number in range(many):
                task = asyncio.create_task(self._ask(tokens, f"{name}-{number}", tenant))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        self._wait(begin())

    def kill(self, engine: int) -> None:
        async def die() -> None:
            self.fleet.ports[engine].refuse()
            self.fleet.ports[engine].cut()

        self._wait(die())

    def stop_router(self) -> None:
        self._wait(self.app.stop())

    def close(self) -> None:
        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._client.close()
            await self.app.stop()
            await self._emulated.__aexit__(None, None, None)

        self._wait(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def world() -> Iterator[LiveWorld]:
    made = LiveWorld()
    yield made
    made.close()


@pytest.fixture
def opened(browser):
    """Opens the page; fails at the end if the page complained or asked anything of another place."""
    complaints: list[str] = []
    contexts = []

    def open_page(url: str, width: int = 1280, theme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(f"console {said.type}: {said.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"a script ran: {dialog.message}"))
        page.on("request", lambda asked: asked.url.startswith((url, "data:")) or complaints.append(asked.url))
        page.goto(url)
        page.wait_for_selector("html[data-ready=yes]")
        return page

    open_page.complaints = complaints
    yield open_page
    for context in contexts:
        context.close()
    assert not complaints, complaints


def keep(page: Any, name: str) -> None:
    """Pictures for people to look at, where asked for."""
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{folder}/live-{name}.png", full_page=True)


def engine(page: Any, number: int) -> Any:
    return page.locator(f'article[data-engine="{number}"]')


def test_an_overload_shows_refusals_and_why(opened, world) -> None:
    page = opened(world.url)
    assert page.locator("article.engine").count() == 3
    for number in range(3):
        engine(page, number).get_by_text("● up").wait_for()
    world.send(60, tokens=150, name="burst", tenant=HOSTILE)
    page.wait_for_selector("#tile-refused.slow")
    row = page.locator("#classes tr", has_text="chat")
    row.get_by_text("queue-full").wait_for()
    errors = page.locator("#errors")
    errors.get_by_text("refused: queue-full").first.wait_for()
    assert "burst-" in errors.inner_text()
    page.locator("#tenants").get_by_text(HOSTILE).wait_for()  # as text
    assert page.locator("img").count() == 0
    heads = page.locator("#classes thead").inner_text()
    assert (
        "plan serves/s" in heads
        and "shadow price" in heads
        and "earns" in page.locator("#classes").inner_text()
    )
    page.wait_for_selector("#timeline path.refused")
    keep(page, "overload")


def test_a_killed_engine_is_down_and_its_streams_are_errors_with_their_ids(opened, world) -> None:
    page = opened(world.url)
    world.send(12, tokens=4000, name="long")
    engine(page, 1).get_by_text("4 of 4").wait_for()
    world.kill(1)
    engine(page, 1).get_by_text("■ down").wait_for()
    assert "bad" in engine(page, 1).get_attribute("class")
    assert "● up" in engine(page, 0).inner_text()
    errors = page.locator("#errors")
    errors.get_by_text("failed: reset").first.wait_for()
    assert "long-" in errors.inner_text()
    errors.get_by_text("engine 1: up → down").wait_for()
    page.wait_for_selector("#timeline .mark", state="attached")
    keep(page, "killed")
    world.stop_router()
    page.get_by_text("connection lost, retrying").wait_for()
    opened.complaints[:] = [each for each in opened.complaints if "ERR_CONNECTION_REFUSED" not in each]


def test_drain_and_undrain_ask_first(opened, world) -> None:
    page, dialog = opened(world.url), "dialog[open]"
    engine(page, 2).get_by_role("button", name="Drain").click()
    assert "Drain engine 2" in page.locator(dialog).inner_text()
    page.get_by_role("button", name="Cancel").click()
    assert page.locator(dialog).count() == 0 and not world.app.upstreams[2].draining
    engine(page, 2).get_by_role("button", name="Drain").click()
    page.locator(dialog).get_by_role("button", name="Drain", exact=True).click()
    engine(page, 2).get_by_text("◇ draining").wait_for()
    assert world.app.upstreams[2].draining and page.locator(dialog).count() == 0
    keep(page, "drained")
    engine(page, 2).get_by_role("button", name="Undrain").click()
    page.locator(dialog).get_by_role("button", name="Undrain", exact=True).click()
    engine(page, 2).get_by_text("● up").wait_for()
    assert not world.app.upstreams[2].draining


def test_it_fits_a_phone_and_the_dark(opened, world) -> None:
    world.send(
        40,
        tokens=60,
        name="x" * 100,
        tenant="a-tenant-with-a-name-of-sixty-four-letters-and-not-one-space-in-it",
    )
    for width, theme in ((390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")):
        page = opened(world.url, width, theme)
        page.locator("#errors").get_by_text("refused: queue-full").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert light == (theme == "light")
        assert page.locator("#tile-served").is_visible() and page.locator("#timeline svg").is_visible()
        engine(page, 0).get_by_role("button", name="Drain").click()  # the confirmation fits, too
        box = page.locator("dialog").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        page.get_by_role("button", name="Cancel").click()
        keep(page, f"{width}-{theme}")


def test_one_engine_has_the_same_page(opened, world) -> None:
    command = [sys.executable, "-c", "from headgate.cli import main; main()", "top", world.fleet[0]]
    with subprocess.Popen([*command, "--page", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True) as child:
        try:
            url = child.stdout.readline().split()[-1]
            world.send(12, tokens=60)
            page = opened(url, 390)
            page.wait_for_selector("#tile-gap_p50")
            assert page.locator("article.engine").count() == 1
            assert not page.get_by_role("button", name="Drain").is_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            keep(page, "engine")
        finally:
            child.terminate()
