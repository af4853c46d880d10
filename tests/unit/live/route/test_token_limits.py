"""Limits in tokens a minute, by key and by class."""

import asyncio
from pathlib import Path

import pytest

from fake_engines import Call, stream
from headgate.core.errors import InputError
from headgate.live.route.classes import new_key, read_keys
from headgate.live.route.deliver.legs import Allowance, TenantBounds, TenantLimits
from router_world import routed, run, until


def test_an_allowance_fills_at_its_rate_and_no_further() -> None:
    made = Allowance(600)  # ten a second
    assert made.wait(600, 100.0) == 0
    made.use(600, 100.0)
    assert made.wait(100, 100.0) == pytest.approx(10.0)
    assert made.wait(100, 110.0) == 0
    assert made.level(10_000.0) == 600
    made.use(700, 10_000.0)  # longer than expected: it has to be earned back
    assert made.wait(1, 10_000.0) == pytest.approx(10.1)
    made.use(-5000, 10_001.0)
    assert made.level(10_001.0) == 600


def test_a_request_larger_than_a_minute_is_let_in_when_the_allowance_is_full() -> None:
    made = Allowance(600)
    assert made.wait(5000, 0.0) == 0
    made.use(5000, 0.0)
    assert made.wait(5000, 439.0) > 0
    assert made.wait(5000, 500.1) == 0


def test_a_reload_keeps_levels_that_it_does_not_change() -> None:
    limits, none = TenantLimits(), TenantBounds()

    def level(key: str) -> float:
        (allowance,) = limits.tokens("", limits.of(key, key, 0.0)).values()
        return allowance.level(0.0)

    limits.set({"a": TenantBounds(tokens=60), "b": TenantBounds(tokens=60)}, none)
    for key in ("a", "b"):
        limits.tokens("", limits.of(key, key, 0.0))["API key"].use(60, 0.0)
    limits.set({"a": TenantBounds(tokens=60), "b": TenantBounds(tokens=120)}, none, none, {"chat": 5})
    assert (level("a"), level("b")) == (0, 120)
    assert limits.tokens("chat", ())["class"].level(0.0) == 5


def test_a_key_file_says_tokens(tmp_path: Path) -> None:
    file, (_, line) = tmp_path / "keys", new_key("alice")
    file.write_text(f"{line} choose tokens=5000\n")
    assert [(key.name, key.limits.tokens) for key in read_keys(file).all] == [("alice", 5000)]
    for wrong in ("tokens=0", "tokens=1 tokens=2", "tokens=x", "tokens=-3"):
        file.write_text(f"{line} {wrong}\n")
        with pytest.raises(InputError, match="tokens=N"):
            read_keys(file)


def test_requests_beyond_the_limit_of_a_key_are_429_and_other_keys_go_on(tmp_path: Path) -> None:
    keys = {name: new_key(name) for name in ("alice", "bob")}
    file = tmp_path / "keys"
    file.write_text(f"{keys['alice'][1]} tokens=40\n{keys['bob'][1]}\n")

    async def work() -> None:
        async with routed(stream, front={"key_file": str(file)}) as world:

            async def asked(name: str) -> int:
                answer = await world.ask(
                    max_tokens=3, headers={"Authorization": f"Bearer {keys[name][0]}"}, prompt=[1] * 5
                )
                if answer.status == 429:
                    assert 1 <= int(answer.headers["Retry-After"]) <= 60
                    assert "40 tokens a minute" in answer.json["error"]["message"]
                return answer.status

            found = [await asked("alice") for _ in range(8)]
            assert found[:5] == [200] * 5  # eight tokens each, as the engine counted
            assert 429 in found[5:]
            assert [await asked("bob") for _ in range(8)] == [200] * 8
            assert world.counted("refused_total", reason="tokens") == found.count(429)
            await world.settled()

    run(work())


def test_a_class_has_one_too_and_what_was_not_used_comes_back() -> None:
    async def work() -> None:
        async with routed(stream, default={"name": "default", "tokens": 30}, limits={"tries": 1}) as world:
            for engine in world.engines:
                engine.healthy = False
                engine.kill()
            refused = [await world.ask(max_tokens=3, prompt=[1] * 20) for _ in range(3)]
            assert {each.status for each in refused} == {503}  # never 429: no token was used
            assert world.app.limits.classes["default"].level(world.app.now()) == 30

    run(work())


@pytest.mark.parametrize("streamed", [True, False])
def test_hanging_up_before_the_first_token_does_not_give_the_prompt_back(streamed: bool) -> None:
    async def never(call: Call) -> None:
        await call.seen.closed.wait()

    async def work() -> None:
        async with routed(never, default={"name": "default", "tokens": 5000}) as world:
            level = world.app.limits.classes["default"].level
            asked = {"prompt": [1] * 4000, "max_tokens": 100, "stream": streamed}
            began = world.app.now()
            first = asyncio.create_task(world.ask(**asked))
            await until(lambda: world.engines[0].seen)
            first.cancel()
            await world.settled()
            used = 4000 if streamed else 4100  # how much of an answer was made is not known without a stream
            now = world.app.now()
            assert level(now) <= 5000 - used + (now - began) * 5000 / 60
            assert (await world.ask(**asked)).status == 429

    run(work())


def test_hanging_up_in_the_queue_costs_nothing() -> None:
    async def never(call: Call) -> None:
        await call.seen.closed.wait()

    async def work() -> None:
        tokens = {"name": "default", "tokens": 5000}
        async with routed(never, default=tokens, engine={"slots": 1}) as world:
            level = world.app.limits.classes["default"].level
            asked = [asyncio.create_task(world.stream(prompt=[1] * 100)) for _ in range(4)]
            gate = world.app.gate
            await until(lambda: world.engines[0].seen and len(gate.tickets) == 4)
            sent = len(world.engines[0].seen)
            assert sent < 4
            for each in asked:
                each.cancel()
            await world.settled()
            assert level(world.app.now()) >= 5000 - 100 * sent

    run(work())


def test_a_key_that_has_used_its_tokens_is_refused_before_its_body_is_read(tmp_path: Path) -> None:
    (key, line), file = new_key("alice"), tmp_path / "keys"
    file.write_text(f"{line} tokens=10\n")

    async def work() -> None:
        async with routed(stream, front={"key_file": str(file)}) as world:
            uses = world.app.limits.of("alice", "alice", world.app.now())
            world.app.limits.tokens("", uses)["API key"].use(1000, world.app.now())
            reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            writer.write(f"{head}Content-Length: 30000000\r\n\r\n".encode())  # and no body
            assert b" 429 " in await reader.readline()
            assert world.counted("refused_total", reason="tokens") == 1
            writer.close()
            await world.settled()

    run(work())
