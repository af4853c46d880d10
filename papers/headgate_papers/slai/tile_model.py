"""The tile model batch by batch, and its coefficients from a model's matrices and a GPU's tiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.cost.derive.transformer import MODELS, Transformer
from headgate.cost.laws.tiles import TileTerms
from headgate.cost.model import Chunk

Sides = tuple[int, int, int]


@dataclass(frozen=True)
class TileGpu:
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


MISTRAL_7B = replace(MODELS["mistral-7b"], vocabulary=32000)  # of its first release
QWEN3_8B = MODELS["qwen3-8b"]


def derive(
    model: Transformer, gpu: TileGpu, constant: float, per_token: float, sampled_head: bool = True
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
    body, head = body_pairs(model, gpu.tile), head_pairs(model, gpu.tile)
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


def body_pairs(model: Transformer, tile: Sides) -> int:
    """Tile pairs of all layers for one column of tokens: G of the paper, without the head."""
    inner, hidden = model.feed_forward, model.hidden
    layer = (*model.attention, (inner, hidden), (inner, hidden), (hidden, inner))
    return model.layers * sum(_pairs(matrix, tile) for matrix in layer)


def head_pairs(model: Transformer, tile: Sides) -> int:
    return _pairs((model.vocabulary, model.hidden), tile)


def _pairs(matrix: tuple[int, int], tile: Sides) -> int:
    return -(-matrix[0] // tile[0]) * -(-matrix[1] // tile[2])


# -- a batch given request by request


class Parts(NamedTuple):
    constant: float
    linear: float
    other: float  # non-linear work, by token
    decodes: float  # their attention
    prompts: float  # their attention
    head: float

    @property
    def total(self) -> float:
        return sum(self)


def batch_parts(terms: TileTerms, chunks: Iterable[Chunk], positions: Iterable[int]) -> Parts:
    """A batch given request by request: prompt chunks, and the position of each decode's newest token.

    Equations 4 to 7 of arXiv 2508.01002 with the missing 1/s of its equation 5, and the extensions of
    `TileTerms`; with those at zero it is equation 7. Nothing takes no time.
    """
    chunks, positions = tuple(chunks), tuple(positions)
    tokens = len(positions) + sum(chunk.tokens for chunk in chunks)
    if not tokens:
        return Parts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    columns = terms.tile[1]
    sampled = len(positions) + sum(chunk.last for chunk in chunks)
    read = sum(decode_pairs(terms, position) for position in positions)
    prompted = sum(terms.prompt_pairs(chunk.start, chunk.tokens) for chunk in chunks)
    return Parts(
        constant=terms.constant,
        linear=max(terms.floor, terms.per_column * -(-tokens // columns)),
        other=terms.per_token * tokens,
        decodes=terms.layers * terms.per_vector_pair * read,
        prompts=terms.layers * terms.per_pair * prompted,
        head=terms.head_per_column * -(-sampled // columns),
    )


def batch_seconds(terms: TileTerms, chunks: Iterable[Chunk], positions: Iterable[int]) -> float:
    return batch_parts(terms, chunks, positions).total


def decode_pairs(terms: TileTerms, position: int) -> float:
    """Tile pairs of a decode's attention in one layer; `position` is that of its newest token, from 1."""
    rows, columns = terms.vector_tile
    return terms.width / columns * -(-position // rows) + -(-position // columns) * (terms.width / rows)
