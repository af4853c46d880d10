"""Early refusal over HTTP: a request that cannot be in time gets a 503, streamed or not."""

from __future__ import annotations

import json

import openai
import pytest
import tiny
from http_server import ONE_PROCESS, served


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("refusals")
    settings = {"ttft": "0.1ms", "tbt": "10s", "refuse": 503, "classes": {"patient": {"ttft": "10min"}}}
    (scratch / "headgate.json").write_text(json.dumps(settings))
    flags: tuple[str, ...] = ("--config", "headgate.json", "--max-num-seqs", "8")
    flags += ("--chat-template", "{% for each in messages %}{{ each['content'] }}{% endfor %}")
    with served(tiny.model(scratch / "model"), scratch, *flags, **ONE_PROCESS) as found:
        yield found


def ask(server, stream, **words):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
    prompt = list(range(10, 40))
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=4, stream=stream, **words)


@pytest.mark.parametrize("stream", [False, True])
def test_a_first_token_that_cannot_be_in_time_is_refused(server, stream):
    with pytest.raises(openai.APIStatusError) as caught:
        list(ask(server, stream))
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


def test_a_chat_stream_is_refused_before_its_first_event(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=4, stream=True
        )
    assert caught.value.status_code == 503


def test_a_request_of_a_class_with_a_longer_promise_is_served(server):
    answer = ask(server, False, extra_body={"vllm_xargs": {"headgate_class": "patient"}})
    assert answer.usage.completion_tokens == 4


def test_the_log_says_that_step_times_are_learned(server):
    assert server.said("card none, step times are learned")
