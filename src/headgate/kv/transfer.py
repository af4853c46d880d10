"""A request on its way from the engine that made its first token to the one that makes the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from headgate.core.errors import InputError
from headgate.core.ledger import Entry

if TYPE_CHECKING:
    from headgate.sim.fleet.fleet_engine import Station


class Transfer(NamedTuple):
    """How long it takes to copy the KV of a request to another engine.

    Every copy has the link for itself: copies that share one are not slowed down.
    """

    fixed: float = 0.0  # seconds, whatever the size
    per_token: float = 0.0  # seconds: bytes of KV per token over the bandwidth

    def checked(self) -> Transfer:
        """The same, or an error that names what cannot be."""
        for name, value in self._asdict().items():
            if not 0 <= value < float("inf"):
                raise InputError(f"transfer: {name} is {value} s; give 0 or more")
        return self

    def seconds(self, tokens: int) -> float:
        """For so many tokens of KV."""
        return self.fixed + self.per_token * tokens


@dataclass(slots=True, eq=False)
class Handover:
    """Prompt done at `sender`, which keeps its KV until the copy is complete.

    Without a receiver it waits for the router; then for KV at the receiver, for the copy, and for a seat.
    """

    entry: Entry
    sender: Station
    receiver: Station | None = None
    reserved: int = 0  # blocks taken at the receiver
    copying: bool = False
    dropped: bool = False  # its client hung up
    stripped: bool = False  # its KV is gone and must be computed again

    @property
    def tokens(self) -> int:
        """KV tokens it brings."""
        return self.entry.prompt + self.entry.generated - 1
