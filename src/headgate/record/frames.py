"""A table of a run as a data frame of the library that is installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from headgate.core.errors import InputError, unknown

if TYPE_CHECKING:
    from headgate.record.tables import Columns, Run

LIBRARIES = ("polars", "pandas", "numpy")  # the first that is installed is taken


def to_dataframe(run: Run, table: str, library: str | None = None) -> Any:
    """One of the run's four tables; classes and ends of requests by their names instead of numbers."""
    from headgate.record.tables import COLUMNS

    if table not in COLUMNS:
        raise unknown("table of a run", table, COLUMNS)
    columns: Columns = dict(getattr(run, table))
    if table == "requests":
        columns |= _names(run)
    name = library or next(each for each in LIBRARIES if find_spec(each))
    if name not in LIBRARIES:
        raise unknown("library for data frames", name, LIBRARIES)
    if name == "numpy":
        return columns
    if find_spec(name) is None:
        raise InputError(f"{name} is not installed; pip install {name}, or take another library")
    return import_module(name).DataFrame(columns)


def _names(run: Run) -> Columns:
    """The columns `kind` and `how` as text; how is "" for a request that had not left."""
    from headgate.record.tables import ENDS

    kinds = np.array([str(kind.get("name", "")) for kind in run.kinds])
    ends = np.array([*(end.value for end in ENDS), ""])  # -1 is the last
    return {"kind": kinds[run.requests["kind"]], "how": ends[run.requests["how"]]}
