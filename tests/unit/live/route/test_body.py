import json
from itertools import product
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headgate.live.route.body as body_module
from headgate.live.route.answers import RefusedError
from headgate.live.route.body import BLOCK, DEPTH, FIELDS, UNBOUNDED, read_body

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
    assert read(messages=[{"role": "user", "content": [{"text": "["}]}] * 500).prompt_bytes > 0
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


@given(st.lists(st.tuples(KEYS, VALUES)), st.sampled_from([1, 2, 7, BLOCK]))
def test_fields_are_counted_exactly(pairs: list[tuple[str, object]], block: int) -> None:
    body = "{" + ", ".join(f"{json.dumps(key)} : {json.dumps(value)}" for key, value in pairs) + "}"
    with mock.patch.object(body_module, "BLOCK", block):
        assert body_module._count_fields(body.encode()) == len(pairs)


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
