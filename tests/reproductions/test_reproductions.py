"""Every reproduction in full against its output in docs/reproductions.md. Minutes each: `make reproduce`."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path

import pytest

from as_text import as_text
from headgate_papers import EXPERIMENTS, Options, find, reproduce
from headgate_papers.page import published_page

PAGE = Path(__file__).parents[2] / "docs" / "reproductions.md"
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
TOLERANCE, MISSED = 0.05, 0.02  # of a number; the share of numbers that may lie beyond it (small ones, ties)


def on_the_page() -> dict[str, str]:
    """The output of each experiment, as the page has it."""
    found = {}
    for block in re.findall(r"```\w*\n(.*?)```", PAGE.read_text(), re.DOTALL):
        body = re.sub(r"\A\$ headgate [^\n]*\n", "", block)
        name = body.partition(":")[0]
        if name in EXPERIMENTS:
            found[name] = body
    return found


SHOWN = on_the_page()


def numbers(text: str) -> list[float]:
    return [float(each.replace(",", "").rstrip(".")) for each in NUMBER.findall(text)]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_page_has_what_comes_out(name):
    assert name in SHOWN, f"docs/reproductions.md has no output of {name}"
    report = reproduce(name, Options(), find(name).jobs(Options()))
    ours, page = numbers(as_text(published_page(report, []))), numbers(SHOWN[name])
    assert abs(len(ours) - len(page)) <= MISSED * len(page)
    off = [
        (there, here)
        for there, here in zip_longest(page, ours, fillvalue=float("nan"))
        if not abs(there - here) <= TOLERANCE * max(abs(there), abs(here), 0.1)
    ]
    assert len(off) <= MISSED * len(page), off[:20]
