"""A tiny Llama that nobody has to download: random weights, a tokenizer of bytes, LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 64, 128, 2, 2, 1, 32, 1024
SPREAD = 0.25  # of the weights: wide enough that greedy outputs differ from prompt to prompt
RANK = 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # rows and columns of the matrices of a layer


def model(folder: Path, seed: int = 0, noise: float = 0.0) -> Path:
    """Config, weights and tokenizer; with a little noise it is a drafter for the model without."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    made = torch.Generator().manual_seed(seed)
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=made) * SPREAD,
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN, generator=made) * SPREAD,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN)
        for name, shape in SHAPES.items():
            weights[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape, generator=made) * SPREAD
    if noise:
        weights = {name: each + noise * torch.randn(each.shape, generator=made) if "_proj" in name else each
                   for name, each in weights.items()}  # fmt: skip
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(folder)
    return folder


def eagle(folder: Path) -> Path:
    """A head of one layer over the model's own hidden states; untrained: few of its drafts are right."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    made = torch.Generator().manual_seed(7)
    weights = {"fc.weight": torch.randn(HIDDEN, 2 * HIDDEN, generator=made) * SPREAD}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    for name, shape in SHAPES.items():
        weights[f"layers.0.{name}.weight"] = torch.randn(shape, generator=made) * SPREAD
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(folder)
    return folder


def _tokenizer(folder: Path) -> None:
    """Every byte is a token; the others are words nobody writes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet]
    words += [f"<{number}>" for number in range(VOCABULARY - len(words))]
    made = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    words_of_it = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words_of_it))


def adapter(folder: Path, number: int) -> Path:
    """A LoRA adapter that changes what the model says."""
    folder.mkdir(parents=True, exist_ok=True)
    made = torch.Generator().manual_seed(1000 + number)
    targets = ["q_proj", "v_proj"]
    weights = {}
    for layer in range(LAYERS):
        for name in targets:
            rows, columns = SHAPES[f"self_attn.{name}"]
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(RANK, columns, generator=made) * SPREAD
            weights[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=made) * SPREAD
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": targets,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
