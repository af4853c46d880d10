"""What comes back: text, counts, ids, ends, for both endpoints, streamed or not."""

import asyncio

import pytest
from calls_of_emulator import FAST, post, run, served, session, stream, text_of

from headgate.live.emulate import answer, chat_answer, emulated

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi there, how are you?"}]


def test_a_completion_is_a_function_of_its_prompt():
    async def test(client, url):
        status, found = await post(client, url, {"prompt": "Once upon a time", "max_tokens": 7})
        assert status == 200
        assert found["choices"][0]["text"] == answer("Once upon a time", 7)
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["usage"]["prompt_tokens"] == 4 and found["usage"]["completion_tokens"] == 7
        events = await stream(client, url, {"prompt": "Once upon a time", "max_tokens": 7})
        assert text_of(events) == answer("Once upon a time", 7)
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert reasons[-1] == "length" and set(reasons[:-1]) == {None}

    served(test)


def test_text_and_its_token_ids_are_the_same_prompt():
    async def test(client, url):
        async with client.post(url + "/tokenize", json={"prompt": "two ways to say it"}) as told:
            found = await told.json()
        assert found["count"] == len(found["tokens"]) == 5 and found["token_strs"] is None
        async with client.post(url + "/detokenize", json={"tokens": found["tokens"]}) as told:
            assert (await told.json())["prompt"] == "two ways to say it"
        body = {"max_tokens": 5, "return_token_ids": True}
        _, one = await post(client, url, body | {"prompt": "two ways to say it"})
        _, two = await post(client, url, body | {"prompt": found["tokens"]})
        assert one["choices"] == two["choices"]
        assert one["choices"][0]["prompt_token_ids"] == found["tokens"]
        assert len(one["choices"][0]["token_ids"]) == 5

    served(test)


def test_chats():
    async def test(client, url):
        status, found = await post(client, url, {"messages": CHAT, "max_tokens": 6}, chat=True)
        assert status == 200 and found["object"] == "chat.completion"
        assert found["choices"][0]["message"]["content"] == chat_answer(CHAT, 6)
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"messages": CHAT, "max_completion_tokens": 6, "n": 2, "stream_options": options}
        events = await stream(client, url, body, chat=True)
        assert text_of(events, 0) == chat_answer(CHAT, 6) and text_of(events, 1) == chat_answer(CHAT, 6, 1)
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 12
        parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        _, found = await post(client, url, {"messages": parts, "max_tokens": 2}, chat=True)
        assert found["choices"][0]["message"]["content"] == chat_answer(
            [{"role": "user", "content": "ab"}], 2
        )

    served(test)


def test_several_prompts_and_choices_are_numbered_as_vllm_numbers_them():
    async def test(client, url):
        body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 4}
        wanted = [answer(prompt, 4, choice) for prompt in ("one", "two") for choice in (0, 1)]
        _, found = await post(client, url, body)
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in found["choices"]] == wanted
        assert found["usage"]["completion_tokens"] == 16
        events = await stream(client, url, body)
        assert [text_of(events, index) for index in range(4)] == wanted

    served(test)


def test_stop_strings_and_stop_tokens_end_an_answer():
    async def test(client, url):
        whole = answer("tell me", 20)
        third = whole.split()[2]
        body = {"prompt": "tell me", "max_tokens": 20}
        _, found = await post(client, url, body | {"stop": [third]})
        assert found["choices"][0]["text"] == answer("tell me", 2) + " "  # cut before the stop string
        assert found["choices"][0]["finish_reason"] == "stop" and found["choices"][0]["stop_reason"] == third
        assert found["usage"]["completion_tokens"] == 3
        _, found = await post(client, url, body | {"stop": third, "include_stop_str_in_output": True})
        assert found["choices"][0]["text"] == answer("tell me", 3)
        assert text_of(await stream(client, url, body | {"stop": third})) == answer("tell me", 2) + " "
        _, found = await post(client, url, body | {"return_token_ids": True})
        fifth = found["choices"][0]["token_ids"][4]
        _, found = await post(client, url, body | {"stop_token_ids": [fifth]})
        assert found["usage"]["completion_tokens"] == 5 and found["choices"][0]["stop_reason"] == fifth
        _, found = await post(client, url, body | {"stop": third, "min_tokens": 10})
        assert found["usage"]["completion_tokens"] >= 10

    served(test)


def test_lengths_come_from_a_law_and_are_the_same_everywhere():
    async def main():
        lengths = []
        for _ in range(2):
            async with emulated(**FAST, output=40, output_law="geometric") as urls, session() as client:
                bodies = [{"prompt": f"number {i}", "max_tokens": 100} for i in range(20)]
                found = await asyncio.gather(*(post(client, urls[0], body) for body in bodies))
                _, forced = await post(client, urls[0], bodies[0] | {"ignore_eos": True})
                assert forced["usage"]["completion_tokens"] == 100
            lengths.append([(each["usage"]["completion_tokens"], each["choices"][0]["finish_reason"])
                            for _, each in found])  # fmt: skip
        assert lengths[0] == lengths[1]
        assert len(set(lengths[0])) > 5
        assert all((reason == "length") == (length == 100) or length == 100 for length, reason in lengths[0])

    run(main())


def test_a_chat_without_a_limit_ends_by_itself():
    async def test(client, url):
        _, found = await post(client, url, {"messages": CHAT}, chat=True)
        assert found["choices"][0]["finish_reason"] == "stop"
        assert 256 <= found["usage"]["completion_tokens"] <= 768  # uniform, mean 512

    served(test)


def test_echo():
    async def test(client, url):
        _, found = await post(client, url, {"prompt": 'say it "back" ä', "max_tokens": 50})
        assert found["choices"][0]["finish_reason"] == "stop"
        events = await stream(client, url, {"prompt": 'say it "back" to me', "max_tokens": 50})
        assert text_of(events) == 'say it "back" to me'

    served(test, echo=True)

    async def asked(client, url):
        _, found = await post(client, url, {"prompt": "before", "max_tokens": 3, "echo": True})
        assert found["choices"][0]["text"] == "before" + answer("before", 3)

    served(asked)


@pytest.mark.parametrize("chat", [False, True])
def test_ids_priorities_parameters_and_logprobs(chat):
    async def test(client, url):
        body = (
            {"messages": CHAT, "logprobs": True, "top_logprobs": 2}
            if chat
            else {"prompt": "x", "logprobs": 2}
        )
        body |= {
            "max_tokens": 3,
            "priority": 3,
            "vllm_xargs": {"headgate_class": "chat", "headgate_ttft": 0.5},
        }
        status, found = await post(client, url, body, chat, **{"X-Request-Id": "abc\t1"})
        assert status == 200 and found["id"] == ("chatcmpl-abc1" if chat else "cmpl-abc1")
        logprobs = found["choices"][0]["logprobs"]
        assert len(logprobs["content"] if chat else logprobs["tokens"]) == 3
        events = await stream(client, url, body, chat)
        assert all(event["choices"][0]["logprobs"] for event in events if text_of([event]))

    served(test)


def test_an_http_1_0_client_gets_a_stream_without_chunks():
    async def test(client, url):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt": "old", "max_tokens": 3, "stream": true}'
        head = (
            f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        told = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        head, _, rest = told.partition("\r\n\r\n")
        assert (
            "chunked" not in head.lower() and rest.startswith("data: {") and rest.endswith("data: [DONE]\n\n")
        )

    served(test)


def test_a_real_tokenizer_counts_and_answers_in_its_own_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "Ġ", *(f"Ġword{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(600)), "hello"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: place for place, word in enumerate(words)}, "<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))

    async def test(client, url):
        body = {"prompt": "hello wordaa wordab", "max_tokens": 12, "return_token_ids": True}
        _, found = await post(client, url, body)
        choice = found["choices"][0]
        assert found["usage"]["prompt_tokens"] == 3
        assert choice["prompt_token_ids"] == made.encode("hello wordaa wordab").ids
        assert made.encode(choice["text"]).ids == choice["token_ids"] and len(choice["token_ids"]) == 12
        assert choice["text"] == made.decode(choice["token_ids"])

    served(test, tokenizer=str(tmp_path))
