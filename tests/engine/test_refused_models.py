"""Models without prefill and decode are refused at the start, with one line that says what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import tiny
from real import engine

from headgate.core.errors import InputError
from headgate.live.engine.settings import Settings
from headgate.live.vllm import factory


@pytest.mark.parametrize(
    "about", [{"runner_type": "pooling"}, {"runner_type": "generate", "is_diffusion": True}]
)
def test_pooling_and_diffusion(about):
    config = SimpleNamespace(model_config=SimpleNamespace(model="org/embedder", **about))
    with pytest.raises(InputError, match="org/embedder does not generate token by token; drop"):
        factory._refuse(Settings(), config)


def test_a_model_that_generates():
    factory._refuse(
        Settings(), SimpleNamespace(model_config=SimpleNamespace(model="m", runner_type="generate"))
    )


def test_a_pooling_model_on_the_real_engine(tmp_path):
    """Embeddings have no decode; without the plug-in vLLM serves them."""
    model = tiny.model(tmp_path / "model")
    refused = pytest.raises(InputError, match="does not generate token by token; drop --scheduler-cls")
    with refused, engine(model, False, runner="pooling", convert="embed"):
        pass
