"""Prices that no step of a linear cost undercuts: of a decode, a prompt token and a context token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog  # type: ignore[import-untyped]

from headgate.cost.laws.linear import LinearCost

Floats = NDArray[np.float64]
ROUNDS = 60  # of adding the steps that undercut the prices most
AT_ONCE = 64  # so many of them
INSTANT = 1e-12  # seconds; a card may say that a step takes no time
TINY = 1e-6  # relative: an undercut below this is taken off the prices instead


class Need(NamedTuple):
    """What a mean request needs: decode steps, prompt tokens, and context tokens read over all its steps."""

    decodes: float
    prompt: float
    context: float


class Room(NamedTuple):
    """What one step may hold, and the least and most context of one decode in it."""

    slots: int
    budget: int
    kv_tokens: float
    shortest: float
    longest: float


class Prices(NamedTuple):
    """Seconds of a decode, a prompt token and a context token. Every step takes at least what is in it."""

    decode: float
    prompt: float
    context: float

    def of(self, need: Need) -> float:
        """The least seconds a request takes from the engine."""
        return self.decode * need.decodes + self.prompt * need.prompt + self.context * need.context


def least_prices(cost: LinearCost, need: Need, room: Room) -> Prices:
    """The highest such prices for this workload: a linear program over the steps that matter.

    Whatever a policy does, the time of its steps is at least the price of what they hold, and they hold what
    the requests need. The program starts with the largest steps and adds those that undercut its prices most
    until none does; all numbers of decodes are looked at, with the worst chunk and context for each. In
    a mixed step the floor (never less than either half alone) is not counted, nor is KV behind prompts: the
    prices stay valid, and are a little low where these matter.
    """
    shapes = _steps(room, np.array([1, room.slots]))
    for _ in range(ROUNDS):
        prices = _best(need, shapes / np.maximum(_seconds(cost, shapes), INSTANT)[:, None])
        worst, ratio = _undercut(cost, room, prices)
        if ratio >= 1 - TINY:
            break
        shapes = np.concatenate((shapes, worst))
    scale = min(1.0, ratio)
    return Prices(*(price * scale for price in prices))


def _best(need: Need, per_second: Floats) -> Prices:
    """The prices worth most to the request that none of these steps undercuts; scaled to numbers near one."""
    scale = per_second.max(axis=0)
    scale[scale == 0] = 1.0
    wanted = -np.array(need) / scale
    limits = np.ones(len(per_second))
    found = linprog(
        wanted / -wanted.min(), A_ub=per_second / scale, b_ub=limits, bounds=(0, None), method="highs"
    )
    return Prices(*(found.x / scale).tolist())


def _steps(room: Room, decodes: NDArray[np.int64], inside: Floats | None = None) -> Floats:
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


def _undercut(cost: LinearCost, room: Room, prices: Prices) -> tuple[Floats, float]:
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
