"""The tile-aware time of a batch: work in whole tiles, weights read once, attention per request."""

from __future__ import annotations

from dataclasses import dataclass

from headgate.cost.model import Chunk, Shape, StepCost, Terms


@dataclass(frozen=True)
class TileTerms(Terms):
    """The coefficients of the tile model, in seconds and tokens.

    `tile` is the output tile of a matrix product and its depth (rows, columns, reduction); tokens are its
    columns. A *pair* is one tile of weights times one tile of tokens, a *column* is what one tile of tokens
    costs in all linear layers together. `vector_tile` is the same for products with a single vector.

    In the order given, the paper's N, d, (t_row, t_col, t_red), (v_row, v_col), 1/mu_Lin, 1/mu_nLin,
    1/(s mu), 1/(s mu_v); then what we add to it: a constant per batch, the time to read all weights once
    (a floor under the linear layers), and a language-model head that is computed for sampled positions only
    and so counted apart (zero where `per_column` contains it, as in the paper).
    """

    layers: int
    width: int
    tile: tuple[int, int, int]
    vector_tile: tuple[int, int]
    per_column: float
    per_token: float
    per_pair: float
    per_vector_pair: float
    constant: float = 0.0
    floor: float = 0.0
    head_per_column: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.layers, self.width, *self.tile, *self.vector_tile) < 1:
            raise ValueError("layers, width and the sides of both tiles must be at least 1")

    @property
    def per_context(self) -> float:
        """Seconds a decode takes per token it reads, in whole tiles: kappa."""
        rows, columns = self.vector_tile
        return 2 * self.layers * self.width * self.per_vector_pair / (rows * columns)

    @property
    def per_square(self) -> float:
        """A_P: a prompt of L tokens in chunks of one tile column c takes A_P * L * (L + c) of attention."""
        rows, columns, depth = self.tile
        return self.layers * self.width * self.per_pair / (rows * columns * depth)

    def prompt_pairs(self, start: int, tokens: int) -> float:
        """Tile pairs of a chunk's attention in one layer: keys times queries, then values times weights."""
        rows, columns, depth = self.tile
        end = start + tokens
        keys = -(-end // rows) * (self.width / depth)
        values = self.width / rows * -(-end // depth)
        return -(-tokens // columns) * (keys + values)


class TileCost(StepCost):
    """The tile model as a step cost: linear layers in whole tiles, prompt attention by chunk.

    Exact but for one thing. A decode's attention comes in whole tiles of its own context, which no sum over
    requests can tell, so each decode is charged for its context and half a tile: what the tiles come to on
    average over all positions, and exactly so for a request that decodes through whole tiles.
    """

    by_chunk = True

    def __init__(self, terms: TileTerms) -> None:
        self.terms = terms
        rows, columns = terms.vector_tile
        self._half_tile = terms.per_context * (rows + columns - 2) / 4
        self._per_context = terms.per_context
        self._attention = terms.layers * terms.per_pair
        self._lines: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}

    def __repr__(self) -> str:
        return f"TileCost({self.terms})"

    def __eq__(self, other: object) -> bool:
        return self.terms == other.terms if isinstance(other, TileCost) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.terms)

    def seconds(self, shape: Shape) -> float:
        """One step of any shape; prompts without chunks are taken as one prompt that ends with this step."""
        decodes, context, prefill, behind, chunks = shape
        if not prefill:
            line = self._lines.get(decodes) or self.decode_line(decodes)
            return line[0] + line[1] * context
        pairs, sampled, terms = 0.0, decodes, self.terms
        for start, tokens, last in chunks or (Chunk(behind, prefill),):
            pairs += terms.prompt_pairs(start, tokens)
            sampled += last
        fixed = self._fixed(decodes, decodes + prefill, sampled)
        return fixed + self._per_context * context + self._attention * pairs

    def decode_line(self, decodes: int) -> tuple[float, float]:
        line = self._lines.get(decodes)
        if line is None:
            line = self._lines[decodes] = (self._fixed(decodes, decodes, decodes), self._per_context)
        return line

    def _fixed(self, decodes: int, tokens: int, sampled: int) -> float:
        terms = self.terms
        columns = terms.tile[1]
        return (
            terms.constant
            + max(terms.floor, terms.per_column * -(-tokens // columns))
            + terms.head_per_column * -(-sampled // columns)
            + terms.per_token * tokens
            + self._half_tile * decodes
        )
