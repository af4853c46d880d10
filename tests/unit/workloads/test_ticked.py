"""Arrivals in coarse ticks are noticed and spread."""

import numpy as np
import pytest

from headgate.experiment.build import make_workload
from headgate.experiment.settings import experiment
from headgate.workloads.arrivals import spread, tick_of

TICKS = np.repeat(np.arange(30) * 3.0, 9)


@pytest.mark.parametrize(
    ("arrival", "tick"),
    [
        (TICKS, 3.0),
        (np.delete(TICKS, slice(9, 18)), 3.0),
        (np.random.default_rng(0).exponential(0.1, 300).cumsum(), 0.0),
        (np.zeros(300), 0.0),
        (np.arange(300.0), 0.0),
        (TICKS / 100, 0.0),
    ],
)
def test_what_is_a_tick(arrival, tick):
    assert tick_of(arrival) == tick


def test_spread_stays_in_its_tick_and_follows_the_seed():
    found = spread(TICKS, 3.0, 1)
    assert np.array_equal(np.floor(found / 3.0) * 3.0, TICKS) and len(np.unique(found)) == len(TICKS)
    assert np.array_equal(found, spread(TICKS, 3.0, 1)) and not np.array_equal(found, spread(TICKS, 3.0, 2))


@pytest.mark.parametrize(
    ("suffix", "wish", "said", "is_spread"),
    [
        ("jsonl", None, "they are spread over their tick", True),
        ("jsonl", False, "--spread-ticks spreads them", False),
        ("csv", None, "--spread-ticks spreads them", False),
        ("csv", True, "they are spread over their tick", True),
    ],
)
def test_mooncake_is_spread_by_itself_others_on_demand(tmp_path, suffix, wish, said, is_spread):
    path = tmp_path / f"trace.{suffix}"
    mooncake = '{{"timestamp": {0:.0f}, "input_length": 5, "output_length": 6}}'
    lines = [mooncake.format(at * 1000) if suffix == "jsonl" else f"{at},5,6" for at in TICKS]
    head = [] if suffix == "jsonl" else ["arrived_at,num_prefill_tokens,num_decode_tokens"]
    path.write_text("\n".join([*head, *lines]))
    words = {"trace": str(path)} | ({} if wish is None else {"spread_ticks": wish})
    workload, _ = make_workload(experiment(words))
    assert "ticks of 3 s, 9 at once" in str(workload.origin["ticks"]) and said in str(
        workload.origin["ticks"]
    )
    assert (len(np.unique(workload.arrival)) == len(TICKS)) is is_spread
