"""Routers by name, runs of the network for Python callers, and classes from lengths."""

import numpy as np
import pytest

from fleet_worlds import ROUTERS
from fluid_worlds import instance
from headgate.advisor.fluid_plan import cluster
from headgate.core.errors import InputError
from headgate.experiment.fleet import make_router
from headgate.methods.fluid.planner import plan_fluid
from headgate_papers.network.run import run_network

PLAN = plan_fluid(instance())


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_can_be_made_and_runs(name):
    settings = {"prefill": 2} if name == "split" else {}
    window = run_network(PLAN, name, 4, seed=1, marks=(20.0,), until=80.0, settings=settings)[0]
    assert 0.3 * PLAN.revenue < window.revenue() < 1.3 * PLAN.revenue


def test_the_same_seed_is_the_same_run():
    runs = [run_network(PLAN, "gate-and-route", 3, seed, until=60.0)[0].revenue() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_settings_reach_the_router():
    assert make_router("service-level", PLAN, 4, settings={"gate": "occupancy"}).admission.closes
    for name, settings, said in (
        ("gates", {}, "unknown router 'gates'"),
        ("service-level", {"gates": "x"}, "unknown parameter of router service-level 'gates'; did you mean"),
        ("fi-wsp", {"gate": "x"}, "router fi-wsp has no parameters; drop gate"),
    ):
        with pytest.raises(InputError, match=said):
            make_router(name, PLAN, 4, settings=settings)
    with pytest.raises(InputError, match="unknown law of phases 'expo'"):
        run_network(PLAN, "fi-wsp", 4, law="expo")


def test_clusters_find_what_is_apart():
    rng = np.random.default_rng(0)
    prompts = np.concatenate([rng.normal(300, 20, 500), rng.normal(3000, 100, 300), rng.normal(50, 4, 200)])
    outputs = np.concatenate([rng.normal(1000, 50, 500), rng.normal(400, 20, 300), rng.normal(30, 3, 200)])
    group = cluster(prompts, outputs, 3)
    parts = (group[:500], group[500:800], group[800:])
    assert [len(set(part.tolist())) for part in parts] == [1, 1, 1]
    assert len({int(part[0]) for part in parts}) == 3
    assert (group == cluster(prompts, outputs, 3)).all()
    assert set(cluster(prompts, outputs, 1).tolist()) == {0}


def test_clusters_of_equal_lengths_are_one():
    assert set(cluster(np.full(50, 10.0), np.full(50, 7.0), 4).tolist()) == {0}
