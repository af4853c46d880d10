"""Transformer: the matrices of a decoder, and what they take in FLOPs and bytes."""

from __future__ import annotations

from dataclasses import dataclass


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
        """Rows and columns of one layer's Q, K, V and output."""
        keys = self.kv_heads * self.head_size
        return (
            (self.width, self.hidden),
            (keys, self.hidden),
            (keys, self.hidden),
            (self.hidden, self.width),
        )

    @property
    def layer(self) -> tuple[tuple[int, int], ...]:
        """The same of a dense layer: attention, gate, up, down."""
        return (*self.attention, *self._net(self.feed_forward))

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def full_layers(self) -> int:
        """Layers that read all of the context."""
        return self.layers if not self.window else self.layers // self.full_every

    @property
    def body_weights(self) -> int:
        """Weights of all layers' matrices, without embeddings and head."""
        routed = self.hidden * self.experts + self.experts * _size(self._net(self.expert_feed_forward))
        return self._weights(routed)

    @property
    def active_weights(self) -> int:
        """The same, of the experts those that one token meets."""
        met = self.experts_per_token * _size(self._net(self.expert_feed_forward))
        return self._weights(self.hidden * self.experts + met)

    @property
    def head_weights(self) -> int:
        """Weights of the language-model head."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """All matrices: layers, head and embedding. Norms and biases, under 0.01 %, are left out."""
        return self.body_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def kv_bytes(self) -> float:
        """Bytes of KV per token, keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.bytes_per_kv

    def flops(self, tokens: int, pairs: float, sampled: int) -> float:
        """FLOPs of a step: matrices for `tokens`, attention over `pairs` of them, head for `sampled`."""
        matrices = 2 * self.active_weights * tokens + 2 * self.head_weights * sampled
        return matrices + 4 * self.layers * self.width * pairs

    def body_pairs(self, tile: tuple[int, int, int]) -> int:
        """Tile pairs of all layers for one column of tokens: G of the paper, without the head."""
        return self.layers * sum(_pairs(matrix, tile) for matrix in self.layer)

    def head_pairs(self, tile: tuple[int, int, int]) -> int:
        """The same for the head."""
        return _pairs((self.vocabulary, self.hidden), tile)

    def shape(self) -> dict[str, int]:
        """The names under which a card has it."""
        found = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads}
        found |= {"kv_heads": self.kv_heads, "head_size": self.head_size, "inner": self.feed_forward}
        found |= {"vocabulary": self.vocabulary}
        if self.experts:
            found |= {"experts": self.experts, "experts_per_token": self.experts_per_token}
            found |= {"expert_inner": self.expert_feed_forward}
        return found

    def _net(self, inner: int) -> tuple[tuple[int, int], ...]:
        return ((inner, self.hidden), (inner, self.hidden), (self.hidden, inner))

    def _weights(self, routed: int) -> int:
        """Of all layers, where each with experts has `routed` beside its shared net."""
        dense = (self.layers - self.expert_layers) * _size(self._net(self.feed_forward))
        mixed = self.expert_layers * (routed + _size(self._net(self.shared_feed_forward)))
        return self.layers * _size(self.attention) + dense + mixed


def _size(matrices: tuple[tuple[int, int], ...]) -> int:
    return sum(rows * columns for rows, columns in matrices)


def _pairs(matrix: tuple[int, int], tile: tuple[int, int, int]) -> int:
    """Tiles that cover a weight matrix."""
    return -(-matrix[0] // tile[0]) * -(-matrix[1] // tile[2])
