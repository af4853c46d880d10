"""Greedy tokens of a real engine under exclusive batching with vLLM's features on, equal to plain vLLM's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import tiny
from answers import assert_same, conversations, varied
from real import Ask, Kinds, Real, engine
from vllm.lora.request import LoRARequest

ARMS = ("eb:refill=4", "eb-online")
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
LITTLE = {"num_gpu_blocks_override": 32, "max_model_len": 512}  # memory for four of the longest requests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("llama"))


def compare(real: Real, asks: list[Ask]) -> list[Kinds]:
    """Every arm against plain vLLM in the same engine; what the steps of plain vLLM and of each held."""
    expected = real.serve(asks)
    assert varied(expected)
    kinds = [expected.kinds]
    for arm in ARMS:
        found = real.serve(asks, arm)
        assert_same(real, asks, expected, found)
        assert not found.kinds.mixed
        kinds.append(found.kinds)
    return kinds


@MODES
def test_prefix_caching(model: Path, asynchronous: bool) -> None:
    asks = conversations(count=30)
    with engine(model, asynchronous, enable_prefix_caching=True) as real:
        compare(real, asks)
        cached = [output.num_cached_tokens for output in real.serve(asks, ARMS[0]).outputs]
        assert sum(tokens >= 64 for tokens in cached) > len(asks) / 5  # of the common 96, whole blocks


@MODES
def test_whole_prompts_only(model: Path, asynchronous: bool) -> None:
    with engine(model, asynchronous, enable_chunked_prefill=False, max_model_len=256) as real:
        compare(real, conversations(count=30))


@MODES
def test_preemption(model: Path, asynchronous: bool) -> None:
    with engine(model, asynchronous, **LITTLE) as real:
        plain, exclusive, _ = compare(real, conversations(count=24, longest=90))
        assert plain.preempted and exclusive.preempted


@MODES
def test_priorities(model: Path, asynchronous: bool) -> None:
    rng = np.random.default_rng(2)
    asks = [replace(ask, priority=int(rng.integers(0, 4))) for ask in conversations(count=24, longest=90)]
    with engine(model, asynchronous, scheduling_policy="priority", **LITTLE) as real:
        plain, exclusive, _ = compare(real, asks)
        assert plain.preempted and exclusive.preempted


@MODES
def test_more_adapters_than_fit(model: Path, tmp_path: Path, asynchronous: bool) -> None:
    folders = [tiny.adapter(tmp_path / f"adapter{number}", number) for number in range(6)]
    adapters = [
        LoRARequest(f"lora{number}", number + 1, str(folder)) for number, folder in enumerate(folders)
    ]
    # Everybody has one: without a GPU, vLLM answers requests without any at random in such an engine.
    plain = conversations(count=24, longest=24)
    asks = [replace(ask, adapter=adapters[number % 6]) for number, ask in enumerate(plain)]
    words: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 8, "max_lora_rank": 8}
    with engine(model, asynchronous, **words) as real:
        compare(real, asks)
        others = [replace(ask, adapter=adapters[number % 5]) for number, ask in enumerate(plain)]
        assert real.serve(asks).tokens != real.serve(others).tokens  # adapters do change what is said
