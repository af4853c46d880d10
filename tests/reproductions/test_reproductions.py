"""Every reproduction in full against its output in papers/outputs. Minutes each: `make reproduce`."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path

import pytest

from as_text import as_text
from headgate_papers import EXPERIMENTS, Options, find, reproduce
from headgate_papers.page import published_page

OUTPUTS = Path(__file__).parents[2] / "papers" / "outputs"
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
TOLERANCE, MISSED = 0.05, 0.02  # of a number; the share of numbers that may lie beyond it (small ones, ties)


def numbers(text: str) -> list[float]:
    return [float(each.replace(",", "").rstrip(".")) for each in NUMBER.findall(text)]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_comes_out_is_what_is_kept(name):
    shown = (OUTPUTS / f"{name}.txt").read_text(encoding="utf-8")
    report = reproduce(name, Options(), find(name).jobs(Options()))
    ours, page = numbers(as_text(published_page(report, []))), numbers(shown)
    assert abs(len(ours) - len(page)) <= MISSED * len(page)
    off = [
        (there, here)
        for there, here in zip_longest(page, ours, fillvalue=float("nan"))
        if not abs(there - here) <= TOLERANCE * max(abs(there), abs(here), 0.1)
    ]
    assert len(off) <= MISSED * len(page), off[:20]
