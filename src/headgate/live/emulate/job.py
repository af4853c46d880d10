"""One sequence that an emulated engine works on: a prompt, an answer, and who is told of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headgate.core.policy import End
from headgate.core.request import Slo
from headgate.kv.prefix import Pieces
from headgate.live.emulate.text import Text

if TYPE_CHECKING:
    from headgate.core.ledger import Entry

NO_SLO = Slo()


class Sink(Protocol):
    """Who gets the tokens of a job. Called by the engine at the moment the tokens are there."""

    streams: bool  # False: only the end matters

    def tokens(self, job: Job) -> None:
        """It has more tokens than before, and will have more."""

    def end(self, job: Job) -> None:
        """It has all the tokens it will get; `job.how` says why."""


class Job:
    """One choice of one prompt.

    `length` is the true output, which no policy sees; `limit` is the client's max_tokens. `loaded` prompt
    tokens come with KV from another engine; with `export`, a name, the KV stays when the job has ended.
    `cached` prompt tokens were found in the prefix cache when it was admitted, as its `content` allows.
    """

    __slots__ = (
        "admitted", "arrival", "cached", "choice", "content", "entry", "error", "events", "evictions",
        "export", "finished", "first", "guess", "how", "id", "kind", "length", "limit", "loaded", "made",
        "mark", "newest", "priority", "prompt", "sent", "sink", "slo", "stop_reason", "stops", "text",
    )  # fmt: skip

    def __init__(self, prompt: int, length: int, limit: int, text: Text, sink: Sink, choice: int = 0) -> None:
        self.prompt, self.length, self.limit = prompt, length, limit
        self.text, self.sink, self.choice = text, sink, choice
        self.mark = 0  # fingerprint of the prompt
        self.kind, self.slo, self.guess, self.priority = "", NO_SLO, None, 0
        self.loaded = self.cached = 0
        self.content: Pieces = ()  # nothing: it shares with nobody
        self.export = ""
        self.stops = False  # it ends with EOS or a stop string, not by its limit
        self.stop_reason: str | int | None = None
        self.id = -1  # arrival number at its engine
        self.entry: Entry | None = None
        self.arrival = self.admitted = self.first = self.newest = self.finished = -1.0  # emulated seconds
        self.made = self.sent = self.evictions = 0
        self.events: list[bytes] = []  # of its next tokens, ready to be written, the next one last
        self.how: End | None = None
        self.error: str | None = None  # the engine failed it

    guess: int | None

    @property
    def reason(self) -> str:
        """Why it ended, in vLLM's words."""
        if self.error is not None:
            return "error"
        if self.how is End.STOPPED and self.stops:
            return "stop"
        return "length" if self.how in (End.STOPPED, End.LIMIT) else "abort"
