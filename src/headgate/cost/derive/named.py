"""`derived:MODEL@GPU:tp4:fp8`, wherever a card is asked for by name."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from headgate.core.errors import InputError
from headgate.cost.card import DERIVED_CARD, Card
from headgate.cost.derive.derived_card import derive_card
from headgate.cost.derive.wanted import BF16, FP8, Wanted

FORM = (
    "write derived:MODEL@GPU, then :tp4, :ep4, :fp8, :kv-fp8, :util0.9, :graph1024, :sync or :approximate as "
    "needed"
)
NUMBER = {"tp": "tensor", "pp": "pipeline", "ep": "expert", "graph": "graph"}
LONGEST = 500  # characters of a name


@lru_cache(maxsize=64)
def card_named(text: str) -> Card:
    """The card of that name; derived once, which takes some 50 ms."""
    return derive_card(parse(text))


def parse(text: str) -> Wanted:
    """What a name asks for."""
    rest = text.removeprefix(DERIVED_CARD)
    model, at, place = rest.rpartition("@")
    if not at or not model or not place or len(text) > LONGEST:
        raise InputError(f"card {text[:80]!r} is not complete; {FORM}")
    gpu, *words = place.split(":")
    wanted = Wanted(model, gpu)
    for word in words:
        wanted = _with(wanted, word, text)
    return wanted


def _with(wanted: Wanted, word: str, text: str) -> Wanted:
    degree = re.fullmatch(r"(tp|pp|ep|graph)(\d{1,5})", word)
    share = re.fullmatch(r"util(0?\.\d{1,6}|1(?:\.0*)?)", word)
    if degree:
        given: dict[str, Any] = {NUMBER[degree[1]]: int(degree[2])}
        return replace(wanted, **given)
    if share:
        return replace(wanted, utilisation=float(share[1]))
    if word in (BF16, FP8):
        return replace(wanted, dtype=word)
    if word == f"kv-{FP8}":
        return replace(wanted, kv_dtype=FP8)
    if word == "sync":
        return replace(wanted, synchronous=True)
    if word == "approximate":
        return replace(wanted, approximate=True)
    raise InputError(f"card {text[:80]!r}: {word[:40]!r} is not known; {FORM}")
