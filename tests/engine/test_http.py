"""The whole thing over HTTP: `headgate serve`, the openai client, and a policy that breaks under load.

One server lives through the file, because starting it takes a minute; the tests run in their order.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from http_server import MAIN, ONE_PROCESS, START, Server, environment, eventually, served, start, stop

from headgate.core.policy import End
from headgate.record.tables import ENDS, Run

SLOTS = 16
FIRST = {
    "policy": "eb",
    "set": {"refill": 4},
    "trace": "steps.jsonl",
    "log_every": "1s",
    "clients_may": ["class", "ttft", "tbt", "guess"],
    "classes": {"chat": {"ttft": "2s", "tbt": "1s"}, "batch": {}},
}
BREAKS = """
from headgate import ALL, BatchPolicy, Plan

class Breaks(BatchPolicy):
    \"\"\"Mixed batching for a while; then an error in the middle of everything.\"\"\"

    def __init__(self):
        self.asked = 0

    def plan(self, view):
        self.asked += 1
        if self.asked > 100:
            raise ZeroDivisionError("this policy is broken")
        slots = max(0, view.limits.running - len(view.decoding) - len(view.prefilling))
        return Plan(ALL, (*view.prefilling, *[*view.waiting][:slots]))
"""


@pytest.fixture(scope="module")
def server(model, scratch):
    (scratch / "bad.py").write_text(BREAKS)
    (scratch / "headgate.json").write_text(json.dumps(FIRST))
    with served(model, scratch, "--config", "headgate.json", "--max-num-seqs", str(SLOTS)) as found:
        yield found


def change(scratch, **words) -> None:
    """Other settings; observers stay as they were at the start."""
    (scratch / "new.json").write_text(json.dumps({**FIRST, "set": {}, **words}))
    (scratch / "new.json").replace(scratch / "headgate.json")  # whole or not at all, whoever looks


def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=START, max_retries=0)


async def ask(api: openai.AsyncOpenAI, number: int, tokens: int, **words) -> str:
    """One completion, not streamed; its text."""
    answer = await api.completions.create(
        model="tiny",
        prompt=f"request {number}: " + "x" * (number * 7 % 60),
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "vllm_xargs": words} if words else {"ignore_eos": True},
    )
    assert answer.usage is not None and answer.usage.completion_tokens == tokens
    assert answer.choices[0].finish_reason == "length"
    return answer.choices[0].text


def ask_all(server: Server, count: int, tokens: int, **words) -> list[str]:
    """So many at the same time."""

    async def together() -> list[str]:
        async with client(server) as api:
            return await asyncio.gather(*(ask(api, n, tokens + n % 7, **words) for n in range(count)))

    return asyncio.run(together())


def alike(texts: list[str], others: list[str]) -> None:
    """The same but for near-ties: another batch rounds differently on a CPU."""
    assert len(texts) == len(others)
    assert sum(text == other for text, other in zip(texts, others, strict=True)) >= 0.9 * len(texts)


def total(server: Server, name: str, labels: str = "") -> float:
    return server.metrics().get((name, labels), 0.0)


def test_what_is_on_is_said_at_the_start(server):
    command, engine = server.said("headgate: policy ")
    assert "policy eb" in command
    assert f"policy eb(slots={SLOTS}, refill=4)" in engine
    assert server.said("headgate: trace in steps.jsonl")
    assert total(server, "headgate_threshold") == 0  # no plan yet
    assert total(server, "headgate_fallen") == 0


def test_streams(server):
    async def stream() -> list[str]:
        async with client(server) as api:
            words = {"ignore_eos": True, "vllm_xargs": {"headgate_class": "chat", "headgate_guess": 300}}
            parts = await api.completions.create(
                model="tiny", prompt="hello", max_tokens=300, temperature=0, stream=True, extra_body=words
            )
            return [part.choices[0].text async for part in parts if part.choices]

    parts = asyncio.run(stream())
    assert len(parts) > 10  # not token by token: a front end that falls behind sends several at once
    server.beyond("headgate_finished_total", 'how="limit"', 0)


def test_two_hundred_at_once_without_a_mixed_step(server):
    alone = asyncio.run(_one_by_one(server, 20, 12))
    texts = ask_all(server, 200, 12)
    assert len(texts) == 200 and all(texts)
    alike(texts[:20], alone)  # the batch does not change what is said
    server.until("headgate_requests", 'state="decoding"', 0)
    server.until("headgate_requests", 'state="waiting"', 0)
    server.beyond("headgate_steps_total", 'kind="prefill"', 20 + 200 / SLOTS)
    server.beyond("headgate_stall_seconds_count", "", 0)
    assert total(server, "headgate_steps_total", 'kind="mixed"') == 0
    assert total(server, "headgate_threshold") == 4 and total(server, "headgate_slots") == SLOTS
    eventually(lambda: bool(server.said("steps in ")), "the line in the log")


async def _one_by_one(server: Server, count: int, tokens: int) -> list[str]:
    async with client(server) as api:
        return [await ask(api, number, tokens + number % 7) for number in range(count)]


def test_clients_that_hang_up_in_mid_stream(server):
    async def hang_up(api: openai.AsyncOpenAI, number: int) -> None:
        parts = await api.completions.create(
            model="tiny",
            prompt=f"hang up {number}",
            max_tokens=900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        seen = 0
        async for _ in parts:
            seen += 1
            if seen == 3 + number % 5:
                break
        await parts.close()

    async def together() -> list[str]:
        async with client(server) as api:
            hanging = [hang_up(api, number) for number in range(24)]  # some of them in the queue for a while
            staying = [ask(api, number, 40) for number in range(24)]
            return (await asyncio.gather(*hanging, *staying))[24:]

    texts = asyncio.run(together())
    assert len(texts) == 24 and all(texts)
    server.until("headgate_finished_total", 'how="aborted"', 24)
    for state in ("waiting", "prefilling", "decoding"):
        server.until("headgate_requests", f'state="{state}"', 0)
    assert total(server, "headgate_fallen") == 0


def test_words_of_requests_right_and_wrong(server):
    ask_all(server, 4, 5, headgate_class="chat", headgate_ttft="500ms", headgate_tbt=0.1, headgate_guess=9)
    ask_all(server, 4, 5, headgate_class="nobody", headgate_ttft="soon", headgate_gues=3)
    for word in ("headgate_class", "headgate_ttft", "others"):
        server.until("headgate_ignored_words_total", f'word="{word}"', 4)
    assert len(server.said("headgate_ttft of a request ignored")) == 1


def use(server: Server, scratch, policy: str, **words) -> None:
    """Writes the settings and serves a little until they are in force."""
    change(scratch, policy=policy, **words)
    for _ in range(60):
        ask_all(server, 1, 3)
        if server.uses(policy):
            return
    raise AssertionError(f"{policy} never came into force: {server.said('headgate')[-5:]}")


def test_settings_are_read_again(server, scratch):
    use(server, scratch, "mixed", card="linear-h200-qwen3-8b")
    before = total(server, "headgate_steps_total", 'kind="mixed"')
    ask_all(server, 60, 20)
    server.beyond("headgate_steps_total", 'kind="mixed"', before)
    change(scratch, polcy="v0")
    eventually(
        lambda: bool(ask_all(server, 1, 3) and server.said("unknown field 'polcy'")), "a word about it"
    )
    ask_all(server, 4, 20)
    (line,) = server.said("unknown field 'polcy'")
    assert "the settings in force stay" in line
    assert total(server, "headgate_renewals_total") == 1


def test_a_policy_that_breaks_under_load_loses_nobody(server, scratch):
    good = ask_all(server, 60, 40)
    use(server, scratch, "bad.py:Breaks")
    assert total(server, "headgate_fallen") == 0
    alike(ask_all(server, 60, 40), good)  # it breaks somewhere in there
    server.until("headgate_fallen", "", 1)
    (line,) = server.said("FALLEN BACK")
    assert "ZeroDivisionError: this policy is broken" in line and "bad.py" in line
    assert total(server, "headgate_mode", 'mode="fallback"') == 1
    assert ask_all(server, 20, 10)  # and vLLM serves on
    use(server, scratch, "v0")
    server.until("headgate_fallen", "", 0)
    alike(ask_all(server, 60, 40), good)


def test_the_end(server, scratch):
    """It stops as it is told, and its trace is the record of all of it."""
    trace = scratch / "steps.jsonl"
    left = sum(count for (name, _), count in server.metrics().items() if name == "headgate_finished_total")
    # vLLM kills its engine when it stops; what the trace has not written by then is lost.
    eventually(lambda: trace.read_text().count('"event":"finished"') >= left, "all of it in the trace")
    assert stop(server) == 0
    run = Run.load(trace)
    how = [ENDS[code] for code in run.requests["how"].tolist()]
    assert len(how) == left
    assert how.count(End.ABORTED) == 24 and run.meta["outcome"] == "finished"
    assert how.count(End.LIMIT) == len(how) - 24 > 400
    assert [kind["name"] for kind in run.meta["kinds"]] == ["chat", ""]
    assert "ZeroDivisionError" in run.meta["fallbacks"][0]["reason"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "trace", "steps.jsonl", "--out", "run"],
        env=environment(scratch), cwd=scratch, capture_output=True, text=True, timeout=START,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"eb on vLLM, {len(how)} requests" in done.stdout


def test_a_wrong_option_stops_the_server_at_the_start_with_one_line(model, scratch):
    """Without `headgate serve`, which would have seen it at once."""
    options = [
        "--scheduler-cls",
        "headgate.vllm.scheduler",
        "--additional-config",
        '{"headgate": {"polcy": 1}}',
    ]
    vllm = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
    server = start(vllm, scratch, *options, **ONE_PROCESS)
    try:
        assert server.child.wait(START) != 0
    finally:
        stop(server)
    (line,) = server.said("[factory.py")
    assert "headgate: --additional-config, headgate: unknown field 'polcy'; did you mean 'policy'?" in line
