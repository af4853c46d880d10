"""Whatever a client sends: never a 500, never a hang. 2,000 cases with HYPOTHESIS_PROFILE=night."""

import http.client
import json
import time

import pytest
from calls_of_emulator import PATIENCE, SMALL, in_thread
from hypothesis import given
from hypothesis import strategies as st

FINE = {200, 400, 404, 405, 408, 411, 413, 422, 431, 501, 503}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 1e308, "", "tiny", "user"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
FIELDS = """model prompt messages max_tokens max_completion_tokens n stream stream_options stop stop_token_ids
include_stop_str_in_output ignore_eos min_tokens temperature top_p presence_penalty seed logprobs top_logprobs
echo priority request_id return_token_ids use_beam_search kv_transfer_params vllm_xargs""".split()  # noqa: SIM905
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name"]), VALUES, max_size=3), max_size=3
)
PARAMS = st.dictionaries(
    st.sampled_from(
        ["do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_request_id", "remote_host",
         "remote_port", "remote_block_ids"]
    ),
    VALUES, max_size=7,
)  # fmt: skip
SENSIBLE = st.fixed_dictionaries(
    {
        "prompt": st.text(max_size=30)
        | st.lists(st.integers(0, 2**33), max_size=5)
        | st.lists(st.text(max_size=5))
    },
    optional={
        "max_tokens": st.integers(-1, 30),
        "n": st.integers(0, 4),
        "stream": st.booleans(),
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
        "min_tokens": st.integers(-1, 40),
        "logprobs": st.integers(-3, 30) | st.booleans(),
        "echo": st.booleans(),
        "return_token_ids": st.booleans(),
        "ignore_eos": st.booleans(),
        "stream_options": st.dictionaries(
            st.sampled_from(["include_usage", "continuous_usage_stats"]), st.booleans() | st.none()
        ),
        "kv_transfer_params": PARAMS,
        "vllm_xargs": st.dictionaries(
            st.sampled_from(["headgate_class", "headgate_ttft", "headgate_guess", "other"]), VALUES
        ),
        "priority": st.integers(),
    },
)
ANY = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), VALUES | MESSAGES | PARAMS, max_size=6)
HEADER = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=30)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["x-request-id", "x-vllm-priority", "x-data-parallel-rank", "content-type", "x-emulate-arrival",
         "authorization", "accept-encoding", "x-session-id", "expect", "connection"]
    ),
    HEADER, max_size=4,
)  # fmt: skip
PATHS = st.sampled_from(
    ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/emulate/kv", "/x"]
)


@pytest.fixture(scope="module")
def port():
    words = SMALL | {"speed": 500.0, "model_len": 2048, "max_requests": 16, "engines": 2, "ranks": True}
    with in_thread(**words, kv_lease=1.0, kv_load_failure="recompute") as urls:
        yield int(urls[0].rpartition(":")[2])
        end = time.monotonic() + PATIENCE
        while not urls.at_rest:  # the last clients have just gone
            assert time.monotonic() < end, "a slot or a block never came back"
            time.sleep(0.01)


def call(port, method, path, data, headers):
    """Status and body; the connection ends with it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        given = {"content-type": "application/json", **headers}
        for name, value in given.items():
            connection.putheader(name, value.encode("latin-1"))
        connection.putheader("content-length", str(len(data)))
        connection.endheaders(data)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def encoded(body):
    return json.dumps(body).encode()


@given(
    path=PATHS, body=SENSIBLE | ANY | VALUES, headers=HEADERS, method=st.sampled_from(["POST", "POST", "GET"])
)
def test_bodies_and_headers(port, path, body, headers, method):
    status, data = call(port, method, path, encoded(body), headers)
    assert status in FINE, (status, data)
    if status >= 400:  # 400 without a body of ours is aiohttp's parser, which refuses the head
        assert b'"error"' in data or b'"detail"' in data or status == 400


@given(path=PATHS, data=st.binary(max_size=200))
def test_bytes(port, path, data):
    status, _ = call(port, "POST", path, data, {})
    assert status in FINE


@given(body=SENSIBLE, cut=st.integers(0, 200))
def test_bodies_that_are_cut_short(port, body, cut):
    data = encoded(body)
    status, _ = call(port, "POST", "/v1/completions", data[:cut], {})
    assert status in FINE


@given(head=st.binary(max_size=300))
def test_heads_that_are_no_http(port, head):
    import socket

    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(head + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        told = b""
        while part := connection.recv(65536):
            told += part
    assert b" 500 " not in told.partition(b"\r\n")[0]
