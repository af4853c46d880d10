"""Carries requests with their KV from the engine of their prompt to the engine of their output."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.core.ledger import Entry
from headgate.sim.fleet.fleet_engine import FleetEngine, Handover


class Transfer(NamedTuple):
    """How long it takes to copy the KV of a request to another engine.

    Every copy has the link for itself: copies that share one are not slowed down. The engine that sends may
    be busy with it: `busy` seconds per request in which it runs no step.
    """

    fixed: float = 0.0  # seconds, whatever the size
    per_token: float = 0.0  # seconds: bytes of KV per token over the bandwidth
    busy: float = 0.0  # seconds of the sender, for each request, between two of its steps

    def checked(self) -> Transfer:
        for name, value in self._asdict().items():
            if not 0 <= value < float("inf"):
                raise InputError(f"transfer: {name} is {value} s; give 0 or more")
        return self

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens


class KvHandover:
    """All that are on their way. KV stays at the sender until its copy is complete, and is reserved at the
    receiver, between two of its steps, before the copy begins. Where a send keeps the sender busy, that time
    is taken before the sender's next step.

    When no engine runs for want of memory, which is full of KV that waits for a place or for its copy, the KV
    of one request is dropped and computed again where it decodes: of the oldest that waits for memory at its
    receiver, or else of one that waits for a receiver.
    """

    def __init__(
        self,
        transfer: Transfer,
        lands: Callable[[float, Handover], None],
        reach: Callable[[FleetEngine], None],
        arrives: Callable[[Handover], None],
    ) -> None:
        self.transfer = transfer
        self._lands, self._reach, self._arrives = lands, reach, arrives
        self._handovers: dict[int, Handover] = {}
        self._copies = 0  # under way

    def take(self, entry: Entry, sender: FleetEngine) -> None:
        self._handovers[entry.id] = Handover(entry, sender)

    def bind(self, id: int, receiver: FleetEngine) -> None:
        handover = self._handovers[id]
        handover.receiver = receiver
        if receiver is not handover.sender and not handover.stripped:
            handover.sender.owed += self.transfer.busy
        (receiver.stripped if handover.stripped else receiver.bound).append(handover)
        receiver.news = True  # the fleet itself reaches it

    def copy(self, handover: Handover, now: float) -> bool:
        seconds = self.transfer.seconds(handover.tokens)
        if seconds <= 0:
            self._free_sender(handover)
            return False
        handover.copying = True
        self._copies += 1
        self._lands(now + seconds, handover)
        return True

    def landed(self, handover: Handover) -> None:
        assert handover.receiver is not None
        handover.copying = False
        self._copies -= 1
        self._free_sender(handover)
        if handover.dropped or handover.stripped:  # its sender failed before the copy was complete
            handover.receiver.unneeded.append(handover)
            if not handover.dropped:
                handover.receiver.stripped.append(handover)
        else:
            handover.receiver.landed.append(handover)
        self._tell(handover.receiver)

    def joined(self, handover: Handover) -> None:
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
            self._tell(handover.receiver)
        elif not handover.reserved and not handover.stripped:
            self._free_sender(handover)
        return handover

    def lose(self, failed: FleetEngine) -> list[Entry]:
        """An engine has failed: the requests on their way that must be served from the start elsewhere.

        Where only the sender failed and a receiver is known, the receiver computes their KV again.
        """
        lost = []
        for id, handover in list(self._handovers.items()):
            if handover.receiver is failed:
                self.drop(id)
                if handover.copying:
                    self._free_sender(handover)
                lost.append(handover.entry)
            elif handover.sender is failed and not handover.stripped:
                if handover.receiver is None:
                    del self._handovers[id]
                    self._free_sender(handover)
                    lost.append(handover.entry)
                elif handover.copying:
                    handover.stripped = True
                elif not handover.reserved:
                    self._strip(handover)
        return lost

    @property
    def may_block(self) -> bool:
        """Is there KV that waits, and none that is being copied?"""
        return bool(self._handovers) and not self._copies

    def recompute_one(self) -> bool:
        """Break a deadlock of memory; False: there is none that this could break."""
        kept = [handover for handover in self._handovers.values() if not handover.stripped]
        bound = (one for one in kept if one.receiver is not None and one in one.receiver.bound)
        handover = next(bound, None) or next((one for one in kept if one.receiver is None), None)
        if handover is None:
            return False
        self._strip(handover)
        return True

    def _strip(self, handover: Handover) -> None:
        """Its KV is dropped; its receiver, if it has one, computes it again."""
        handover.stripped = True
        self._free_sender(handover)
        if handover.receiver is not None:
            handover.receiver.bound.remove(handover)
            handover.receiver.stripped.append(handover)
            self._tell(handover.receiver)

    def _free_sender(self, handover: Handover) -> None:
        """Once: the engine may hold KV of the same request again before a copy in vain has landed."""
        if handover.freed:
            return
        handover.freed = True
        handover.sender.freed.append(handover)
        self._tell(handover.sender)

    def _tell(self, station: FleetEngine) -> None:
        station.news = True
        self._reach(station)
