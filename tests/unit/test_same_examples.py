"""Examples do not depend on what else was loaded before."""

from __future__ import annotations

import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from same_examples import LOOKS, freeze_examples

pytestmark = pytest.mark.skipif(not settings.default.derandomize, reason="this profile wants other examples")


def examples() -> list[tuple[list[int], float]]:
    seen = []

    @settings(max_examples=100, derandomize=True)
    @given(st.lists(st.integers(20, 600), max_size=5), st.floats(0, 1e6))
    def look(numbers, number):
        seen.append((numbers, number))

    look()
    return seen


def test_another_module_changes_nothing(tmp_path, monkeypatch):
    before = examples()
    (tmp_path / "of_no_importance.py").write_text("NUMBERS = [77, 78, 79, 333, 444, 3.25, 99.5, 12345.5]\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("of_no_importance")
    assert examples() == before


def test_a_release_of_hypothesis_that_looks_otherwise_is_named(monkeypatch):
    monkeypatch.delattr(providers, LOOKS)
    with pytest.raises(RuntimeError, match="has no _get_local_constants"):
        freeze_examples()
