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


class Solver:
    """Solves programs of one shape after another, each from the basis of the one before.

    A program with more or fewer rows or columns than the last is passed whole; otherwise HiGHS gets the
    differences and needs a few pivots instead of a fresh start.
    """

    def __init__(self) -> None:
        self._model = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("primal_feasibility_tolerance", TOLERANCE),
            ("dual_feasibility_tolerance", TOLERANCE),
        ):
            self._model.setOptionValue(name, value)
        self._last: Program | None = None

    def solve(self, program: Program) -> Optimum:
        last = self._last
        if last is None or last.rows.shape != program.rows.shape:
            self._pass(program)
        else:
            self._send_changes(last, program)
        self._last = program
        self._model.run()
        status = self._model.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            self._last = None
            if status in (
                highspy.HighsModelStatus.kInfeasible,
                highspy.HighsModelStatus.kUnboundedOrInfeasible,
            ):
                raise Infeasible
            raise RuntimeError(f"HiGHS stopped: {self._model.modelStatusToString(status)}")
        found = self._model.getSolution()
        objective = float(self._model.getInfo().objective_function_value)
        return Optimum(objective, np.array(found.col_value), np.array(found.row_dual))

    def _pass(self, program: Program) -> None:
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
        self._model.passModel(lp)

    def _send_changes(self, last: Program, program: Program) -> None:
        model = self._model
        for row, column in np.argwhere(last.rows != program.rows).tolist():
            model.changeCoeff(row, column, program.rows[row, column])
        gains = np.flatnonzero(last.gain != program.gain).astype(np.int32)
        if gains.size:
            model.changeColsCost(gains.size, gains, program.gain[gains])
        for column in np.flatnonzero((last.most != program.most) | (last.least != program.least)).tolist():
            model.changeColBounds(column, program.least[column], program.most[column])
        for number in np.flatnonzero((last.low != program.low) | (last.high != program.high)).tolist():
            model.changeRowBounds(number, program.low[number], program.high[number])
