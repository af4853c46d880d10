"""Prices that no step of a linear cost undercuts: what a decode, a prompt token and a context token cost at least."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog  # type: ignore[import-untyped]

from headgate.cost.model import LinearCost

Floats = NDArray[np.float64]
ROUNDS = 40  # of adding the step that undercuts the prices most
TINY = 1e-9  # relative: an undercut below this is taken off the prices instead


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
    the requests need. The program starts with the largest steps and adds the step that undercuts its prices
    most until none does; all numbers of decodes are looked at, with the worst chunk and context for each. In
    a mixed step the floor (never less than either half alone) is not counted, nor is KV behind prompts: the
    prices stay valid, and are a little low where these matter.
    """
    shapes = _steps(room, np.array([1, room.slots]), np.array([1.0, np.inf]))
    shapes = np.concatenate((shapes, [[0.0, float(room.budget), 0.0]]))
    wanted = -np.array(need)
    prices = Prices(0.0, 0.0, 0.0)
    for _ in range(ROUNDS):
        found = linprog(wanted, A_ub=shapes, b_ub=_seconds(cost, shapes), bounds=(0, None), method="highs")
        prices = Prices(*found.x.tolist())
        worst, ratio = _undercut(cost, room, prices)
        if ratio >= 1 - TINY:
            break
        shapes = np.concatenate((shapes, [worst]))
    scale = min(1.0, ratio)
    return Prices(*(price * scale for price in prices))


def _steps(room: Room, decodes: NDArray[np.int64], chunks: Floats) -> Floats:
    """Decodes alone and with prompt chunks, at the least and the most context: rows of (n, c, x)."""
    n = np.repeat(decodes.astype(float), 2)
    x = np.empty(len(n))
    x[::2] = decodes * room.shortest
    x[1::2] = np.minimum(decodes * room.longest, room.kv_tokens)
    rows = [np.column_stack((n, np.zeros(len(n)), x))]
    for chunk in np.broadcast_to(chunks, (len(chunks),)):
        rows.append(np.column_stack((n, np.clip(chunk, 0.0, room.budget - n), x)))
    found = np.concatenate(rows)
    return found[found[:, 2] <= room.kv_tokens]


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
    """The step that costs least by its prices, and its seconds as a share of them."""
    decodes = np.arange(1, room.slots + 1)
    shapes = [_steps(room, decodes, np.array([1.0, np.inf])), np.array([[0.0, float(room.budget), 0.0]])]
    a, b, s = cost.mixed.by_share
    slope = cost.mixed.per_prefill + a - prices.prompt
    if s > 0 and slope > 0:  # a convex price per share: the worst chunk may lie inside
        for number in decodes:
            inside = number * (np.sqrt(s / slope) - 1)
            if inside > 1:
                shapes.append(_steps(room, np.array([number]), np.array([inside])))
    rows = np.concatenate(shapes)
    worth = rows @ np.array(prices)
    ratio = np.divide(_seconds(cost, rows), worth, out=np.full(len(rows), np.inf), where=worth > 0)
    least = int(np.argmin(ratio))
    return rows[least], float(ratio[least])
