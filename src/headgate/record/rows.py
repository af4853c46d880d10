"""Rows of a recorder's tables as bytes: doubles, and counts of 64 bits.

The columns of every table stand here, in the order of writing. `compiled_rows` writes the same by name.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

STEPS = {"start": float, "first": float, "seconds": float, "count": int, "decodes": int, "context": int}
STEPS |= {"prefill": int, "behind": int, "kv": int, "replica": int}
STAYS = {"number": int, "request": int, "opened": float, "gap": float, "first_tick": int, "ticks": int}
STAYS |= {"replica": int}
PLANS = {"time": float, "step": int, "decode": int, "prompts": int, "evict": int, "replica": int}
REQUESTS = {"id": int, "arrival": float, "admitted": float, "first_token": float, "finished": float}
REQUESTS |= {"prompt": int, "kind": int, "priority": int, "cached": int, "output": int, "evictions": int}
REQUESTS |= {"wasted": int, "how": int, "replica": int}


COUNT: Final = Struct("<q").pack
STEP, STAY, PLAN, REQUEST = (
    Struct("<" + "".join("d" if kind is float else "q" for kind in columns.values())).pack
    for columns in (STEPS, STAYS, PLANS, REQUESTS)
)


class Rows:
    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows = bytearray()

    def parts(self) -> list[bytes | bytearray]:
        """All that was written. Not a copy: no row can be added as long as it is used."""
        return [self._rows] if self._rows else []

    def step(self, *columns: float) -> None:
        self._rows += STEP(*columns)

    def stay(self, *columns: float) -> None:
        self._rows += STAY(*columns)

    def plan(self, *columns: float) -> None:
        self._rows += PLAN(*columns)

    def request(self, *columns: float) -> None:
        self._rows += REQUEST(*columns)

    def count(self, number: int) -> None:
        self._rows += COUNT(number)
