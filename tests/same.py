"""When two texts say the same: the same words, and numbers that differ only in their last digits."""

from __future__ import annotations

import re

import pytest

SHAPE = "[]{}()*=,:;"
SIZE = re.compile(r"\d+ [kM]B")  # of a file: any change of a page changes it


def assert_alike(printed: str, expected: str) -> None:
    """The same words; numbers within 2 %, because other processors round the last digits differently."""
    ours, theirs = (SIZE.sub("some kB", text).split() for text in (printed, expected))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if one != other:
            assert number(one) == pytest.approx(number(other), rel=0.02), (one, other)


def number(word: str) -> float:
    return float(re.sub(r"%$", "", word.strip(SHAPE)).replace(",", ""))
