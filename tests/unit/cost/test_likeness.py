"""Cards of another model, release, GPU or setting are noticed where both sides say what they are."""

from __future__ import annotations

import pytest

from headgate.core.errors import InputError
from headgate.cost.card import Card, load_card
from headgate.cost.likeness import Likeness, doubts, refusals
from headgate.live.engine.policy import build_policy
from headgate.live.engine.settings import Settings
from headgate.live.vllm import VLLM

SHAPE = {"layers": 36, "hidden": 4096, "heads": 32}
SETTINGS = {"tensor parallel": "1", "dtype": "bfloat16"}
LIMITS = {"kv_tokens": 10_000, "block": 16, "max_model_len": 2048, "batch_tokens": 512, "running": 8}


def card() -> Card:
    """A shipped card that says of which model it is."""
    plain = load_card("linear-h200-qwen3-8b")
    update = {"model_shape": SHAPE, "settings": SETTINGS, "versions": {"vllm": "0.26.0"}}
    return plain.model_copy(update={"provenance": plain.provenance.model_copy(update=update)})


def test_the_same_engine_is_the_same() -> None:
    engine = Likeness({**SHAPE, "experts": 8}, "0.26.1", "NVIDIA H200", SETTINGS)
    assert refusals(card(), engine) == []
    assert doubts(card(), engine) == []


def test_nothing_is_said_where_nothing_is_known() -> None:
    plain = load_card("linear-h200-qwen3-8b")
    assert refusals(plain, Likeness(SHAPE, settings=SETTINGS)) == []
    assert doubts(card(), Likeness()) == []


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (
            Likeness({**SHAPE, "layers": 48}),
            "is of another model (Qwen3-8B): layers 36 instead of 48; calibrate",
        ),
        (Likeness(settings={"tensor parallel": "2"}), "measured with tensor parallel 1, this engine has 2"),
    ],
)
def test_another_model_is_refused(engine: Likeness, says: str) -> None:
    (line,) = refusals(card(), engine)
    assert says in line
    assert line.endswith("or give --any-card")
    assert doubts(card(), engine) == []


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (Likeness(vllm="0.31.0"), "was measured on vLLM 0.26.0, this is 0.31.0"),
        (Likeness(gpu="NVIDIA A100-SXM4-80GB"), "on NVIDIA H200 141 GB, this is NVIDIA A100-SXM4-80GB"),
        (
            Likeness(settings={"dtype": "float16"}),
            "was measured with dtype bfloat16, this engine has float16",
        ),
    ],
)
def test_another_release_is_told(engine: Likeness, says: str) -> None:
    (line,) = doubts(card(), engine)
    assert says in line
    assert refusals(card(), engine) == []


def test_the_plug_in_refuses_unless_told_otherwise(
    tmp_path: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"{tmp_path}/mine.json"
    card().save(path)
    other = Likeness({**SHAPE, "layers": 48})
    with pytest.raises(InputError, match="is of another model"):
        build_policy(Settings(policy="mixed", card=path), VLLM, **LIMITS, like=other)
    build_policy(Settings(policy="mixed", card=path, any_card=True), VLLM, **LIMITS, like=other)
    assert "is of another model" in caplog.text
    build_policy(Settings(policy="mixed", card=path), VLLM, **LIMITS, like=Likeness(SHAPE))
