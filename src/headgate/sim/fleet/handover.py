"""A request on its way from the engine that made its first token to the one that makes the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headgate.core.ledger import Entry

if TYPE_CHECKING:
    from headgate.sim.fleet.fleet_engine import FleetEngine


@dataclass(slots=True, eq=False)
class Handover:
    """Prompt done at `sender`, which keeps its KV until the copy is complete.

    Without a receiver it waits for the router; then for KV at the receiver, for the copy, and for a seat.
    """

    entry: Entry
    sender: FleetEngine
    receiver: FleetEngine | None = None
    reserved: int = 0  # blocks taken at the receiver
    copying: bool = False
    dropped: bool = False  # its client hung up
    freed: bool = False  # its sender may drop the KV
    stripped: bool = False  # its KV is gone and must be computed again

    @property
    def tokens(self) -> int:
        return self.entry.prompt + self.entry.generated - 1
