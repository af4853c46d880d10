"""The tile model fitted to timed batches: non-negative least squares, tile width and floor by hold-out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls  # type: ignore[import-untyped]

from headgate.core.errors import InputError
from headgate.cost.laws.tiles import TileTerms
from headgate.cost.model import Chunk

Floats = NDArray[np.float64]
Rows = NDArray[np.bool_]

WIDTHS = (64, 128, 256)  # tile columns that are tried
FLOORS = tuple((20 + step) / 20 for step in range(61))  # weight reading, in columns: 1.00, 1.05, ..., 4.00
HELD_OUT = 4  # every so many batches one is kept from the fit
OUTLIER = 3.0  # residuals beyond so many deviations are dropped once
TRUSTED = 0.95  # of the held-out batches, the nearest; the others may be outliers
FEWEST = 20
GOOD_MEDIAN, GOOD_P95 = 0.05, 0.15  # relative errors that a card may have


class Timed(NamedTuple):
    """A batch request by request, and how long it took."""

    chunks: tuple[Chunk, ...]
    positions: tuple[int, ...]  # of each decode's newest token, from 1
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Coefficients, and how far they are from batches they have not seen (relative errors)."""

    terms: TileTerms
    median: float
    p95: float
    dropped: int  # batches left out as outliers

    @property
    def good(self) -> bool:
        """Is it good enough for a card?"""
        return self.median < GOOD_MEDIAN and self.p95 < GOOD_P95


def features(batches: Sequence[Timed], like: TileTerms, floor: float) -> Floats:
    """One row per batch, in the order of the unknowns: constant, per column, token, vector pair, pair.

    All are known before a batch runs. `like` gives layers, width and tiles, `floor` the least number of
    columns (in which the reading of weights is expressed).
    """
    columns = like.tile[1]
    rows = []
    for batch in batches:
        tokens = len(batch.positions) + sum(chunk.tokens for chunk in batch.chunks)
        decodes = sum(like.decode_pairs(position) for position in batch.positions)
        prompts = sum(like.prompt_pairs(chunk.start, chunk.tokens) for chunk in batch.chunks)
        linear = max(floor, -(-tokens // columns))
        rows.append((1.0, linear, tokens, like.layers * decodes, like.layers * prompts))
    return np.array(rows, dtype=np.float64)


def fit_tiles(batches: Sequence[Timed], like: TileTerms, constant: bool = True) -> Fit:
    """The coefficients that fit timed batches best, in relative error.

    Tile columns (64, 128, 256) and the floor are scanned; the pair that predicts held-out batches best is
    fitted again to all of them. `like` gives layers, width and the other sides of the tiles; its
    coefficients are not read. Token counts must not all be multiples of a tile, or the price of a token
    cannot be told from that of a column. The head is part of `per_column`.

    Args:
        batches: at least 20, better 200 to 500: decodes alone at many sizes and contexts, chunks at several
            starts, mixtures.
        like: the model's and the tiles' sizes.
        constant: whether a batch may have a fixed cost.
    """
    seconds = _checked(batches)
    held = np.arange(len(batches)) % HELD_OUT == HELD_OUT - 1
    best: tuple[float, TileTerms, float, Floats] | None = None
    for columns in WIDTHS:
        tiled = replace(like, tile=(like.tile[0], columns, like.tile[2]))
        least = features(batches, tiled, 0.0)
        for floor in FLOORS:
            rows = least.copy()
            rows[:, 1] = np.maximum(rows[:, 1], floor)
            found, _ = _solve(rows, seconds, ~held, constant)
            errors = np.abs(rows[held] @ found / seconds[held] - 1)
            error = float(np.mean(np.sort(errors)[: int(np.ceil(TRUSTED * len(errors)))]))
            if best is None or error < best[0] * (1 - 1e-9):
                best = error, tiled, floor, errors
    assert best is not None
    _, tiled, floor, errors = best
    found, dropped = _solve(features(batches, tiled, floor), seconds, np.ones(len(held), bool), constant)
    return Fit(
        _terms(tiled, floor, found), float(np.median(errors)), float(np.quantile(errors, 0.95)), dropped
    )


def _checked(batches: Sequence[Timed]) -> Floats:
    seconds = np.array([batch.seconds for batch in batches], dtype=np.float64)
    if len(batches) < FEWEST:
        raise InputError(f"{len(batches)} timed batches; a fit needs at least {FEWEST}, measure more")
    if not np.all(np.isfinite(seconds)) or seconds.min() <= 0:
        raise InputError("a batch took no time, or no finite one; leave it out")
    if not all(batch.chunks or batch.positions for batch in batches):
        raise InputError("a timed batch is empty; leave it out")
    return seconds


def _solve(rows: Floats, seconds: Floats, use: Rows, constant: bool) -> tuple[Floats, int]:
    """Coefficients from the rows in use, once more without outliers; and how many those were."""
    found = _least_squares(rows[use], seconds[use], constant)
    residual = rows[use] @ found / seconds[use] - 1
    near = np.abs(residual) <= max(OUTLIER * float(np.std(residual)), 1e-9)
    if near.all():
        return found, 0
    return _least_squares(rows[use][near], seconds[use][near], constant), int((~near).sum())


def _least_squares(rows: Floats, seconds: Floats, constant: bool) -> Floats:
    """Relative errors squared, none of the coefficients negative; columns are scaled to be comparable."""
    relative = rows / seconds[:, None]
    if not constant:
        relative[:, 0] = 0.0
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(relative / scale, np.ones(len(seconds)))
    return np.asarray(found / scale, dtype=np.float64)


def _terms(like: TileTerms, floor: float, found: Floats) -> TileTerms:
    constant, per_column, per_token, per_vector_pair, per_pair = found.tolist()
    return replace(
        like,
        per_column=per_column,
        per_token=per_token,
        per_pair=per_pair,
        per_vector_pair=per_vector_pair,
        constant=constant,
        floor=floor * per_column if floor > 1 else 0.0,
        head_per_column=0.0,
    )
