"""Tokens of a real engine under every policy, equal to those of a vLLM that never heard of headgate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import tiny
from answers import assert_nearly_same, assert_same, conversations, varied
from real import BUDGET, EVERY_POLICY, NEVER_MIXES, SLOTS, Real, Served, engine
from vllm.sampling_params import StructuredOutputsParams

from headgate.methods.make import split_name

MODES, NAMES = [False, True], ["sync", "async"]
EB = "eb:refill=4"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=MODES, ids=NAMES)
def unmodified(request: pytest.FixtureRequest, model: Path) -> tuple[bool, Served]:
    """What vLLM says where headgate was never loaded."""
    with engine(model, request.param, plugin=False) as made:
        return request.param, made.serve(conversations())


@pytest.fixture(scope="module")
def real(unmodified: tuple[bool, Served], model: Path) -> Iterator[Real]:
    grammar = {"backend": "xgrammar", "disable_any_whitespace": True}  # or random weights say nothing else
    with engine(model, unmodified[0], structured_outputs_config=grammar) as made:
        yield made


@pytest.mark.parametrize("arm", EVERY_POLICY)
def test_every_policy(real: Real, unmodified: tuple[bool, Served], arm: str) -> None:
    asks, (_, expected) = conversations(), unmodified
    found = real.serve(asks, arm)
    assert_same(real, asks, expected, found)
    assert varied(expected) and expected.kinds.mixed
    if split_name(arm)[0] in NEVER_MIXES:
        assert found.kinds.mixed == 0
        assert found.kinds.prefill and found.kinds.decode


def test_silent_plugin_is_plain_vllm(real: Real, unmodified: tuple[bool, Served]) -> None:
    found = real.serve(conversations())
    assert found.tokens == unmodified[1].tokens
    assert found.kinds == unmodified[1].kinds


def test_clients_that_hang_up(real: Real) -> None:
    rng = np.random.default_rng(8)
    asks = [
        replace(ask, gone=ask.step + int(rng.integers(1, 40))) if number % 4 == 1 else ask
        for number, ask in enumerate(conversations())
    ]
    expected, found = real.serve(asks), real.serve(asks, EB)
    assert sum(answer is None for answer in found.tokens) == len(asks) // 4
    assert_same(real, asks, expected, found)
    assert found.kinds.mixed == 0


SAMPLING: dict[str, dict[str, Any]] = {
    "three samples": {"n": 3, "temperature": 0.9, "seed": 17},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 4},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "likelihoods": {"logprobs": 3, "prompt_logprobs": 2},
}


@pytest.mark.parametrize("words", SAMPLING.values(), ids=SAMPLING)
def test_sampling(real: Real, words: dict[str, Any]) -> None:
    asks = [replace(ask, words=words) for ask in conversations(count=24, longest=24)]
    if "seed" in words:  # without a GPU, vLLM cannot cut a prompt whose request has its own generator
        asks = [replace(ask, prompt=ask.prompt[-BUDGET // SLOTS :]) for ask in asks]
    expected, found = real.serve(asks), real.serve(asks, EB)
    assert found.kinds.mixed == 0
    assert_nearly_same(expected.tokens, found.tokens)
    if "logprobs" in words:
        for number, (one, other) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
            if expected.tokens[number] == found.tokens[number]:
                assert likelihoods(one) == pytest.approx(likelihoods(other), abs=1e-4)


def likelihoods(output: Any) -> list[float]:
    """Of what was said, and of the prompt."""
    said = zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
    heard = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return [choices[token].logprob for choices, token in (*said, *heard)]


def test_structured_output(real: Real) -> None:
    schema = {
        "type": "object",
        "properties": {"fruit": {"enum": ["apple", "pear"]}, "ripe": {"type": "boolean"}},
        "required": ["fruit", "ripe"],
        "additionalProperties": False,
    }
    grammars = [
        StructuredOutputsParams(choice=["alpha", "beta", "gamma"]),
        StructuredOutputsParams(regex="[a-f]{6,10}"),
        StructuredOutputsParams(json=schema),
        None,
    ]
    asks = [
        replace(ask, limit=60, words={"structured_outputs": grammars[number % 4], "ignore_eos": False})
        for number, ask in enumerate(conversations(count=24))
    ]
    expected, found = real.serve(asks), real.serve(asks, EB)
    assert found.kinds.mixed == 0
    assert_same(real, asks, expected, found)
    tokenizer = (
        real.llm.get_tokenizer()
    )  # vLLM's own text begins with the prompt where that ends in half a letter
    texts = [
        tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True) for output in found.outputs
    ]
    assert set(texts[::4]) <= {"alpha", "beta", "gamma"}
    assert all(re.fullmatch("[a-f]{6,10}", text) for text in texts[1::4])
    assert all(json.loads(text)["fruit"] in ("apple", "pear") for text in texts[2::4])


def test_clients_that_go_on_writing(real: Real) -> None:
    rng = np.random.default_rng(6)
    sessions = [
        [rng.integers(2, tiny.VOCABULARY, rng.integers(4, 60)).tolist() for _ in range(1 + number % 3)]
        for number in range(20)
    ]
    expected = real.talk(sessions, limit=12, arm=None)
    assert real.watch.kinds().mixed
    assert all(len(said) == 12 * len(inputs) for said, inputs in zip(expected, sessions, strict=True))
    assert_nearly_same(expected, real.talk(sessions, limit=12, arm=EB))
    assert real.watch.kinds().mixed == 0
