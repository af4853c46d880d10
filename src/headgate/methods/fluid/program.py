"""A linear program as arrays, and how to build one by blocks of columns and rows."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import highspy
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


class Optimum(NamedTuple):
    """An optimal vertex; `duals` are d(objective)/d(right-hand side) of each row."""

    objective: float
    values: Floats
    duals: Floats


class Builder:
    def __init__(self) -> None:
        self.blocks: dict[str, slice] = {}  # columns by name
        self._gain: list[float] = []
        self._most: list[float] = []
        self._rows: list[tuple[dict[str, Floats], float, float]] = []

    def columns(self, name: str, gain: Floats, most: float | Floats = inf) -> None:
        start = len(self._gain)
        self.blocks[name] = slice(start, start + len(gain))
        self._gain += gain.tolist()
        self._most += np.broadcast_to(most, len(gain)).tolist()

    def row(self, parts: dict[str, Floats], low: float = -inf, high: float = inf) -> int:
        self._rows.append((parts, low, high))
        return len(self._rows) - 1

    def program(self) -> Program:
        width = len(self._gain)
        matrix = np.zeros((len(self._rows), width))
        for number, (parts, _, _) in enumerate(self._rows):
            for name, values in parts.items():
                matrix[number, self.blocks[name]] = values
        low, high = (np.array([row[place] for row in self._rows]) for place in (1, 2))
        return Program(np.array(self._gain), np.zeros(width), np.array(self._most), matrix, low, high)


TOLERANCE = 1e-9  # of rows, columns and reduced costs


class Infeasible(Exception):  # noqa: N818  (a verdict on the program, not a mistake in it)
    """No point satisfies all rows."""


def solve(program: Program) -> Optimum:
    """Afresh each time: a solver that starts from the last basis saves a millisecond in ten seconds."""
    model = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in (
        ("output_flag", False),
        ("threads", 1),
        ("primal_feasibility_tolerance", TOLERANCE),
        ("dual_feasibility_tolerance", TOLERANCE),
    ):
        model.setOptionValue(name, value)
    lp = highspy.HighsLp()
    lp.num_row_, lp.num_col_ = program.rows.shape
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = program.gain, program.least, program.most
    lp.row_lower_, lp.row_upper_ = program.low, program.high
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    where = program.rows != 0
    lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(where.sum(axis=1))))
    lp.a_matrix_.index_ = np.nonzero(where)[1]
    lp.a_matrix_.value_ = program.rows[where]
    model.passModel(lp)
    model.run()
    status = model.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        raise Infeasible
    if status != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"HiGHS stopped: {model.modelStatusToString(status)}")
    found = model.getSolution()
    objective = float(model.getInfo().objective_function_value)
    return Optimum(objective, np.array(found.col_value), np.array(found.row_dual))
