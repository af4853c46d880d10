"""The end of a burst: the last prompts enter as soon as they have slots, when nothing else comes."""

from __future__ import annotations

import pytest

from headgate.experiment.library import card_engine, simulate
from headgate.methods.eb.exclusive import Exclusive, RequestLevel
from headgate.workloads.lengths import Uniform
from headgate.workloads.synthetic import generate
from headgate.workloads.workload import Workload
from worlds import batches


def engine():
    return card_engine("cal-h200-qwen3-8b", slots=512, budget=16384)


def seconds(policy, requests: Workload) -> float:
    return simulate(engine(), policy, requests).span()[1]


def test_a_queue_that_drains_costs_no_throughput():
    """128/1024 with k = 160: before the rule 11 % slower than with k = 48, 7 % than the real engine."""
    requests = generate(700, seed=0, prompt=Uniform(128), output=Uniform(1024))
    late, early = (seconds(Exclusive(512, refill), requests) for refill in (160, 48))
    assert late == pytest.approx(early, rel=0.02)


def test_the_last_prompts_enter_when_they_have_slots():
    requests = Workload.of([8] * 5, [4, 10, 10, 10, 3])
    made = card_engine("cal-h200-qwen3-8b", slots=4, budget=64)
    entered = [
        (len(batch.decodes), [id for id, _, _ in batch.chunks])
        for batch in batches(made, Exclusive(4, 3), requests)
        if batch.chunks
    ]
    assert entered == [(0, [0, 1, 2, 3]), (0, [4])]  # a prefill step decodes nothing
    ends = simulate(made, Exclusive(4, 3), requests).requests["admitted"]
    first_end = simulate(made, Exclusive(4, 3), requests).requests["finished"][0]
    assert ends[4] == pytest.approx(first_end)  # the slot of the first that left, not of three


def test_request_level_still_runs_its_batch_empty():
    requests = Workload.of([8] * 5, [4, 10, 10, 10, 3])
    made = card_engine("cal-h200-qwen3-8b", slots=4, budget=64)
    run = simulate(made, RequestLevel(4), requests).requests
    assert run["admitted"][4] == pytest.approx(run["finished"][:4].max())


def test_an_arrival_makes_it_wait_for_more():
    """The fifth and sixth come one after the other: the fifth waits for idle slots as EB(k) says."""
    requests = Workload.of([8] * 6, [4, 40, 40, 40, 3, 3], arrival=[0, 0, 0, 0, 0.001, 0.5])
    made = card_engine("cal-h200-qwen3-8b", slots=4, budget=64)
    run = simulate(made, Exclusive(4, 3), requests).requests
    assert run["admitted"][4] > run["finished"][0]


def test_an_arrival_during_a_refill_counts():
    """Traffic flows: a prompt that came while others were computed waits until it is k/N of the batch."""
    requests = Workload.of([300] * 4 + [8], [40, 40, 40, 60, 3], arrival=[0, 0, 0, 0, 0.01])
    made = card_engine("cal-h200-qwen3-8b", slots=8, budget=64)
    run = simulate(made, Exclusive(8, 4), requests).requests
    assert run["first_token"][:4].max() > 0.01  # it came during the refill
    assert run["admitted"][4] == pytest.approx(run["finished"][:3].max())
