"""Prompts and outputs on different engines, before emulators that answer wrong text for stale KV."""

import asyncio
import json
import random
from contextlib import asynccontextmanager

import msgspec
import pytest

from fake_engines import stream
from headgate.core.fleet import Move, Stage
from headgate.live.emulate import answer, chat_answer, emulated
from headgate.live.route.deliver.connections import EngineAnswer, Fault, LegError
from headgate.live.route.deliver.handover import (
    KvParams,
    decode_body,
    prefill_body,
    read_params,
    release_body,
)
from headgate.live.route.deliver.relay import Leg
from headgate.live.route.gate.gate import Gate, Ticket
from headgate.live.route.gate.queue import UNBOUNDED
from headgate.live.route.request import at_once
from router_world import World, fail_first_decode, routed, run, until

SPEED = 50.0


@asynccontextmanager
async def split(
    engines: int = 3, router: str = "split:prefill=1", kv: dict | None = None, slots: int = 32, **options
):
    given = {"speed": SPEED, "slots": 32, "model": "m", "kv_lease": 300.0 * SPEED, **options}
    async with emulated(engines=engines, **given) as fleet:
        config = {"router": {"name": router}, "kv": {"lease": 300.0, **(kv or {})}}
        async with routed(urls=list(fleet), engine={"slots": slots}, **config) as world:
            yield world, fleet


def fill(world: World, engine: int, full: bool = True) -> None:
    """All slots of an engine are taken by others, or free again."""
    world.app.gate.set_engine(engine, most=0 if full else UNBOUNDED)


async def wanted(world: World, prompt: str, tokens: int, streams: bool = True) -> None:
    got = await world.ask(prompt=prompt, max_tokens=tokens, stream=streams, ignore_eos=True)
    assert got.status == 200, got.body
    if streams:
        text = "".join(each["choices"][0]["text"] for each in got.events[:-1] if each.get("choices"))
    else:
        text = got.json["choices"][0]["text"]
    assert text == answer(prompt, tokens)


def handed_over(world: World) -> float:
    return world.counted("kv_handovers_total")


def test_answers_are_those_of_one_engine() -> None:
    async def work() -> None:
        async with split() as (world, fleet):
            await asyncio.gather(
                *(wanted(world, f"prompt {n} " * (1 + n % 7), 1 + n % 23, n % 3 > 0) for n in range(60))
            )
            await world.settled()
            assert handed_over(world) == 60
            assert fleet.engines[0].tally.generation_tokens <= 60  # its own outputs come from elsewhere
            await until(lambda: fleet.at_rest)
            assert all(each.tally.nixl["notifications_after_expiry"] == 0 for each in fleet.engines)

    run(work())


def test_chats_too() -> None:
    async def work() -> None:
        async with split() as (world, fleet):
            messages = [{"role": "user", "content": "what is a head gate?"}]
            got = await world.ask(
                "/v1/chat/completions", raw=json.dumps({"messages": messages, "max_tokens": 9}).encode()
            )
            assert got.json["choices"][0]["message"]["content"] == chat_answer(messages, 9)
            assert handed_over(world) == 1
            await until(lambda: fleet.at_rest)

    run(work())


WHOLE = {
    "list prompt": {"prompt": ["one prompt", "another"]},  # trap 4
    "n = 2": {"n": 2},  # trap 5
    "echo": {"echo": True},
}


@pytest.mark.parametrize("body", WHOLE.values(), ids=WHOLE)
def test_whole_only(body: dict) -> None:
    async def work() -> None:
        async with split() as (world, fleet):
            got = await world.ask(**{"prompt": "one prompt", "max_tokens": 5, "ignore_eos": True, **body})
            if got.status == 200:
                prompts = body.get("prompt", ["one prompt"])
                texts = [each["text"].removeprefix("one prompt") for each in got.json["choices"]]
                assert texts[0] == answer("one prompt", 5)
                if len(prompts) == 2:
                    assert texts[1] == answer("another", 5)
            assert handed_over(world) == 0
            await world.settled()
            await until(lambda: fleet.at_rest)

    run(work())


def test_a_decode_that_fails_means_a_new_prompt_never_the_same_parameters() -> None:  # traps 1 and 2
    async def work() -> None:
        async with split(engines=4) as (world, fleet):
            for number in (1, 2):
                fleet.faults[number].set({"always": "503"})  # refuses, and frees the KV at its owner
            for number in range(8):
                await wanted(world, f"prompt number {number}", 7)
            await world.settled()
            assert (
                world.counted("retries_total", fault="status") + world.counted("retries_total", fault="busy")
                > 0
            )

    run(work())


@pytest.mark.parametrize("refused", [False, True], ids=["read, then reset", "refused by its engine"])
def test_spent_parameters_are_never_sent_again(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traps 1 and 2 one by one; `tests/engine/test_route_vllm.py` does the same before real vLLM."""

    async def work() -> None:
        sent = fail_first_decode(monkeypatch, refused)
        async with split(engines=2) as (world, fleet):
            await wanted(world, "a prompt whose decode fails", 9)
            await world.settled()
            assert len(sent) == len(set(sent))
            assert len(sent) == 2 or refused  # an engine that refused is full, and the prompt stays at home
            await until(lambda: fleet.at_rest)

    run(work())


@pytest.mark.parametrize("fault", ["reset-before-head", "error-event=0", "abort", "drop=0", "500", "429"])
def test_faults_of_either_leg_never_give_wrong_text(fault: str) -> None:
    async def work() -> None:
        async with split(engines=4, fail_rate=0.15, fault=fault) as (world, _):
            world.app.service.budget.share = 1.0

            async def one(prompt: str) -> bool:
                got = await world.ask(prompt=prompt, max_tokens=6, stream=True, ignore_eos=True)
                whole = got.status == 200 and got.events[-1] == b"[DONE]"
                if whole:
                    events = [each for each in got.events[:-1] if each.get("choices")]
                    assert "".join(each["choices"][0]["text"] for each in events) == answer(prompt, 6)
                return whole

            assert sum(await asyncio.gather(*(one(f"prompt {number}") for number in range(30)))) >= 10
            await world.settled()

    run(work())


def test_a_prefill_that_fails_is_tried_elsewhere_and_then_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    prefills, start = [], Leg.start

    async def failing(leg: Leg, body: bytes, headers, first_token: float | None = None) -> None:
        if b'"do_remote_decode":true' not in body:
            return await start(leg, body, headers, first_token)
        prefills.append(leg._url)
        raise LegError(Fault.RESET, "made up")

    async def work() -> None:
        async with split(engines=4, router="split:prefill=2") as (world, fleet):
            monkeypatch.setattr(Leg, "start", failing)
            await wanted(world, "a prompt", 5)
            await world.settled()
            assert len(prefills) == len(set(prefills)) == 2
            assert handed_over(world) == 0 and world.counted("retries_total", fault="reset") == 2
            await until(lambda: fleet.at_rest)

    run(work())


LONG = "a prompt of ten thousand tokens " * 1250  # its prefill takes a while at this speed
SLOW = 2.0


async def close_all_when_prefilling(world: World, fleet) -> None:
    """Its prompt runs; from now on there is no place to decode."""
    await until(lambda: fleet.engines[0].running)
    for engine in (0, 1):
        fill(world, engine)


def test_a_hand_over_that_waits_too_long_is_stripped() -> None:  # trap 3
    async def work() -> None:
        async with split(engines=2, kv={"lease": 0.2}, speed=SLOW) as (world, fleet):
            asked = asyncio.create_task(wanted(world, LONG, 5))
            await close_all_when_prefilling(world, fleet)
            await until(lambda: world.counted("kv_stripped_total") == 1)
            for engine in (0, 1):
                fill(world, engine, full=False)
            await asked
            await world.settled()
            assert handed_over(world) == 0
            assert world.counted("kv_released_total", result="ok") == 1
            await until(lambda: fleet.at_rest)

    run(work())


def test_kv_of_a_drained_engine_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other engine of prompts has a request that waits too, and has waited longer."""
    decodes, send = [], Gate._sent

    def noted(gate: Gate, request: Ticket, move: Move) -> None:
        if move.stage is Stage.DECODE:
            decodes.append(request)
        send(gate, request, move)

    monkeypatch.setattr(Gate, "_sent", noted)

    async def work() -> None:
        async with split(engines=4, router="split:prefill=2", slots=1) as (world, fleet):
            gate = world.app.gate
            endless = {"prompt": "x", "max_tokens": 10_000, "ignore_eos": True}
            full = [asyncio.create_task(world.stream(**endless)) for _ in range(4)]
            await until(lambda: len(decodes) == 4)
            waiting = [asyncio.create_task(wanted(world, f"{n} waits", 5)) for n in range(2)]
            await until(lambda: len(gate.roster.handoff) == 2)
            stays, drained = (gate.tickets[id] for id in gate.roster.handoff)
            assert stays.engine != drained.engine
            async with world.client.post(f"{world.admin}/admin/engines/{drained.engine}/drain") as told:
                assert told.status == 200
            for each in full:
                each.cancel()
            await asyncio.gather(*waiting)
            assert decodes[4:] == [drained, stays]
            await world.settled()
            await until(lambda: fleet.at_rest)

    run(work())


def test_at_home_without_parameters_and_the_pin_is_released() -> None:  # traps 6 and 7
    async def work() -> None:
        async with split(engines=2, speed=SLOW) as (world, fleet):
            asked = asyncio.create_task(wanted(world, LONG, 5))
            await until(lambda: fleet.engines[0].running)
            fill(world, 1)  # the engine of the prompt has to decode as well
            await asked
            await world.settled()
            assert world.app.gate.counts["moved"] == 2
            assert handed_over(world) == 0
            assert world.counted("kv_released_total", result="ok") == 1
            await until(lambda: fleet.at_rest)

    run(work())


@pytest.mark.parametrize("prefills", [True, False])
def test_the_only_engine_left_is_sent_whole_requests(prefills: bool) -> None:
    """No KV is pinned for an engine that is not there: its memory, of seven prompts here, stays its own."""

    async def work() -> None:
        async with split(engines=2, kv_tokens=8000, slots=7) as (world, fleet):
            world.app.drain_engine(world.app.upstreams[1 if prefills else 0], True)
            await asyncio.gather(*(wanted(world, f"{n} " + "abcd" * 1000, 5) for n in range(40)))
            await world.settled()
            assert world.app.gate.counts["moved"] == 40
            assert all(world.counted("kv_released_total", result=each) == 0 for each in ("ok", "no-engine"))
            await until(lambda: fleet.at_rest)
            world.app.drain_engine(world.app.upstreams[1 if prefills else 0], False)
            await wanted(world, "both are up again", 5)
            assert handed_over(world) == 1

    run(work())


@pytest.mark.parametrize("moment", ["prefilling", "handed over"])
def test_a_client_that_goes_between_the_legs_pins_nothing(moment: str) -> None:  # trap 8
    async def work() -> None:
        async with split(engines=2, speed=SLOW) as (world, fleet):
            asked = asyncio.create_task(world.stream(prompt=LONG, max_tokens=5))
            if moment == "handed over":
                await close_all_when_prefilling(world, fleet)
                await until(lambda: world.app.gate.roster.handoff)
            else:
                await until(lambda: fleet.engines[0].running)
            asked.cancel()
            await world.settled()
            assert world.counted("kv_released_total", result="ok") == 1
            await until(lambda: fleet.at_rest)

    run(work())


def held_decodes(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Calls that carry parameters of a prefill wait before they are sent: told when one does, and let go."""
    waiting, go_on, send = asyncio.Event(), asyncio.Event(), Leg._send

    async def slow(leg: Leg, body: bytes, headers, limit: float) -> EngineAnswer:
        if b'"do_remote_prefill":true' in body and b"2147483647" not in body:
            waiting.set()
            await go_on.wait()
        return await send(leg, body, headers, limit)

    monkeypatch.setattr(Leg, "_send", slow)
    return waiting, go_on


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_while_its_decode_is_opened_pins_nothing(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine of the decode does not know of the KV yet: nobody would free it before its lease ends."""

    async def work() -> None:
        waiting, go_on = held_decodes(monkeypatch)
        async with split(engines=2) as (world, fleet):
            asked = asyncio.create_task(world.ask(prompt="soon gone", max_tokens=5, stream=streams))
            await waiting.wait()
            asked.cancel()
            labels = {"class": "default", "outcome": "client-gone"}
            await until(lambda: world.counted("requests_total", **labels) == 1)
            assert world.app.gate.roster.replicas[1].decodes == 1  # its slot is held until the call is closed
            go_on.set()
            await world.settled()
            assert world.counted("kv_consumed_total") == 1
            await until(lambda: fleet.at_rest)

    run(work())


def test_a_decode_that_could_not_be_sent_releases_its_kv_and_goes_elsewhere() -> None:
    async def work() -> None:
        async with split(engines=4) as (world, fleet):
            dead = world.app.upstreams[1]
            dead.spec = dead.spec.model_copy(update={"url": "http://127.0.0.1:1"})  # nothing listens there
            for engine in (2, 3):
                fill(world, engine)
            asked = asyncio.create_task(wanted(world, "a prompt for a dead engine", 6))
            await until(lambda: world.counted("retries_total", fault="connect"))
            for engine in (2, 3):
                fill(world, engine, full=False)
            await asked
            await world.settled()
            failed = world.counted("retries_total", fault="connect")
            assert world.counted("kv_released_total", result="ok") == failed
            await until(lambda: fleet.at_rest)

    run(work())


def test_a_decode_goes_to_another_engine_than_the_one_that_failed_it() -> None:
    async def work() -> None:
        async with split(engines=3) as (world, fleet):
            fleet.faults[1].set({"always": "503"})
            fill(world, 2)
            asked = asyncio.create_task(wanted(world, "a prompt that fails once", 6))
            await until(lambda: world.app.gate.counts["returned"] == 1)
            fill(world, 2, full=False)
            await asked
            moves = world.app.gate.counts["moved"]
            assert moves <= 4  # prefill, decode at 1, prefill, decode at 2: never at 1 again
            assert fleet.engines[1].tally.generation_tokens == 0
            await world.settled()

    run(work())


def test_a_prefill_without_parameters_is_served_whole_and_warned_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with routed(stream, stream, router={"name": "split:prefill=1"}) as world:
            answers = [await world.stream() for _ in range(3)]
            assert all(each.events[-1] == b"[DONE]" for each in answers)
            assert world.counted("kv_missing_total", engine="0") == 3
            await world.settled()

    run(work())
    assert caplog.text.count("no KV connector?") == 1


def test_random_hang_ups_leave_nothing_behind() -> None:
    async def work() -> None:
        draw = random.Random(7)
        lease = 20.0  # seconds; KV whose decode was cut before its engine knew of it is pinned until then
        settings = {
            "router": "split:prefill=2",
            "speed": 20.0,
            "kv_lease": 20.0 * lease,
            "kv": {"lease": lease},
        }
        async with split(engines=4, **settings) as (world, fleet):
            tasks = []
            for number in range(80):
                task = asyncio.create_task(wanted(world, f"prompt {number} " * 20, 12))
                tasks.append(task)
                if number % 4 == 0:
                    asyncio.get_running_loop().call_later(draw.random() * 0.3, task.cancel)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(each is None or isinstance(each, asyncio.CancelledError) for each in results)
            assert results.count(None) >= 60
            await world.settled()
            assert all(each.tally.nixl["notifications_after_expiry"] == 0 for each in fleet.engines)
            await until(lambda: fleet.at_rest)

    run(work())


def test_a_lease_may_have_begun_when_the_prefill_was_sent() -> None:
    async def work() -> None:
        settings = {"speed": 1.0, "kv_lease": 60.0, "kv": {"lease": 0.05}}
        async with split(**settings) as (world, fleet):
            prompt = "a prompt that takes longer than the lease " * 400
            got = await world.ask(prompt=prompt, max_tokens=9)
            assert got.json["choices"][0]["text"] == answer(prompt, 9)
            assert handed_over(world) == 0
            await until(lambda: fleet.at_rest)

    run(work())


@pytest.mark.parametrize("late", [False, True])
def test_the_alarm_names_answers_only_where_kv_was_read_late(
    late: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        waiting, go_on = held_decodes(monkeypatch)
        async with split(engines=2, kv={"lease": 20.0 if late else 300.0}) as (world, fleet):
            asked = asyncio.create_task(wanted(world, "a prompt", 5))
            await waiting.wait()
            if late:
                (deadline,) = world.app.upstreams[0].reading
                await until(lambda: world.app.now() > deadline)
            go_on.set()
            await asked
            fleet.engines[0].tally.nixl["notifications_after_expiry"] += 1  # of KV that it no longer holds
            await until(lambda: "notifications_after_expiry_total rose to 1" in caplog.text)
            await world.settled()
            assert not world.app.upstreams[0].reading

    run(work())
    assert ("an answer may be wrong" in caplog.text) == late


def test_requests_with_the_same_id_have_kv_of_their_own() -> None:
    async def work() -> None:
        async with split() as (world, fleet):

            async def one(number: int) -> None:
                prompt = f"prompt number {number}"
                got = await world.ask(prompt=prompt, max_tokens=9, headers={"x-request-id": "the-same"})
                assert got.json["choices"][0]["text"] == answer(prompt, 9)
                assert "the-same" in got.json["id"]

            await asyncio.gather(*(one(number) for number in range(12)))
            assert handed_over(world) == 12
            await until(lambda: fleet.at_rest)

    run(work())


def test_parameters_from_clients_are_refused() -> None:
    async def work() -> None:
        async with split() as (world, fleet):
            got = await world.ask(kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.0.0.1"})
            assert got.status == 400
            assert all(each.tally.generation_tokens == 0 for each in fleet.engines)

    run(work())


def test_parameters_are_given_out_once_and_in_time() -> None:
    made = KvParams({"remote_host": msgspec.Raw(b'"a"')}, 0, deadline=10.0)
    assert made.take(9.9) == b'{"remote_host":"a"}'
    assert made.take(9.9) is None
    assert made.take(float("-inf")) is None
    late = KvParams({}, 0, deadline=10.0)
    assert late.take(10.0) is None
    assert late.take(float("-inf")) == b"{}"


@pytest.mark.parametrize("prompt", ["x", '\\"x{é,' * (1 << 15)], ids=["small", "in turns"])
def test_bodies_of_the_legs(prompt: str) -> None:
    asked = {"prompt": prompt, "max_tokens": 9, "stream": True, "min_tokens": 2, "stream_options": {"a": 1}}
    body = json.dumps(asked, ensure_ascii=False).encode() + b" \n"
    first = json.loads(at_once(prefill_body(body)))
    assert (first["max_tokens"], first["stream"], first["prompt"]) == (1, False, prompt)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert "stream_options" not in first and "min_tokens" not in first
    second = decode_body(body, b'{"a":1}')
    assert second.startswith(body.rstrip().removesuffix(b"}"))
    assert json.loads(second)["kv_transfer_params"] == {"a": 1}
    assert json.loads(decode_body(b"{}", b'{"a":1}')) == {"kv_transfer_params": {"a": 1}}
    third = json.loads(at_once(release_body(body, b'{"a":1}')))
    assert (third["max_tokens"], third["stream"], third["prompt"]) == (2147483647, False, prompt)
    params = read_params(b'{"kv_transfer_params":{"x":[1, 2]}}', 3, 100.0, 30.0)
    assert (params.owner, params.deadline) == (3, 118.0)
    for wrong in (b"", b"[]", b'{"choices":[]}', b'{"kv_transfer_params":null}'):
        with pytest.raises(LegError):
            read_params(wrong, 0, 0.0, 30.0)
