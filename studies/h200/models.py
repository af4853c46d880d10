"""Model folders that nobody has to download: the shapes of Qwen3, and small ones with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

EMBEDDING_SPREAD = 1.0
GAIN = 2.0  # of every random matrix: below, all prompts end in the same few tokens


@dataclass(frozen=True)
class Shape:
    """What a Qwen3 config.json says of its size."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int
    dtype: str = "bfloat16"
    tied: bool = False  # the head is the embedding

    def write(self, folder: Path, longest: int = 40960) -> Path:
        """A folder with a config.json of this shape; enough where weights are made up."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {**self.config(), "max_position_embeddings": longest}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return folder

    def config(self) -> dict[str, object]:
        """As transformers reads it."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "rope_theta": 1000000,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": self.tied,
            "torch_dtype": self.dtype,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


@dataclass(frozen=True)
class MoeShape(Shape):
    """The same of a mixture of experts; `inner` is then never used.

    With made-up weights a word decides alone which experts it meets. Greedy decodes all say the same word and
    meet the same few experts; random words (a temperature of 1) meet all experts about equally, more evenly
    than with real weights, so that batches of middling size read more experts than they would.
    """

    experts: int = 128
    chosen: int = 8  # experts of one token
    expert_inner: int = 768

    def config(self) -> dict[str, object]:
        """As transformers reads it."""
        return super().config() | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.expert_inner,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


@dataclass(frozen=True)
class LlamaShape(Shape):
    """The same of Llama 3, which has no norms of queries and keys."""

    def config(self) -> dict[str, object]:
        """As transformers reads it."""
        return super().config() | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


QWEN3_8B = Shape(4096, 36, 32, 8, 128, 12288, 151936)
QWEN3_4B = Shape(2560, 36, 32, 8, 128, 9728, 151936, tied=True)
QWEN3_14B = Shape(5120, 40, 40, 8, 128, 17408, 151936)
LLAMA_8B = LlamaShape(4096, 32, 32, 8, 128, 14336, 128256)
QWEN3_30B_A3B = MoeShape(2048, 48, 32, 4, 128, 6144, 151936)
CHECKED = Shape(1024, 4, 16, 8, 64, 3072, 32768)  # for the comparison of tokens
TINY = Shape(128, 2, 4, 2, 32, 256, 1024, "float32")  # to try the scripts without a GPU
TINY_MOE = MoeShape(128, 2, 4, 2, 32, 256, 1024, "float32", experts=8, chosen=2, expert_inner=64)


def write_weights(shape: Shape, folder: Path, seed: int = 0) -> Path:
    """Random weights beside the config, wide enough that greedy outputs differ from prompt to prompt."""
    import torch
    from safetensors.torch import save_file

    shape.write(folder)
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def matrix(rows: int, columns: int, spread: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * spread).to(dtype)

    def linear(rows: int, columns: int) -> torch.Tensor:
        return matrix(rows, columns, GAIN / sqrt(columns))

    ones = torch.ones(shape.hidden, dtype=dtype)
    weights = {
        "model.embed_tokens.weight": matrix(shape.vocabulary, shape.hidden, EMBEDDING_SPREAD),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": linear(shape.vocabulary, shape.hidden),
    }
    width, kv_width = shape.heads * shape.head, shape.kv_heads * shape.head
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": ones.clone(),
            name + "post_attention_layernorm.weight": ones.clone(),
            name + "self_attn.q_proj.weight": linear(width, shape.hidden),
            name + "self_attn.k_proj.weight": linear(kv_width, shape.hidden),
            name + "self_attn.v_proj.weight": linear(kv_width, shape.hidden),
            name + "self_attn.o_proj.weight": linear(shape.hidden, width),
            name + "self_attn.q_norm.weight": torch.ones(shape.head, dtype=dtype),
            name + "self_attn.k_norm.weight": torch.ones(shape.head, dtype=dtype),
            name + "mlp.gate_proj.weight": linear(shape.inner, shape.hidden),
            name + "mlp.up_proj.weight": linear(shape.inner, shape.hidden),
            name + "mlp.down_proj.weight": linear(shape.hidden, shape.inner),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
