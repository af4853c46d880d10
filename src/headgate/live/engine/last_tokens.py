"""When each decode that runs gets the last token it may have, in ticks of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from headgate.core.ledger import Entry, Ledger

SPARE = 64  # entries of requests that have left, beside as many as there are decodes


class LastTokens:
    """Decodes by the tick of their last token, so that a step in flight can retire them in time.

    Requests that leave or are held stay in the heap until their tick comes. It is rebuilt when there are more
    of those than decodes: an engine that never asks for `due` (synchronous scheduling) keeps it small too.
    """

    __slots__ = ("_heap", "_ledger")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._heap: list[tuple[int, int]] = []  # tick, request

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, entry: Entry) -> None:
        """It gets a token in each step from now on."""
        heap, decoding = self._heap, self._ledger.decoding
        if len(heap) >= 2 * len(decoding) + SPARE:
            heap[:] = [self._last(each) for each in decoding.values() if each.rolls]
            heapify(heap)
        else:
            heappush(heap, self._last(entry))

    def due(self) -> Sequence[Entry]:
        """Those that have all their tokens now; each is named once."""
        heap, ledger = self._heap, self._ledger
        if not heap or heap[0][0] > ledger.tick:
            return ()
        found: dict[int, Entry] = {}
        while heap and heap[0][0] <= ledger.tick:
            entry = ledger.decoding.get(heappop(heap)[1])
            if entry is None or not entry.rolls:  # it left, or is held: it is added again when it resumes
                continue
            if entry.generated < entry.limit:  # tokens were taken back
                heappush(heap, self._last(entry))
            else:
                found[entry.id] = entry
        return list(found.values())

    def _last(self, entry: Entry) -> tuple[int, int]:
        return self._ledger.tick + entry.limit - entry.generated, entry.id
