"""One step on its way through a live engine, from being composed to its tokens being known."""

from __future__ import annotations

from typing import Any, NamedTuple

from headgate.core.ledger import Entry


class Chunk(NamedTuple):
    """A piece of a prompt in a step."""

    entry: Entry
    tokens: int
    behind: int  # KV tokens that were already there for it
    left: int  # tokens of the prompt still to run after it


class StepInFlight:
    """What a step holds. An engine may compose the next step before the tokens of this one are known.

    A step counts as *booked* when the ledger shows its effect: at its end, or when the next step is composed,
    whichever comes first. Observers hear of it at its end, when its duration is known; what happens to
    requests between booking and end waits in `later`.
    """

    __slots__ = ("booked", "chunks", "context", "decodes", "later", "output", "rolls", "scheduled", "start")

    def __init__(
        self, start: float, decodes: int, context: int, chunks: tuple[Chunk, ...], rolls: bool
    ) -> None:
        self.start = start
        self.decodes = decodes
        self.context = context
        self.chunks = chunks
        self.rolls = rolls  # prompts it completes decode on with the others
        self.booked = False
        self.output: Any = None  # the engine's own name for it
        self.scheduled: Any = None  # tokens, by the engine's names of requests
        self.later: list[tuple[str, Entry, float | None]] = []  # hook, request, time (None: the step's end)

    @property
    def kind(self) -> str:
        if not self.chunks:
            return "decode"
        return "mixed" if self.decodes else "prefill"
