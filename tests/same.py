"""When two texts say the same: the same words, and numbers that differ only in their last digits."""

from __future__ import annotations

import re

import pytest

SHAPE = "[]{}()*=,:;"


def assert_alike(printed: str, expected: str) -> None:
    """The same words; numbers within 2 %, because other processors round the last digits differently."""
    ours, theirs = printed.split(), expected.split()
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if one != other:
            assert number(one) == pytest.approx(number(other), rel=0.02), (one, other)


def number(word: str) -> float:
    return float(re.sub(r"%$", "", word.strip(SHAPE)).replace(",", ""))
