"""A model's shape from the config.json of its repository, and what in it the laws do not cover."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headgate.core.errors import InputError
from headgate.cost.derive.transformer import Transformer

MOST = 10**9  # of any number in a config
LARGEST_FILE = 4 * 2**20  # bytes
STATES = ("mamba", "ssm", "rwkv", "recurrent", "linear_attention", "lfm2", "falcon_h1", "jamba", "zamba")
UNGATED = ("opt", "gpt2", "gpt_neox", "gptj", "bloom", "falcon", "mpt", "phi", "starcoder2", "gpt_bigcode")
LOCAL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6}  # layers of which one reads everything
FP8_METHODS = ("fp8", "compressed-tensors-fp8")


def read_config(path: str | Path) -> tuple[Transformer, list[str], bool]:
    """The shape, what the laws do not cover (one phrase each), and whether the weights are stored in fp8."""
    where = f"model config {path}"
    file = Path(str(path).replace("\0", "?"))
    try:
        size = file.stat().st_size
        if not file.is_file():  # opening a FIFO would wait for ever
            raise InputError(f"{where}: not a regular file; give a config.json")
        data = file.read_bytes() if size <= LARGEST_FILE else b""
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or type(error).__name__}; give a config.json") from None
    if size > LARGEST_FILE:
        raise InputError(f"{where}: {size:,} bytes; a config.json is a small file")
    try:
        document: Any = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise InputError(f"{where}: not JSON; give the config.json of a model") from None
    if not isinstance(document, dict):
        raise InputError(f"{where}: must be a JSON object; give the config.json of a model")
    return parse_config(document, where)


def parse_config(document: Mapping[str, Any], where: str) -> tuple[Transformer, list[str], bool]:
    """The same of a config that was read. Pictures and sound are left out: the text model is taken."""
    text = document.get("text_config")
    inner: Mapping[str, Any] = {**document, **text} if isinstance(text, dict) else document
    read = _Reader(inner, where)
    heads = read.count("num_attention_heads")
    hidden = read.count("hidden_size")
    kind = str(inner.get("model_type", ""))
    experts = read.first(("num_experts", "num_local_experts", "n_routed_experts"))
    each = read.optional("moe_intermediate_size") or read.optional("intermediate_size")
    window, full_every = _window(inner, kind, read)
    shared = read.optional("shared_expert_intermediate_size")
    shared += read.optional("n_shared_experts") * read.optional("moe_intermediate_size")
    model = Transformer(
        layers=read.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=read.optional("num_key_value_heads") or heads,
        head_size=read.optional("head_dim") or _head(hidden, heads, where),
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
    fp8 = _method(inner) in FP8_METHODS
    return model, _uncovered(inner, kind, fp8), fp8


class _Reader:
    """Numbers of a config: whole, positive, and not absurd."""

    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        self._document, self._where = document, where

    def count(self, name: str) -> int:
        """One that must be there."""
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

    def first(self, names: tuple[str, ...]) -> int:
        """Of several names for one thing."""
        return next((found for name in names if (found := self.optional(name))), 0)


def _head(hidden: int, heads: int, where: str) -> int:
    if hidden % heads:
        raise InputError(f"{where}: hidden_size {hidden} is no multiple of {heads} heads; give head_dim")
    return hidden // heads


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
    found = document.get("quantization_config")
    if not isinstance(found, dict):
        return ""
    method = str(found.get("quant_method", "unknown"))[:40]
    text = json.dumps(found)[:4000].lower()
    return f"{method}-fp8" if method == "compressed-tensors" and '"float"' in text else method


def _uncovered(document: Mapping[str, Any], kind: str, fp8: bool) -> list[str]:
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
    method = _method(document)
    if method and not fp8:
        found.append(f"quantised weights ({method})")
    return found
