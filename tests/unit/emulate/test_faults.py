"""Every fault, by header, by setting, and by the admin port."""

import asyncio

import aiohttp
import pytest
from calls_of_emulator import FAST, events_of, post, run, session, stream, text_of, until

from headgate.core.errors import InputError
from headgate.live.emulate import answer, emulated
from headgate.live.emulate import service as completions
from headgate.live.emulate.faults import Faults, read_fault

BODY = {"prompt": "hello", "max_tokens": 20}


def served(test, **words):
    async def main():
        async with emulated(**FAST | words) as urls, session() as client:
            await test(client, urls)

    run(main())


async def broken_stream(client, url, **headers):
    """What a client has read when the connection ends."""
    got = b""
    with pytest.raises(aiohttp.ClientError):
        async with client.post(
            f"{url}/v1/completions", json=BODY | {"stream": True}, headers=headers
        ) as answer:
            async for part in answer.content.iter_any():
                got += part
    return got.decode()


def test_before_the_head():
    async def test(client, urls):
        with pytest.raises(aiohttp.ClientError):
            await post(client, urls[0], BODY, **{"x-emulate-fault": "reset-before-head"})
        for status in (429, 500, 503):
            found = await post(client, urls[0], BODY, **{"x-emulate-fault": str(status)})
            assert found[0] == status and found[1]["error"]["code"] == status
        status, found = await post(client, urls[0], BODY, **{"x-emulate-fault": "slow-head=0.01"})
        assert status == 200 and found["choices"][0]["text"] == answer("hello", 20)
        status, found = await post(client, urls[0], BODY, **{"x-emulate-fault": "abort"})
        assert (status, found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == (
            200,
            "",
            "abort",
        )
        status, found = await post(client, urls[0], BODY, **{"x-emulate-fault": "no-such"})
        assert status == 400 and "no-such" in found["error"]["message"]
        await until(lambda: urls.at_rest)

    served(test)


def test_in_the_middle_of_a_stream():
    async def test(client, urls):
        got = await broken_stream(client, urls[0], **{"x-emulate-fault": "drop=5"})
        assert got.count("data: ") <= 5 and "[DONE]" not in got
        got = await broken_stream(client, urls[0], **{"x-emulate-fault": "reset-mid-event=5"})
        assert got.count("\n\n") == 4 and not got.endswith("\n\n") and "[DONE]" not in got
        async with client.post(
            f"{urls[0]}/v1/completions",
            json=BODY | {"stream": True},
            headers={"x-emulate-fault": "error-event=3"},
        ) as told:
            assert told.status == 200
            events = events_of(await told.text())
        assert events[-1]["error"]["code"] == 500 and text_of(events[:-1]) == answer("hello", 2)
        await until(lambda: urls.at_rest)

    served(test)


def test_in_place_of_an_answer_that_is_not_streamed():
    async def test(client, urls):
        for fault in ("drop=3", "reset-mid-event=3"):
            with pytest.raises(aiohttp.ClientError):
                await post(client, urls[0], BODY, **{"x-emulate-fault": fault})
        status, _ = await post(client, urls[0], BODY, **{"x-emulate-fault": "error-event"})
        assert status == 500
        waiting = asyncio.create_task(post(client, urls[0], BODY, **{"x-emulate-fault": "stall"}))
        await until(lambda: urls.engines[0].tally.ended_by["length"] == 3)
        assert not waiting.done()
        waiting.cancel()
        await until(lambda: urls.ports[0].place.inside == 0)

    served(test)


def test_a_stall_keeps_the_connection_open_until_the_client_leaves():
    async def test(client, urls):
        got = b""
        async with client.post(f"{urls[0]}/v1/completions", json=BODY | {"stream": True}) as told:
            while got.count(b"\n\n") < 3:
                got += await told.content.readany()
            await until(lambda: not urls.engines[0].running)  # the engine has done its work
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(told.content.readany(), 0.2)
            assert urls.ports[0].place.inside == 1
        await until(lambda: urls.ports[0].place.inside == 0)

    served(test, stall_at=4)


def test_a_wrong_content_length(caplog):
    async def test(client, urls):
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(client, urls[0], BODY, **{"x-emulate-fault": "wrong-length"})
        got = await broken_stream(client, urls[0], **{"x-emulate-fault": "wrong-length"})
        assert "[DONE]" in got
        assert got.count("HTTP/1.1") == 0  # nothing follows it

    served(test)
    assert not caplog.records


def test_a_client_that_has_gone_is_no_error(caplog, monkeypatch):
    """It hangs up just before the head of its answer is written; the log says nothing."""
    opened = completions._open

    async def test(client, urls):
        def open_late(*words):
            urls.ports[0].cut()
            return opened(*words)

        monkeypatch.setattr(completions, "_open", open_late)
        with pytest.raises(aiohttp.ClientError):
            await stream(client, urls[0], BODY)
        await until(lambda: urls.ports[0].place.inside == 0 and urls.at_rest)

    served(test)
    assert not caplog.records


def test_a_share_of_the_requests_fails_and_always_the_same_ones():
    faults = Faults(rate=0.25, kind="503")
    assert [faults.of(None) is not None for _ in range(8)] == [False, False, False, True] * 2

    async def test(client, urls):
        codes = [(await post(client, urls[0], BODY))[0] for _ in range(8)]
        assert codes == [200, 200, 200, 503] * 2

    served(test, fail_rate=0.25, fault="503")


@pytest.mark.parametrize("text", ["drop=x", "drop=-1", "nothing", "error=200", "drop=nan", "", "stall=1e12"])
def test_faults_that_are_none(text):
    with pytest.raises(InputError):
        read_fault(text)


@pytest.mark.parametrize("word", ["kind", "always"])
@pytest.mark.parametrize("value", [5, ["drop", 2], {"kind": "drop"}, True])
def test_a_fault_that_is_no_text_is_refused_with_what_to_give(word, value):
    with pytest.raises(InputError, match=f"^{word}: unknown fault .*; (did you mean|choose from)"):
        Faults().set({word: value})


def test_the_admin_port():
    async def test(client, urls):
        async def admin(path, body=None):
            async with client.post(urls.admin_url + path, json=body or {}) as told:
                return told.status, await told.json(content_type=None)

        status, shown = await admin("/engines/1/faults", {"always": "503"})
        assert status == 200 and shown["faults"]["always"] == "error=503"
        assert (await post(client, urls[1], BODY))[0] == 503
        assert (await post(client, urls[0], BODY))[0] == 200
        await admin("/engines/1/faults", {"always": None})
        assert (await post(client, urls[1], BODY))[0] == 200
        assert (await admin("/engines/1/faults", {"rate": 2}))[0] == 400
        assert (await admin("/engines/1/faults", {"nothing": 2}))[0] == 400
        assert (await admin("/engines/7/faults", {}))[0] == 404
        async with client.get(urls.admin_url + "/engines") as told:
            assert [each["url"] for each in await told.json()] == list(urls)
        await admin("/engines/1/crash")
        status, told = await admin("/engines/1/listen")
        assert status == 409 and "the engine has crashed" in told["error"]["message"]

    served(test, engines=2, admin_port=0)


def test_refused_connections_and_back():
    async def test(client, urls):
        urls.ports[0].refuse()
        async with session() as other:
            with pytest.raises(aiohttp.ClientConnectorError):
                await post(other, urls[0], BODY)
            await urls.ports[0].listen()
            assert (await post(other, urls[0], BODY))[0] == 200

    served(test)


def test_a_crash_after_some_tokens():
    async def test(client, urls):
        got = await broken_stream(client, urls[0])
        assert "[DONE]" not in got
        await until(lambda: urls.engines[0].dead is not None)
        with pytest.raises(aiohttp.ClientError):
            await post(client, urls[0], BODY)

    served(test, crash_after=10)


def test_a_policy_that_fails_kills_the_engine_and_health_says_so(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(
        "from headgate.methods.mixed.mixed import Mixed\n"
        "class Bad(Mixed):\n"
        "    def plan(self, view):\n"
        "        raise RuntimeError('no more')\n"
    )

    async def test(client, urls):
        status, found = await post(client, urls[0], BODY)
        assert status == 500 and "no more" in found["error"]["message"]
        async with client.get(urls[0] + "/health") as told:
            assert told.status == 503
        events = []
        async with client.post(f"{urls[0]}/v1/completions", json=BODY | {"stream": True}) as told:
            events.append(told.status)
        assert events == [500]

    served(test, policy=f"{file}:Bad")


def test_the_stream_helper_sees_whole_streams():
    async def test(client, urls):
        assert text_of(await stream(client, urls[0], BODY)) == answer("hello", 20)

    served(test)
