"""A linear program as arrays, and how to build one by blocks of columns and rows."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Program(NamedTuple):
    """Maximise gain @ z with low <= rows @ z <= high and least <= z <= most."""

    gain: Floats
    least: Floats
    most: Floats
    rows: Floats
    low: Floats
    high: Floats


class Answer(NamedTuple):
    """An optimal vertex; `duals` are d(objective)/d(right-hand side) of each row."""

    objective: float
    values: Floats
    duals: Floats


class Builder:
    """A program under construction: columns by block name, rows by what they say."""

    def __init__(self) -> None:
        self._blocks: dict[str, slice] = {}
        self._gain: list[float] = []
        self._most: list[float] = []
        self._rows: list[tuple[dict[str, Floats], float, float]] = []

    def columns(self, name: str, gain: Floats, most: float | Floats = inf) -> None:
        """A block of variables between 0 and `most`."""
        start = len(self._gain)
        self._blocks[name] = slice(start, start + len(gain))
        self._gain += gain.tolist()
        self._most += np.broadcast_to(most, len(gain)).tolist()

    def row(self, parts: dict[str, Floats], low: float = -inf, high: float = inf) -> int:
        """A row: coefficients by block, and its bounds. Returns its number."""
        self._rows.append((parts, low, high))
        return len(self._rows) - 1

    def block(self, name: str) -> slice:
        return self._blocks[name]

    def program(self) -> Program:
        width = len(self._gain)
        matrix = np.zeros((len(self._rows), width))
        for number, (parts, _, _) in enumerate(self._rows):
            for name, values in parts.items():
                matrix[number, self._blocks[name]] = values
        low, high = (np.array([row[place] for row in self._rows]) for place in (1, 2))
        return Program(np.array(self._gain), np.zeros(width), np.array(self._most), matrix, low, high)
