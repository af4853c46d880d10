"""Carries requests with their KV from the engine of their prompt to the engine of their output."""

from __future__ import annotations

from collections.abc import Callable

from headgate.core.ledger import Entry
from headgate.drivers.handover import Handover, Transfer
from headgate.drivers.station import Station


class Porter:
    """All that are on their way. KV stays at the sender until its copy is complete, and is reserved at the
    receiver, between two of its steps, before the copy begins.

    When nothing in the fleet can move any more, because every receiver's memory is full of KV that waits to
    be copied elsewhere, the oldest goes without its KV, which is computed again.
    """

    def __init__(
        self,
        transfer: Transfer,
        lands: Callable[[float, Handover], None],
        reach: Callable[[Station], None],
        arrives: Callable[[Handover], None],
    ) -> None:
        self.transfer = transfer
        self._lands, self._reach, self._arrives = lands, reach, arrives
        self._handovers: dict[int, Handover] = {}

    def take(self, entry: Entry, sender: Station) -> None:
        """Its prompt is done there."""
        self._handovers[entry.id] = Handover(entry, sender)

    def bind(self, id: int, receiver: Station) -> None:
        """The router has found a place for its decode."""
        handover = self._handovers[id]
        handover.receiver = receiver
        receiver.bound.append(handover)

    def copy(self, handover: Handover, now: float) -> bool:
        """Begin to copy; False: it takes no time."""
        seconds = self.transfer.seconds(handover.tokens)
        if seconds <= 0:
            self._free_sender(handover)
            return False
        handover.copying = True
        self._lands(now + seconds, handover)
        return True

    def landed(self, handover: Handover) -> None:
        """The copy is complete."""
        assert handover.receiver is not None
        handover.copying = False
        self._free_sender(handover)
        if handover.dropped:
            handover.receiver.unneeded.append(handover)
        else:
            handover.receiver.landed.append(handover)
        self._reach(handover.receiver)

    def joined(self, handover: Handover) -> None:
        """It decodes at its receiver."""
        del self._handovers[handover.entry.id]
        self._arrives(handover)

    def drop(self, id: int) -> Handover | None:
        """Its client has hung up, if it is on its way; a copy that has begun goes on to its end."""
        handover = self._handovers.pop(id, None)
        if handover is None:
            return None
        handover.dropped = True
        if handover.reserved and not handover.copying:
            assert handover.receiver is not None
            handover.receiver.unneeded.append(handover)
            self._reach(handover.receiver)
        elif not handover.reserved:
            self._free_sender(handover)
        return handover

    def recompute_one(self) -> bool:
        """Break a deadlock of memory: the oldest that waits for KV at its receiver goes there without."""
        for handover in self._handovers.values():
            receiver = handover.receiver
            if receiver is not None and handover in receiver.bound:
                receiver.bound.remove(handover)
                receiver.stripped.append(handover)
                self._free_sender(handover)
                self._reach(receiver)
                return True
        return False

    def _free_sender(self, handover: Handover) -> None:
        handover.sender.freed.append(handover)
        self._reach(handover.sender)
