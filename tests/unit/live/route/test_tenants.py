"""Tenants and classes in the router: who goes first, what each may have, what engines are told of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engines import FakeEngine, stream
from headgate.core.errors import InputError
from headgate.core.fleet import Move, RoutePolicy, Routing, Stage
from headgate.core.policy import End
from headgate.core.request import Slo
from headgate.live.route.classes import Key, new_key, read_keys, tenant_of
from headgate.live.route.config import Addresses, Class, ClassLimits, checked, read_config
from headgate.live.route.deliver.legs import MOST_TENANTS, TenantBounds, TenantLimits, TenantUse
from headgate.live.route.gate.gate import EngineState, Gate, Refused, Ticket, TicketState
from headgate.live.route.gate.policy import LivePolicy
from headgate.live.route.gate.queue import Content
from headgate.live.route.request import RefusedError, at_once, read_body, telling
from headgate.live.route.server import RouterApp
from headgate.methods.balance.balance import LeastLoaded
from headgate.methods.balance.prefix import PrefixAware
from router_world import World, routed, run, until
from still_loop import Still

ENDPOINT = "http://a:1"
PLUG_IN = 'headgate_info{engine="0",policy="keep"} 1.0\n'

# -- whose turn it is


class AllAtOnce(RoutePolicy):
    """One routing for all that wait, the newest of them turned away: as users may write them."""

    def __init__(self, keep: int = 100) -> None:
        self.keep = keep

    def route(self, fleet: Any) -> Routing:
        waiting = [id for queue in fleet.queues.values() for id in queue]
        places = sum(1 for engine in fleet.replicas if engine.idle)
        moves = tuple(Move(id, 0) for id in waiting[:places])
        return Routing(moves, tuple(waiting[places + self.keep :]))


def gated(router: RoutePolicy | None = None, slots: int = 1, **more: Any) -> tuple[Gate, Still]:
    loop = Still()
    made = Gate(
        router or LeastLoaded(1),
        ["chat", "batch"],
        [EngineState(slots, rooms=None)],
        clock=loop.time,
        loop=loop,
        draw=lambda: 0.5,
        **more,
    )
    return made, loop


def serve_all(made: Gate, loop: Still, tickets: list[Ticket], seconds: float = 0.1) -> list[str]:
    """Serve what is placed, one after the other, until none is left; the tenants in the order of service."""
    order: list[str] = []
    while live := [ticket for ticket in tickets if ticket.state is TicketState.PREFILLING]:
        for ticket in live:
            order.append(ticket.tenant)
            loop.go(loop.now + seconds)
            made.end(ticket, End.STOPPED, 10)
            loop.turn()
            assert made.check() == []
    return order


@pytest.mark.parametrize("router", [LeastLoaded(1), AllAtOnce()], ids=["least-loaded", "all at once"])
def test_a_flood_does_not_hold_up_a_tenant_with_few_requests(router: RoutePolicy) -> None:
    """Its requests go in turn with the first of the flood, not behind all of it."""
    made, loop = gated(router)
    flood = [made.arrive("chat", 100, 50, tenant="flood") for _ in range(40)]
    good = [made.arrive("chat", 100, 50, tenant="good") for _ in range(5)]
    order = serve_all(made, loop, [*flood, *good])
    assert len(order) == 45 and made.fallen is None
    assert order[:14].count("good") == 5, order


def test_without_tenants_first_come_is_first_served() -> None:
    made, loop = gated()
    tickets = [made.arrive("chat", 100 + number, 50) for number in range(12)]
    serve_all(made, loop, tickets)
    sent = [ticket.queued for ticket in tickets]
    assert sent == sorted(sent) and not made.desk._unsent


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    made, loop = gated()
    first = [made.arrive("chat", 100, 50, tenant="idle")]
    serve_all(made, loop, first)
    busy = [made.arrive("chat", 1000, 50, tenant="busy") for _ in range(30)]
    half = busy[:15]
    for ticket in half:
        loop.go(loop.now + 0.1)
        made.end(ticket, End.STOPPED, 10)
        loop.turn()
    back = [made.arrive("chat", 1000, 50, tenant="idle") for _ in range(10)]
    order = serve_all(made, loop, [*busy, *back])
    assert 3 <= order[:10].count("idle") <= 7, order


def test_classes_do_not_change_places() -> None:
    """The router chooses the class; tenants are compared within it."""
    made, loop = gated(AllAtOnce())
    batch = [made.arrive("batch", 100, 50, tenant="flood") for _ in range(5)]
    chat = made.arrive("chat", 100, 50, tenant="good")
    order = serve_all(made, loop, [*batch, chat])
    assert order.count("flood") == 5


def test_a_request_that_came_back_from_an_engine_goes_itself() -> None:
    made, loop = gated()
    flood = [made.arrive("chat", 100, 50, tenant="flood") for _ in range(6)]
    running = next(ticket for ticket in flood if ticket.state is TicketState.PREFILLING)
    good = made.arrive("chat", 100, 50, tenant="good")
    made.back(running)
    loop.turn()
    assert running.state is TicketState.PREFILLING and good.state is TicketState.QUEUED
    serve_all(made, loop, [*flood, good])


def test_turned_away_while_others_went_in_their_place() -> None:
    """A router that sends some and turns others away at once names requests that have gone already."""
    made, loop = gated(AllAtOnce(keep=3), limits={"chat": ClassLimits(100, 30.0)})
    refused, kept = 0, []
    for number in range(12):
        try:
            kept.append(made.arrive("chat", 100, 50, tenant="flood" if number < 9 else f"good{number}"))
        except Refused:
            refused += 1
    assert made.fallen is None and made.check() == [] and refused > 0
    serve_all(made, loop, kept)
    assert made.fallen is None and not made.tickets and not made.desk._unsent


def test_a_router_that_reads_contents_keeps_its_choice_within_a_quantum() -> None:
    made, loop = gated(PrefixAware(1, lambda: 0.5))
    flood = [made.arrive("chat", 100, 50, tenant="flood") for _ in range(20)]
    good = [made.arrive("chat", 100, 50, tenant="good") for _ in range(3)]
    order = serve_all(made, loop, [*flood, *good])
    assert order[-3:].count("good") == 3, "a few hundred tokens are no reason to leave a cache"
    flood = [made.arrive("chat", 5000, 50, tenant="flood") for _ in range(20)]
    good = [made.arrive("chat", 5000, 50, tenant="good") for _ in range(3)]
    order = serve_all(made, loop, [*flood, *good])
    assert order[:14].count("good") == 3, order


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30_000), st.booleans()), max_size=40))
def test_every_request_ends_once_whatever_tenants_do(asked: list[tuple[str, int, bool]]) -> None:
    made, loop = gated(limits={"chat": ClassLimits(8, 5.0, 0.5)})
    tickets, refused = [], 0
    for tenant, prompt, hangs_up in asked:
        try:
            ticket = made.arrive("chat", prompt, 50, tenant=tenant)
        except Refused:
            refused += 1
            continue
        tickets.append(ticket)
        if hangs_up:
            made.end(ticket, End.ABORTED)
            loop.turn()
        assert made.check() == []
    serve_all(made, loop, tickets)
    loop.go(loop.now + 10.0)
    assert not made.tickets and not made.desk._unsent and not any(made.desk._waiting.values())
    assert not made.desk.accounts._of


# -- a queue that is full


def test_in_a_full_queue_the_longest_backlog_makes_room() -> None:
    made, _ = gated(limits={"chat": ClassLimits(6, 30.0)})
    flood = []
    with pytest.raises(Refused, match="queue full"):
        for _ in range(20):
            flood.append(made.arrive("chat", 100, 50, tenant="flood"))
    good = [made.arrive("chat", 100, 50, tenant="good") for _ in range(3)]
    assert [ticket.state for ticket in good] == [TicketState.QUEUED] * 3
    assert [ticket.state for ticket in flood[-3:]] == [TicketState.GONE] * 3
    assert all(isinstance(ticket.answer, Refused) and ticket.answer.status == 429 for ticket in flood[-3:])
    with pytest.raises(Refused, match="queue full"):
        made.arrive("chat", 100, 50, tenant="good")  # as many as the other by now
    assert made.check() == []


def test_one_tenant_may_have_a_share_of_the_queue() -> None:
    made, _ = gated(limits={"chat": ClassLimits(8, 30.0, 0.25)})
    waiting = []
    with pytest.raises(Refused, match="tenant queue") as refused:
        for _ in range(20):
            waiting.append(made.arrive("chat", 100, 50, tenant="flood"))
    assert sum(ticket.state is TicketState.QUEUED for ticket in waiting) == 2
    assert refused.value.status == 429 and refused.value.retry_after >= 1


def test_the_predicted_wait_is_that_of_the_tenant() -> None:
    """Behind 40 requests of another tenant it waits for two."""
    made, loop = gated(limits={"chat": ClassLimits(100, 300.0)})
    flood = [made.arrive("chat", 100, 50, tenant="flood") for _ in range(20)]
    for ticket in flood[:10]:
        loop.go(loop.now + 1.0)
        made.end(ticket, End.STOPPED, 5)
        loop.turn()
    flood += [made.arrive("chat", 100, 50, tenant="flood") for _ in range(30)]
    with pytest.raises(Refused, match="wait too long"):
        made.arrive("chat", 100, 50, tenant="flood", most_wait=10.0)
    assert made.arrive("chat", 100, 50, tenant="good", most_wait=10.0).state is TicketState.QUEUED


# -- what each may have, on a clock of the test's own


def entered(limits: TenantLimits, now: float, key: str = "", tenant: str = "") -> str:
    try:
        with limits.inside(key, tenant, now):
            return "in"
    except RefusedError as refused:
        assert refused.status == 429 and 1 <= (refused.retry_after or 0) <= 60
        return refused.reason


def test_requests_a_second() -> None:
    limits = TenantLimits()
    limits.set({}, TenantBounds(requests=2.0))
    assert [entered(limits, 0.0, tenant="a") for _ in range(3)] == ["in", "in", "tenant-requests"]
    assert entered(limits, 0.0, tenant="b") == "in"
    assert [entered(limits, 0.5, tenant="a") for _ in range(2)] == ["in", "tenant-requests"]
    assert [entered(limits, 100.0, tenant="a") for _ in range(3)] == ["in", "in", "tenant-requests"]
    slow = TenantLimits()
    slow.set({}, TenantBounds(requests=0.1))
    assert [entered(slow, 0.0, tenant="a"), entered(slow, 9.0, tenant="a")] == ["in", "tenant-requests"]
    assert entered(slow, 10.1, tenant="a") == "in"


def test_requests_at_once() -> None:
    limits = TenantLimits()
    limits.set({"gold": TenantBounds(inflight=3)}, TenantBounds(inflight=1))
    with limits.inside("free", "free", 0.0), limits.inside("gold", "gold", 0.0):
        assert entered(limits, 0.0, "free", "free") == "tenant-inflight"
        assert entered(limits, 0.0, "gold", "gold") == "in", "the words of its key come first"
    assert entered(limits, 0.0, "free", "free") == "in"


def test_tokens_of_tenants_are_counted_apart_from_those_of_keys() -> None:
    limits = TenantLimits()
    limits.set({"gold": TenantBounds(tokens=5)}, TenantBounds(tokens=600))

    def tokens(key: str, tenant: str) -> dict[str, float]:
        with limits.inside(key, tenant, 0.0) as uses:
            return {what: each.per_minute for what, each in limits.tokens("", uses).items()}

    assert tokens("free", "free") == {"tenant": 600}
    assert tokens("gold", "gold") == {"API key": 5}
    assert tokens("gold", "acme") == {"API key": 5, "tenant": 600}


def test_a_key_s_own_bounds_hold_for_all_the_tenants_it_names() -> None:
    limits = TenantLimits()
    limits.set({"proxy": TenantBounds(requests=1.0)}, TenantBounds())
    found = [entered(limits, 0.0, "proxy", f"tenant {number}") for number in range(3)]
    assert found == ["in", "tenant-requests", "tenant-requests"]


def test_a_hundred_thousand_tenants_fit_into_a_bounded_account() -> None:
    limits = TenantLimits()
    limits.set({}, TenantBounds(requests=1.0))
    found = [entered(limits, 0.0, tenant=f"t{number}") for number in range(100_000)]
    assert len(limits._tenants._uses) <= MOST_TENANTS + 1
    assert found.count("in") == MOST_TENANTS + 1, "all later ones share one"
    assert entered(limits, 5.0, tenant="late") == "in", "those at rest are forgotten"
    assert len(limits._tenants._uses) <= MOST_TENANTS


def test_a_reload_that_changes_nothing_keeps_the_accounts() -> None:
    limits = TenantLimits()
    limits.set({}, TenantBounds(requests=1.0))
    assert entered(limits, 0.0, tenant="a") == "in"
    limits.set({}, TenantBounds(requests=1.0))
    assert entered(limits, 0.0, tenant="a") == "tenant-requests"
    limits.set({}, TenantBounds(requests=2.0))
    assert entered(limits, 0.0, tenant="a") == "in"


def test_a_new_key_voids_no_other_limit() -> None:
    limits, web = TenantLimits(), TenantBounds(requests=0.02, inflight=1)
    every = TenantBounds(requests=0.01)
    limits.set({"web": web, "free": TenantBounds()}, every)
    assert [entered(limits, 0.0, key, key) for key in ("web", "free")] == ["in", "in"]
    assert entered(limits, 0.0, "free", "acme") == "in"
    limits.set({"web": web, "free": TenantBounds(), "new": TenantBounds(requests=5.0)}, every)
    for key, tenant in (("web", "web"), ("free", "free"), ("free", "acme")):
        assert entered(limits, 1.0, key, tenant) == "tenant-requests"
    with limits.inside("web", "web", 100.0):
        limits.set({"web": web}, every)
        assert entered(limits, 200.0, "web", "web") == "tenant-inflight"
    limits.set({"web": web._replace(requests=1.0)}, every)
    assert entered(limits, 200.0, "web", "web") == "in", "its own bound changed"


def test_a_tenant_in_a_header_and_a_key_of_that_name_are_two() -> None:
    keys = {"acme": TenantBounds(requests=100.0), "proxy": TenantBounds()}
    for first, second in (("proxy", "acme"), ("acme", "proxy")):
        limits = TenantLimits()
        limits.set(keys, TenantBounds(requests=1.0))
        found = {key: [entered(limits, 0.0, key, "acme") for _ in range(5)] for key in (first, second)}
        assert found["acme"] == ["in"] * 5
        assert found["proxy"] == ["in", *["tenant-requests"] * 4]


def test_made_up_tenants_reach_neither_keys_nor_the_account_of_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits, looks = TenantLimits(), 0
    rests = TenantUse.rests

    def counted(use: TenantUse, now: float) -> bool:
        nonlocal looks
        looks += 1
        return rests(use, now)

    monkeypatch.setattr(TenantUse, "rests", counted)
    limits.set({"gold": TenantBounds(requests=1000.0), "proxy": TenantBounds()}, TenantBounds(requests=0.01))
    assert entered(limits, 0.0, "proxy", "others") == "in"
    for number in range(MOST_TENANTS - 1):
        assert entered(limits, 0.0, "proxy", f"t{number}") == "in"
    assert [entered(limits, 0.0, "gold", "gold") for _ in range(5)] == ["in"] * 5
    further = [entered(limits, 0.5, "proxy", f"u{number}") for number in range(500)]
    assert further == ["in", *["tenant-requests"] * 499], "one account, bounded as every tenant is"
    assert looks <= MOST_TENANTS, "one look at all accounts, not one for each request"


def test_a_key_file_says_what_a_key_may_have(tmp_path: Path) -> None:
    file, (_, line) = tmp_path / "keys", new_key("alice")
    file.write_text(f"{line} tokens=5000 requests=0.5 choose inflight=8\n")
    (key,) = read_keys(file).all
    assert key.limits == Addresses(tokens=5000, requests=0.5, inflight=8) and key.choose
    for wrong in (
        "requests=0",
        "requests=-1",
        "inflight=1.5",
        "inflight=2 inflight=3",
        "weight=9",
        "tenant=x",
    ):
        file.write_text(f"{line} {wrong}\n")
        with pytest.raises(InputError, match=r"keys:1: write NAME SHA256"):
            read_keys(file)


# -- who a tenant is

PLAIN, CHOOSES = Key("web", b""), Key("proxy", b"", choose=True)


@pytest.mark.parametrize(
    ("key", "keyed", "shown", "tenant"),
    [
        (None, False, [], ""),
        (None, False, ["acme"], "acme"),
        (PLAIN, True, ["acme"], "web"),
        (CHOOSES, True, ["acme"], "acme"),
        (CHOOSES, True, [" Müller \t"], "Müller"),
        (CHOOSES, True, [], "proxy"),
        (CHOOSES, True, ["acme", "evil"], "proxy"),
        (CHOOSES, True, ["x" * 65], "proxy"),
        (CHOOSES, True, ["x" * 10_000_000], "proxy"),
        (CHOOSES, True, ["a\x00b"], "proxy"),
        (CHOOSES, True, ["\udcff"], "proxy"),
        (CHOOSES, True, [""], "proxy"),
    ],
    ids=range(12),
)
def test_who_a_tenant_is(key: Key | None, keyed: bool, shown: list[str], tenant: str) -> None:
    assert tenant_of(key, keyed, shown) == tenant


# -- bodies: what engines are told

WORDS = {"headgate_class": "gold", "headgate_tenant": "acme"}
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
}


def told(path: str, body: bytes, words: dict[str, str]) -> bytes:
    return bytes(at_once(telling(read_body(body, path), path, words)).body)


@pytest.mark.parametrize("path", DIALECTS)
def test_each_dialect_is_told(path: str) -> None:
    body = b" " + json.dumps({"model": "m", **DIALECTS[path]}, indent=1).encode() + b" \n"
    written = told(path, body, WORDS)
    assert json.loads(written) == {"model": "m", **DIALECTS[path], "vllm_xargs": WORDS}
    assert written.startswith(body.rstrip().rstrip(b"}")), "all else stays byte for byte"
    assert told(path, body, {}) == body
    for empty in (b"{}", b" { }\n", b"{" + b" " * 70_000 + b"}"):
        assert json.loads(told(path, empty, WORDS)) == {"vllm_xargs": WORDS}
    assert told(path, body, {"headgate_class": "", "headgate_tenant": ""}) == body
    large = json.dumps({**DIALECTS[path], "pad": "é}" * 100_000}).encode()
    assert json.loads(told(path, large, WORDS)) == {**json.loads(large), "vllm_xargs": WORDS}
    evil = {"headgate_tenant": "evil", "headgate_ttft": 0.1, "headgate_weight": 9}
    own = {**DIALECTS[path], "vllm_xargs": {**evil, "x": [1]}}
    for body in (json.dumps(own).encode(), json.dumps({**own, "pad": "x" * 200_000}).encode()):
        extra = json.loads(told(path, body, WORDS))["vllm_xargs"]
        assert extra == {**WORDS, "x": [1]}
        extra = json.loads(told(path, body, {"headgate_class": "gold"}))["vllm_xargs"]
        assert extra == {"headgate_class": "gold", "headgate_tenant": "evil", "x": [1]}, "the engine's matter"
        extra = json.loads(told(path, body, {"headgate_class": "", "headgate_tenant": ""}))["vllm_xargs"]
        assert extra == {"x": [1]}
    promised = json.dumps({**DIALECTS[path], "vllm_xargs": {"headgate_ttft": 0.1}}).encode()
    assert json.loads(told(path, promised, {"headgate_tenant": ""}))["vllm_xargs"] == {}
    assert told(path, promised, {}) == promised, "no classes and no tenants: as it came"


@pytest.mark.parametrize(
    "extra",
    [
        b'{"headgate_tenant":"evil","headgate_tenant":"worse"}',
        b'{"headgate\\u005ftenant":"evil"}',
        b'{"\\u0068eadgate_tenant":["evil"], "headgate_class": {"a": 1}}',
        b"null",
        b"{}",
        b'{ "headgate_class" : null }',
    ],
)
def test_no_spelling_of_a_clients_words_passes(extra: bytes) -> None:
    body = b'{"prompt":"hi","vllm_xargs":' + extra + b"}"
    written = told("/v1/completions", body, WORDS)
    assert json.loads(written)["vllm_xargs"] == WORDS and b"evil" not in written
    silent = told("/v1/completions", body, {"headgate_class": "", "headgate_tenant": ""})
    assert not {*(json.loads(silent)["vllm_xargs"] or {})} & {*WORDS} and b"evil" not in silent


def test_sglang_is_told_in_its_own_field() -> None:
    path, both = "/v1/completions", ("vllm_xargs", "custom_params")

    def said(body: dict[str, Any], words: dict[str, str], *into: str) -> Any:
        asked = read_body(json.dumps(body).encode(), path)
        return json.loads(at_once(telling(asked, path, words, into)).body)

    plain, evil = {"prompt": "hi"}, {"headgate_tenant": "evil", "headgate_ttft": 0.1}
    assert said(plain, WORDS, "custom_params") == {**plain, "custom_params": WORDS}
    assert said(plain, WORDS, *both) == {**plain, "vllm_xargs": WORDS, "custom_params": WORDS}
    own = {**plain, "custom_params": {**evil, "x": 1}}
    assert said(own, WORDS, "custom_params") == {**plain, "custom_params": {"x": 1, **WORDS}}
    assert said(own, WORDS, "vllm_xargs") == {**plain, "custom_params": {"x": 1}, "vllm_xargs": WORDS}
    assert said(own, dict.fromkeys(WORDS, ""), *both) == {**plain, "custom_params": {"x": 1}}
    with pytest.raises(RefusedError):
        twice = b'{"prompt":"hi","custom_params":{},"custom\\u005fparams":{"headgate_tenant":"evil"}}'
        at_once(telling(read_body(twice, path), path, WORDS, both))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/v1/messages/count_tokens", "/v1/rerank"])
def test_other_paths_are_told_nothing(path: str) -> None:
    body = b'{"input": "hi", "vllm_xargs": {"headgate_tenant": "evil"}}'
    assert told(path, body, WORDS) == body


@given(st.text(max_size=64).filter(str.isprintable), st.text(max_size=20))
def test_whatever_a_tenant_is_called_the_body_is_the_same(tenant: str, prompt: str) -> None:
    body = json.dumps({"prompt": prompt}).encode()
    written = json.loads(told("/v1/completions", body, {"headgate_tenant": tenant}))
    assert written == {"prompt": prompt, **({"vllm_xargs": {"headgate_tenant": tenant}} if tenant else {})}


# -- over HTTP


def keyed(tmp_path: Path, **words: str) -> tuple[dict[str, dict[str, str]], str]:
    """Headers of each key, and the file."""
    made = {name: new_key(name) for name in words}
    file = tmp_path / "keys"
    file.write_text("".join(f"{made[name][1]} {rest}\n" for name, rest in words.items()))
    return {name: {"Authorization": f"Bearer {key}"} for name, (key, _) in made.items()}, str(file)


GOLD = {"name": "gold", "match": {"key": "web"}, "ttft": 100.0, "weight": 10, "priority": -1}


def test_class_and_tenant_reach_engines_with_the_plug_in_and_clients_cannot_name_them(tmp_path: Path) -> None:
    keys, file = keyed(tmp_path, web="", free="")
    evil = {"headgate_class": "gold", "headgate_tenant": "evil", "headgate_weight": 1e9}

    async def work() -> None:
        async with routed(stream, front={"key_file": file}, classes=[GOLD]) as world:
            (engine,) = world.engines
            plain = await world.stream(headers=keys["web"], prompt="x")
            assert plain.status == 200 and "vllm_xargs" not in engine.seen[-1].json, "no plug-in: as it came"
            engine.extra_metrics = PLUG_IN
            await until(lambda: world.app.upstreams[0].reads_words)
            await world.stream(headers=keys["web"], vllm_xargs=evil)
            words = engine.seen[-1].json["vllm_xargs"]
            assert words == {"headgate_class": "gold", "headgate_tenant": "web"}
            assert engine.seen[-1].header("x-vllm-priority") == "-1"
            await world.stream(headers=keys["free"], vllm_xargs=evil, priority=-5)
            words = engine.seen[-1].json["vllm_xargs"]
            assert words == {"headgate_tenant": "free"}
            assert engine.seen[-1].header("x-vllm-priority") == "0", "undoes the priority of the body"
            assert (
                world.counted("promises_total", **{"class": "gold", "promise": "ttft", "kept": "true"}) == 2
            )
            assert world.counted("tenant_tokens_total", tenant="web", kind="output") == 6
            await world.settled()

    run(work())


@pytest.mark.parametrize("tells", ["auto", "never"])
def test_a_clients_class_and_tenant_are_dropped_where_no_engine_is_told(tmp_path: Path, tells: str) -> None:
    """A plug-in without metrics is not seen, and believes what it reads."""
    keys, file = keyed(tmp_path, free="")
    own = {"headgate_class": "gold", "headgate_tenant": "web", "x": 1}

    async def work() -> None:
        async with routed(stream, front={"key_file": file, "tell_engines": tells}, classes=[GOLD]) as world:
            assert (await world.stream(headers=keys["free"], vllm_xargs=own)).status == 200
            assert world.engines[0].seen[-1].json["vllm_xargs"] == {"x": 1}
            await world.settled()

    run(work())


def test_without_classes_and_keys_bodies_pass_as_they_are() -> None:
    raw = b'{"model":"m", "prompt":"x","vllm_xargs":{"headgate_class":"chat"},"priority":3}'

    async def work() -> None:
        async with routed(stream) as world:
            world.engines[0].extra_metrics = PLUG_IN
            await until(lambda: world.app.upstreams[0].reads_words)
            assert (await world.ask(raw=raw)).status == 200
            assert world.engines[0].seen[-1].body == raw
            assert world.engines[0].seen[-1].header("x-vllm-priority") is None

    run(work())


def test_a_header_names_the_tenant_only_where_the_operator_says_so(tmp_path: Path) -> None:
    keys, file = keyed(tmp_path, proxy="choose", web="")
    log = tmp_path / "access"

    async def work() -> None:
        front = {"key_file": file, "tell_engines": "always", "access_log": str(log)}
        async with routed(stream, front=front, tenants={"header": "x-tenant"}) as world:
            (engine,) = world.engines
            cases = (
                (keys["proxy"], "acme", "acme"),
                (keys["web"], "acme", "web"),
                (keys["proxy"], None, "proxy"),
            )
            for key, shown, tenant in cases:
                await world.stream(headers={**key, **({"X-Tenant": shown} if shown else {})})
                assert engine.seen[-1].json["vllm_xargs"] == {"headgate_tenant": tenant}
                assert engine.seen[-1].header("x-tenant") is None
            await world.settled()

    run(work())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["key"], line.get("tenant")) for line in lines] == [
        ("proxy", "acme"),
        ("web", None),
        ("proxy", None),
    ]


def test_limits_of_tenants_are_429_in_metrics_and_the_log(tmp_path: Path) -> None:
    keys, file = keyed(tmp_path, web="requests=1000", free="")
    log = tmp_path / "access"

    async def work() -> None:
        front = {"key_file": file, "access_log": str(log)}
        async with routed(stream, front=front, tenants={"requests": 0.001}) as world:
            found = [await world.stream(headers=keys["free"]) for _ in range(3)]
            assert [answer.status for answer in found] == [200, 429, 429]
            assert found[1].headers["Retry-After"] == "60"
            assert "may send 0.001 requests a second" in found[1].json["error"]["message"]
            assert {(await world.stream(headers=keys["web"])).status for _ in range(5)} == {200}
            assert world.counted("refused_total", reason="tenant-requests") == 2
            await world.settled()

    run(work())
    faults = [json.loads(line)["fault"] for line in log.read_text().splitlines()]
    assert faults.count("tenant-requests") == 2


def test_a_flood_of_one_key_leaves_the_other_its_time_in_the_queue(tmp_path: Path) -> None:
    """One slot and 30 requests of the flood before it: the other waits for three or so, not for all."""
    keys, file = keyed(tmp_path, flood="", good="")
    order: list[str] = []

    async def slow(call: Any) -> None:
        order.append(call.seen.json["vllm_xargs"]["headgate_tenant"])
        await asyncio.sleep(0.01)
        await stream(call)

    async def work() -> None:
        front = {"key_file": file, "tell_engines": "always"}
        async with routed(slow, front=front, engine={"slots": 1}) as world:
            flood = [asyncio.create_task(world.stream(headers=keys["flood"])) for _ in range(30)]
            await until(lambda: len(world.app.gate.tickets) == 30)
            good = [asyncio.create_task(world.stream(headers=keys["good"])) for _ in range(4)]
            answers = await asyncio.gather(*flood, *good)
            assert {answer.status for answer in answers} == {200}
            await world.settled()

    run(work())
    last = max(place for place, tenant in enumerate(order) if tenant == "good")
    assert len(order) == 34 and last < 20, order


def test_weights_are_read_again(tmp_path: Path) -> None:
    async def work() -> None:
        file = tmp_path / "fleet.toml"

        def write(url: str, weight: str) -> None:
            file.write_text(
                f'[front]\nport = 0\nadmin = "127.0.0.1:0"\n[[engines]]\nurl = "{url}"\n'
                f'[[classes]]\nname = "gold"\nmatch = {{ model = "m" }}\nttft = "1s"\nweight = {weight}\n'
            )

        seen: list[Slo] = []
        async with FakeEngine() as engine:
            write(engine.url, "2")
            app = RouterApp(read_config(file, {}, []), lambda: read_config(file, {}, []))
            await app.start()
            arrive = app.gate.arrive

            def spied(*args: Any, slo: Slo, **words: Any) -> Ticket:
                seen.append(slo)
                return arrive(*args, slo=slo, **words)

            app.gate.arrive = spied  # type: ignore[method-assign]
            async with aiohttp.ClientSession() as client:
                world = World(app, client, [engine])
                await world.stream()
                write(engine.url, "0")
                with pytest.raises(InputError, match=r"classes\.0: weight=0; give a number above 0"):
                    await app.reload()
                await world.stream()
                write(engine.url, "10")
                assert "[classes] has new settings" in await app.reload()
                await world.stream()
            await app.stop()
        assert [slo.weight for slo in seen] == [2, 2, 10] and seen[0].first_token == 1.0

    run(work())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"background": True, "ttft": 5.0}, "background and ttft=5s; background promises nothing: drop one"),
        ({"weight": 0}, "weight=0; give a number above 0"),
        ({"weight": "10"}, "classes.0.weight"),
        ({"weight": float("inf")}, "classes.0.weight"),
    ],
)
def test_classes_that_contradict_themselves(words: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        checked({"engines": [{"url": ENDPOINT}], "classes": [{"name": "a", **words}]})
    assert said in str(refused.value)
    assert Class(name="a", weight=3, ttft=1.0).slo == Slo(1.0, weight=3)


ROUTERS = (
    "least-loaded",
    "power-of-two",
    "affinity",
    "prefix-aware",
    "llm-d",
    "density-deep",
    "gate-and-route+",
    "token-bucket",
    "split:prefill=1",
)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_serves_all_tenants(name: str) -> None:
    """Whichever request goes in whose place, its books stay whole and none is lost."""
    config = checked(
        {
            "engines": [{"url": ENDPOINT}, {"url": "http://b:1"}],
            "router": {"name": name, "card": "cal-h200-qwen3-8b"},
            "classes": [{"name": "chat", "prompt": 100, "output": 50, "rate": 5}, {"name": "batch"}],
            "limits": {"queue": 200, "queue_ttl": 1e6},
        }
    )
    loop, draw = Still(), Random(1)
    router = LivePolicy(config, 2).router
    states = [EngineState(2, 1, group="a") for _ in range(2)]
    made = Gate(router, config.kinds, states, limits=config.class_limits, clock=loop.time, loop=loop)
    tickets = []
    for number in range(60):
        tenant = "flood" if number < 40 or number % 2 else f"tenant {number % 3}"
        prompt = draw.choice((10, 500, 20_000))
        words = {"content": Content(((number % 4, prompt),), prompt, None), "tenant": tenant}
        tickets.append(made.arrive(draw.choice(("chat", "batch", "default")), prompt, 50, **words))
    first: list[str] = []
    for _ in range(4000):
        if not made.tickets:
            break
        loop.go(loop.now + 0.05)
        busy = [ticket for ticket in made.tickets.values() if ticket.engine >= 0]
        for ticket in busy:
            if ticket.state is TicketState.PREFILLING:
                first.append(ticket.tenant)
                if made.roster.places[ticket.id].stage is Stage.PREFILL:
                    made.parted(ticket)
                else:
                    made.first_token(ticket)
            elif ticket.state is TicketState.DECODING:
                made.end(ticket, End.STOPPED, draw.randint(1, 50))
        loop.turn()
        assert made.fallen is None and made.check() == []
    assert not made.tickets and len(first) == 60
    assert first[:40].count("flood") < 36, first
