"""The soak's own checks can fail: each on the fault it is there for."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "soak"))

from checks import Soaked, equal, slope, verdicts

from benchmarks.soak_route import KEPT, LEAK, Sample, growth

MEMORY = [(100 * beat, 10**9 + (beat * 7919 % 13) * 1000) for beat in range(600)]
GOOD = Soaked(100, 90, 10, [], {1: {"a"}, 2: {"b"}}, {"mixed": [0.1] * 100}, MEMORY)


def grown(bytes: float) -> list[tuple[int, int]]:
    return [(count, int(held + bytes * count)) for count, held in MEMORY]


def test_the_slope_is_found_within_its_error():
    rng = np.random.default_rng(0)
    noisy = [(count, int(held + 200 * count + rng.normal(0, 50_000))) for count, held in MEMORY]
    found = slope(noisy)
    assert abs(found.bytes - 200) < 3 * found.error < 10


def failed(gated: Soaked, left: dict[str, float] | None = None, fallen: float = 0.0) -> list[str]:
    return [name for name, _, good in verdicts(GOOD, gated, left or {}, fallen) if not good]


@pytest.mark.parametrize(
    ("gated", "name"),
    [
        (GOOD._replace(answered=89), "lost"),
        (GOOD._replace(failures=["24 in place of 25 tokens"]), "failures"),
        (GOOD._replace(texts={1: {"a"}, 2: {"c"}}), "answers equal to plain vLLM's"),
        (GOOD._replace(memory=grown(213)), "engine memory above plain vLLM's"),
        (GOOD._replace(seconds={"mixed": [0.1] * 98, "eb": [5.0] * 2}), "p99 latency against plain vLLM's"),
    ],
)
def test_each_fault_is_found(gated, name):
    assert failed(GOOD) == [] and failed(gated) == [name]


def test_books_and_policies():
    assert failed(GOOD, {'state="waiting"': 1.0}) == ["books empty when idle"]
    assert failed(GOOD, fallen=1) == ["policies fallen"]
    assert equal({1: {"a"}}, {2: {"a"}}) == 0.0


@pytest.mark.parametrize(
    ("leak", "kept", "flat"), [(0, 0, True), (LEAK / 2, KEPT / 2, True), (2 * LEAK, 0, False), (0, 1, False)]
)
def test_memory_of_a_router_that_levels_off_is_flat_and_a_leak_is_not(leak, kept, flat):
    """The noise is that of a soak: 0.1 MiB, and the objects of about ten requests."""
    served, draw = range(0, 30_000, 500), np.random.default_rng(0)
    samples = [
        Sample(
            n,
            70 + 9 * (1 - np.exp(-n / 2000)) + leak * n / 2**20 + draw.normal(0, 0.1),
            300_000 + round(kept * n + draw.normal(0, 1500)),
            100,
        )
        for n in served
    ]
    bytes, objects = growth(samples)
    assert (bytes <= LEAK and objects <= KEPT) is flat
