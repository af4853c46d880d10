"""Errors have vLLM's status and shape. The cases and their answers were read off vLLM 0.32."""

import pytest
from calls_of_emulator import FAST, post, run, session

from headgate.live.emulate import emulated

LONG = "x" * 400_000
CASES = [
    ({"model": "nope", "prompt": "hi"}, 404, "NotFoundError", "model"),
    ({"prompt": "hi", "max_tokens": 99999}, 400, "BadRequestError", "max_tokens"),
    ({"prompt": "hi", "max_tokens": 2**31 - 1}, 400, "BadRequestError", "max_tokens"),
    ({"prompt": "hi", "max_tokens": "x"}, 400, "Bad Request", "body.max_tokens"),
    ({"prompt": "hi", "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
    ({"prompt": "hi", "stream_options": {"include_usage": True}}, 400, "BadRequestError", "stream_options"),
    ({}, 400, "BadRequestError", "prompt"),
    ({"prompt": ""}, 400, "BadRequestError", "prompt"),
    ({"prompt": []}, 400, "BadRequestError", "prompt"),
    ({"prompt": ["a", 1]}, 400, "Bad Request", "body.prompt"),
    ({"prompt": [[1, 2], "a"]}, 400, "Bad Request", "body.prompt"),
    ({"prompt": [-1]}, 400, "Bad Request", "body.prompt"),
    ({"prompt": [2**40]}, 400, "BadRequestError", None),
    ({"prompt": {"a": 1}}, 400, "Bad Request", "body.prompt"),
    ({"prompt": "x", "n": 0}, 400, "BadRequestError", None),
    ({"prompt": "x", "n": 2, "temperature": 0}, 400, "BadRequestError", None),
    ({"prompt": "x", "presence_penalty": 3}, 400, "BadRequestError", None),
    ({"prompt": "x", "n": 10_000_000}, 400, "BadRequestError", None),
    ({"prompt": "x", "temperature": -1}, 400, "BadRequestError", "temperature"),
    ({"prompt": "x", "top_p": 3}, 400, "BadRequestError", "top_p"),
    ({"prompt": "x", "max_tokens": 4, "min_tokens": 9}, 400, "BadRequestError", None),
    ({"prompt": "x", "seed": 2**70}, 400, "Bad Request", "body.seed"),
    ({"prompt": "x", "priority": 2**63}, 400, "Bad Request", "body.priority"),
    ({"prompt": LONG}, 400, "BadRequestError", "input_tokens"),
    ([], 400, "Bad Request", None),
    ("text", 400, "Bad Request", None),
]
CHATS = [
    ({}, 400, "Bad Request", "body.messages"),
    ({"messages": []}, 400, "BadRequestError", None),
    ({"messages": "x"}, 400, "Bad Request", "body.messages"),
    ({"messages": [{"content": "no role"}]}, 400, "Bad Request", "body.messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "Bad Request", "body.messages.0.content"),
    ({"messages": [3]}, 400, "Bad Request", "body.messages.0.role"),
]


@pytest.mark.parametrize("chat", [False, True])
def test_bodies(chat):
    async def main():
        async with emulated(**FAST) as urls, session() as client:
            for body, status, kind, param in CHATS if chat else CASES:
                found, told = await post(client, urls[0], body, chat)
                assert found == status, body
                error = told["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert (error["type"], error["code"], error["param"]) == (kind, status, param), body
                assert error["message"]
            assert urls.at_rest

    run(main())


NOT_JSON = [
    (b"{bad", "application/json"),
    (b'{"prompt": "x"}', "text/plain"),
    (b"[" * 100_000, "application/json"),
    (b"\xff\xfe", "application/json"),
    (b"", "application/json"),
    (b'{"prompt": NaN}', "application/json"),
]
PATHS = [
    ("GET", "/nothing", 404),
    ("GET", "/v1/completions", 405),
    ("POST", "/v1/models", 405),
    ("HEAD", "/health", 405),
    ("GET", "/health", 200),
    ("POST", "/ping", 200),
    ("GET", "/ping", 200),
    ("GET", "/tokenize", 405),
    ("GET", "/../etc/passwd", 404),
]


def test_what_is_not_json():
    async def main():
        async with emulated(**FAST) as urls, session() as client:
            for data, kind in NOT_JSON:
                headers = {"content-type": kind}
                async with client.post(urls[0] + "/v1/completions", data=data, headers=headers) as told:
                    assert told.status == 400, data[:20]
                    assert (await told.json())["error"]["type"] == "Bad Request"

    run(main())


def test_paths_and_methods():
    async def main():
        async with emulated(**FAST) as urls, session() as client:
            for method, path, status in PATHS:
                async with client.request(method, urls[0] + path) as told:
                    assert told.status == status, path
                    if status in (404, 405) and method != "HEAD":
                        assert set(await told.json()) == {"detail"}
                    if status == 405:
                        assert told.headers["allow"]

    run(main())


def test_limits_of_a_port():
    async def main():
        async with emulated(**FAST | {"body_limit": 1000}) as urls, session() as client:
            status, told = await post(client, urls[0], {"prompt": "x" * 2000})
            assert status == 413 and told["error"]["code"] == 413
            async with client.get(urls[0] + "/health", headers={"x": "y" * 20_000}) as told:
                assert told.status == 400

    run(main())
