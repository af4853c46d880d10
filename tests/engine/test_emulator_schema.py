"""The same requests to real vLLM and to the emulator: answers compared field by field, metrics by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from http_server import MAIN, ONE_PROCESS, PATIENCE, environment, start, stop, wait

VLLM = "import sys; sys.argv[0] = 'vllm'; from vllm.entrypoints.cli.main import main; main()"
TEMPLATE = "{% for m in messages %}{{m.role}}: {{m.content}}\n{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "chat_template": TEMPLATE}
PLAIN = {"prompt": "hi there"}
FIXED = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
RUNNING = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
WARM = {"temperature": 1}  # greedy sampling has one choice
KV = {"kv_transfer_params": None}
ANSWERS = [
    *(base | FIXED | more
      for base in (PLAIN, CHAT)
      for more in ({}, {"n": 2} | WARM, {"stream": True}, {"stream": True, "n": 2} | WARM, USAGE, RUNNING,
                   {"return_token_ids": True}, {"return_token_ids": True, "stream": True},
                   {"model": "tiny"}, {"priority": 0}, {"seed": 3}, {"vllm_xargs": {"a": 1}}, KV,
                   {"max_completion_tokens": 2}, {"stop": ["zzzz"]}, {"min_tokens": 2})),
    *(PLAIN | FIXED | more for more in ({"logprobs": 1}, {"logprobs": 1, "stream": True}, {"echo": True},
                                        {"prompt": ["a", "b"]}, {"prompt": [1, 2, 3]},
                                        {"prompt": [[1, 2], [3]], "stream": True}, {"max_tokens": None},
                                        {"prompt": "x" * 1015, "max_tokens": 500})),
    *(CHAT | FIXED | {"logprobs": True, "top_logprobs": 1} | more for more in ({}, {"stream": True})),
]  # fmt: skip
REFUSED = [
    *(PLAIN | more
      for more in ({"model": "nope"}, {"max_tokens": 99999}, {"max_tokens": "x"}, {"max_tokens": 0},
                   {"stream_options": {"include_usage": True}}, {"prompt": ""}, {"prompt": None}, {"n": 0},
                   {"temperature": -1}, {"top_p": 3}, {"max_tokens": 4, "min_tokens": 9},
                   {"prompt": "x" * 5000},
                   {"prompt": [99999999999]}, {"prompt": {"a": 1}}, {"stop": [""]}, {"min_tokens": -1},
                   {"presence_penalty": 7}, {"seed": 2**70}, {"priority": 2**70}, {"stream": "maybe"},
                   {"n": 2, "temperature": 0}, {"stop": 5}, {"ignore_eos": []})),
    *(CHAT | more for more in ({"messages": []}, {"messages": "x"}, {"n": 0},
                               {"max_completion_tokens": 0}, {"messages": [{"content": "x"}]})),
]  # fmt: skip
GETS = ("/v1/models", "/version", "/load", "/health", "/ping", "/nothing", "/v1/completions", "/tokenize")
POSTS = [
    ("/tokenize", {"prompt": "hello"}),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("/detokenize", {"tokens": [73, 74]}),
    ("/ping", {}),
    ("/health", {}),
]
AGAIN = 20  # times
# Of the hardware, of parts that the emulator has not, or of vLLM's web framework.
NOT_OURS = re.compile(r"vllm:estimated_|.*_created$|http_|python_|process_")


@pytest.fixture(scope="module")
def real(model, scratch):
    server = start(
        [sys.executable, "-c", VLLM, "serve", str(model)], scratch,
        "--trust-request-chat-template", "--scheduling-policy", "priority", **ONE_PROCESS,
    )  # fmt: skip
    try:
        wait(server)
        yield server.url
    finally:
        stop(server)


@pytest.fixture(scope="module")
def ours(model, scratch):
    command = [sys.executable, "-c", MAIN, "emulate", "--port", "0", "--model", "tiny", "--model-len", "1024"]
    child = subprocess.Popen(
        [*command, "--tokenizer", str(model), "--speed", "20"],
        stdout=subprocess.PIPE, text=True, env=environment(scratch),
    )  # fmt: skip
    try:
        yield child.stdout.readline().split()[2]
    finally:
        child.terminate()
        child.wait(PATIENCE)
        child.stdout.close()


def call(url: str, path: str, body: object = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def shape(value: object, key: str = "") -> object:
    """Types and fields, in order; of a list the first element; keys that are tokens do not count."""
    if isinstance(value, dict):
        if key == "top_logprobs":
            return {"token": shape(next(iter(value.values())))}
        return [(name, shape(each, name)) for name, each in value.items()]
    if isinstance(value, list):
        if key == "bytes":
            return "bytes"
        return [shape(value[0], key)] if value else []
    return type(value).__name__


def events(data: bytes) -> list[object]:
    """The shapes of a stream's events, equal neighbours once: vLLM may put several tokens into one event."""
    found: list[object] = []
    for part in data.decode().split("\n\n"):
        if part:
            assert part.startswith("data: ")
            new = part if part == "data: [DONE]" else shape(json.loads(part[6:]))
            if not found or found[-1] != new:
                found.append(new)
    return found


def path_of(body: dict[str, object]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def named(body: object) -> str:
    return json.dumps(body)[:100]


def order_of(events: list[object], body: dict[str, object]) -> list[object]:
    """As they came; of several choices, which take turns as they come, each once."""
    if body.get("n") != 2 and not isinstance(body.get("prompt"), list):
        return events
    return [json.loads(each) for each in sorted({json.dumps(event) for event in events})]


@pytest.mark.parametrize("body", ANSWERS, ids=named)
def test_answers(real, ours, body):
    def ask(url):
        return call(url, path_of(body), body, **{"X-Request-Id": "mine"})

    (status, head, data), (our_status, our_head, our_data) = ask(real), ask(ours)
    assert (status, our_status) == (200, 200), (data, our_data)
    assert head["content-type"] == our_head["Content-Type"]
    if body.get("stream"):
        one, two = order_of(events(data), body), order_of(events(our_data), body)
        for _ in range(AGAIN):  # a vLLM that has to wait for its CPU puts all tokens into one event
            if two != one:
                one = order_of(events(ask(real)[2]), body)
        assert two == one
    else:
        assert shape(json.loads(our_data)) == shape(json.loads(data))
        assert json.loads(our_data)["id"] == json.loads(data)["id"]
        if body.get("messages") is None:  # our chats are laid out without the model's template
            assert json.loads(our_data)["usage"] == json.loads(data)["usage"]


@pytest.mark.parametrize("body", REFUSED, ids=named)
def test_errors(real, ours, body):
    (status, _, data), (our_status, _, our_data) = (call(url, path_of(body), body) for url in (real, ours))
    assert our_status == status, (data, our_data)
    theirs, ourselves = json.loads(data)["error"], json.loads(our_data)["error"]
    assert shape(ourselves) == shape(theirs) or {ourselves["param"], theirs["param"]} & {None}
    assert (ourselves["type"], ourselves["code"]) == (theirs["type"], theirs["code"]), (theirs, ourselves)
    if theirs["type"] == "BadRequestError":
        assert ourselves["param"] == theirs["param"], (theirs, ourselves)


@pytest.mark.parametrize("path", GETS)
def test_small_endpoints(real, ours, path):
    (status, head, data), (our_status, our_head, our_data) = (call(url, path) for url in (real, ours))
    assert our_status == status
    assert bool(our_data) == bool(data)
    if data:
        assert our_head["Content-Type"].partition(";")[0] == head["content-type"]
        assert shape(json.loads(our_data)) == shape(json.loads(data))
    assert our_head.get("Allow") == head.get("allow")


@pytest.mark.parametrize(("path", "body"), POSTS)
def test_tokens(real, ours, path, body):
    (status, _, data), (our_status, _, our_data) = (call(url, path, body) for url in (real, ours))
    assert our_status == status
    assert our_data == data or json.loads(our_data) == json.loads(data)


def test_metrics(real, ours):
    texts = [call(url, "/metrics")[2].decode() for url in (real, ours)]
    theirs, ourselves = (dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)) for text in texts)
    missing = {name: kind for name, kind in theirs.items()
               if not NOT_OURS.match(name) and ourselves.get(name) != kind}  # fmt: skip
    assert not missing
    own = {name for name in ourselves if name not in theirs}
    assert all(name.startswith(("headgate_", "vllm:nixl_")) for name in own), own
    for name, kind in theirs.items():
        if kind == "histogram" and name.startswith("vllm:"):
            found = [re.findall(rf'^{name}_bucket{{.*le="([^"]+)"', text, re.MULTILINE) for text in texts]
            assert found[0] == found[1], name
        labels = [{label for line in re.findall(rf"^{name}(?:_sum)?{{(.*)}}", text, re.MULTILINE)
                   for label in re.findall(r'(\w+)="', line)} for text in texts]  # fmt: skip
        if name.startswith("vllm:") and name != "vllm:cache_config_info" and not NOT_OURS.match(name):
            assert labels[0] == labels[1], name
