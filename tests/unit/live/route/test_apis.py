"""Every path that the router serves, in its own dialect, and the clients people have."""

import json
import re
from pathlib import Path

import aiohttp
import pytest

from fake_engines import Call
from headgate.live.route.request import APIS, RefusedError, at_once, reading_form
from router_world import routed, run

CHAT = [{"role": "user", "content": "p"}]
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
INPUT = {"input_tokens": 4, "output_tokens": 2, "total_tokens": 6}
OF_CACHE = {**INPUT, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 1}
RESPONSE = {"id": "r", "object": "response", "created_at": 1, "model": "m", "output": [], "tools": [],
            "parallel_tool_calls": True, "tool_choice": "auto", "status": "in_progress",
            "usage": None}  # fmt: skip
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "m",
           "stop_reason": None, "stop_sequence": None,
           "usage": {"input_tokens": 7, "output_tokens": 0}}  # fmt: skip
TEXT = {"item_id": "i", "output_index": 0, "content_index": 0, "logprobs": []}


def named(name: str, **fields: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


def plain(*objects: object) -> list[bytes]:
    return [f"data: {json.dumps(each)}\n\n".encode() for each in objects] + [b"data: [DONE]\n\n"]


def chunks(kind: str, *pieces: dict) -> list[bytes]:
    head = {"id": "c", "object": kind, "created": 1, "model": "m"}
    choices = [{"index": 0, "finish_reason": None, **piece} for piece in pieces]
    return plain(*({**head, "choices": [each]} for each in choices), {**head, "choices": [], "usage": USAGE})


DELTAS = (
    {"delta": {"role": "assistant", "content": ""}},
    {"delta": {"content": "a"}},
    {"delta": {"content": "b"}},
)
STREAMS = {
    "/v1/completions": chunks("text_completion", {"text": "a"}, {"text": "b"}),
    "/v1/chat/completions": chunks("chat.completion.chunk", *DELTAS),
    "/v1/audio/transcriptions": chunks("transcription.chunk", *DELTAS[1:]),
    "/v1/audio/translations": chunks("translation.chunk", *DELTAS[1:]),
    "/v1/responses": [
        named("response.created", response=RESPONSE, sequence_number=0),
        named("response.in_progress", response=RESPONSE, sequence_number=1),
        named("response.output_text.delta", sequence_number=2, delta="a", **TEXT),
        named("response.output_text.delta", sequence_number=3, delta="b", **TEXT),
        named(
            "response.completed",
            sequence_number=4,
            response={**RESPONSE, "status": "completed", "usage": {**INPUT, "input_tokens": 7}},
        ),
    ],
    "/v1/messages": [
        named("message_start", message=MESSAGE),
        named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *(named("content_block_delta", index=0, delta={"type": "text_delta", "text": each}) for each in "ab"),
        named("content_block_stop", index=0),
        named("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=OF_CACHE),
        named("message_stop"),
    ],
}
POOLED = {"usage": {"prompt_tokens": 7, "total_tokens": 7}}
WHOLE = {  # a body, an answer, and tokens of prompt and output as the router counts them
    "/v1/completions": ({"prompt": "p"}, {"choices": [{"text": "ab"}], "usage": USAGE}, (7, 2)),
    "/v1/chat/completions": ({"messages": CHAT}, {"choices": [], "usage": USAGE}, (7, 2)),
    "/v1/messages": ({"messages": CHAT, "max_tokens": 5}, {**MESSAGE, "usage": OF_CACHE}, (7, 2)),
    "/v1/responses": ({"input": "p"}, {**RESPONSE, "usage": {**INPUT, "input_tokens": 7}}, (7, 2)),
    "/v1/messages/count_tokens": ({"messages": CHAT}, {"input_tokens": 4}, (None, 0)),
    "/v1/embeddings": ({"input": ["p", "q"]}, {"object": "list", "data": [], **POOLED}, (7, 0)),
    "/v2/embed": ({"texts": ["p"]}, {"id": "e", "embeddings": {}, **POOLED}, (7, 0)),
    "/classify": ({"input": "p"}, {"data": [], **POOLED}, (7, 0)),
    "/pooling": ({"input": "p"}, {"data": [], **POOLED}, (7, 0)),
    "/v1/rerank": ({"query": "p", "documents": ["q"]}, {"results": [], **POOLED}, (7, 0)),
    "/v2/rerank": ({"query": "p", "documents": ["q"]}, {"results": [], **POOLED}, (7, 0)),
    "/rerank": ({"query": "p", "documents": ["q"]}, {"results": [], **POOLED}, (7, 0)),
    "/v1/score": ({"text_1": "p", "text_2": "q"}, {"data": [], **POOLED}, (7, 0)),
    "/score": ({"queries": "p", "documents": "q"}, {"data": [], **POOLED}, (7, 0)),
    "/tokenize": ({"prompt": "p"}, {"count": 1, "tokens": [1]}, (None, 0)),
    "/detokenize": ({"tokens": [1, 2, 3]}, {"prompt": "p"}, (3, 0)),
    "/v1/audio/transcriptions": (None, {"text": "ab", "usage": {"type": "duration", "seconds": 2}}, (100, 0)),
    "/v1/audio/translations": (None, {"text": "ab"}, (None, 0)),
}


def form(*parts: bytes, line: bytes = b"--b", end: bytes = b"--\r\n") -> bytes:
    return b"".join(line + b"\r\n" + part + b"\r\n" for part in parts) + line + end


def field(name: str, value: bytes, more: str = "") -> bytes:
    return f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value


AUDIO = field("file", b"\r\n--RIFF\0" * 500, '; filename="a;b.wav"')
KIND = "multipart/form-data; boundary=b"


def asked_of(path: str, stream: bool) -> tuple[bytes, dict[str, str]]:
    body = WHOLE[path][0]
    if body is None:
        parts = [AUDIO, field("model", b"m")] + [field("stream", b"true")] * stream
        return form(*parts), {"Content-Type": KIND}
    return json.dumps({"model": "m", **body} | ({"stream": True} if stream else {})).encode(), {}


async def speak(call: Call) -> None:
    """An engine that serves every path, as events where they are asked for."""
    path, body = call.seen.path, call.seen.body
    if (b'"stream"' in body and b"true" in body) or b'"stream": true' in body:
        await call.head()
        for event in STREAMS[path]:
            await call.chunk(event)
        await call.finish()
    else:
        await call.answer(200, json.dumps(WHOLE[path][1]).encode())


def test_every_path_is_tried_here_and_stands_in_the_docs() -> None:
    assert {*WHOLE} == {*APIS} and {*STREAMS} == {path for path, api in APIS.items() if api.streams}
    page = (Path(__file__).parents[4] / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`/.*?) \|", page.split("## Every API")[1].split("\n## ")[0], re.MULTILINE)
    assert {*re.findall("`(.*?)`", " ".join(rows))} == {*APIS}


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_pass_untouched_and_tokens_are_counted(path: str, stream: bool, tmp_path: Path) -> None:
    if stream and path not in STREAMS:
        pytest.skip("it has no streams")

    async def work() -> None:
        front = {"access_log": str(tmp_path / "log"), "port": 0, "admin": "127.0.0.1:0", "drain_delay": 0.0}
        async with routed(speak, front=front) as world:
            raw, headers = asked_of(path, stream)
            answer = await world.ask(path, headers, raw)
            seen = world.engines[0].seen[0]
            assert (answer.status, seen.body, seen.path) == (200, raw, path)
            assert answer.body == world.engines[0].calls[0].sent
            await world.settled()
            world.app.access_log.flush()
        logged = json.loads((tmp_path / "log").read_text())
        prompt, output = (7, 2) if stream else WHOLE[path][2]
        assert (logged["outcome"], logged["stream"], logged["output"]) == ("ok", stream, output)
        assert logged["prompt"] == prompt or (prompt is None and logged["prompt"] > 0)

    run(work())


@pytest.mark.parametrize("path", APIS)
def test_refusals_have_the_shape_of_the_path(path: str) -> None:
    async def work() -> None:
        async with routed(speak) as world:
            answer = await world.ask(path, {"Content-Type": KIND}, raw=b"nothing")
            error = answer.json["error"]
            assert answer.status == 400 and error["type"] == "invalid_request_error" and error["message"]
            assert (answer.json.get("type") == "error") == path.startswith("/v1/messages")

    run(work())


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("at", [1, 2, -1])
def test_a_stream_that_breaks_is_tried_again_before_its_first_token_and_ends_with_an_error_after_it(
    path: str, at: int
) -> None:
    async def breaks(call: Call) -> None:
        if len(call.engine.seen) > 1:
            return await speak(call)
        await call.head()
        for event in STREAMS[path][:at]:
            await call.chunk(event)
        call.reset()

    async def work() -> None:
        async with routed(breaks) as world:
            answer = await world.ask(path, asked_of(path, True)[1], asked_of(path, True)[0])
            opening = len(APIS[path].opens) > 0 or path == "/v1/chat/completions"  # a role comes first
            again = (at == 1 and opening) or (at == 2 and path == "/v1/responses")
            assert len(world.engines[0].seen) == 1 + again
            if again:
                assert answer.body == b"".join(STREAMS[path])
            else:
                assert answer.body.startswith(b"".join(STREAMS[path][:at])) and b"[DONE]" not in answer.body
                last = answer.body.split(b"\n\n")[-2]
                assert (b"event: error\n" in last) == bool(APIS[path].ends) and b'"error"' in last

    run(work())


def test_the_openai_client_speaks_to_every_path_it_knows() -> None:
    openai = pytest.importorskip("openai")

    async def work() -> None:
        async with routed(speak) as world:
            client = openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="x", max_retries=0)
            kinds, text = [], ""
            async for event in await client.responses.create(model="m", input="p", stream=True):
                kinds.append(event.type)
                text += event.delta if event.type.endswith("delta") else ""
            assert (text, kinds[0], kinds[-1]) == ("ab", "response.created", "response.completed")
            assert (await client.responses.create(model="m", input="p")).usage.input_tokens == 7
            whole = await client.embeddings.create(model="m", input="p", encoding_format="float")
            assert whole.usage.prompt_tokens == 7
            sound = ("a.wav", b"RIFF" * 999, "audio/wav")
            heard = await client.audio.transcriptions.create(model="m", file=sound)
            assert heard.text == "ab"
            events = [
                part
                async for part in await client.chat.completions.create(model="m", messages=CHAT, stream=True)
            ]
            assert events[-1].usage.prompt_tokens == 7
            await client.close()

    run(work())


def test_anthropic_s_client_reads_streams_usage_and_refusals(tmp_path: Path) -> None:
    anthropic = pytest.importorskip("anthropic")
    keys = tmp_path / "keys"
    keys.write_text("web 2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683 tokens=5\n")  # key

    async def work() -> None:
        front = {"key_file": str(keys), "port": 0, "admin": "127.0.0.1:0", "drain_delay": 0.0}
        async with routed(speak, front=front) as world:
            asked = {"model": "m", "max_tokens": 9, "messages": CHAT}
            stranger = anthropic.AsyncAnthropic(base_url=world.url, api_key="wrong", max_retries=0)
            with pytest.raises(anthropic.AuthenticationError, match="wrong or missing API key") as refused:
                await stranger.messages.create(**asked)
            assert refused.value.body["error"]["type"] == "authentication_error"
            await stranger.close()
            client = anthropic.AsyncAnthropic(base_url=world.url, api_key="key", max_retries=0)
            async with client.messages.stream(**asked) as stream:
                final = await stream.get_final_message()
            assert final.content[0].text == "ab" and final.usage.output_tokens == 2
            with pytest.raises(anthropic.RateLimitError) as refused:
                await client.messages.create(**asked)
            assert refused.value.body["error"]["type"] == "rate_limit_error"
            assert int(refused.value.response.headers["Retry-After"]) > 1
            await client.close()

    run(work())


# -- forms


def read(body: bytes, kind: str = KIND):
    return at_once(reading_form(body, kind))


def test_what_a_form_says() -> None:
    more = [field("stream", b"True"), field("model", b"whisper"), field("max_completion_tokens", b"9"), AUDIO]
    asked = read(form(*more))
    assert (asked.stream, asked.model, asked.limit, asked.prompt_tokens) == (
        True,
        "whisper",
        9,
        1 + 4500 // 640,
    )
    assert not read(form(AUDIO), 'multipart/form-data; boundary="b"').stream
    assert read(form(field("a", b""), AUDIO, end=b"--")).limit > 1000


HOSTILE = {
    "no form": b"{}",
    "no parts": b"--b--\r\n",
    "other boundary": form(AUDIO, line=b"--c"),
    "before it": b"x\r\n" + form(AUDIO),
    "after it": form(AUDIO) + b"--b\r\n",
    "no end": form(AUDIO, end=b""),
    "padded line": form(AUDIO, end=b" \r\n" + field("vllm_xargs", b"{}") + b"\r\n--b--"),
    "xargs": form(AUDIO, field("vllm_xargs", b'{"headgate_class":"gold"}')),
    "kv": form(AUDIO, field("kv_transfer_params", b"{}")),
    "escaped name": form(field("vllm_\\xargs", b"{}")),
    "encoded name": form(b"Content-Disposition: form-data; name*=utf-8''vllm_xargs\r\n\r\n{}"),
    "two names": form(field("a", b"{}", '; name="vllm_xargs"')),
    "name in capitals": form(field("a", b"{}", '; NAME="vllm_xargs"')),
    "name with a tab": form(b"Content-Disposition: form-data; name=vllm_xargs\t; filename=x\r\n\r\n{}"),
    "name in brackets": form(b"Content-Disposition: form-data; name=<vllm_xargs>\r\n\r\n{}"),
    "continued name": form(b'Content-Disposition: form-data; name*0="vllm_"; name*1="xargs"\r\n\r\n{}'),
    "folded": form(b'Content-Disposition: form-data;\r\n name="a"\r\n\r\n{}'),
    "two dispositions": form(b'Content-Disposition: form-data; name="a"\r\n' + field("vllm_xargs", b"{}")),
    "line feed": form(
        b'Content-Type: x\nContent-Disposition: form-data; name="vllm_xargs"\r\n' + field("a", b"")
    ),
    "not ascii": form('Content-Disposition: form-data; name="modèl"\r\n\r\nx'.encode()),
    "twice": form(field("model", b"a"), field("model", b"b")),
    "long head": form(b"Content-Type: " + b"x" * 5000 + b"\r\n" + field("a", b"")),
    "many parts": form(*[field("a", b"")] * 65),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_form_that_another_parser_might_read_otherwise_is_refused(body: bytes) -> None:
    with pytest.raises(RefusedError) as refused:
        read(body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "kind",
    ["application/json", "multipart/form-data", KIND + "; boundary=c", KIND + "," + KIND, KIND + ", c",
     "multipart/mixed"],
)  # fmt: skip
def test_the_type_of_a_form_names_one_boundary(kind: str) -> None:
    with pytest.raises(RefusedError):
        read(form(AUDIO), kind)


def test_engines_are_told_class_and_tenant_in_a_form_and_large_ones_are_within_the_body_limit() -> None:
    classes = [{"name": "gold", "match": {"model": "m"}}]

    async def work() -> None:
        front = {"tell_engines": "always", "body_limit": 1 << 20, "port": 0, "admin": "127.0.0.1:0"}
        async with routed(speak, classes=classes, front={**front, "drain_delay": 0.0}) as world:
            path, sound = "/v1/audio/transcriptions", aiohttp.FormData({"model": "m"})
            sound.add_field("file", b"x" * 900_000, filename="a.wav", content_type="audio/wav")
            async with world.client.post(world.url + path, data=sound) as answer:
                assert answer.status == 200
            body = world.engines[0].seen[0].body
            told = body.split(b"\r\n--")[0].partition(b"\r\n\r\n")
            assert b'name="vllm_xargs"' in told[0] and json.loads(told[2]) == {"headgate_class": "gold"}
            sound = aiohttp.FormData({"model": "m"})
            sound.add_field("file", b"x" * (1 << 20), filename="a.wav")
            async with world.client.post(world.url + path, data=sound) as answer:
                assert answer.status == 413 and len(world.engines[0].seen) == 1
            await world.settled()

    run(work())
