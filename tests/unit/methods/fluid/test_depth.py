"""The gate with prompts in stock: whom it sends where, how deep, and what engines that refill gain."""

from types import SimpleNamespace

import numpy as np
import pytest

from fluid_worlds import instance
from headgate.core.errors import InputError
from headgate.core.fleet import Move
from headgate.core.policy import End
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.experiment.fleet import FleetSetup
from headgate.methods.fluid.flows import TokenPrices
from headgate.methods.fluid.online import DensityDeep
from headgate.methods.fluid.planner import plan_fluid
from headgate.methods.make import make_policy
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Kind, Workload

PLAN = plan_fluid(instance(1, 1, slots=8))  # class1 brings more per decode token


def one(id: int, kind: str = "class0"):
    return SimpleNamespace(id=id, kind=kind)


def fleet(engines: int, *waiting: tuple[int, str], busy: tuple[int, ...] = ()):
    queues = {"class0": {}, "class1": {}}
    for id, kind in waiting:
        queues[kind][id] = one(id, kind)
    replicas = [SimpleNamespace(idle=engine not in busy) for engine in range(engines)]
    return SimpleNamespace(queues=queues, replicas=replicas, idle={"any": [*set(range(engines)) - {*busy}]})


def router(engines: int = 2, spare: float = 0.0) -> DensityDeep:
    return DensityDeep(PLAN, engines, lambda: 0.0, spare)


def test_the_best_class_first_to_the_emptiest_engine():
    gate = router()
    gate.moved(one(7), Move(7, 0), 0.0)
    (move,) = gate.route(fleet(2, (1, "class0"), (2, "class1"))).moves
    assert move == Move(2, 1)


@pytest.mark.parametrize(("spare", "most"), [(0.0, 8), (0.25, 10), (0.01, 9)])
def test_no_engine_holds_more_than_its_slots_and_the_share(spare, most):
    gate, sent = router(1, spare), 0
    while (routing := gate.route(fleet(1, *((100 + n, "class0") for n in range(50))))).moves:
        gate.moved(one(sent), routing.moves[0], 0.0)
        sent += 1
    assert sent == most
    gate.finished(one(3), 0, 1.0)
    gate.left(one(99), 1.0, End.ABANDONED)  # it was never sent anywhere
    assert gate.route(fleet(1, (200, "class0"))).moves
    gate.moved(one(200), Move(200, 0), 1.0)
    assert not gate.route(fleet(1, (201, "class0"))).moves


def test_an_engine_that_takes_nothing_now_is_passed_over():
    (move,) = router().route(fleet(2, (1, "class0"), busy=(0,))).moves
    assert move.replica == 1
    assert not router().route(fleet(2, (1, "class0"), busy=(0, 1))).moves
    assert not router().route(fleet(2)).moves


def test_an_order_of_ones_own():
    gate = DensityDeep(PLAN, 1, lambda: 0.0, order="class0")
    assert gate.route(fleet(1, (1, "class0"), (2, "class1"))).moves[0].request == 1
    with pytest.raises(InputError, match="did you mean 'class1'"):
        DensityDeep(PLAN, 1, lambda: 0.0, order="clas1")


def test_a_wrong_share():
    with pytest.raises(InputError, match="spare=-1; give 0 or more"):
        router(1, -1.0)


def test_engines_that_refill_need_prompts_in_stock():
    """Prefill is dear by the step: one prompt at a time serves less than a refill of four."""
    cost = LinearCost(DecodeTerms(0.01, 0.0), PrefillTerms(0.05, 1e-5), MixedTerms(0.08, 1e-5))
    setup = FleetSetup(Engine(cost, 1 << 20, 4096, 1024, 8, 16), 2, prices=TokenPrices(1.0, 1.0))
    rng = np.random.default_rng(0)
    kinds = (Kind("class0"), Kind("class1"))
    requests = Workload.of(
        rng.integers(20, 60, 300),
        rng.integers(10, 30, 300),
        arrival=np.cumsum(rng.exponential(0.02, 300)),
        kind=rng.integers(0, 2, 300),
        kinds=kinds,
    )
    ends = {}
    for name in ("density-first", "density-deep"):
        made, _ = setup.router(name, {} if name == "density-first" else {"spare": 0.5}, requests)
        run = setup.run(lambda role: make_policy("eb", {"refill": 4}, setup.engine)[0], made, requests)
        assert run.meta["outcome"] == "finished"
        ends[name] = run.requests["finished"].max()
    assert ends["density-deep"] < 0.9 * ends["density-first"]
