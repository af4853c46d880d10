"""What to run: name to class, in a dictionary one can read."""

from __future__ import annotations

from headgate.core.policy import BatchPolicy
from headgate.policies.adaptive import AdaptiveExclusive
from headgate.policies.exclusive import Exclusive, PrefillFirst, RequestLevel
from headgate.policies.hybrid import Hybrid
from headgate.policies.mixed import Mixed

__all__ = ["BATCH", "AdaptiveExclusive", "Exclusive", "Hybrid", "Mixed", "PrefillFirst", "RequestLevel"]

BATCH: dict[str, type[BatchPolicy]] = {
    "mixed": Mixed,
    "eb": Exclusive,
    "eb-online": AdaptiveExclusive,
    "eb+": Hybrid,
    "v0": PrefillFirst,
    "request-level": RequestLevel,
}
