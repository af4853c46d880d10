"""`rows` for the compiled build, where a number becomes bytes without a Python object in between."""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, write_f64_le, write_i64_le

FULL: Final = 1 << 20  # bytes of a part


class Rows:
    """One below the other, all of one table; in parts, because a writer hands out copies only."""

    __slots__ = ("_full", "_rows")

    def __init__(self) -> None:
        self._full: list[bytes | bytearray] = []
        self._rows = BytesWriter()

    def parts(self) -> list[bytes | bytearray]:
        return [*self._full, self._rows.getvalue()] if len(self._rows) else self._full

    def _begin(self) -> BytesWriter:
        if len(self._rows) >= FULL:
            self._full.append(self._rows.getvalue())
            self._rows = BytesWriter()
        return self._rows

    def step(
        self, start: float, first: float, seconds: float, count: int, decodes: int, context: int,
        prefill: int, behind: int, kv: int, replica: int,
    ) -> None:  # fmt: skip
        rows = self._begin()
        write_f64_le(rows, start)
        write_f64_le(rows, first)
        write_f64_le(rows, seconds)
        write_i64_le(rows, count)
        write_i64_le(rows, decodes)
        write_i64_le(rows, context)
        write_i64_le(rows, prefill)
        write_i64_le(rows, behind)
        write_i64_le(rows, kv)
        write_i64_le(rows, replica)

    def stay(
        self, number: int, request: int, opened: float, gap: float, first_tick: int, ticks: int, replica: int
    ) -> None:
        rows = self._begin()
        write_i64_le(rows, number)
        write_i64_le(rows, request)
        write_f64_le(rows, opened)
        write_f64_le(rows, gap)
        write_i64_le(rows, first_tick)
        write_i64_le(rows, ticks)
        write_i64_le(rows, replica)

    def plan(self, time: float, step: int, decode: int, prompts: int, evict: int, replica: int) -> None:
        rows = self._begin()
        write_f64_le(rows, time)
        write_i64_le(rows, step)
        write_i64_le(rows, decode)
        write_i64_le(rows, prompts)
        write_i64_le(rows, evict)
        write_i64_le(rows, replica)

    def request(
        self, id: int, arrival: float, admitted: float, first_token: float, finished: float, prompt: int,
        kind: int, priority: int, cached: int, output: int, evictions: int, wasted: int, how: int,
        replica: int,
    ) -> None:  # fmt: skip
        rows = self._begin()
        write_i64_le(rows, id)
        write_f64_le(rows, arrival)
        write_f64_le(rows, admitted)
        write_f64_le(rows, first_token)
        write_f64_le(rows, finished)
        write_i64_le(rows, prompt)
        write_i64_le(rows, kind)
        write_i64_le(rows, priority)
        write_i64_le(rows, cached)
        write_i64_le(rows, output)
        write_i64_le(rows, evictions)
        write_i64_le(rows, wasted)
        write_i64_le(rows, how)
        write_i64_le(rows, replica)

    def count(self, number: int) -> None:
        write_i64_le(self._rows, number)
