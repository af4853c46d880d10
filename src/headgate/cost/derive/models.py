"""Shapes of common models, as their published config.json has them."""

from __future__ import annotations

from dataclasses import replace

from headgate.core.errors import unknown
from headgate.cost.derive.transformer import Transformer

LLAMA, QWEN, GEMMA_2, GEMMA_3 = 128256, 151936, 256000, 262208  # vocabularies
LONG = 131072


def _llama(layers: int, hidden: int, heads: int, head: int, inner: int, tied: bool = False) -> Transformer:
    return Transformer(layers, hidden, heads, 8, head, inner, LLAMA, tied=tied, longest=LONG)


def _qwen3(layers: int, hidden: int, heads: int, inner: int, tied: bool = False) -> Transformer:
    return Transformer(layers, hidden, heads, 8, 128, inner, QWEN, tied=tied, longest=40960)


def _qwen3_moe(layers: int, hidden: int, heads: int, inner: int, each: int) -> Transformer:
    dense = Transformer(layers, hidden, heads, 4, 128, inner, QWEN, longest=40960)
    return replace(dense, experts=128, experts_per_token=8, expert_feed_forward=each)


def _mixtral(layers: int, hidden: int, heads: int, inner: int, words: int, longest: int) -> Transformer:
    dense = Transformer(layers, hidden, heads, 8, 128, inner, words, longest=longest)
    return replace(dense, experts=8, experts_per_token=2, expert_feed_forward=inner)


def _gemma(
    layers: int, hidden: int, heads: tuple[int, int, int], inner: int, words: int, window: tuple[int, int]
) -> Transformer:
    longest = 8192 if words == GEMMA_2 else LONG
    whole = Transformer(layers, hidden, *heads, inner, words, tied=True, longest=longest)
    return replace(whole, window=window[0], full_every=window[1])


MODELS: dict[str, Transformer] = {
    "llama-3.2-1b": _llama(16, 2048, 32, 64, 8192, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 128, 8192, tied=True),
    "llama-3.1-8b": _llama(32, 4096, 32, 128, 14336),
    "llama-3.1-70b": _llama(80, 8192, 64, 128, 28672),
    "llama-3.3-70b": _llama(80, 8192, 64, 128, 28672),
    "llama-3.1-405b": _llama(126, 16384, 128, 128, 53248),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 12288, 1536),
    "mistral-7b": Transformer(32, 4096, 32, 8, 128, 14336, 32768, longest=32768),
    "mistral-small-24b": Transformer(40, 5120, 32, 8, 128, 32768, 131072, longest=32768),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 32000, 32768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 32768, 65536),
    "gemma-2-9b": _gemma(42, 3584, (16, 8, 256), 14336, GEMMA_2, (4096, 2)),
    "gemma-2-27b": _gemma(46, 4608, (32, 16, 128), 36864, GEMMA_2, (4096, 2)),
    "gemma-3-4b": _gemma(34, 2560, (8, 4, 256), 10240, GEMMA_3, (1024, 6)),
    "gemma-3-12b": _gemma(48, 3840, (16, 8, 256), 15360, GEMMA_3, (1024, 6)),
    "gemma-3-27b": _gemma(62, 5376, (32, 16, 128), 21504, GEMMA_3, (1024, 6)),
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
