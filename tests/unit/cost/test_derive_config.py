"""A model's shape from its config.json: what is read, what is not covered, what is nonsense."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.cost.derive.derived_card import WantedCard, derive_card
from headgate.cost.derive.transformer import MODELS, parse_config, read_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
}
GEMMA = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 21504,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
    "vision_config": {"hidden_size": 1152},
}


@pytest.mark.parametrize(
    ("document", "name"), [(LLAMA, "llama-3.1-8b"), (MOE, "qwen3-30b-a3b"), (GEMMA, "gemma-3-27b")]
)
def test_a_config_is_the_shape_of_the_table(document, name):
    model, uncovered, fp8 = parse_config(document, "here")
    assert (model, uncovered, fp8) == (MODELS[name], [], False)


def test_a_card_from_a_file_is_the_card_of_the_name(tmp_path):
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA))
    mine, named = load_card(f"derived:{file}@h100-sxm"), load_card("derived:llama-3.1-8b@h100-sxm")
    assert mine.work == named.work and mine.kv_tokens == named.kv_tokens
    assert mine.model == "llama-3.1-8b"


def test_shared_experts_and_dense_layers():
    more = {"n_shared_experts": 2, "first_k_dense_replace": 3, "shared_expert_intermediate_size": None}
    model, _, _ = parse_config({**MOE, **more}, "here")
    assert (model.shared_feed_forward, model.dense_layers, model.expert_layers) == (1536, 3, 45)
    plain = replace(model, shared_feed_forward=0, dense_layers=0)
    assert plain == MODELS["qwen3-30b-a3b"]


def test_all_layers_with_a_window():
    model, _, _ = parse_config({**LLAMA, "model_type": "mistral", "sliding_window": 4096}, "here")
    assert model.window == 4096 and model.full_layers == 0
    types = ["sliding_attention"] * 3 + ["full_attention"]
    model, _, _ = parse_config({**LLAMA, "sliding_window": 512, "layer_types": types * 8}, "here")
    assert (model.window, model.full_layers) == (512, 8)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"model_type": "mamba2"}, "state-space"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear-attention"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"model_type": "opt"}, "without gate"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised weights (awq)"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights (gptq)"),
    ],
)
def test_what_the_laws_do_not_cover_is_refused_unless_asked_for(tmp_path, more, said):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, **more}))
    wanted = WantedCard(str(file), "h100-sxm")
    with pytest.raises(InputError) as caught:
        derive_card(wanted)
    assert said in str(caught.value) and "--approximate" in str(caught.value)
    card = derive_card(replace(wanted, approximate=True))
    assert card.expected_error.throughput == 0.5
    assert any(said in text for text in card.provenance.assumptions)


def test_four_bit_weights_leave_more_room_for_kv(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "awq"}}))
    small = derive_card(WantedCard(str(file), "l4", approximate=True))
    assert small.kv_tokens > derive_card(WantedCard("llama-3.1-8b", "l4")).kv_tokens


def test_weights_stored_in_fp8_are_fp8_by_themselves(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "fp8"}}))
    own, named = (
        derive_card(WantedCard(str(file), "h100-sxm")),
        load_card("derived:llama-3.1-8b@h100-sxm:fp8"),
    )
    assert own.work == named.work and own.provenance.settings["quantization"] == "fp8"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "must be a whole number"),
        ({"hidden_size": -1}, "must be a whole number"),
        ({"hidden_size": 10**12}, "must be a whole number"),
        ({"num_hidden_layers": 3.5}, "must be a whole number"),
        ({"num_attention_heads": 33}, "no multiple of 33 heads"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok must be 1 to 8"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 99}, "more than the layers"),
    ],
)
def test_nonsense_is_one_line(more, said):
    with pytest.raises(InputError) as caught:
        parse_config({**LLAMA, **more}, "model config here")
    assert said in str(caught.value) and "here" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff"])
def test_a_file_that_is_no_config(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"config\.json"):
        read_config(file)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_only_regular_files_are_read(tmp_path, make):
    make(tmp_path / "config.json")
    with pytest.raises(InputError, match=r"not a regular file|Is a directory"):
        read_config(tmp_path / "config.json")


def test_a_huge_file_is_not_read(tmp_path):
    file = tmp_path / "config.json"
    with file.open("wb") as hole:
        hole.truncate(10**10)
    with pytest.raises(InputError, match="more than 4,194,304"):
        read_config(file)


def test_heads_must_divide(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128})
    )
    with pytest.raises(InputError, match="12 heads, which it does not divide"):
        derive_card(WantedCard(str(file), "h100-sxm", 8))
