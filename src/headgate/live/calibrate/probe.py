"""Probe: walks an engine through a grid of batch shapes, so that the time of each can be taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.core.plan import NONE, Plan, Until
from headgate.core.policy import BatchPolicy, End
from headgate.core.request import Request
from headgate.core.view import View
from headgate.methods.mixed.mixed import Mixed

FEED = "feed"  # the kind of the cells' own prompts, which come in the order of the walk
NOT_YET = Plan(NONE, until=Until(arrivals=1))


class DecodePool(NamedTuple):
    kind: str
    prompt: int
    size: int
    fill: int  # prompt tokens in a step while the pool is filled


class ProbeMove(NamedTuple):
    decodes: int = 0
    pools: tuple[str, ...] = ()  # whose decodes
    prompts: tuple[int, ...] = ()  # which of the cell's own prompts, by place
    tokens: int = 0  # prompt tokens in each step
    steps: int = 1


class ProbeCell(NamedTuple):
    name: str
    moves: tuple[ProbeMove, ...]
    feed: tuple[int, ...] = ()


class ProbeWalk(NamedTuple):
    pools: tuple[DecodePool, ...]
    cells: tuple[ProbeCell, ...]

    def ordered(self, order: Sequence[int]) -> ProbeWalk:
        return self._replace(cells=tuple(self.cells[place] for place in order))


class _Doing(NamedTuple):
    decodes: frozenset[int]
    tokens: int  # output tokens of the first of them at the end
    prompts: tuple[int, ...]
    left: int  # prompt tokens of the last of them still to run at the end


class Probe(BatchPolicy):
    """Compose the batches of a walk one after the other; then serve what is left as `mixed`, with `slots` and
    `budget`. Requests tell by their kind what they are for: that of a pool, or `feed` for the prompts of
    cells, sent in the order of the walk. A move decodes those of its pools that have the fewest tokens, so
    that contexts grow evenly. Where the engine refuses prompts, a move ends when its decodes have had their
    tokens; a cell whose decodes are gone is left out. Source: our own, for what the EB paper's cost law
    needs. Not one of the policies to serve with.
    """

    def __init__(self, walk: ProbeWalk, slots: int, budget: int) -> None:
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
        if self.position >= len(self.walk.cells):
            return "after"
        filling = self._doing is None and self._move == 0
        return "fill" if filling else self.walk.cells[self.position].name

    def arrived(self, request: Request, now: float) -> None:
        if request.kind in self._members:
            self._members[request.kind][request.id] = None
            self._arrived[request.kind] += 1
        elif request.kind == FEED:
            self._feed.append(request.id)

    def finished(self, request: Request, now: float, how: End) -> None:
        if request.kind in self._members:
            self._members[request.kind].pop(request.id, None)

    def gauges(self) -> Mapping[str, float]:
        return {"cell": self.position, "cells": len(self.walk.cells)}

    def plan(self, view: View) -> Plan:
        cells = self.walk.cells
        while self.position < len(cells):
            cell = cells[self.position]
            if self._doing is None:
                if self._move == 0 and (plan := self._before(view)) is not None:
                    return plan
                self._doing = self._begin(cell.moves[self._move], view)
            if (plan := self._remaining(cell.moves[self._move], self._doing, view)) is not None:
                return plan
            self._doing = None
            self._move += 1
            if self._move == len(cell.moves):
                self.position, self._move = self.position + 1, 0
        return self._rest.plan(view)

    def _before(self, view: View) -> Plan | None:
        for pool in self.walk.pools:
            members = self._members[pool.kind]
            prompts = [id for id in members if id in view.prefilling]
            prompts += [id for id in members if id in view.waiting]
            if prompts:
                return Plan(NONE, tuple(prompts), pool.fill, until=Until(prefills=len(prompts)))
            if self._arrived[pool.kind] < pool.size:
                return NOT_YET
        return NOT_YET if len(self._feed) < self._feeds[self.position + 1] else None

    def _begin(self, move: ProbeMove, view: View) -> _Doing:
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

    def _remaining(self, move: ProbeMove, doing: _Doing, view: View) -> Plan | None:
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
    return view.waiting.get(id) or view.prefilling.get(id)


# -- the grid: decodes, prompts, both, and changes

SHORT, MIDDLE, LONG, LONGEST = "short", "middle", "long", "longest"  # the pools, by context
LEAD = 64  # decodes of the step before prompts alone
TOGETHER = 16  # most prompts of a cell in one step
SPARE = 2 * TOGETHER  # slots for them: those of a step are let go when the next one is under way
ROOM = 0.92  # of the KV is planned to be used
LEAST_SHARE, LEAST_CONTEXT = 0.3, 96  # to which the pools shrink before the batches do
FEWEST_SLOTS, FEWEST_TOKENS, FEWEST_KV = 4, 64, 2048
# Batch sizes: on and between those for which engines keep CUDA graphs.
DECODES = (
    1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 96, 100, 128, 160, 200, 256, 300, 384, 450, 512,
    600, 768, 900, 1024, 1280, 1536, 2048,
)  # fmt: skip
PROMPTS = (16, 32, 64, 128, 256, 400, 512, 1000, 1024, 2048, 3000, 4096, 8192, 12000, 16384, 24576, 32768)
SEVERAL = ((256, 4), (1024, 4), (1024, 16), (4096, 4), (4096, 16), (16384, 8))  # tokens, prompts
LADDERS = (256, 1024, 4096)  # pieces in which a long prompt is run
BESIDE = (64, 256, 1024, 4096)  # prompt tokens beside decodes
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)  # decodes among the tokens of a step
TOTALS = (512, 1024, 2048)
# Decode steps of a cell, by batch. Small batches wait for the host, which needs some steps to come to rest
# after a change of the decodes; large ones cost KV with every step, and short models end their requests soon.
STEADY = ((64, 24), (128, 16), (320, 8), (512, 6), (1 << 30, 4))
LEAST_STEADY = 5


@dataclass(frozen=True)
class Ground:
    decodes: int  # the largest batch of decodes to measure
    budget: int  # tokens in one step
    kv_tokens: int  # KV of the engine
    longest: int  # prompt and output tokens of one request
    passes: int = 2  # how often the cells will be visited; contexts grow with each
    quick: bool = False  # every other cell of the large families only
    width: int = 1  # tokens of a decode in a step: more than 1 with drafts

    @property
    def slots(self) -> int:
        return self.decodes + _many(self.decodes, 40) + _many(self.decodes, 160) + SPARE


def grid(ground: Ground) -> ProbeWalk:
    """Pools and cells, each cell once, families one after the other; give the walk an order before use."""
    if ground.decodes < FEWEST_SLOTS:
        raise InputError(f"{ground.decodes} decodes are too few to measure; allow at least {FEWEST_SLOTS}")
    least = max(FEWEST_TOKENS, ground.decodes * ground.width)
    if ground.budget < least:
        raise InputError(f"a budget of {ground.budget} tokens is too small to measure; give at least {least}")
    if ground.kv_tokens < FEWEST_KV:
        raise InputError(f"{ground.kv_tokens} KV tokens are too few to measure; give at least {FEWEST_KV}")
    decodes, middle, few = ground.decodes, max(16, ground.longest // 24), 1.0
    while True:
        walk = _walk(ground, decodes, middle, few)
        held = sum(pool.prompt * pool.size for pool in walk.pools)
        if held + kv_of(walk.cells, ground.passes) <= ROOM * ground.kv_tokens:
            return walk
        if few > LEAST_SHARE or middle > LEAST_CONTEXT:
            few, middle = max(LEAST_SHARE, 0.9 * few), max(min(LEAST_CONTEXT, middle), middle * 15 // 16)
        elif decodes > FEWEST_SLOTS:
            decodes = max(FEWEST_SLOTS, decodes * 3 // 4)
        else:
            raise InputError(
                f"{ground.kv_tokens} KV tokens are too few to measure at; give the engine more memory, "
                "or a smaller model length"
            )


def _many(decodes: int, part: int) -> int:
    return max(2, decodes // part)


def _walk(ground: Ground, decodes: int, middle: int, few: float) -> ProbeWalk:
    half, budget, longest = decodes // 2, ground.budget, ground.longest
    deepest = min(longest - longest // 16, ground.kv_tokens // 16)  # room to grow
    pools = (
        DecodePool(SHORT, max(16, longest // 128), half, max(64, budget // 4)),
        DecodePool(MIDDLE, middle, decodes - half, budget),
        DecodePool(LONG, deepest // 4, max(2, int(few * _many(decodes, 40))), max(64, budget // 2)),
        DecodePool(LONGEST, deepest, max(2, int(few * _many(decodes, 160))), budget),
    )
    build = _Builder(ground, pools)
    cells = [*build.decode(), *build.prompts(), *build.mixed(), *build.shares(), *build.cycles()]
    named = {cell.name: cell for cell in cells}  # families meet where the engine is small
    return ProbeWalk(pools, tuple(named.values()))


def kv_of(cells: Sequence[ProbeCell], passes: int) -> int:
    """Tokens by which the pools grow while the cells are visited, and those of a cell's own prompts."""
    grown = sum(move.decodes * move.steps for cell in cells for move in cell.moves)
    return passes * grown + max(sum(cell.feed) for cell in cells)


class _Builder:
    """Cells begin with decodes alone: an asynchronous engine sees their end late beside prompts."""

    def __init__(self, ground: Ground, pools: tuple[DecodePool, ...]) -> None:
        self.budget, self.width = ground.budget, ground.width
        self.longest = ground.longest - 1  # a prompt brings one token
        self.quick = ground.quick
        self.counts = {pool.kind: pool.size for pool in pools}
        self.most = self.counts[SHORT] + self.counts[MIDDLE]

    def decode(self) -> Iterator[ProbeCell]:
        ladder = [each for each in self._some(DECODES) if each <= self.most]
        for kind in (SHORT, MIDDLE):
            for number in _with_largest(ladder, self.counts[kind]):
                yield self._decodes(number, (kind,))
        for number in [each for each in _with_largest(ladder, self.most) if each > self.counts[MIDDLE]]:
            yield self._decodes(number, (SHORT, MIDDLE))
        for kind in (LONG, LONGEST):
            for number in _with_largest((1, 2, 4, 8, 16), self.counts[kind]):
                yield self._decodes(number, (kind,))
        yield self._decodes(sum(self.counts.values()), tuple(self.counts))
        yield self._decodes(self.counts[MIDDLE] + self.counts[LONG], (MIDDLE, LONG))

    def prompts(self) -> Iterator[ProbeCell]:
        most = min(self.budget, self.longest)
        for tokens in _with_largest(self._some(PROMPTS), most):
            yield self._prompts(tokens, 1, 2 if tokens <= most // 4 else 1)
        for tokens, number in SEVERAL:
            if tokens <= self.budget:
                yield self._prompts(tokens, number, 2 if tokens <= most // 4 else 1)
        length = self.longest - self.longest // 16
        for piece in LADDERS:
            if 2 * piece <= length and piece <= self.budget:
                steps = length // piece
                move = ProbeMove(prompts=(0,), tokens=piece, steps=steps)
                yield ProbeCell(f"prompt of {length} by {piece}", (self._lead(), move), (steps * piece,))
        yield from self._behind(0, ())

    def mixed(self) -> Iterator[ProbeCell]:
        beside = [tokens for tokens in BESIDE if tokens <= self.budget // 4] or [self.budget // 4]
        for number in _with_largest((1, 8, 64, 256), self.counts[MIDDLE]):
            for tokens in beside:
                yield self._mixed(number, (MIDDLE,), tokens)
        for tokens in beside:
            yield self._mixed(self.most, (SHORT, MIDDLE), tokens)
        for number in _with_largest((64,), self.counts[SHORT]):
            for tokens in beside[1:3]:
                yield self._mixed(number, (SHORT,), tokens)
        for kind in (LONG, LONGEST):
            for tokens in beside[1:3]:
                yield self._mixed(self.counts[kind], (kind,), tokens)
        for number in _with_largest((64,), self.counts[MIDDLE]):
            room = min(self.budget - number * self.width, self.longest)
            yield self._mixed(number, (MIDDLE,), room, steps=1)
            yield from self._behind(number, (MIDDLE,))
        yield self._mixed(self.counts[MIDDLE], (MIDDLE,), beside[-1], together=TOGETHER)

    def shares(self) -> Iterator[ProbeCell]:
        for total in TOTALS:
            for share in SHARES:
                number = round(share * total)
                if number <= self.most and total <= self.budget:
                    pools = (MIDDLE,) if number <= self.counts[MIDDLE] else (SHORT, MIDDLE)
                    yield self._mixed(number, pools, total - number)
                    yield self._prompts(total - number, 1, 2)

    def cycles(self) -> Iterator[ProbeCell]:
        tokens = min(2048, self.budget // 4)
        for number in _with_largest((64,), self.counts[MIDDLE]):
            yield self._cycle(number, (MIDDLE,), tokens, 4, 3)
        yield self._cycle(self.most, (SHORT, MIDDLE), tokens, 4, 2)
        yield self._cycle(self.counts[MIDDLE], (MIDDLE,), 4 * tokens, 8, 2)
        yield self._cycle(self.counts[MIDDLE], (MIDDLE,), tokens, 1, 1)

    def _some(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return values[1::2] if self.quick else values

    def _lead(self) -> ProbeMove:
        return ProbeMove(min(LEAD, self.counts[MIDDLE]), (MIDDLE,))

    def _decodes(self, number: int, pools: tuple[str, ...]) -> ProbeCell:
        steps = next(steps for most, steps in STEADY if number <= most)
        steps = min(steps, max(LEAST_STEADY, self.longest // 128))
        return ProbeCell(f"{number} decodes, {'+'.join(pools)}", (ProbeMove(number, pools, steps=steps),))

    def _prompts(self, tokens: int, together: int, times: int) -> ProbeCell:
        length = max(1, tokens // together)
        moves = [ProbeMove(prompts=batch, tokens=length * together) for batch in _batches(times, together)]
        name = f"{together} prompts of {length}"
        return ProbeCell(name, (self._lead(), *moves), (length,) * (times * together))

    def _behind(self, number: int, pools: tuple[str, ...]) -> Iterator[ProbeCell]:
        deep, piece, steps = min(self.longest // 2, self.budget), min(512, self.budget // 4), 4
        moves = (
            self._lead(),
            ProbeMove(prompts=(0,), tokens=deep),
            ProbeMove(number, pools, (0,), piece, steps),
            ProbeMove(number, pools, (0,), max(1, piece // 8), steps),
        )
        length = deep + steps * (piece + max(1, piece // 8))
        if length <= self.longest:
            yield ProbeCell(f"{number} decodes, pieces of {piece} after {deep}", moves, (length,))

    def _mixed(
        self, number: int, pools: tuple[str, ...], tokens: int, together: int = 1, steps: int = 3
    ) -> ProbeCell:
        tokens = max(1, min(tokens, self.budget - number * self.width))
        steps = max(1, min(steps, self.longest // tokens, 3 if number + tokens <= 1024 else 2))
        length = max(1, tokens // together)
        name = f"{number} decodes, {'+'.join(pools)}, {together} prompts of {length}"
        moves = [ProbeMove(number, pools, batch, length * together) for batch in _batches(steps, together)]
        return ProbeCell(name, (ProbeMove(number, pools), *moves), (length,) * (steps * together))

    def _cycle(
        self, number: int, pools: tuple[str, ...], tokens: int, together: int, decodes: int
    ) -> ProbeCell:
        length, times, decode = max(1, tokens // together), 3, ProbeMove(number, pools, steps=decodes)
        moves = [decode]
        for batch in _batches(times, together):
            moves += [ProbeMove(prompts=batch, tokens=length * together), decode]
        name = f"cycles of {decodes} x {number} decodes and {together} prompts of {length}"
        return ProbeCell(name, tuple(moves), (length,) * (times * together))


def _batches(times: int, together: int) -> list[tuple[int, ...]]:
    return [tuple(range(time * together, (time + 1) * together)) for time in range(times)]


def _with_largest(values: Iterable[int], largest: int) -> list[int]:
    return [*(value for value in values if value < largest), largest]
