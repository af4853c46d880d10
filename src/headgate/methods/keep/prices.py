"""What a step costs on the GPU and how long the host takes to launch it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headgate.core.build import mypyc_attr, quick
from headgate.cost.model import Chunk, Shape, StepCost
from headgate.methods.keep.host import SlowHost


class Load(NamedTuple):
    """Who decodes: how many requests, and the KV tokens they read in one step."""

    decodes: int
    context: int


class Cut(NamedTuple):
    """The first so many tokens of the prompts in a queue."""

    tokens: int
    behind: int  # KV tokens already there for the prompts it touches
    chunks: tuple[Chunk, ...]
    done: int  # prompts completed
    length: int  # context of those, their first token included


@mypyc_attr(serializable=True)
class Prompts:
    """Prompts in the order in which they run: (tokens already there, tokens to do) of each."""

    def __init__(self, parts: Iterable[tuple[int, int]]) -> None:
        self.parts = list(parts)
        self.total = sum(todo for _, todo in self.parts)

    def first(self, tokens: int) -> Cut:
        """The first `tokens` of them; at most the last prompt is cut."""
        behind = done = length = 0
        chunks: list[Chunk] = []
        room = tokens
        for there, todo in self.parts:
            if room <= 0:
                break
            taken = min(todo, room)
            room -= taken
            behind += there
            chunks.append(quick(Chunk, (there, taken, taken == todo)))
            if taken == todo:
                done += 1
                length += there + todo + 1
        return quick(Cut, (tokens - max(room, 0), behind, tuple(chunks), done, length))


@mypyc_attr(serializable=True)
class Prices:
    """Seconds of a step: GPU (`alone`, `together`, `decodes`) and host (`launch`).

    Where a card knows its host, GPU and host are priced apart, because an asynchronous engine overlaps them.
    Otherwise the card's price is that of the whole step and `launch` is 0.
    """

    def __init__(self, cost: StepCost) -> None:
        self.host = cost.host
        self.slow = SlowHost()
        self._seconds = (cost.unhosted() if cost.host else cost).seconds

    def decodes(self, load: Load) -> float:
        """A step of decodes alone."""
        return self._seconds(quick(Shape, (*load, 0, 0, ()))) if load.decodes else 0.0

    def alone(self, cut: Cut) -> float:
        """A step of prompts alone."""
        return self._seconds(quick(Shape, (0, 0, cut.tokens, cut.behind, cut.chunks)))

    def together(self, load: Load, cut: Cut) -> float:
        return self._seconds(quick(Shape, (*load, cut.tokens, cut.behind, cut.chunks)))

    def launch(self, decodes: int, cut: Cut) -> float:
        """Host time of a step with these prompts, as usual."""
        if self.host is None:
            return 0.0
        return self.host.seconds(quick(Shape, (decodes, 0, cut.tokens, cut.behind, cut.chunks)))

    def slow_launch(self, decodes: int, cut: Cut) -> float:
        """The same when the host is slow."""
        return self.slow.factor * self.launch(decodes, cut)

    def sticks_out(self, load: Load, launch: float) -> bool:
        """May decodes wait for a launch that usually takes so long, beyond a step of their own?"""
        return not self.slow.steady and not self.slow.hides(launch, self.decodes(load))

    @property
    def graph(self) -> int:
        """Tokens of the largest CUDA graph; 0 where none is known."""
        return self.host.graph if self.host else 0
