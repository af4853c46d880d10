"""Memory-safe batch sizes, the switch and the gate: known answers."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.methods.eb.refill import refill_due
from headgate.methods.eb.thresholds import safe_slots
from headgate_papers.eb.policies import kv_reserve
from headgate_papers.eb.theory import paper_slots

PAPER = [  # C, mu_O, mu_L, theta, N*
    (400000, 256, 512, 0.175971, 536),
    (400000, 1024, 128, 0.3, 369),
    (400000, 128, 1024, 0.3, 353),
    (450000, 1039, 122, 0.2, 389),
    (700000, 280, 105, 0.5, 2329),
    (100000, 1039, 122, 0.2, 56),
    (40000, 1039, 122, 0.2, -1),
    (400000, 384, 1, 0.23, -829),
]


@pytest.mark.parametrize(("capacity", "output", "prompt", "share", "star"), PAPER)
def test_the_papers_bounds(capacity: int, output: int, prompt: int, share: float, star: int) -> None:
    assert paper_slots(share, 1 / output, prompt, capacity) == star


SAFE = [  # C, mu_O, mu_L, theta, sigma_L, N
    (400000, 256, 512, 0.176, 512 / sqrt(12), 516.636103),
    (400000, 1024, 128, 0.7, 128 / sqrt(12), 491.973286),
    (170000, 280, 105, 0.8, 0, 689.937372),
    (40000, 1039, 122, 0.2, 122 / sqrt(12), 26.318773),
]


@pytest.mark.parametrize(("capacity", "output", "prompt", "share", "spread", "exact"), SAFE)
def test_safe_slots(
    capacity: int, output: int, prompt: int, share: float, spread: float, exact: float
) -> None:
    assert safe_slots(share, 1 / output, prompt, spread, capacity) == int(exact)


worlds = {
    "share": st.floats(0.01, 0.9),
    "output": st.floats(2, 4000),
    "prompt": st.floats(1, 4000),
    "capacity": st.floats(20_000, 2e6),
}


@given(**worlds, more=st.floats(1, 3), miss=st.floats(1e-9, 0.4), stricter=st.floats(1e-6, 1))
def test_safe_slots_are_monotone(
    share: float, output: float, prompt: float, capacity: float, more: float, miss: float, stricter: float
) -> None:
    here = safe_slots(share, 1 / output, prompt, prompt / 4, capacity, miss=miss)
    assert here >= 1
    assert safe_slots(share, 1 / output, prompt, prompt / 4, capacity * more, miss=miss) >= here - 1
    assert safe_slots(share, 1 / output, prompt, prompt / 4, capacity, miss=miss * stricter) <= here
    assert safe_slots(share, 1 / output, prompt, prompt / 4, capacity, miss=miss, block=16) <= here


@pytest.mark.parametrize(
    ("output", "prompt", "share", "capacity", "cycles"),
    [(256, 512, 0.176, 400_000, 200), (1024, 128, 0.7, 400_000, 25)],
)
def test_safe_slots_keep_their_promise_in_a_simulation(
    output: int, prompt: int, share: float, capacity: int, cycles: int
) -> None:
    """6.8: cycles that overflow, simulated for geometric outputs; (6) overflows in 34 and 77 per cent."""
    ending, spread = 1 / output, prompt / sqrt(12)
    safe = safe_slots(share, ending, prompt, spread, capacity)
    paper = paper_slots(share, ending, prompt, capacity)
    assert overflows(safe, ending, prompt, share, capacity, cycles) < 0.05
    assert overflows(paper, ending, prompt, share, capacity, cycles) > 0.15


def overflows(slots: int, ending: float, prompt: int, share: float, capacity: int, cycles: int) -> float:
    """The share of cycles whose KV peaks above the capacity; prompts are uniform on half to 1.5 means."""
    generator = np.random.default_rng(4)
    refill = round(share * slots)
    held = generator.integers(prompt // 2, prompt * 3 // 2 + 1, slots)
    over = 0
    for cycle in range(-8, cycles):
        peak = held.sum()
        while len(held) > slots - refill:
            held = held[generator.random(len(held)) >= ending] + 1
            peak = max(peak, held.sum())
        over += cycle >= 0 and peak > capacity
        fresh = generator.integers(prompt // 2, prompt * 3 // 2 + 1, slots - len(held))
        held = np.concatenate((held, fresh))
    return over / cycles


def test_gate() -> None:
    assert kv_reserve(512, 256, 25000 * 16) == pytest.approx(0.163840)
    assert kv_reserve(1024, 1024, 25000 * 16) == 0.6
    assert kv_reserve(32, 11, 25000 * 16) == 0.05
    assert kv_reserve(256, 280, 10000 * 16) == pytest.approx(0.224)


def test_switch() -> None:
    assert refill_due(128, 24, 104, 10**9)
    assert not refill_due(128, 24, 105, 10**9)
    assert not refill_due(128, 24, 50, 11)
    assert refill_due(128, 24, 50, 12)
    assert refill_due(128, 24, 0, 1)
    assert not refill_due(128, 24, 0, 0)
    assert not refill_due(128, 24, 200, 50)  # more decode than there are slots now: nobody enters


@given(st.integers(1, 300), st.data(), st.integers(0, 300))
def test_switch_with_a_long_queue_counts_idle_slots(slots: int, data: st.DataObject, decoding: int) -> None:
    refill = data.draw(st.integers(1, slots))
    due = refill_due(slots, refill, decoding, 10**6)
    assert due == (slots - decoding >= refill)
    if refill == 1 and decoding:
        assert refill_due(slots, 1, decoding, 10**6) == (decoding < slots)


@pytest.mark.parametrize(
    ("call", "inequality"),
    [
        (lambda: safe_slots(0.2, 0.01, 100, 0, 150), "capacity=150 KV tokens < 200"),
    ],
)
def test_bad_input_names_the_inequality(call, inequality: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert inequality in str(caught.value)
    assert "\n" not in str(caught.value)
