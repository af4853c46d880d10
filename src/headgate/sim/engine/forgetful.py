"""An engine that forgets: an evicted decode loses its newest output tokens, or all of them."""

from __future__ import annotations

from headgate.core.ledger import Entry
from headgate.sim.engine.replica import VirtualEngine

EVERYTHING = 2**31 - 1  # an evicted request starts from nothing


class Forgetful(VirtualEngine):
    """Takes `lost` output tokens from every decode that is evicted; they must be brought again.

    Engines lose none: the step that computes the KV again brings the next token. Analyses assume worse. One
    lost token is that step without a token, as in models where a prompt brings none; EVERYTHING is the
    restart that arguments against first come, first served rest on (WAIT's Proposition 4).
    """

    lost = EVERYTHING

    def _drop(self, entry: Entry) -> None:
        lost = min(self.lost, entry.generated) if entry.id in self.ledger.decoding else 0
        super()._drop(entry)
        self.ledger.recount(entry, entry.generated - lost)
        entry.todo -= lost
