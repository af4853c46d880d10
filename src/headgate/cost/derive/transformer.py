"""The matrices of a decoder and what they take: of any model, of common ones by name, or of a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headgate.core.errors import InputError, unknown
from headgate.core.files import read_json, read_text


@dataclass(frozen=True)
class Transformer:
    """A decoder with grouped KV heads and gated feed-forward nets, dense or with experts.

    `feed_forward` is the net of dense layers; with experts the first `dense_layers` have it, the others a
    router, `experts` of `expert_feed_forward` and a net of `shared_feed_forward` that every token passes.
    `window`: all layers but each `full_every`-th read at most that many tokens of context; 0: none does.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    bytes_per_weight: float = 2
    bytes_per_kv: float = 2
    experts: int = 0
    experts_per_token: int = 0
    expert_feed_forward: int = 0
    shared_feed_forward: int = 0
    dense_layers: int = 0
    tied: bool = False  # the head is the embedding, stored once
    window: int = 0
    full_every: int = 1
    longest: int = 32768  # positions the model was made for

    @property
    def width(self) -> int:
        """All queries of a token together: d of the EB paper. Not always `hidden`."""
        return self.heads * self.head_size

    @property
    def attention(self) -> tuple[tuple[int, int], ...]:
        keys = self.kv_heads * self.head_size
        return ((self.width, self.hidden), *[(keys, self.hidden)] * 2, (self.hidden, self.width))

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def full_layers(self) -> int:
        return self.layers if not self.window else self.layers // self.full_every

    @property
    def body_weights(self) -> int:
        net = 3 * self.hidden  # for each row of a gated one
        routed = self.experts * (self.hidden + net * self.expert_feed_forward)
        dense = (self.layers - self.expert_layers) * net * self.feed_forward
        mixed = self.expert_layers * (routed + net * self.shared_feed_forward)
        return self.layers * sum(rows * columns for rows, columns in self.attention) + dense + mixed

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """All matrices: layers, head and embedding. Norms and biases, under 0.01 %, are left out."""
        return self.body_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def kv_bytes(self) -> float:
        return 2 * self.layers * self.kv_heads * self.head_size * self.bytes_per_kv

    def shape(self) -> dict[str, int]:
        sizes = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "kv_heads": self.kv_heads}
        sizes |= {"head_size": self.head_size, "inner": self.feed_forward, "vocabulary": self.vocabulary}
        if self.experts:
            sizes |= {"experts": self.experts, "experts_per_token": self.experts_per_token}
            sizes |= {"expert_inner": self.expert_feed_forward}
        return sizes


# -- shapes of common models, as published

LLAMA, QWEN, GEMMA_2, GEMMA_3 = 128256, 151936, 256000, 262208  # vocabularies
LONG = 131072


_llama = partial(Transformer, kv_heads=8, vocabulary=LLAMA, longest=LONG)
_qwen3 = partial(Transformer, kv_heads=8, head_size=128, vocabulary=QWEN, longest=40960)
_qwen3_moe = partial(_qwen3, kv_heads=4, experts=128, experts_per_token=8)
_mistral = partial(Transformer, kv_heads=8, head_size=128, longest=32768)
_mixtral = partial(_mistral, experts=8, experts_per_token=2)
_gemma2 = partial(Transformer, vocabulary=GEMMA_2, tied=True, longest=8192, window=4096, full_every=2)
_gemma3 = partial(Transformer, vocabulary=GEMMA_3, tied=True, longest=LONG, window=1024, full_every=6)
# Layers, hidden, heads; for Gemma KV heads, size of a head and inner size, too
MODELS: dict[str, Transformer] = {
    "llama-3.2-1b": _llama(16, 2048, 32, head_size=64, feed_forward=8192, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 24, head_size=128, feed_forward=8192, tied=True),
    "llama-3.1-8b": _llama(32, 4096, 32, head_size=128, feed_forward=14336),
    "llama-3.1-70b": _llama(80, 8192, 64, head_size=128, feed_forward=28672),
    "llama-3.3-70b": _llama(80, 8192, 64, head_size=128, feed_forward=28672),
    "llama-3.1-405b": _llama(126, 16384, 128, head_size=128, feed_forward=53248),
    "qwen3-0.6b": _qwen3(28, 1024, 16, feed_forward=3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, feed_forward=6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, feed_forward=9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, feed_forward=12288),
    "qwen3-14b": _qwen3(40, 5120, 40, feed_forward=17408),
    "qwen3-32b": _qwen3(64, 5120, 64, feed_forward=25600),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, feed_forward=6144, expert_feed_forward=768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, feed_forward=12288, expert_feed_forward=1536),
    "mistral-7b": _mistral(32, 4096, 32, feed_forward=14336, vocabulary=32768),
    "mistral-small-24b": _mistral(40, 5120, 32, feed_forward=32768, vocabulary=131072),
    "mixtral-8x7b": _mixtral(32, 4096, 32, feed_forward=14336, expert_feed_forward=14336, vocabulary=32000),
    "mixtral-8x22b": _mixtral(
        56, 6144, 48, feed_forward=16384, expert_feed_forward=16384, vocabulary=32768, longest=65536
    ),
    "gemma-2-9b": _gemma2(42, 3584, 16, 8, 256, 14336),
    "gemma-2-27b": _gemma2(46, 4608, 32, 16, 128, 36864),
    "gemma-3-4b": _gemma3(34, 2560, 8, 4, 256, 10240),
    "gemma-3-12b": _gemma3(48, 3840, 16, 8, 256, 15360),
    "gemma-3-27b": _gemma3(62, 5376, 32, 16, 128, 21504),
}


def model_named(name: str) -> tuple[str, Transformer]:
    """A shape of the table; the owner before a slash, case and suffixes such as -Instruct do not matter."""
    plain = name.rsplit("/", 1)[-1].lower()
    for suffix in ("-instruct", "-it", "-chat", "-base", "-v0.1", "-v0.3", "-2507"):
        plain = plain.replace(suffix, "")
    plain = plain.replace("meta-llama", "llama")
    if plain not in MODELS:
        raise unknown("model", name, sorted(MODELS))
    return plain, MODELS[plain]


# -- a shape from a config.json

MOST = 10**9  # of any number in a config
LARGEST_FILE = 4 * 2**20  # bytes
STATES = ("mamba", "ssm", "rwkv", "recurrent", "linear_attention", "lfm2", "falcon_h1", "jamba", "zamba")
UNGATED = ("opt", "gpt2", "gpt_neox", "gptj", "bloom", "falcon", "mpt", "phi", "starcoder2", "gpt_bigcode")
LOCAL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6}  # layers of which one reads everything


def read_config(path: str | Path) -> tuple[Transformer, list[str], bool]:
    """The shape, what the laws do not cover (one phrase each), and whether the weights are stored in fp8."""
    where = f"model config {path}"
    text = read_text(str(path), "model config", "give a config.json", LARGEST_FILE)
    document = read_json(text, where, "give the config.json of a model")
    return parse_config(document, where)


def parse_config(document: Mapping[str, Any], where: str) -> tuple[Transformer, list[str], bool]:
    """The same of a config that was read. Pictures and sound are left out: the text model is taken."""
    text = document.get("text_config")
    inner: Mapping[str, Any] = {**document, **text} if isinstance(text, dict) else document
    read = _Reader(inner, where)
    heads = read.count("num_attention_heads")
    hidden = read.count("hidden_size")
    kind = str(inner.get("model_type", ""))
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((found for name in names if (found := read.optional(name))), 0)
    each = read.optional("moe_intermediate_size") or read.optional("intermediate_size")
    if not read.optional("head_dim") and hidden % heads:
        raise InputError(f"{where}: hidden_size {hidden} is no multiple of {heads} heads; give head_dim")
    window, full_every = _window(inner, kind, read)
    shared = read.optional("shared_expert_intermediate_size")
    shared += read.optional("n_shared_experts") * read.optional("moe_intermediate_size")
    model = Transformer(
        layers=read.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=read.optional("num_key_value_heads") or heads,
        head_size=read.optional("head_dim") or hidden // heads,
        feed_forward=read.optional("intermediate_size") or 4 * hidden,
        vocabulary=read.count("vocab_size"),
        experts=experts,
        experts_per_token=read.optional("num_experts_per_tok") if experts else 0,
        expert_feed_forward=each if experts else 0,
        shared_feed_forward=shared if experts else 0,
        dense_layers=read.optional("first_k_dense_replace") if experts else 0,
        tied=bool(inner.get("tie_word_embeddings", kind.startswith("gemma"))),
        window=window,
        full_every=full_every,
        longest=read.optional("max_position_embeddings") or 32768,
    )
    if experts and not 1 <= model.experts_per_token <= experts:
        raise InputError(f"{where}: num_experts_per_tok must be 1 to {experts}; correct it")
    if model.dense_layers > model.layers:
        raise InputError(f"{where}: first_k_dense_replace is more than the layers; correct it")
    method = _method(inner)
    fp8 = method in ("fp8", "compressed-tensors-fp8")
    return model, _uncovered(inner, kind, "" if fp8 else method), fp8


class _Reader:
    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        self._document, self._where = document, where

    def count(self, name: str) -> int:
        if self._document.get(name) is None:
            raise InputError(f"{self._where}: {name} is missing; give the config.json of a decoder")
        return max(1, self.optional(name))

    def optional(self, name: str) -> int:
        """One that may be missing or null: 0."""
        value = self._document.get(name)
        if value is None:
            return 0
        if type(value) is not int or not 0 <= value <= MOST:
            raise InputError(f"{self._where}: {name} must be a whole number, not {str(value)[:40]}; fix it")
        return value


def _window(document: Mapping[str, Any], kind: str, read: _Reader) -> tuple[int, int]:
    """The window of layers that have one, and how often a layer has none; (0, 1): none has one."""
    window = read.optional("sliding_window")
    if not window or document.get("use_sliding_window") is False:
        return 0, 1
    types = document.get("layer_types")
    if isinstance(types, list) and types:
        full = sum(each == "full_attention" for each in types)
        return (window, max(1, round(len(types) / full))) if full else (window, len(types) + 1)
    every = read.optional("sliding_window_pattern") or LOCAL_EVERY.get(kind, 0)
    return window, every or read.count("num_hidden_layers") + 1


def _method(document: Mapping[str, Any]) -> str:
    quantised = document.get("quantization_config")
    if not isinstance(quantised, dict):
        return ""
    method = str(quantised.get("quant_method", "unknown"))[:40]
    text = json.dumps(quantised)[:4000].lower()
    return f"{method}-fp8" if method == "compressed-tensors" and '"float"' in text else method


def _uncovered(document: Mapping[str, Any], kind: str, method: str) -> list[str]:
    found = []
    if document.get("kv_lora_rank") or document.get("q_lora_rank"):
        found.append("multi-head latent attention (MLA)")
    types = document.get("layer_types")
    layers = {str(each) for each in types} if isinstance(types, list) else set()
    known = [str(document.get(name)) for name in ("layers_block_type", "hybrid_override_pattern", "ssm_cfg")]
    if any(state in kind or state in layers for state in STATES) or any(each != "None" for each in known):
        found.append("state-space or linear-attention layers")
    if document.get("is_encoder_decoder"):
        found.append("an encoder")
    if kind in UNGATED:
        found.append(f"a feed-forward net without gate ({kind})")
    if method:
        found.append(f"quantised weights ({method})")
    return found
