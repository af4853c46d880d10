"""An emulated SGLang: /generate, its other paths, its metrics, its health, and what it refuses."""

import pytest
from calls_of_emulator import events_of, post, run, served, session

from headgate.core.errors import InputError
from headgate.live.emulate import answer, emulated
from headgate.live.emulate.options import Options
from headgate.live.emulate.service import EmulatorSetup
from headgate.settings_base import checked

SGLANG = {"engine": "sglang"}


async def generate(client, url, body, status=200):
    async with client.post(url + "/generate", json=body) as told:
        assert told.status == status, await told.text()
        return await told.json()


def test_generate_answers_as_sglang_does():
    async def test(client, url):
        asked = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 7, "temperature": 0}}
        found = await generate(client, url, asked | {"rid": "r-1"})
        assert found["text"] == answer("Once upon a time", 7) and len(found["output_ids"]) == 7
        about = found["meta_info"]
        assert about["id"] == "r-1" and about["finish_reason"] == {"type": "length", "length": 7}
        assert (about["prompt_tokens"], about["completion_tokens"], about["cached_tokens"]) == (4, 7, 0)
        assert about["e2e_latency"] > 0
        async with client.post(url + "/generate", json=asked | {"stream": True}) as told:
            events = events_of(await told.text())
        assert [len(event["output_ids"]) for event in events] == list(range(1, 8))  # each repeats the others
        assert events[-1]["text"] == found["text"] and found["text"].startswith(events[2]["text"])
        assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * 6
        ids = await generate(client, url, {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}})
        assert ids["text"] == answer([5, 6, 7], 3)
        several = await generate(client, url, {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}})
        assert [each["text"] for each in several] == [answer("a", 2), answer("b", 2)]
        default = await generate(client, url, {"text": "a", "sampling_params": {"ignore_eos": True}})
        assert default["meta_info"]["completion_tokens"] == 128
        stop = answer("Once upon a time", 7)[6:9]
        ended = await generate(client, url, {"text": "Once upon a time", "sampling_params": {"stop": stop}})
        assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        status, found = await post(client, url, {"prompt": "Once upon a time", "max_tokens": 7})
        assert status == 200 and found["choices"][0]["text"] == answer("Once upon a time", 7)

    served(test, **SGLANG)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "text, input_ids"),
        ({"text": "a", "input_ids": [1]}, "text, input_ids"),
        ({"text": ""}, "empty"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 10**9}}, "max_model_len"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "many"}}, "Expected `int"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": ["a", "b"], "stream": True}, "one prompt"),
        ({"text": "a", "stream": True, "sampling_params": {"n": 2}}, "one answer"),
        ({"text": [["a"]]}, "Expected"),
        ({"input_ids": [-1]}, "token ids"),
        ({"input_ids": [2**40]}, "out of vocabulary"),
    ],
)
def test_bad_bodies_are_answered_400(body, said):
    async def test(client, url):
        found = await generate(client, url, body, status=400)
        assert said in found["error"]["message"]

    served(test, **SGLANG)


def test_other_paths_are_sglangs():
    async def test(client, url):
        async with client.get(url + "/model_info") as told:
            assert (await told.json())["served_model_name"] == "tiny"
        async with client.get(url + "/get_model_info") as told:
            assert (await told.json())["is_generation"] is True
        async with client.get(url + "/server_info") as told:
            found = await told.json()
        assert (found["max_running_requests"], found["chunked_prefill_size"]) == (32, 2048)
        assert found["version"] == "0.5.23"
        async with client.get(url + "/v1/models") as told:
            assert (await told.json())["data"][0]["owned_by"] == "sglang"
        for path, status in (
            ("/health_generate", 200),
            ("/health", 200),
            ("/version", 404),
            ("/tokenize", 404),
        ):
            async with client.get(url + path) as told:
                assert told.status == status

    served(test, **SGLANG)


def test_metrics_have_sglangs_names():
    async def test(client, url):
        for _ in range(3):
            await generate(
                client, url, {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 5}}
            )
        async with client.get(url + "/metrics") as told:
            text = await told.text()
        values = {
            line.partition("{")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if not line.startswith("#")
        }
        assert values["sglang:num_running_reqs"] == values["sglang:num_queue_reqs"] == 0
        assert values["sglang:generation_tokens_total"] == 15 and values["sglang:num_requests_total"] == 3
        assert values["sglang:time_to_first_token_seconds_count"] == 3
        assert values["sglang:kv_available_tokens"] > 0 and values["sglang:token_usage"] == 0
        assert values["sglang:new_token_ratio"] == pytest.approx(0.7)
        assert "vllm:" not in text

    served(test, **SGLANG)


def test_one_that_drains_says_so_by_its_health_and_goes_on():
    async def main():
        async with emulated(card="cal-h200-qwen3-8b", speed=50.0, **SGLANG) as urls, session() as client:
            urls.ports[0].place.draining = True
            async with client.get(urls[0] + "/health") as told:
                assert told.status == 503
            found = await generate(client, urls[0], {"text": "a", "sampling_params": {"max_new_tokens": 2}})
            assert found["meta_info"]["completion_tokens"] == 2

    run(main())


def test_its_policy_is_sglangs_own_and_it_hands_no_kv_over():
    setup = EmulatorSetup(checked(Options, SGLANG))
    assert setup.policy_name == "sglang" and setup.engine.retraction == "shortest"
    assert not setup.options.kv_connector
    assert EmulatorSetup(checked(Options, SGLANG | {"policy": "eb+"})).policy_name == "eb+"
    with pytest.raises(InputError, match="hand-over of KV"):
        checked(Options, SGLANG | {"kv_connector": True})
