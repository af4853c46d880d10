"""Rows of a recorder's tables as bytes: doubles, and counts of 64 bits. `compiled_rows` writes the same.

The columns of every table stand here, in the order in which both write them.
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


def _packed(columns: dict[str, type]) -> Struct:
    return Struct("<" + "".join("d" if kind is float else "q" for kind in columns.values()))


COUNT: Final = Struct("<q").pack
STEP: Final = _packed(STEPS).pack
STAY: Final = _packed(STAYS).pack
PLAN: Final = _packed(PLANS).pack
REQUEST: Final = _packed(REQUESTS).pack


class Rows:
    """One below the other, all of one table."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows = bytearray()

    def parts(self) -> list[bytes | bytearray]:
        """All that was written. Not a copy: no row can be added as long as it is used."""
        return [self._rows] if self._rows else []

    def step(
        self,
        start: float,
        first: float,
        seconds: float,
        count: int,
        decodes: int,
        context: int,
        prefill: int,
        behind: int,
        kv: int,
        replica: int,
    ) -> None:
        """A run of equal steps."""
        self._rows += STEP(start, first, seconds, count, decodes, context, prefill, behind, kv, replica)

    def stay(
        self, number: int, request: int, opened: float, gap: float, first_tick: int, ticks: int, replica: int
    ) -> None:
        """A stay among the decodes that has ended."""
        self._rows += STAY(number, request, opened, gap, first_tick, ticks, replica)

    def plan(self, time: float, step: int, decode: int, prompts: int, evict: int, replica: int) -> None:
        """A plan in numbers."""
        self._rows += PLAN(time, step, decode, prompts, evict, replica)

    def request(
        self,
        id: int,
        arrival: float,
        admitted: float,
        first_token: float,
        finished: float,
        prompt: int,
        kind: int,
        priority: int,
        cached: int,
        output: int,
        evictions: int,
        wasted: int,
        how: int,
        replica: int,
    ) -> None:
        """A request that has left."""
        self._rows += REQUEST(
            id,
            arrival,
            admitted,
            first_token,
            finished,
            prompt,
            kind,
            priority,
            cached,
            output,
            evictions,
            wasted,
            how,
            replica,
        )

    def count(self, number: int) -> None:
        """One more field of the last row."""
        self._rows += COUNT(number)
