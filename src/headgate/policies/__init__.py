"""What to run: name to class, in a dictionary one can read."""

from __future__ import annotations

from headgate.core.policy import BatchPolicy
from headgate.policies.exclusive import Exclusive, PrefillFirst, RequestLevel
from headgate.policies.mixed import Mixed

__all__ = ["BATCH", "Exclusive", "Mixed", "PrefillFirst", "RequestLevel"]

BATCH: dict[str, type[BatchPolicy]] = {
    "mixed": Mixed,
    "eb": Exclusive,
    "v0": PrefillFirst,
    "request-level": RequestLevel,
}
