"""The rate no policy can exceed: nodes over the least time a mean request takes from one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linprog  # type: ignore[import-untyped]

from headgate.core.errors import InputError
from headgate.cost.laws.linear import LinearCost
from headgate.cost.laws.tiles import TileCost, TileTerms
from headgate.cost.laws.work import WorkCost
from headgate.cost.model import StepCost

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bound:
    """Least seconds of a mean request by where they go, and what follows: T^R and λ* of arXiv 2508.01002."""

    prompt_tokens: float  # linear and non-linear work
    output_tokens: float
    prompt_attention: float
    output_attention: float
    error: float = 0.0  # standard error of the whole, from the spread of the requests it was taken from
    nodes: int = 1

    @property
    def prefill(self) -> float:
        return self.prompt_tokens + self.prompt_attention

    @property
    def decode(self) -> float:
        return self.output_tokens + self.output_attention

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode

    @property
    def rate(self) -> float:
        """Requests per second of all nodes; beyond it the backlog grows under any policy."""
        return self.nodes / self.seconds


@dataclass(frozen=True)
class Requests:
    """Lengths as samples: prompts, decode iterations, and how much each pair weighs (None: all alike).

    Decode iterations are output tokens less one, for the prompt's last step brings the first; the paper
    counts one more, that of the stop token. With speculation an iteration brings `burst` tokens on average.
    """

    prompts: Floats
    decodes: Floats
    weights: Floats | None = None
    burst: float = 1.0

    def in_steps(self, burst: float) -> Requests:
        return self if burst == 1 else replace(self, decodes=self.decodes / burst, burst=burst)

    @classmethod
    def of(cls, prompts: ArrayLike, decodes: ArrayLike, weights: ArrayLike | None = None) -> Requests:
        tokens, steps = (np.asarray(x, dtype=np.float64) for x in (prompts, decodes))
        shares = None if weights is None else np.asarray(weights, dtype=np.float64)
        unequal = tokens.shape != steps.shape or (shares is not None and shares.shape != tokens.shape)
        if not len(tokens) or unequal:
            raise InputError(
                f"{len(tokens)} prompts, {len(steps)} outputs; give as many of each, at least one"
            )
        if tokens.min() < 1 or steps.min() < 0:
            raise InputError("a prompt below 1 token or a negative output; fix the lengths")
        if shares is not None and (shares.min() < 0 or not 0 < shares.sum() < inf):
            raise InputError("weights of requests must be zero or more, and not all zero; fix them")
        return cls(tokens, steps, shares)

    def mean(self, values: Floats) -> float:
        return float(np.average(values, weights=self.weights))

    def error(self, values: Floats) -> float:
        if self.weights is not None:
            return 0.0
        return float(np.std(values)) / sqrt(len(values))


def tile_bound(
    terms: TileTerms,
    requests: Requests,
    nodes: int = 1,
    batch_tokens: int | None = None,
    averaged: bool = False,
) -> Bound:
    """The bound of the tile model, section 3 of arXiv 2508.01002: every tile full, every batch large.

    A token takes at least its share of a full column, a decode its own attention, a prompt of L tokens
    A_P L (L + t_col): a column holds at most t_col tokens, so at least ⌈(L - x) / t_col⌉ columns see more
    context than x (the paper has the common multiple of the tile's sides for t_col, which is not proved).
    Constant and floor only make batches longer, so the bound stays one without them.

    With `batch_tokens`, the most in one batch, they are counted too: each token's share of them in the best
    batch there can be, a sharper bound for that engine. `averaged` takes decode attention as `TileCost` has
    it, half a tile on top of the context.
    """
    columns = terms.tile[1]
    price = _token_price(terms, batch_tokens)
    head = terms.head_per_column / columns
    prompts, decodes = requests.prompts, requests.decodes
    read = _attention(terms, requests, averaged)
    prompt_attention = terms.per_square * prompts * (prompts + columns)
    output_tokens = price * decodes + head * (decodes + 1)
    each = price * prompts + output_tokens + prompt_attention + read
    return Bound(
        prompt_tokens=requests.mean(price * prompts),
        output_tokens=requests.mean(output_tokens),
        prompt_attention=requests.mean(prompt_attention),
        output_attention=requests.mean(read),
        error=requests.error(each),
        nodes=nodes,
    )


def linear_bound(
    cost: LinearCost, requests: Requests, slots: int, budget: int, kv_tokens: float = inf, nodes: int = 1
) -> Bound:
    """The same argument for straight lines: prices that no step of this engine undercuts (`least_prices`).

    Constants are counted, shared by as many as a step may hold, so the bound belongs to the engine's limits.
    """
    prompts, decodes = requests.prompts, requests.decodes
    contexts = decodes * prompts + decodes * (requests.burst * decodes + 1) / 2
    need = Need(requests.mean(decodes), requests.mean(prompts), requests.mean(contexts))
    longest = float((prompts + requests.burst * decodes).max())
    room = StepRoom(slots, budget, kv_tokens, float(prompts.min()) + 1, longest)
    prices = least_prices(cost, need, room)
    each = prices.decode * decodes + prices.prompt * prompts + prices.context * contexts
    return Bound(
        prompt_tokens=prices.prompt * need.prompt,
        output_tokens=prices.decode * need.decodes,
        prompt_attention=0.0,
        output_attention=prices.context * need.context,
        error=requests.error(each),
        nodes=nodes,
    )


def engine_bound(
    cost: StepCost, requests: Requests, slots: int, budget: int, kv_tokens: float = inf, nodes: int = 1
) -> Bound:
    """The sharpest bound we have for an engine with these limits, by the kind of its cost."""
    if isinstance(cost, TileCost):
        return tile_bound(cost.terms, requests, nodes, batch_tokens=budget, averaged=True)
    if isinstance(cost, WorkCost):  # a bound for what is cheaper holds for it too
        cost = cost.below()
    if isinstance(cost, LinearCost):
        return linear_bound(cost, requests, slots, budget, kv_tokens, nodes)
    raise InputError(f"no throughput bound for a cost of kind {type(cost).__name__}; use a card's cost")


def ideal_bound(cost: StepCost, requests: Requests, slots: int, budget: int, kv_tokens: float = inf) -> Bound:
    """λ* as the paper draws it: for tiles without the engine's limits; for lines there is only one bound."""
    if isinstance(cost, TileCost):
        return tile_bound(cost.terms, requests)
    return engine_bound(cost, requests, slots, budget, kv_tokens)


def _token_price(terms: TileTerms, batch_tokens: int | None) -> float:
    columns = terms.tile[1]
    if batch_tokens is None:
        return terms.per_column / columns + terms.per_token
    sizes = {*range(columns, batch_tokens + 1, columns), batch_tokens}
    shares: list[float] = [
        (terms.constant + max(terms.floor, terms.per_column * ceil(size / columns))) / size for size in sizes
    ]
    return min(shares) + terms.per_token


def _attention(terms: TileTerms, requests: Requests, averaged: bool) -> Floats:
    prompts, decodes = requests.prompts, requests.decodes
    if averaged:
        rows, columns = terms.vector_tile
        contexts = decodes * prompts + decodes * (decodes + 1) / 2
        return np.asarray(terms.per_context * (contexts + decodes * (rows + columns - 2) / 4))
    reads = decode_reads(terms, int((prompts + decodes).max()))
    return np.asarray(reads[(prompts + decodes).astype(np.int64)] - reads[prompts.astype(np.int64)])


def decode_reads(terms: TileTerms, longest: int) -> Floats:
    """Seconds of attention of decodes at positions 1 to x, for every x from 0 on."""
    rows, columns = terms.vector_tile
    place = np.arange(1, longest + 1)
    pairs = terms.width / columns * -(-place // rows) + -(-place // columns) * (terms.width / rows)
    return np.concatenate(([0.0], np.cumsum(terms.layers * terms.per_vector_pair * pairs)))


# -- prices that no step of a linear cost undercuts

ROUNDS = 60  # of adding the steps that undercut the prices most
AT_ONCE = 64  # so many of them
INSTANT = 1e-12  # seconds; a card may say that a step takes no time
TINY = 1e-6  # relative: an undercut below this is taken off the prices instead


class Need(NamedTuple):
    decodes: float
    prompt: float
    context: float


class StepRoom(NamedTuple):
    slots: int
    budget: int
    kv_tokens: float
    shortest: float
    longest: float


class LeastPrices(NamedTuple):
    """Seconds of a decode, a prompt token and a context token. Every step takes at least what is in it."""

    decode: float
    prompt: float
    context: float


def least_prices(cost: LinearCost, need: Need, room: StepRoom) -> LeastPrices:
    """The highest such prices for this workload: a linear program over the steps that matter.

    Whatever a policy does, the time of its steps is at least the price of what they hold, and they hold what
    the requests need. The program starts with the largest steps and adds those that undercut its prices most
    until none does; all numbers of decodes are looked at, with the worst chunk and context for each. In
    a mixed step the floor (never less than either half alone) is not counted, nor is KV behind prompts: the
    prices stay valid, and are a little low where these matter.
    """
    shapes = _steps(room, np.array([1, room.slots]))
    for _ in range(ROUNDS):
        # The prices worth most to the request that no step undercuts so far, scaled to numbers near one.
        per_second = shapes / np.maximum(_seconds(cost, shapes), INSTANT)[:, None]
        unit = per_second.max(axis=0)
        unit[unit == 0] = 1.0
        wanted = -np.array(need) / unit
        limits, gain = np.ones(len(per_second)), wanted / -wanted.min()
        optimum = linprog(gain, A_ub=per_second / unit, b_ub=limits, bounds=(0, None), method="highs")
        prices = LeastPrices(*(optimum.x / unit).tolist())
        worst, ratio = _undercut(cost, room, prices)
        if ratio >= 1 - TINY:
            break
        shapes = np.concatenate((shapes, worst))
    scale = min(1.0, ratio)
    return LeastPrices(*(price * scale for price in prices))


def _steps(room: StepRoom, decodes: NDArray[np.int64], inside: Floats | None = None) -> Floats:
    """Rows of (decodes, prompt tokens, context): each number alone, with a token and with a full budget.

    All at the least and the most context; `inside` adds a chunk of its own for each number.
    """
    n = np.repeat(decodes.astype(float), 2)
    x = n * room.shortest
    x[1::2] = np.minimum(decodes * room.longest, room.kv_tokens)
    chunks = [np.zeros(len(n)), np.minimum(1.0, room.budget - n), room.budget - n]
    if inside is not None:
        chunks.append(np.clip(np.repeat(inside, 2), np.minimum(1.0, room.budget - n), room.budget - n))
    rows = np.concatenate([np.column_stack((n, chunk, x)) for chunk in chunks])
    fits = rows[rows[:, 2] <= room.kv_tokens]
    return np.concatenate((fits, [[0.0, float(room.budget), 0.0]]))


def _seconds(cost: LinearCost, shapes: Floats) -> Floats:
    """Steps that may hold fractions of tokens; mixed ones without their floor."""
    n, c, x = shapes.T
    decode, prefill, mixed = cost.decode, cost.prefill, cost.mixed
    alone = decode.constant + decode.per_decode * np.maximum(n - decode.free_decodes, 0)
    prompts = prefill.constant + prefill.per_token * c
    a, b, s = mixed.by_share
    together = mixed.constant + mixed.per_prefill * c + mixed.per_context * x + a * (n + c) + b * n
    together = together + mixed.per_decode * np.maximum(n - mixed.free_decodes, 0)
    together = together + s * n**2 / np.maximum(n + c, 1)
    pure = np.where(n > 0, alone + decode.per_context * x, prompts)
    return np.asarray(np.where((n > 0) & (c > 0), together, pure), dtype=np.float64)


def _undercut(cost: LinearCost, room: StepRoom, prices: LeastPrices) -> tuple[Floats, float]:
    """The steps that cost least by their prices, and the seconds of the first as a share of them."""
    decodes = np.arange(1, room.slots + 1)
    a, _, s = cost.mixed.by_share
    slope = cost.mixed.per_prefill + a - prices.prompt
    inside = None
    if s > 0 and slope > 0:  # convex in the chunk: the worst may lie between its ends
        inside = decodes * (np.sqrt(s / slope) - 1)
    rows = _steps(room, decodes, inside)
    worth = rows @ np.array(prices)
    ratio = np.divide(_seconds(cost, rows), worth, out=np.full(len(rows), np.inf), where=worth > 0)
    order = np.argsort(ratio)[:AT_ONCE]
    return rows[order], float(ratio[order[0]])
