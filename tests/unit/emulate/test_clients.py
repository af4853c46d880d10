"""The clients people have: OpenAI's package and curl, unchanged."""

import json
import shutil
import subprocess

import pytest
from calls_of_emulator import FAST, PATIENCE, in_thread

from headgate.live.emulate import answer, chat_answer

CHAT = [{"role": "user", "content": "Say something."}]


def test_the_openai_package():
    openai = pytest.importorskip("openai")
    with in_thread(**FAST) as urls:
        client = openai.OpenAI(base_url=urls[0] + "/v1", api_key="none", timeout=PATIENCE, max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        found = client.completions.create(model="tiny", prompt="Hello", max_tokens=6)
        assert found.choices[0].text == answer("Hello", 6) and found.usage.completion_tokens == 6
        found = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=6, n=2)
        assert [choice.message.content for choice in found.choices] == [
            chat_answer(CHAT, 6, choice) for choice in (0, 1)
        ]
        events = list(
            client.chat.completions.create(
                model="tiny", messages=CHAT, max_tokens=6, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(event.choices[0].delta.content for event in events if event.choices)
        assert text == chat_answer(CHAT, 6) and events[-1].usage.completion_tokens == 6
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="Hello")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt="Hello", max_tokens=10**6)
        extra = {"vllm_xargs": {"headgate_class": "chat"}, "priority": 2, "ignore_eos": True}
        found = client.completions.create(
            model="tiny",
            prompt="Hello",
            max_tokens=3,
            extra_body=extra,
            extra_headers={"X-Request-Id": "mine"},
        )
        assert found.id == "cmpl-mine"
        client.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl():
    with in_thread(**FAST) as urls:
        body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 4, "stream": True})
        command = ["curl", "-sN", "-m", str(PATIENCE), "-H", "Content-Type: application/json", "-d", body]
        told = subprocess.run(
            [*command, urls[0] + "/v1/completions"], capture_output=True, check=True, text=True
        )
        lines = [line for line in told.stdout.splitlines() if line]
        assert lines[-1] == "data: [DONE]" and len(lines) == 5
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
        assert text == answer("Hello", 4)
        told = subprocess.run(
            ["curl", "-s", "-o", "-", "-w", "%{http_code}", urls[0] + "/health"],
            capture_output=True, check=True, text=True,
        )  # fmt: skip
        assert told.stdout == "200"
