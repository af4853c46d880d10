"""The live view: what is computed from counters, what a router shows, and that its address stays guarded."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
import time
from math import isclose
from typing import Any, Literal

import aiohttp
import pytest

from fake_engines import Call, never, stream
from headgate.live.emulate import emulated
from headgate.live.route.observe import RouterMetrics
from headgate.live.route.view import feed
from headgate.live.route.view.counters import (
    COLUMNS,
    MOST,
    MOST_ERRORS,
    MOST_REFUSALS,
    Change,
    EngineView,
    collected,
    parsed,
)
from router_world import World, routed, run, until

HTML = {"Accept": "text/html,application/xhtml+xml"}
HOSTILE = "<img src=x onerror=alert(1)>"


# -- counters


def test_gains_are_summed_by_label_and_a_counter_that_fell_began_anew() -> None:
    before = parsed('a_total{engine="0",how="x"} 5\na_total{engine="1",how="x"} 100\n')
    now = parsed(
        'a_total{engine="0",how="x"} 7\na_total{engine="1",how="x"} 3\na_total{engine="2",how="y"} 4\n'
    )
    change = Change(2.0, now, before)
    assert change.rate("nothing") == 0.0
    assert change.by("a_total", "engine") == {("0",): 2.0, ("1",): 3.0, ("2",): 4.0}
    assert change.of("a_total", "how", engine="0") == {"x": 2.0}
    assert change.rate("a_total") == 4.5
    assert Change(0.0, now, before).rate("a_total") == 0.0  # no time has passed


def test_percentiles_are_of_new_observations_alone() -> None:
    metrics = RouterMetrics()
    for _ in range(1000):
        metrics.first_token.labels("chat").observe(100.0)
    before = collected(metrics.first_token.collect())
    for number in range(100):
        metrics.first_token.labels("chat").observe(0.1 + 0.0015 * number)  # evenly within one bucket
    change = Change(1.0, collected(metrics.first_token.collect()), before)
    (all_classes,) = change.quantiles("headgate_first_token_seconds").values()
    assert isclose(all_classes.p50, 0.175, rel_tol=0.02) and isclose(all_classes.p95, 0.2425, rel_tol=0.02)
    assert change.quantiles("headgate_first_token_seconds", "class") == {"chat": all_classes}
    metrics.first_token.labels("late").observe(1e6)
    late = Change(1.0, collected(metrics.first_token.collect()), before)
    of_late = late.quantiles("headgate_first_token_seconds", "class")["late"]
    assert of_late.p50 == of_late.p95 == 120.0  # its last bound


def test_a_page_of_metrics_is_read_as_far_as_it_makes_sense() -> None:
    text = (
        '# HELP a about\na 1\nb{x="1",y="a\\"b\\\\c\\nd"} 2.5e3 1700000000000\nc NaN\nd{x="open} 1\n'
        "no number\n\x00\x1b[2Jgarbage{} {{{\ne{} 7\n" + "f" * 100_000 + "\n"
    )
    counts = parsed(text)
    assert counts["a"] == {(): 1.0} and counts["e"] == {(): 7.0}
    assert counts["b"] == {(("x", "1"), ("y", 'a"b\\c\nd')): 2500.0}
    assert set(counts) == {"a", "b", "d", "e"}


# -- a router


async def breaks(call: Call) -> None:
    await call.head()
    await call.token()
    call.reset()


def shown(world: World) -> dict[str, Any]:
    seen = world.app.view.snapshot(world.app.now() + 1.0)
    return json.loads(json.dumps(seen, allow_nan=False))


CLASSES = [{"name": "chat", "match": {"header": "chat"}, "ttft": 60.0, "queue": 1}]
TENANTS = {"tenants": {"header": "x-tenant", "requests": 50.0}}


def test_a_snapshot_says_what_was_served_refused_and_why() -> None:
    async def work() -> None:
        async with routed(stream, classes=CLASSES, **TENANTS) as world:
            world.app.view.sample(world.app.now())
            words = {"x-headgate-class": "chat", "x-tenant": HOSTILE}
            for _ in range(3):
                assert (await world.ask(headers=words, stream=True)).status == 200
            async with world.client.get(world.url + "/nowhere", headers={"x-request-id": "mine"}) as lost:
                assert lost.status == 404
            seen = shown(world)
            chat = next(row for row in seen["classes"] if row["name"] == "chat")
            assert chat["served"] > 0 and chat["refused"] == 0 and chat["kept"] == {"ttft": 1.0}
            assert seen["totals"]["kept"] == 1.0 and seen["totals"]["served"] == chat["served"]
            (tenant,) = seen["tenants"]
            assert tenant["name"] == HOSTILE and tenant["tokens"] > 0 and tenant["kept"] == 1.0
            assert seen["refused"] == {"path": 1}
            (error,) = seen["errors"]
            assert (error["id"], error["fault"], error["status"]) == ("mine", "path", 404)
            (engine,) = seen["engines"]
            assert engine["status"] == "up" and engine["breaker"] == "closed" and engine["ttft"] is not None

    run(work())


def test_a_full_queue_is_told_by_class_and_tenant_and_hides_no_error() -> None:
    async def work() -> None:
        async with routed(never, classes=CLASSES, engine={"slots": 1}, **TENANTS) as world:
            world.app.view.sample(world.app.now())
            words = {"x-headgate-class": "chat", "x-tenant": "alice"}
            inside = [asyncio.create_task(world.ask(headers=words)) for _ in range(8)]
            await until(
                lambda: len(world.app.gate.roster.waiting) == 1 and any(task.done() for task in inside)
            )
            before = sum(task.done() for task in inside)
            world.app.view.errors.append({"time": 0.0, "id": "older"})
            for number in range(30):
                answer = await world.ask(headers={**words, "x-request-id": f"r{number}"})
                assert answer.status == 429
            seen = shown(world)
            chat = next(row for row in seen["classes"] if row["name"] == "chat")
            assert chat["waiting"] == 1 and chat["why"] == {"queue-full": 30 + before} and chat["refused"] > 0
            assert seen["tenants"][0]["why"] == {"queue-full": 30 + before}
            newest = [f"r{29 - number}" for number in range(MOST_REFUSALS)]
            assert [row["id"] for row in seen["errors"]] == [*newest, "older"]
            for task in inside:
                task.cancel()

    run(work())


def test_a_broken_stream_is_an_error_with_its_id_and_engine() -> None:
    async def work() -> None:
        async with routed(breaks) as world:
            world.app.view.sample(world.app.now())
            await world.ask(headers={"x-request-id": "torn"}, stream=True)
            (error,) = shown(world)["errors"]
            assert (error["id"], error["outcome"], error["engine"]) == ("torn", "failed", 0)
            assert shown(world)["engines"][0]["faults"]

    run(work())


def test_tenants_refused_before_they_have_a_class_are_counted() -> None:
    async def work() -> None:
        limits = {"tenants": {"header": "x-tenant", "requests": 1.0}}
        async with routed(stream, **limits) as world:
            world.app.view.sample(world.app.now())
            answers = [await world.ask(headers={"x-tenant": "bob"}) for _ in range(4)]
            assert 429 in [answer.status for answer in answers]
            (bob,) = shown(world)["tenants"]
            assert bob["name"] == "bob" and "tenant-requests" in bob["why"] and bob["refused"] > 0

    run(work())


def test_a_snapshot_is_bounded_whatever_clients_send() -> None:
    async def work() -> None:
        classes = [{"name": f"class-{number}"} for number in range(40)]
        async with routed(*[stream] * 3, classes=classes, tenants={"header": "x-tenant"}) as world:
            view, app = world.app.view, world.app
            view.sample(app.now())
            for number in range(1500):
                name = f"{number}-{'x' * 60}"
                view.refused("i" * 500, _refused(name))
                app.metrics.served(name, 1, 1)
            for number in range(100):
                view.changes.append({"time": 0.0, "engine": number, "from": "up", "to": "down"})
                view.errors.append({"time": 0.0})
            seen = shown(world)
            assert len(seen["tenants"]) == MOST["tenants"] and seen["left_out"]["tenants"] == 1025 - 20
            assert len(seen["classes"]) == MOST["classes"] and seen["left_out"]["classes"] == 41 - 32
            assert len(seen["errors"]) == MOST_ERRORS + MOST_REFUSALS
            assert len(json.dumps(seen)) < 60_000
            for _ in range(1000):
                view._points.append([0.0] * len(COLUMNS))
            assert len(json.dumps(view.history())) < 20_000

    run(work())


def _refused(tenant: str) -> Any:
    from headgate.live.route.request import RefusedError

    refused = RefusedError(429, "tenant-requests", "no")
    refused.tenant = tenant
    return refused


def test_the_plan_stands_beside_what_happens_and_changes_of_engines_are_kept() -> None:
    async def work() -> None:
        planned = {"name": "density-deep", "card": "linear-h200-qwen3-8b"}
        async with routed(stream, stream, router=planned, classes=CLASSES) as world:
            seen = shown(world)
            chat = next(row for row in seen["classes"] if row["name"] == "chat")
            assert seen["plan"]["revenue"] > 0 and chat["plan"]["worth"] >= 0 and chat["plan"]["rate"] > 0
            world.app.drain_engine(world.app.upstreams[1], True)
            (change,) = shown(world)["changes"]
            assert (change["engine"], change["from"], change["to"]) == (1, "up", "draining")
            assert shown(world)["engines"][1]["draining"]

    run(work())


def test_a_snapshot_takes_less_than_a_hundredth_of_its_second() -> None:
    """Processor time of this process alone, the best of several, with eight engines and four classes."""

    async def work() -> None:
        classes = [{"name": f"c{n}", "match": {"header": f"c{n}"}, "ttft": 1.0} for n in range(4)]
        async with routed(*[stream] * 8, classes=classes, tenants={"header": "x-tenant"}) as world:
            for n in range(40):
                await world.ask(headers={"x-headgate-class": f"c{n % 4}", "x-tenant": f"t{n}"}, stream=True)
            took = []
            for _ in range(50):
                began = time.process_time()
                json.dumps(world.app.view.snapshot(world.app.now()))
                took.append(time.process_time() - began)
            assert min(took) < 0.01

    run(work())


# -- events and the page


async def events(world: World, many: int) -> list[tuple[str, Any]]:
    found = []
    async with world.client.get(world.admin + "/events") as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        name = ""
        async for line in answer.content:
            word, _, data = line.decode().strip().partition(": ")
            if word == "event":
                name = data
            elif word == "data":
                found.append((name, json.loads(data)))
                if len(found) == many:
                    break
    return found


def test_events_begin_with_the_history_and_cost_nothing_without_a_viewer(monkeypatch) -> None:
    monkeypatch.setattr(feed, "EVERY", 0.02)

    async def work() -> None:
        async with routed(stream) as world:
            calls = []
            whole = world.app.view.snapshot
            monkeypatch.setattr(world.app.view, "snapshot", lambda now: calls.append(now) or whole(now))
            (first, history), *others = await events(world, 5)
            assert first == "history" and history["columns"] == list(COLUMNS)
            assert [name for name, _ in others] == ["snapshot"] * 4
            assert others[-1][1]["time"] > others[0][1]["time"] and others[0][1]["kind"] == "router"
            await asyncio.gather(*(events(world, 4) for _ in range(3)))
            await asyncio.sleep(0.2)  # the last viewer's end is seen
            seen = len(calls)
            await asyncio.sleep(0.2)
            assert len(calls) == seen

    run(work())


def test_viewers_beyond_a_limit_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(feed, "MOST_VIEWERS", 2)

    async def work() -> None:
        async with routed(stream) as world:
            url = world.admin + "/events"
            async with world.client.get(url), world.client.get(url), world.client.get(url) as third:
                assert third.status == 503 and "Retry-After" in third.headers

    run(work())


def test_a_viewer_that_does_not_read_is_dropped_and_others_go_on(monkeypatch) -> None:
    monkeypatch.setattr(feed, "EVERY", 0.01)
    monkeypatch.setattr(feed, "STALL", 0.3)

    async def work() -> None:
        async with routed(stream) as world:
            monkeypatch.setattr(world.app.view, "snapshot", lambda now: {"much": "x" * 200_000})
            deaf = socket.create_connection(("127.0.0.1", world.app.admin_port))
            deaf.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: world.app.admin.feed.viewers == 1)
            assert len(await events(world, 10)) == 10
            await until(lambda: world.app.admin.feed.viewers == 0)
            deaf.close()

    run(work())


def test_a_router_that_ends_ends_its_viewers() -> None:
    async def work() -> None:
        async with routed(stream) as world, world.client.get(world.admin + "/events") as answer:
            stopping = asyncio.create_task(world.app.stop())
            async with asyncio.timeout(30):
                await answer.content.read()
            await stopping

    run(work())


def test_browsers_get_a_page_that_may_run_its_own_script_only() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            async with world.client.get(world.admin + "/") as listed:
                assert (await listed.text()).startswith("GET /\nGET /events\n")
            async with world.client.get(world.admin + "/", headers=HTML) as answer:
                text, policy = await answer.text(), answer.headers["Content-Security-Policy"]
            for kind in ("script", "style"):
                (part,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
                digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
                assert f"{kind}-src 'sha256-{digest}'" in policy
            assert (
                "default-src 'none'" in policy
                and "unsafe" not in policy
                and "frame-ancestors 'none'" in policy
            )
            markup = re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL)
            assert not re.search(r"\son\w+=|\sstyle=|src=|https?:", markup)
            assert "innerHTML" not in text and "insertAdjacent" not in text and "document.write" not in text

    run(work())


# -- who may change something


def origin(world: World) -> str:
    return f"http://127.0.0.1:{world.app.admin_port}"


@pytest.mark.parametrize("act", ["drain", "undrain"])
def test_our_own_page_may_drain(act: str) -> None:
    async def work() -> None:
        async with routed(stream) as world:
            headers = {"Origin": origin(world), "Sec-Fetch-Site": "same-origin"}
            world.app.upstreams[0].draining = act == "undrain"
            url = f"{world.admin}/admin/engines/0/{act}"
            async with world.client.post(url, headers=headers) as told:
                assert told.status == 200
            assert world.app.upstreams[0].draining == (act == "drain")

    run(work())


def test_pages_of_others_may_not() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            port, drain = world.app.admin_port, world.admin + "/admin/engines/0/drain"
            for headers in (
                {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"},  # another port here
                {"Origin": f"http://localhost:{port}"},  # our other name: not the page that was opened
                {"Origin": f"https://127.0.0.1:{port}"},
                {"Origin": f"http://evil.example:{port}", "Host": f"evil.example:{port}"},  # DNS rebinding
                {"Origin": f"http://127.0.0.1:{port}.evil.example"},
                {"Origin": origin(world), "Sec-Fetch-Site": "cross-site"},
                {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"},
                {"Host": f"0.0.0.0:{port}"},
            ):
                async with world.client.post(drain, headers=headers) as told:
                    assert told.status == 403, headers
                async with world.client.get(world.admin + "/events", headers=headers) as told:
                    assert told.status == 403, headers
            assert not world.app.upstreams[0].draining

    run(work())


def test_a_link_from_elsewhere_opens_the_page_and_nothing_else() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            link = {
                "Sec-Fetch-Site": "cross-site",
                "Sec-Fetch-Dest": "document",
                "Sec-Fetch-Mode": "navigate",
            }
            for path, status in (("/", 200), ("/engines", 403), ("/events", 403)):
                async with world.client.get(world.admin + path, headers={**HTML, **link}) as told:
                    assert told.status == status
            framed = {**HTML, **link, "Sec-Fetch-Dest": "iframe"}
            async with world.client.get(world.admin + "/", headers=framed) as told:
                assert told.status == 403

    run(work())


def test_an_address_that_others_reach_lets_pages_change_something_by_its_number_only() -> None:
    async def work() -> None:
        async with routed(stream, front={"admin": "0.0.0.0:0"}) as world:
            drain = world.admin + "/admin/engines/0/drain"
            named = {"Host": "evil.example:9300", "Origin": "http://evil.example:9300"}
            async with world.client.post(drain, headers=named) as told:
                assert told.status == 403
            async with world.client.post(drain, headers={"Origin": origin(world)}) as told:
                assert told.status == 200

    run(work())


# -- one engine


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_is_shown_from_its_metrics(name: Literal["vllm", "sglang"]) -> None:
    async def work() -> None:
        async with (
            emulated(engine=name, engines=1, speed=50.0, slots=4, model="m") as fleet,
            aiohttp.ClientSession() as client,
        ):

            async def text() -> str:
                async with client.get(fleet[0] + "/metrics") as answer:
                    return await answer.text()

            view = EngineView(fleet[0])
            first = await text()
            assert EngineView.knows(first) and not EngineView.knows("up 1\n")
            view.read(first, 100.0)
            assert view.snapshot(100.0)["totals"]["served"] == 0.0
            for _ in range(3):
                body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}
                async with client.post(fleet[0] + "/v1/completions", json=body) as answer:
                    assert answer.status == 200
            view.read(await text(), 102.0)
            seen = json.loads(json.dumps(view.snapshot(102.0), allow_nan=False))
            assert seen["totals"]["served"] == 1.5 and seen["totals"]["output"] == 30.0
            assert seen["totals"]["ttft_p50"] > 0 and seen["totals"]["gap_p95"] > 0
            (engine,) = seen["engines"]
            assert engine["running"] == 0 and engine["url"] == fleet[0] and seen["kind"] == "engine"

    run(work())


PLUG_IN = """
vllm:num_requests_running{engine="0"} 7
vllm:num_requests_waiting{engine="0"} 2
vllm:kv_cache_usage_perc{engine="0"} 0.25
headgate_info{engine="0",policy="keep",card="c"} 1
headgate_phase{engine="0",phase="mixed"} 1
headgate_phase{engine="0",phase="idle"} 0
headgate_slots{engine="0"} 256
headgate_policy{engine="0",gauge="budget"} 2048
headgate_queue{engine="0",class="chat"} 2
headgate_promises_total{engine="0",class="chat",promise="ttft",kept="true"} %d
headgate_promises_total{engine="0",class="chat",promise="tbt",kept="false"} %d
headgate_tenant_tokens_total{engine="0",tenant="al\x1b[31mice",kind="output"} %d
headgate_fallen{engine="0"} 1
headgate_fallbacks_total{engine="0",reason="raised"} 1
"""


def test_what_the_plug_in_says_is_shown_by_class_and_tenant() -> None:
    view = EngineView("http://a:1")
    view.read(PLUG_IN % (10, 10, 1000), 0.0)
    view.read(PLUG_IN % (13, 11, 1500), 10.0)
    seen = view.snapshot(10.0)
    assert seen["name"] == "keep" and seen["policy"] == {"budget": 2048}
    assert seen["classes"] == [{"name": "chat", "waiting": 2.0, "kept": {"ttft": 1.0, "tbt": 0.0}, "why": {}}]
    assert seen["tenants"] == [{"name": "al?[31mice", "tokens": 50.0}]
    assert seen["engines"][0]["slots"] == 256 and seen["engines"][0]["status"] == "mixed"
    assert seen["totals"]["kept"] == 0.75
    assert seen["notes"] == ["the policy failed and the engine decides alone: raised"]
