"""How to split a fleet: the known answers for the chat trace on RTX ADA 6000."""

import pytest

from headgate.core.errors import InputError
from headgate.methods.split.split import best_split

PROMPT, OUTPUT = 0.21563, 0.33551  # seconds of one request


@pytest.mark.parametrize(
    ("engines", "prefill", "share"), [(2, 1, 0.82), (3, 1, 0.85), (4, 2, 0.82), (5, 2, 0.99), (8, 3, 0.96)]
)
def test_the_best_splits_of_the_paper_s_numbers(engines, prefill, share):
    assert best_split(engines, PROMPT, OUTPUT) == prefill
    whole = engines / (PROMPT + OUTPUT)
    rate = min(prefill / PROMPT, (engines - prefill) / OUTPUT)
    assert rate / whole == pytest.approx(share, abs=0.005)


def test_extremes():
    assert best_split(8, 1.0, 0.0) == 7
    assert best_split(8, 0.0, 1.0) == 1
    with pytest.raises(InputError, match="cannot be split"):
        best_split(1, 1.0, 1.0)
    with pytest.raises(InputError, match="the split of the engines is undefined"):
        best_split(4, 0.0, 0.0)
