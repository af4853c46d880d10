"""Shape and StepCost: how long a step takes, as a function of what is in it; `laws/` has the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from headgate.cost.laws.terms import HostTerms

Counts = NDArray[np.float64]  # of tokens or requests, one for each of many steps
LARGEST = 1e6  # of any coefficient, in seconds: no step takes days, and no sum overflows


class Chunk(NamedTuple):
    """A part of one prompt that a step processes."""

    start: int  # tokens of the prompt that are already there
    tokens: int
    last: bool = True  # the prompt ends with it, so it brings a token


class Shape(NamedTuple):
    """All a step's duration may depend on."""

    decodes: int = 0  # requests that get one token
    context: int = 0  # KV tokens those decodes read, the one just written included
    prefill: int = 0  # prompt tokens processed
    behind: int = 0  # KV tokens already there for the prompts being processed
    chunks: tuple[Chunk, ...] = ()  # the same prompts one by one; () unless `StepCost.by_chunk`


class StepCost(ABC):
    """The duration of a step in seconds, and everything else a card may say of its engine's time.

    A law of its own subclasses this and answers `seconds` and `decode_line`. The rest has an answer for
    engines without it, so that no caller has to ask whether a cost has one.

    Examples:
        >>> import headgate
        >>> class Flat(headgate.StepCost):
        ...     def seconds(self, shape):
        ...         return 0.01 + 1e-5 * shape.prefill
        ...     def decode_line(self, decodes):
        ...         return 0.01, 0.0  # whatever the context
        >>> engine = headgate.Engine(Flat(), 100_000, 4096, 2048, 64)
        >>> run = headgate.simulate(engine, "mixed", headgate.Workload.of([1000], [11]))
        >>> round(float(run.requests["finished"][0]), 3)  # one step with the prompt, ten without
        0.12
    """

    by_chunk: bool = False  # True: drivers fill `Shape.chunks`; without them prompts count as one prompt
    switch: float = 0.0  # seconds that the first decode step after prompts alone takes beyond its price
    host: HostTerms | None = None  # what the host of an asynchronous engine takes for a step, where known
    width: int = 1  # tokens that a decode computes in a step: more than 1 where drafts are verified

    @abstractmethod
    def seconds(self, shape: Shape) -> float:
        """One step of any shape."""

    @abstractmethod
    def decode_line(self, decodes: int) -> tuple[float, float]:
        """(fixed, per_context): a decode-only step of that many takes fixed + per_context * context.

        It takes `decode_floor` where that is longer.
        """

    def decode_floor(self, decodes: int) -> float:
        """The least a decode-only step of that many takes, whatever its context."""
        return 0.0

    def span(self, decodes: int, context: int, steps: int) -> NDArray[np.float64]:
        """Consecutive decode-only steps; the same numbers `seconds` would give, bit for bit.

        `context` is that of the first step and grows by `decodes` with each.
        """
        fixed, per_context = self.decode_line(decodes)
        contexts = (context + decodes * np.arange(steps, dtype=np.int64)).astype(np.float64)
        found: NDArray[np.float64] = np.maximum(fixed + per_context * contexts, self.decode_floor(decodes))
        return found

    def many(
        self, decodes: Counts, context: Counts, prefill: Counts, behind: Counts, prompts: Counts
    ) -> NDArray[np.float64]:
        """Steps of many shapes, none of them empty; each step's `prompts` share its prefill and behind alike.

        Where the law goes by chunk, all of a step's chunks are priced as `prompts` times the mean one.
        """
        taken = np.empty(len(decodes))
        for row, (running, read, tokens, before, parts) in enumerate(
            zip(decodes, context, prefill, behind, prompts, strict=True)
        ):
            chunks: tuple[Chunk, ...] = ()
            if self.by_chunk and tokens:
                count = min(max(round(parts), 1), max(int(tokens), 1))
                each = [int(tokens) * (i + 1) // count - int(tokens) * i // count for i in range(count)]
                chunks = tuple(Chunk(int(before) // count, part) for part in each)
            taken[row] = self.seconds(Shape(int(running), int(read), int(tokens), int(before), chunks))
        return taken

    def unhosted(self) -> StepCost:
        """The same without the host: what the GPU alone takes."""
        return self

    def graphed(self, tokens: int) -> StepCost:
        return self


class Terms:
    """Coefficients: finite and not negative. The message names the field."""

    # Read by pydantic when a card is loaded; here so that this module need not import pydantic.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 <= value <= LARGEST:
                raise ValueError(f"{field.name} must be a finite number, zero or more, not {value}")
