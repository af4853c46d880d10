"""Coefficients of the tile model from a model's real matrices and a GPU's speed, memory and tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headgate.core.errors import InputError
from headgate.cost.derive.transformer import MODELS, Transformer
from headgate.cost.laws.tiles import TileTerms


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
