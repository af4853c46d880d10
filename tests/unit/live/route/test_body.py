import asyncio
import json
from contextlib import suppress
from itertools import product
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headgate.live.route.request as body_module
from headgate.live.route.request import (
    DEPTH,
    EXTRA,
    FIELDS,
    NAME,
    TURN,
    UNBOUNDED,
    AskedRequest,
    RefusedError,
    Turns,
    at_once,
    fields_of,
    read_body,
    reading,
)  # fmt: skip

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def read(path: str = TEXT, **fields: object):
    return read_body(json.dumps(fields).encode(), path)


def test_what_is_read() -> None:
    body = (
        b'{"model": "m", "prompt":"hello \xc3\xa9", "max_tokens": 7, "stream":true, "metadata":{"class":"x"}}'
    )
    asked = read_body(body, TEXT)
    assert asked.body is body
    assert (asked.model, asked.stream, asked.limit, asked.field_class) == ("m", True, 7, "x")
    assert asked.prompt_bytes == len(b'"hello \xc3\xa9"')
    assert read(prompt="x").limit == UNBOUNDED
    assert read(CHAT, messages=[], max_completion_tokens=3, max_tokens=9).limit == 3
    assert read(prompt="x", max_tokens=-1, model=3).model == ""
    assert read(prompt=[1, 2, 3]).prompt_tokens == 3
    assert not read(prompt="x", stream="true").stream


@pytest.mark.parametrize(
    "whole",
    [
        {"prompt": ["a", "b"]}, {"prompt": [[1, 2], [3]]}, {"prompt": "a", "n": 2}, {"prompt": []},
        {"prompt": "a", "best_of": 2}, {"prompt": "a", "echo": True}, {"prompt": "a", "prompt_logprobs": 0},
        {"prompt": "a", "use_beam_search": True},
    ],
)  # fmt: skip
def test_whole_only(whole: dict) -> None:
    assert not read(**whole).splittable


def test_splittable() -> None:
    assert read(prompt="a", n=1, echo=False).splittable
    assert read(prompt=[5, 6]).splittable
    assert read(CHAT, messages=[{"role": "user", "content": "x"}]).splittable
    assert not read("/v1/responses", input="x").splittable


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "json"), (b"[]", "json"), (b"{", "json"), (b"nul", "json"), (b'{"a":1}x', "json"),
        (b"\xff\xfe{}", "json"),
        (b'{"prompt":"a","prompt":"b"}', "duplicate"),
        (b'{"kv_transfer_params":{"remote_host":"x"},"kv_transfer_params":null}', "duplicate"),
        (b'{"prompt":"a","p\\u0072ompt":"b"}', "duplicate"),
        (b'{"kv_transfer_params":{}}', "kv_params"),
        (b'{"ec_transfer_params":{"a":1}}', "kv_params"),
        (b'{"vllm_xargs":{"kv_transfer_params":"x"}}', "kv_params"),
        (b'{"vllm_xargs":{"ec_transfer_param\\u0073":["x"]}}', "kv_params"),
        (b'{"vllm_xargs":{"kv_transfer_params":"x"},"vllm_xargs":{}}', "duplicate"),
        (b'{"vllm_xargs":{"a":"\\ud800","kv_transfer_params":"x"}}', "json"),
        (b'{"\\u006bv_transfer_params":{"do_remote_prefill":true}}', "duplicate"),
        (b'{"a":' + b"[" * 65 + b"]" * 65 + b"}", "depth"),
        (b'{"a":' + b"[" * 100_000, "depth"),
        (b'{"prompt":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "depth"),
    ],
)  # fmt: skip
def test_refused(body: bytes, reason: str) -> None:
    with pytest.raises(RefusedError) as caught:
        read_body(body, TEXT)
    assert (caught.value.status, caught.value.reason) == (400, reason)


def test_depth_is_not_fooled_by_brackets_in_texts_or_by_width() -> None:
    assert read(prompt="[[[{{{" * 100).prompt_bytes > 0
    assert read(prompt='\\"[' * 100).prompt_bytes > 0
    assert read(CHAT, messages=[{"role": "user", "content": [{"text": "["}]}] * 500).prompt_bytes > 0
    nested: object = 1
    for _ in range(DEPTH - 1):
        nested = [nested]
    assert read(a=nested, b=[[]] * 100)


def test_same_names_deeper_are_no_duplicates() -> None:
    assert read(prompt="x", tools=[{"prompt": 1, "model": 2}], model="m").model == "m"


def test_kv_params_where_allowed() -> None:
    assert read(prompt="a", vllm_xargs={"class": "chat", "more": [1]}, kv_transfer_params=None)
    assert read(prompt="a", vllm_xargs=None)
    asked = read_body(b'{"prompt":"a","kv_transfer_params":{"x":1}}', TEXT, allow_kv_params=True)
    assert not asked.splittable


def test_too_many_fields_are_refused_before_anything_is_made_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs(number: int) -> bytes:
        return b"{" + b",".join(b'"%d":{"a":0}' % each for each in range(number)) + b"}"

    assert read_body(pairs(FIELDS), TEXT).model == ""
    assert read(prompt=":" * 2 * FIELDS, inside={str(number): 0 for number in range(2 * FIELDS)})
    monkeypatch.setattr(body_module, "_TOP", None)
    with pytest.raises(RefusedError, match="more than 10000 fields") as refused:
        read_body(pairs(FIELDS + 1), TEXT)
    assert (refused.value.status, refused.value.reason) == (400, "fields")


KEYS = st.sampled_from(["model", 'a"b', "p:{", "\\", "é]", "x"])
VALUES = st.recursive(
    st.none() | KEYS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=8
)


@given(st.lists(st.tuples(KEYS, VALUES)), st.sampled_from([2, 3, 7, TURN]))
def test_fields_are_found_exactly_wherever_a_turn_ends(pairs: list[tuple[str, object]], turn: int) -> None:
    body = "{" + ", ".join(f"{json.dumps(key)} : {json.dumps(value)}" for key, value in pairs) + " }\n"
    with mock.patch.object(body_module, "TURN", turn):
        if len(dict(pairs)) < len(pairs) or any(json.dumps(key)[1:-1] != key for key, _ in pairs):
            with pytest.raises(RefusedError) as refused:
                at_once(body_module._scan(body.encode()))
            assert refused.value.reason == "duplicate"
        else:
            found = at_once(body_module._scan(body.encode()))
            assert {name: json.loads(bytes(raw)) for name, raw in found.items()} == dict(pairs)


OWN = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text() | st.lists(st.integers(0, 10**6)) | st.lists(st.text()),
        "messages": st.lists(st.dictionaries(st.sampled_from(["role", "content"]), VALUES)),
        "max_tokens": st.integers() | st.booleans() | st.none(),
        "stream": st.booleans() | st.text(),
        "model": st.text() | st.integers(),
        "n": st.integers(0, 2),
        "metadata": VALUES | st.fixed_dictionaries({"class": st.text()}),
        "vllm_xargs": st.none() | st.dictionaries(st.sampled_from(["a", "kv_transfer_params"]), VALUES),
        "kv_transfer_params": VALUES,
        "other": VALUES,
    },
)


def told(body: bytes) -> object:
    """All that is read of a body, or why it is refused."""
    try:
        asked = read_body(body, TEXT)
    except RefusedError as refused:
        return refused.reason
    return [
        tuple(map(bytes, value)) if name == "salt" else bytes(value) if name in ("text", "session") else value
        for name in AskedRequest.__struct_fields__
        for value in (getattr(asked, name),)
    ]


@given(OWN, st.sampled_from([2, 5, 30]), st.sampled_from([None, 1]))
def test_a_body_read_in_turns_is_understood_as_one_read_at_once(
    fields: dict[str, object], turn: int, indent: int | None
) -> None:
    body = json.dumps(fields, ensure_ascii=False, indent=indent).encode("utf-8", "surrogatepass")
    parsed = told(body)
    with mock.patch.object(body_module, "TURN", turn):
        assert told(body) == parsed


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1}{"b":2}', b'{"a":1},', b'{"a":1}]', b'{"a":1', b'{"a"', b'{"a":"', b"{,}", b'{"a":1,}',
        b'[{"a":1}]', b'{"a":1 "b":2}', b"{:1}", b"x", b'{"a":1,,"b":2}', '{"a":1}'.encode("utf-16"),
        b'\xef\xbb\xbf{"a":1}',
        b'\n{\0"a":1}', b'{"a":1}' + b" " * 100 + b"x",
    ],
)  # fmt: skip
def test_what_no_engine_would_take_is_refused_in_turns_too(body: bytes) -> None:
    with mock.patch.object(body_module, "TURN", 4), pytest.raises(RefusedError) as refused:
        at_once(fields_of(body))
    assert refused.value.reason == "json"


@pytest.mark.parametrize("field", ["vllm_xargs", "model", "max_tokens", "n", "kv_transfer_params"])
def test_what_is_decoded_is_bounded(field: str) -> None:
    for value in ('"' + "x" * EXTRA + '"', "1" * EXTRA + "1"):
        with pytest.raises(RefusedError, match=f"{field} is larger"):
            read_body(f'{{"prompt":"x","{field}":{value}}}'.encode(), TEXT)
    with pytest.raises(RefusedError, match="longer than 256"):
        read_body(b'{"%b":"%b"}' % (b"x" * (NAME + 1), b"y" * TURN), TEXT)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"' + b'a: \\"b\\", ' * (1 << 17) + b'"}',
        b'{"prompt":[' + b"123456," * (1 << 17) + b"0]}",
        b'{"prompt":"x","messages":[' + b'{"a":0},' * (1 << 17) + b"0]}",
        b'{"x":[' + b'"[",' * (1 << 18) + b"0]}",
        b'{"model":"' + b"x" * EXTRA + b'"}',
        b'{"kv_transfer_params":' + b" " * (1 << 20) + b"null}",
        b"{" + b'"%d":0,' * FIELDS % (*range(FIELDS),) + b'"z":0}',
    ],
    ids=["text", "ids", "objects", "brackets", "model", "spaces", "fields"],
)  # fmt: skip
def test_the_event_loop_goes_on_while_a_large_body_is_read(body: bytes) -> None:
    """It is counted in turns, not in seconds: at most TURN bytes are looked at between two of them."""

    async def work() -> int:
        turns, over = 0, False

        async def beat() -> None:
            nonlocal turns
            while not over:
                turns += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(beat())
        with suppress(RefusedError):
            await Turns().finish(reading(body, TEXT))
        over = True
        await beating
        return turns

    assert asyncio.run(work()) >= len(body) // TURN


def test_a_short_body_is_not_behind_long_ones() -> None:
    long = b'{"prompt":"' + b"x" * (50 * TURN) + b'"}'

    async def work() -> list[int]:
        turns, ended = Turns(), []

        async def read(body: bytes) -> None:
            await turns.finish(reading(body, TEXT))
            ended.append(len(body))

        await asyncio.gather(*(read(body) for body in (long, long, long[: -40 * TURN] + b'"}')))
        return ended

    first, *_ = asyncio.run(work())
    assert first < len(long)


def test_what_stands_twice_is_refused_and_nothing_else() -> None:
    values = ['"x"', '{"model":[":{"]}', '"\\\\\\"model\\":"']
    fields = [(name, f'"{name}" :{value}') for name in ("model", "a", "é:") for value in values]
    for chosen in product(fields, repeat=3):
        body = ("{" + ",".join(text for _, text in chosen) + "}").encode()
        names = [name for name, _ in chosen]
        if names.count("model") > 1:
            with pytest.raises(RefusedError):
                read_body(body, TEXT)
        elif len(set(names)) == len(names):
            read_body(body, TEXT)


@pytest.mark.parametrize("spaces", [0, 3, NAME - 1, NAME, NAME + 1, 5000])
def test_spaces_before_a_value_do_not_hide_it(spaces: int) -> None:
    """Two prompts that are taken for one would be split over engines, and answered with wrong tokens."""
    body = b'{"x":"%b","prompt":%b["one","another"]}' % (b"y" * TURN, b" " * spaces)
    try:
        assert not read_body(body, TEXT).splittable
    except RefusedError as refused:
        assert refused.reason == "json" and spaces > NAME


@pytest.mark.parametrize(
    ("path", "counted", "ignored"),
    [
        (TEXT, ["prompt"], ["messages", "input", "system", "instructions"]),
        (CHAT, ["messages", "tools"], ["prompt", "input", "system", "instructions"]),
        ("/v1/messages", ["messages", "system", "tools"], ["prompt", "input", "instructions"]),
        ("/v1/responses", ["input", "instructions", "tools"], ["prompt", "messages", "system"]),
        ("/v1/embeddings", ["messages"], ["input"]),
        ("/v1/embeddings", ["input"], ["system"]),
    ],
)
def test_prompts_are_read_where_the_path_has_them(path: str, counted: list[str], ignored: list[str]) -> None:
    asked = read(path, **dict.fromkeys(ignored, ""), **dict.fromkeys(counted, "x" * 98))
    assert asked.prompt_bytes == 100 * len(counted)
    assert bytes(asked.text) == b'"' + b"x" * 98 + b'"'
    ids = {name: [1] for name in ignored}
    assert read(path, **ids, **dict.fromkeys(counted, "x")).prompt_tokens is None


def test_the_limit_is_that_of_the_path() -> None:
    assert read(prompt="x", max_tokens=2000, max_completion_tokens=1, max_output_tokens=1).limit == 2000
    assert read(CHAT, max_tokens=5, max_output_tokens=1).limit == 5
    assert read(CHAT, max_tokens=1, max_completion_tokens=None).limit == 1
    assert read(CHAT, max_tokens=1, max_completion_tokens="2000").limit == UNBOUNDED  # pydantic takes texts
    assert read("/v1/messages", max_tokens=9, max_completion_tokens=1).limit == 9
    assert read("/v1/responses", max_output_tokens=9, max_tokens=1).limit == 9
    assert read("/v1/score", max_output_tokens=9).limit == 1
