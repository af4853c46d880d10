"""A run's tables as data frames: polars, pandas, or columns of numpy where neither is installed."""

from __future__ import annotations

import numpy as np
import pytest

import headgate
from headgate.core.errors import InputError
from headgate.record import tables as frames
from headgate.record.tables import COLUMNS


@pytest.fixture(scope="module")
def run():
    engine = headgate.card_engine("linear-h200-qwen3-8b", slots=2)
    kinds = (headgate.Kind("chat"), headgate.Kind("batch"))
    requests = headgate.Workload.of(
        [100, 200, 300], [5, 9, 7], kind=[0, 1, 0], kinds=kinds, limit=[100, 4, 100], patience=[9, 9, 1e-4]
    )
    return headgate.simulate(engine, "mixed", requests)


@pytest.mark.parametrize("library", ["polars", "pandas"])
@pytest.mark.parametrize("table", COLUMNS)
def test_every_table_has_its_columns_and_values(run, library, table):
    module = pytest.importorskip(library)
    frame = run.to_dataframe(table, library)
    assert isinstance(frame, module.DataFrame)
    columns = getattr(run, table)
    assert list(frame.columns) == list(columns) and len(frame) == len(columns[COLUMNS[table][0]])
    for name in COLUMNS[table]:
        if (table, name) not in (("requests", "kind"), ("requests", "how")):
            assert np.array_equal(frame[name].to_numpy(), columns[name], equal_nan=True)


@pytest.mark.parametrize("library", ["polars", "pandas", "numpy"])
def test_classes_and_ends_have_names(run, library):
    frame = run.to_dataframe("requests", library)
    assert list(frame["kind"]) == ["chat", "batch", "chat"]
    assert list(frame["how"]) == ["stopped", "limit", "abandoned"]


def test_the_first_library_that_is_installed_is_taken(run, monkeypatch):
    here = {"numpy"}
    monkeypatch.setattr(frames, "find_spec", lambda name: name if name in here else None)
    assert isinstance(run.to_dataframe(), dict)
    with pytest.raises(InputError, match="pandas is not installed; pip install pandas"):
        run.to_dataframe(library="pandas")
    monkeypatch.undo()
    pytest.importorskip("polars")
    assert type(run.to_dataframe()).__module__.startswith("polars")


def test_what_is_not_there(run):
    with pytest.raises(InputError, match="unknown table of a run 'request'; did you mean 'requests'"):
        run.to_dataframe("request")
    with pytest.raises(InputError, match="unknown library for data frames 'plars'; did you mean 'polars'"):
        run.to_dataframe(library="plars")
