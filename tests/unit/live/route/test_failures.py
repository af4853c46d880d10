"""Failures before the first token: each is retried elsewhere or passed on, and nothing leaks."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from fake_engines import Call, stream
from headgate.live.route.engines import BreakerState as BreakerState
from router_world import routed, run, until

Script = Callable[[Call], Awaitable[None]]


async def reset_before_head(call: Call) -> None:
    call.reset()


async def half_a_head(call: Call) -> None:
    await call.raw(b"HTTP/1.1 200 OK\r\nContent-")
    call.reset()


async def head_then_reset(call: Call) -> None:
    await call.head()
    call.reset()


async def clean_end_before_the_first_event(call: Call) -> None:
    await call.head()
    await call.finish()


async def half_an_event_then_reset(call: Call) -> None:
    await call.head()
    await call.chunk(b'data: {"choices":[{"te')
    call.reset()


async def done_at_once(call: Call) -> None:
    await call.head()
    await call.done()


async def error_event(call: Call) -> None:
    await call.head()
    await call.chunk(
        b'data: {"error":{"message":"KV load failed","type":"InternalServerError","code":500}}\n\n'
    )
    await call.done()


async def abort_event(call: Call) -> None:
    await call.head()
    await call.token("", finish_reason="abort")
    await call.done()


async def abort_after_role(call: Call) -> None:
    await call.head()
    for delta, reason in (({"role": "assistant", "content": ""}, None), ({"content": ""}, "abort")):
        event = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        await call.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
    await call.done()


async def abort_whole(call: Call) -> None:
    await call.answer(200, json.dumps({"choices": [{"text": "", "finish_reason": "abort"}]}).encode())


async def garbage(call: Call) -> None:
    await call.raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    call.reset()


async def login_page(call: Call) -> None:
    await call.answer(200, b"<html>please log in</html>", "text/html; charset=utf-8")


async def redirect(call: Call) -> None:
    await call.answer(307, b"", more="Location: http://169.254.169.254/\r\n")


def status(code: int, kind: str = "InternalServerError") -> Script:
    async def script(call: Call) -> None:
        await call.answer(code, json.dumps({"error": {"message": "no", "type": kind, "code": code}}).encode())

    return script


RETRIED: dict[str, tuple[Script, str, bool]] = {  # the script, its fault, whether the breaker counts it
    "reset before the head": (reset_before_head, "reset", True),
    "reset inside the head": (half_a_head, "reset", True),
    "reset after the head": (head_then_reset, "reset", True),
    "reset inside the first event": (half_an_event_then_reset, "reset", True),
    "clean end before the first event": (clean_end_before_the_first_event, "empty", True),
    "[DONE] at once": (done_at_once, "empty", True),
    "first event is an error": (error_event, "error-event", True),
    "abort without text": (abort_event, "abort", True),
    "abort after the role": (abort_after_role, "abort", True),
    "502": (status(502), "status", True),
    "503": (status(503), "status", True),
    "504": (status(504), "status", True),
    "503 of a full queue": (status(503, "Service Unavailable"), "busy", False),
    "429": (status(429), "busy", False),
    "not HTTP": (garbage, "garbage", True),
    "redirect": (redirect, "garbage", True),
    "200 with a page": (login_page, "garbage", True),
}


@pytest.mark.parametrize(("script", "fault", "trips"), RETRIED.values(), ids=RETRIED)
@pytest.mark.parametrize("streams", [True, False])
def test_another_engine_answers(script: Script, fault: str, trips: bool, streams: bool) -> None:
    async def work() -> None:
        open = asyncio.Event()

        async def waits(call: Call) -> None:
            await open.wait()
            await script(call)

        async with routed(waits, stream) as world:
            bad, good = world.engines
            world.app.drain_engine(world.app.upstreams[1], True)  # the first try goes to the bad one
            asked = asyncio.create_task(world.ask(stream=streams))
            await until(lambda: bad.seen)
            world.app.drain_engine(world.app.upstreams[1], False)
            open.set()
            answer = await asked
            assert answer.status == 200
            assert answer.body == good.calls[-1].sent
            assert answer.headers["x-headgate-tries"] == "2"
            assert world.counted("retries_total", fault=fault) == 1
            assert world.counted("leg_faults_total", engine="0", fault=fault) == 1
            assert (world.app.upstreams[0].breaker._row == 1) == trips
            await world.settled()
            assert (len(bad.seen), len(good.seen)) == (1, 1)

    run(work())


def test_a_whole_answer_that_was_aborted_is_retried() -> None:
    async def work() -> None:
        async with routed(abort_whole, abort_whole, stream) as world:
            answers = [await world.ask() for _ in range(3)]
            assert [each.json["choices"][0]["text"] for each in answers] == ["t0t1t2"] * 3
            await world.settled()

    run(work())


def test_connect_error() -> None:
    async def work() -> None:
        async with routed(stream, stream) as world:
            dead, good = world.engines
            dead.kill()
            answers = [await world.stream() for _ in range(6)]
            assert {each.status for each in answers} == {200}
            assert len(good.seen) == 6
            assert world.counted("retries_total", fault="connect") >= 1
            await world.settled()

    run(work())


PASSED_ON = {
    "500": (status(500), 500),
    "400": (status(400), 400),
    "404": (status(404), 404),
    "422": (status(422), 422),
}


@pytest.mark.parametrize(("script", "code"), PASSED_ON.values(), ids=PASSED_ON)
def test_passed_on_unchanged_and_not_retried(script: Script, code: int) -> None:
    async def work() -> None:
        async with routed(script, script) as world:
            answer = await world.stream()
            assert answer.status == code
            assert answer.body == next(call.sent for engine in world.engines for call in engine.calls)
            assert sum(len(engine.seen) for engine in world.engines) == 1
            assert not any(each.breaker._row for each in world.app.upstreams.values())
            await world.settled()

    run(work())


def test_500_is_retried_where_configured() -> None:
    async def work() -> None:
        async with routed(*[status(500)] * 3, limits={"retry_500": True}) as world:
            answer = await world.stream()
            assert answer.status == 500
            assert sorted(len(engine.seen) for engine in world.engines) == [0, 1, 1]  # it is the request's
            await world.settled()

    run(work())


ANSWERED = {"500": status(500), "501": status(501), "error event": error_event}


def poisoned_by(script: Script) -> Script:
    """An engine that answers so to what its client asks for, and serves everything else."""

    async def chooses(call: Call) -> None:
        await (script if "poison" in call.seen.json["prompt"] else stream)(call)

    return chooses


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("router", ["least-loaded", "split:prefill=2"])
@pytest.mark.parametrize("script", ANSWERED.values(), ids=ANSWERED)
def test_errors_that_follow_a_client_open_no_breaker(script: Script, router: str, streams: bool) -> None:
    async def work() -> None:
        async with routed(*[poisoned_by(script)] * 4, router={"name": router}) as world:
            world.app.service.budget.share = 1.0
            asked = [
                world.ask(prompt=("poison" if number % 2 else "fine") + f" {number}", stream=streams)
                for number in range(40)
            ]
            answers = await asyncio.gather(*asked)
            assert {each.status for each in answers[::2]} == {200}
            assert not {each.status for each in answers[1::2]} & {200, 503}
            tries = [int(each.headers["x-headgate-tries"]) for each in answers[1::2]]
            assert max(tries) <= 2
            assert not any(each.breaker.opened or each.breaker._row for each in world.app.upstreams.values())
            await world.settled()

    run(work())


@pytest.mark.parametrize("router", ["least-loaded", "split:prefill=1"])
@pytest.mark.parametrize("script", ANSWERED.values(), ids=ANSWERED)
def test_an_engine_that_fails_everyone_is_found_out_and_closed_off(script: Script, router: str) -> None:
    async def work() -> None:
        limits = {"retry_share": 1.0}
        async with routed(script, stream, stream, stream, router={"name": router}, limits=limits) as world:
            states = [each.breaker for each in world.app.upstreams.values()]
            answers = []
            while not states[0].opened:
                answers.append(await world.stream(prompt=f"fine {len(answers)}"))
                assert len(answers) < 200
            failed = [each for each in answers if each.status != 200]
            assert len(failed) <= 3  # then errors of this engine are tried elsewhere
            assert [each.opened for each in states] == [1, 0, 0, 0]
            seen = len(world.engines[0].seen)
            assert {(await world.stream()).status for _ in range(8)} == {200}
            assert len(world.engines[0].seen) == seen
            await world.settled()

    run(work())


@pytest.mark.parametrize("script", [status(500), status(502), error_event], ids=["500", "502", "error event"])
def test_half_of_the_engines_stay_as_long_as_they_answer(script: Script) -> None:
    async def work() -> None:
        async with routed(*[script] * 4, limits={"retry_share": 1.0}) as world:
            assert not {(await world.stream()).status for _ in range(40)} & {200, 503}
            assert sum(each.up(world.app.now()) for each in world.app.upstreams.values()) >= 2
            await world.settled()

    run(work())


def test_a_probe_that_the_request_itself_fails_leaves_the_breaker_half_open() -> None:
    async def work() -> None:
        async with routed(poisoned_by(status(500)), poisoned_by(status(500))) as world:
            breaker = world.app.upstreams[0].breaker
            for _ in range(5):
                breaker.failed(world.app.now())
            breaker._until = 0.0  # ten seconds later
            world.app.watch.tell(world.app.upstreams[0])
            world.app.drain_engine(world.app.upstreams[1], True)
            assert (await world.stream(prompt="poison")).status == 500
            assert breaker.state is BreakerState.HALF_OPEN and breaker.opened == 1
            assert [(await world.stream()).status for _ in range(2)] == [200, 200]
            assert breaker.state is BreakerState.CLOSED

    run(work())


def test_a_request_goes_whole_to_an_engine_of_another_role_where_all_of_its_own_failed() -> None:
    async def work() -> None:
        async with routed(reset_before_head, stream, stream, router={"name": "split:prefill=1"}) as world:
            answer = await world.stream()
            assert answer.status == 200 and answer.headers["x-headgate-tries"] == "3"
            await world.settled()

    run(work())


def test_an_error_too_long_to_pass_on_keeps_its_status_and_is_not_tried_elsewhere() -> None:
    async def repeats(call: Call) -> None:
        await call.answer(400, b"x" * (2 << 20))

    async def work() -> None:
        async with routed(repeats, repeats) as world:
            answer = await world.stream()
            assert answer.status == 400 and "larger than" in answer.json["error"]["message"]
            assert sum(len(engine.seen) for engine in world.engines) == 1
            assert not any(each.breaker._row for each in world.app.upstreams.values())

    run(work())


def test_an_error_event_of_the_client_is_passed_on() -> None:
    async def bad_request(call: Call) -> None:
        await call.head()
        await call.chunk(b'data: {"error":{"message":"too long","code":400}}\n\n')
        await call.done()

    async def work() -> None:
        async with routed(bad_request, bad_request) as world:
            answer = await world.stream()
            assert answer.events[0]["error"]["code"] == 400
            assert sum(len(engine.seen) for engine in world.engines) == 1
            await world.settled()

    run(work())


def test_tries_are_bounded_and_each_goes_elsewhere() -> None:
    async def work() -> None:
        async with routed(*[reset_before_head] * 5) as world:
            answer = await world.stream()
            assert answer.status == 502
            assert answer.json["error"]["type"] == "server_error"
            assert sorted(len(engine.seen) for engine in world.engines) == [0, 0, 1, 1, 1]
            await world.settled()

    run(work())


def test_the_engine_s_answer_is_passed_on_when_no_try_is_left() -> None:
    async def work() -> None:
        async with routed(status(503, "Service Unavailable"), limits={"tries": 1}) as world:
            answer = await world.stream()
            assert answer.status == 503
            assert answer.json["error"]["type"] == "Service Unavailable"
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            await world.settled()

    run(work())


@pytest.mark.parametrize("code", [429, 503])
def test_the_engine_s_retry_after_is_passed_on(code: int) -> None:
    async def busy(call: Call) -> None:
        await call.answer(code, b'{"error": {"type": "Service Unavailable"}}', more="Retry-After: 37\r\n")

    async def work() -> None:
        async with routed(busy, limits={"tries": 1}) as world:
            answer = await world.stream()
            assert (answer.status, answer.headers["Retry-After"]) == (code, "37")

    run(work())


def test_the_budget_of_retries_is_shared() -> None:
    async def work() -> None:
        limits = {"tries": 10, "retry_share": 0.0}
        async with routed(reset_before_head, reset_before_head, limits=limits) as world:
            answers = [await world.stream() for _ in range(3)]
            assert {each.status for each in answers} == {502}
            assert sum(len(engine.seen) for engine in world.engines) == 3
            assert world.app.service.budget.denied == 3
            await world.settled()

    run(work())


def test_no_first_token_in_time() -> None:
    async def silent(call: Call) -> None:
        await call.head()
        await asyncio.Event().wait()

    async def work() -> None:
        async with routed(silent, silent, silent, limits={"first_token": 0.2, "tries": 3}) as world:
            answer = await world.stream()
            assert answer.status == 504
            assert answer.json["error"]["type"] == "timeout_error"
            assert sum(len(engine.seen) for engine in world.engines) == 2  # retried once
            await world.settled()
            for engine in world.engines:
                for seen in engine.seen:
                    await seen.closed.wait()

    run(work())


def test_whole_answers_count_as_successes() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            breaker = world.app.upstreams[0].breaker
            for _ in range(4):
                breaker.failed(world.app.now())
            assert (await world.ask()).status == 200
            breaker.failed(world.app.now())
            assert breaker.state is BreakerState.CLOSED  # not five in a row
            await world.settled()

    run(work())


def test_a_broken_engine_is_closed_off_also_where_others_are_down() -> None:
    async def work() -> None:
        health = {"every": 0.1, "timeout": 1.0, "fails": 1}
        limits = {"retry_share": 1.0}
        async with routed(status(502), stream, stream, health=health, limits=limits) as world:
            world.engines[2].kill()
            await until(lambda: not world.app.upstreams[2].healthy)
            breaker = world.app.upstreams[0].breaker
            for _ in range(60):
                assert (await world.stream()).status == 200
            assert breaker.state is BreakerState.OPEN
            assert world.app.upstreams[1].up(world.app.now())
            await world.settled()

    run(work())


def test_an_engine_that_fails_every_other_request_is_found_out_and_closed_off() -> None:
    turns = 0

    async def alternates(call: Call) -> None:
        nonlocal turns
        turns += 1
        await (status(500) if turns % 2 else stream)(call)

    async def work() -> None:
        limits = {"retry_share": 1.0}
        async with routed(alternates, stream, stream, stream, limits=limits) as world:
            breaker, answers = world.app.upstreams[0].breaker, []
            while not breaker.opened:
                answers.append((await world.stream()).status)
                assert len(answers) < 300
            assert answers.count(500) <= 5
            await world.settled()

    run(work())
