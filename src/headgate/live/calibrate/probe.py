"""Probe: walks an engine through a list of batch shapes, so that the time of each can be taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from headgate.core.plan import NONE, Plan, Until
from headgate.core.policy import BatchPolicy, End
from headgate.core.request import Request
from headgate.core.view import View
from headgate.methods.mixed.mixed import Mixed

FEED = "feed"  # the kind of the cells' own prompts, which come in the order of the walk
NOT_YET = Plan(NONE, until=Until(arrivals=1))


class Pool(NamedTuple):
    """Requests that stay: a cell decodes some of them, the others keep their KV and wait."""

    kind: str
    prompt: int
    size: int
    fill: int  # prompt tokens in a step while the pool is filled


class Move(NamedTuple):
    """Steps of one shape."""

    decodes: int = 0
    pools: tuple[str, ...] = ()  # whose decodes
    prompts: tuple[int, ...] = ()  # which of the cell's own prompts, by place
    tokens: int = 0  # prompt tokens in each step
    steps: int = 1


class Cell(NamedTuple):
    """One place of the walk: its own prompts (lengths, of one output token each) and what it does."""

    name: str
    moves: tuple[Move, ...]
    feed: tuple[int, ...] = ()


class Walk(NamedTuple):
    """What a probe does: fill the pools, then visit the cells in this order."""

    pools: tuple[Pool, ...]
    cells: tuple[Cell, ...]

    def ordered(self, order: Sequence[int]) -> Walk:
        """The same cells in the order of a permutation (or a part of one, or several in a row)."""
        return self._replace(cells=tuple(self.cells[place] for place in order))


class _Doing(NamedTuple):
    """The move under way: who decodes, which prompts run, and where both stand when it is done."""

    decodes: frozenset[int]
    tokens: int  # output tokens of the first of them at the end
    prompts: tuple[int, ...]
    left: int  # prompt tokens of the last of them still to run at the end


class Probe(BatchPolicy):
    """Compose the batches of a walk one after the other; when it is over, serve whoever is left as `mixed`.

    Requests tell by their kind what they are for: that of a pool, or `feed` for the prompts of cells, which
    the driver sends in the order of the walk; until those of a cell are there the probe waits. A move decodes
    those of its pools that have the fewest tokens, so that contexts grow evenly and slowly. What is done is
    read from the requests themselves, so it does not matter when a driver tells of steps.

    Where the engine refuses prompts, a move ends when its decodes have had their tokens; a cell whose decodes
    are gone is left out.

    Parameters:
        walk: pools and cells.
        slots, budget: of the policy that serves the rest.

    Source: our own. It measures what the EB paper's cost law needs: decodes at the contexts of the workload,
    the cost of a phase by cycles of decode, refill, decode. Not one of the policies to serve with.
    """

    def __init__(self, walk: Walk, slots: int, budget: int) -> None:
        self.walk = walk
        self.position = 0  # of the cell under way
        self._move = 0
        self._doing: _Doing | None = None
        self._members: dict[str, dict[int, None]] = {pool.kind: {} for pool in walk.pools}
        self._arrived = dict.fromkeys(self._members, 0)
        self._feed: list[int] = []  # of all cells, one after the other
        self._feeds = [0, *accumulate(len(cell.feed) for cell in walk.cells)]  # where a cell's begin in it
        self._rest = Mixed(slots, budget)

    @property
    def label(self) -> str:
        """What the steps composed now are for."""
        if self.position >= len(self.walk.cells):
            return "after"
        if self._doing is None and self._move == 0:
            return "fill"
        return self.walk.cells[self.position].name

    def arrived(self, request: Request, now: float) -> None:
        """One of a pool, one of a cell's prompts, or a stranger, who waits for the end of the walk."""
        if request.kind in self._members:
            self._members[request.kind][request.id] = None
            self._arrived[request.kind] += 1
        elif request.kind == FEED:
            self._feed.append(request.id)

    def finished(self, request: Request, now: float, how: End) -> None:
        """It belongs to no pool any more."""
        if request.kind in self._members:
            self._members[request.kind].pop(request.id, None)

    def gauges(self) -> Mapping[str, float]:
        """How far the walk is."""
        return {"cell": self.position, "cells": len(self.walk.cells)}

    def plan(self, view: View) -> Plan:
        """The move under way, or the next that can begin."""
        cells = self.walk.cells
        while self.position < len(cells):
            cell = cells[self.position]
            if self._doing is None:
                plan = self._before(view) if self._move == 0 else None
                if plan is not None:
                    return plan
                self._doing = self._begin(cell.moves[self._move], view)
            plan = self._remaining(cell.moves[self._move], self._doing, view)
            if plan is not None:
                return plan
            self._doing = None
            self._move += 1
            if self._move == len(cell.moves):
                self.position, self._move = self.position + 1, 0
        return self._rest.plan(view)

    def _before(self, view: View) -> Plan | None:
        """What must happen before a cell can begin: its pools are full, its own prompts are there."""
        for pool in self.walk.pools:
            members = self._members[pool.kind]
            prompts = [id for id in members if id in view.prefilling]
            prompts += [id for id in members if id in view.waiting]
            if prompts:
                return Plan(NONE, tuple(prompts), pool.fill, until=Until(prefills=len(prompts)))
            if self._arrived[pool.kind] < pool.size:
                return NOT_YET
        return NOT_YET if len(self._feed) < self._feeds[self.position + 1] else None

    def _begin(self, move: Move, view: View) -> _Doing:
        """Choose who takes part; where they stand at the end follows from where they stand now."""
        decoding = view.decoding
        members = [decoding[id] for kind in move.pools for id in self._members[kind] if id in decoding]
        members.sort(key=lambda request: (request.generated, request.id))
        chosen = members[: move.decodes]
        tokens = chosen[0].generated + move.steps if chosen else 0
        first = self._feeds[self.position]
        prompts = tuple(self._feed[first + place] for place in move.prompts)
        last = _found(prompts[-1], view) if prompts else None
        left = last.todo - move.steps * move.tokens if last is not None and len(prompts) == 1 else 0
        return _Doing(frozenset(request.id for request in chosen), tokens, prompts, max(0, left))

    def _remaining(self, move: Move, doing: _Doing, view: View) -> Plan | None:
        """A plan for what is left of the move; None when nothing is."""
        decodes = doing.decodes.intersection(view.decoding)
        steps = move.steps
        if move.decodes:
            if not decodes:
                return None
            first = min(decodes, key=lambda id: (view.decoding[id].generated, id))
            steps = doing.tokens - view.decoding[first].generated
        if move.prompts:
            waiting = [request for id in doing.prompts if (request := _found(id, view)) is not None]
            todo = sum(request.todo for request in waiting) - doing.left
            if todo <= 0:
                return None
            prompts = tuple(sorted((r.id for r in waiting), key=lambda id: id not in view.prefilling))
            steps = min(steps, -(-todo // move.tokens)) if move.decodes else -(-todo // move.tokens)
            if steps < 1:
                return None
            budget = len(decodes) * view.limits.decode_width + min(move.tokens, todo)
            return Plan(decodes or NONE, prompts, budget, min(move.tokens, todo), until=Until(steps=1))
        return Plan(decodes, until=Until(steps=steps)) if steps > 0 else None


def _found(id: int, view: View) -> Request | None:
    """A prompt that is not done yet."""
    return view.waiting.get(id) or view.prefilling.get(id)
