"""Ranks that step together: one is the simulator, several share every step's length."""

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.experiment.library import card_engine, simulate, simulate_fleet
from headgate.experiment.settings import experiment, refuse_conflicts
from headgate.stats.gaps import Gaps
from headgate.workloads.workload import Workload

ENGINE = card_engine("cal-h200-qwen3-8b")
ENGINE = ENGINE._replace(cost=ENGINE.cost.unhosted())


def requests(ranks, rate=8.0, each=60):
    chance = np.random.default_rng(3)
    rows = each * ranks
    arrival = np.cumsum(chance.exponential(1 / (rate * ranks), rows))
    return Workload.of(chance.integers(500, 4000, rows), chance.integers(50, 400, rows), arrival=arrival)


def ranks_of(engine, workload, ranks, policy="mixed"):
    return simulate_fleet(
        engine, policy, "round-robin", workload, engines=ranks, asynchronous=False, lock_step=True
    )


@pytest.mark.parametrize("policy", ["mixed", "eb:refill=4", "keep"])
@pytest.mark.parametrize("speculate", [None, "3:accept=0.6,spread=4"])
def test_one_rank_is_the_simulator(policy, speculate):
    engine = card_engine("cal-h200-qwen3-8b", slots=16, kv_tokens=40_000, speculate=speculate)
    workload = requests(1, rate=20)
    alone = simulate(engine, policy, workload, asynchronous=False)
    rank = ranks_of(engine, workload, 1, policy)
    for column in ("first_token", "finished", "output", "evictions", "wasted"):
        assert alone.requests[column].tolist() == rank.requests[column].tolist()
    assert alone.steps["count"].sum() == rank.steps["count"].sum()


def test_a_prompt_of_one_rank_is_a_gap_of_all():
    alone, together = (ranks_of(ENGINE, requests(ranks), ranks) for ranks in (1, 4))
    late = []
    for run in (alone, together):
        gaps = Gaps(run).sample()
        late.append(gaps.weights[gaps.values > 0.05].sum() / gaps.weights.sum())
    assert late[1] > 2 * late[0]
    assert together.requests["output"].tolist() == requests(4).output.tolist()


def test_steps_of_all_ranks_end_together():
    run = ranks_of(ENGINE, requests(3), 3)
    steps = run.steps
    ends = np.round(steps["start"] + steps["seconds"], 9)
    starts = {}
    for start, end in zip(np.round(steps["start"], 9).tolist(), ends.tolist(), strict=True):
        assert starts.setdefault(start, end) == end
    assert len(np.unique(steps["replica"])) == 3


def test_what_ranks_refuse():
    impatient = Workload.of([100], [5], patience=[1.0])
    with pytest.raises(InputError, match="drop --patience"):
        ranks_of(ENGINE, impatient, 2)
    with pytest.raises(InputError, match="--lock-step ranks"):
        refuse_conflicts(experiment({"engines": 2, "lock_step": True, "router": "round-robin"}))
    with pytest.raises(InputError, match="is about fleets"):
        refuse_conflicts(experiment({"lock_step": True}))
