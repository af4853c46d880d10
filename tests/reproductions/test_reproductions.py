"""Every reproduction in full against its output in papers/outputs. Minutes each: `make reproduce`."""

from __future__ import annotations

import os
import re
import time
from itertools import zip_longest
from pathlib import Path

import pytest

from as_text import as_text
from headgate_papers import EXPERIMENTS, Options, find, reproduce
from headgate_papers.page import published_page

LOG = os.environ.get("REPRODUCE_LOG", os.devnull)  # name, seconds and verdict, a line each
OUTPUTS = Path(__file__).parents[2] / "papers" / "outputs"
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
CHECKED = re.compile(r"\d+ of \d+ checked")
TOLERANCE, MISSED = 0.05, 0.02  # of a number; the share of numbers that may lie beyond it (small ones, ties)


def numbers(text: str) -> list[float]:
    return [float(each.replace(",", "").rstrip(".")) for each in NUMBER.findall(text)]


def verdict(text: str) -> str:
    return " ".join(text.rstrip().split("\n\n")[-1].split())


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_comes_out_is_what_is_kept(name):
    shown, start = (OUTPUTS / f"{name}.txt").read_text(encoding="utf-8"), time.monotonic()
    text = as_text(published_page(reproduce(name, Options(), find(name).jobs(Options())), []))
    with open(LOG, "a", encoding="utf-8") as log:
        log.write(f"{name} {time.monotonic() - start:.0f} s: {verdict(text)}\n")
    assert CHECKED.findall(verdict(text)) == CHECKED.findall(verdict(shown)), "docs/reproductions.md says why"
    ours, page = numbers(text), numbers(shown)
    assert abs(len(ours) - len(page)) <= MISSED * len(page)
    off = [
        (there, here)
        for there, here in zip_longest(page, ours, fillvalue=float("nan"))
        if not abs(there - here) <= TOLERANCE * max(abs(there), abs(here), 0.1)
    ]
    assert len(off) <= MISSED * len(page), off[:20]
