"""A request on its way from the engine that made its first token to the one that makes the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.core.ledger import Entry

if TYPE_CHECKING:
    from headgate.sim.fleet.fleet_engine import FleetEngine


class Handover:
    """Prompt done at `sender`, which keeps its KV until the copy is complete.

    Without a receiver it waits for the router; then for KV at the receiver, for the copy, and for a seat.
    """

    __slots__ = ("copying", "dropped", "entry", "freed", "receiver", "reserved", "sender", "stripped")

    def __init__(self, entry: Entry, sender: FleetEngine) -> None:
        self.entry, self.sender = entry, sender
        self.receiver: FleetEngine | None = None
        self.reserved = 0  # blocks taken at the receiver
        self.copying = False
        self.dropped = False  # its client hung up
        self.freed = False  # its sender may drop the KV
        self.stripped = False  # its KV is gone and must be computed again

    @property
    def tokens(self) -> int:
        return self.entry.prompt + self.entry.generated - 1
