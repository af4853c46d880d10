"""Coefficients of the tile model from a model's real matrices and a GPU's speed, memory and tiles."""

from __future__ import annotations

from dataclasses import dataclass

from headgate.core.errors import InputError
from headgate.cost.laws.tiles import TileTerms


@dataclass(frozen=True)
class Transformer:
    """The matrices of a decoder with grouped KV heads and a gated feed-forward net."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    bytes_per_weight: int = 2

    @property
    def width(self) -> int:
        """All queries of a token together: d of the paper."""
        return self.heads * self.head_size

    @property
    def layer(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of one layer's weights: Q, K, V, output, gate, up, down."""
        hidden, width, inner = self.hidden, self.width, self.feed_forward
        keys = self.kv_heads * self.head_size
        attention = ((width, hidden), (keys, hidden), (keys, hidden), (hidden, width))
        return (*attention, (inner, hidden), (inner, hidden), (hidden, inner))

    @property
    def body_weights(self) -> int:
        """Weights of all layers, without embeddings and head."""
        return self.layers * sum(rows * columns for rows, columns in self.layer)

    @property
    def head_weights(self) -> int:
        """Weights of the language-model head."""
        return self.vocabulary * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV per token, keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.bytes_per_weight

    def body_pairs(self, tile: tuple[int, int, int]) -> int:
        """Tile pairs of all layers for one column of tokens: G of the paper, without the head."""
        return self.layers * sum(_pairs(matrix, tile) for matrix in self.layer)

    def head_pairs(self, tile: tuple[int, int, int]) -> int:
        """The same for the head."""
        return _pairs((self.vocabulary, self.hidden), tile)


@dataclass(frozen=True)
class Gpu:
    """What a GPU does in practice: FLOP/s of large products, bytes/s, and the tiles of its best kernels.

    `kv_share` is the share of the memory's speed that attention reaches when it reads KV.
    """

    flops: float
    bandwidth: float
    tile: tuple[int, int, int] = (128, 128, 32)
    vector_tile: tuple[int, int] = (64, 64)
    kv_share: float = 1.0

    @property
    def per_pair(self) -> float:
        """Seconds of one tile pair, all units of the GPU together."""
        rows, columns, depth = self.tile
        return 2 * rows * columns * depth / self.flops


MISTRAL_7B = Transformer(32, 4096, 32, 8, 128, 14336, 32000)
QWEN3_8B = Transformer(36, 4096, 32, 8, 128, 12288, 151936)


def derive(
    model: Transformer, gpu: Gpu, constant: float, per_token: float, sampled_head: bool = True
) -> TileTerms:
    """The tile model's coefficients, without a measurement of steps.

    Args:
        model: the matrices.
        gpu: the speed; its `flops` should be measured, 45 to 70 % of the data sheet's are usual.
        constant: seconds per batch for scheduling, launching and sampling.
        per_token: seconds of non-linear work per token.
        sampled_head: the head is computed for sampled positions only, as engines do; else for every token,
            as the paper has it.
    """
    if gpu.tile[0] > model.head_size:
        raise InputError(
            f"a tile of {gpu.tile[0]} rows is taller than a head of {model.head_size}; attention would be "
            "under-counted, choose a tile of at most that many rows"
        )
    body, head = model.body_pairs(gpu.tile), model.head_pairs(gpu.tile)
    weights = model.body_weights + (0 if sampled_head else model.head_weights)
    kappa = model.kv_bytes / (gpu.bandwidth * gpu.kv_share)
    rows, columns = gpu.vector_tile
    return TileTerms(
        layers=model.layers,
        width=model.width,
        tile=gpu.tile,
        vector_tile=gpu.vector_tile,
        per_column=(body + (0 if sampled_head else head)) * gpu.per_pair,
        per_token=per_token,
        per_pair=gpu.per_pair,
        per_vector_pair=kappa * rows * columns / (2 * model.layers * model.width),
        constant=constant,
        floor=model.bytes_per_weight * weights / gpu.bandwidth,
        head_per_column=head * gpu.per_pair if sampled_head else 0.0,
    )


def _pairs(matrix: tuple[int, int], tile: tuple[int, int, int]) -> int:
    """Tiles that cover a weight matrix."""
    return -(-matrix[0] // tile[0]) * -(-matrix[1] // tile[2])
