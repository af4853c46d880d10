"""The simulator against queueing theory: one slot is M/G/1, and every run obeys Little's law."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from headgate.methods.eb.exclusive import PrefillFirst, RequestLevel
from headgate.methods.mixed.mixed import Mixed
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.stats.metrics import summarise
from headgate.workloads.workload import Workload
from worlds import Line

POLICIES = {
    "mixed": lambda slots: Mixed(slots=slots, budget=4096),
    "v0": lambda slots: PrefillFirst(slots=slots),
    "request-level": lambda slots: RequestLevel(slots=slots),
}


def recorded(engine: Engine, policy, workload: Workload, **options) -> Run:
    recorder = Recorder()
    Simulator(engine, policy, workload, (recorder,), **options).run()
    return Run({}, **recorder.tables())


def one_slot(cost: Line) -> Engine:
    return Engine(cost, kv_tokens=10**6, max_model_len=10**6, batch_tokens=4096, running=1, block=16)


# -- M/G/1 -------------------------------------------------------------------------------------------

STEP = 0.02  # every step takes as long, so that a service time is STEP times the output length
COUNT = 30_000


def geometric(rng: np.random.Generator) -> tuple[np.ndarray, float, float]:
    """Output lengths, and the first two moments of their law: geometric with mean 25."""
    p = 1 / 25
    return rng.geometric(p, COUNT), 1 / p, (2 - p) / p**2


def short_or_long(rng: np.random.Generator) -> tuple[np.ndarray, float, float]:
    """One token in five cases out of six, else 121."""
    lengths = np.where(rng.random(COUNT) < 1 / 6, 121, 1)
    return lengths, (5 * 1 + 121) / 6, (5 * 1 + 121**2) / 6


@pytest.mark.parametrize(("law", "name"), [(geometric, "v0"), (short_or_long, "mixed")])
def test_one_slot_waits_as_pollaczek_and_khinchine_say(law, name):
    rng = np.random.default_rng(6)
    output, mean, square = law(rng)
    load = 0.6
    rate = load / (STEP * mean)
    workload = Workload.of(np.full(COUNT, 7), output, arrival=np.cumsum(rng.exponential(1 / rate, COUNT)))
    cost = Line(fixed=STEP, prefill=0.0, decode=0.0, context=0.0, behind=0.0)
    run = recorded(one_slot(cost), POLICIES[name](1), workload)

    wait = run.requests["admitted"] - run.requests["arrival"]
    expected = rate * STEP**2 * square / (2 * (1 - load))
    batch = wait.reshape(30, -1).mean(axis=1)
    error = batch.std(ddof=1) / sqrt(len(batch))
    assert error < 0.06 * expected, "too few requests for the test to mean anything"
    assert abs(wait.mean() - expected) < 3 * error
    assert np.mean(wait == 0) == pytest.approx(1 - load, abs=0.02)  # Poisson arrivals see time averages
    busy = STEP * output.sum() / (run.requests["finished"].max() - run.requests["arrival"].min())
    assert summarise(run, "all").engine.utilisation == pytest.approx(busy, rel=1e-9)
    assert busy == pytest.approx(load, abs=0.02)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("leases", [True, False])
def test_one_slot_follows_lindley_to_the_last_bit(name, leases):
    rng = np.random.default_rng(11)
    count = 300
    prompt, output = rng.integers(1, 200, count), rng.integers(1, 150, count)
    arrival = np.cumsum(rng.exponential(70.0, count))
    cost = Line()
    workload = Workload.of(prompt, output, arrival=arrival)
    run = recorded(one_slot(cost), POLICIES[name](1), workload, leases=leases)
    free = 0.0
    begun, ended = [], []
    for id in range(count):
        now = max(float(arrival[id]), free)
        begun.append(now)
        now = now + (cost.fixed + cost.prefill * int(prompt[id]))
        for token in range(1, int(output[id])):
            now = now + (cost.fixed + cost.decode + cost.context * (int(prompt[id]) + token))
        free = now
        ended.append(now)
    assert any(start > time for start, time in zip(begun, arrival, strict=True))
    assert begun == run.requests["admitted"].tolist()
    assert ended == run.requests["finished"].tolist()


# -- saturation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("prompt", "output"), [(1, 40), (1, 2), (30, 17)])
def test_saturated_closed_loop_of_equal_requests(name, prompt, output):
    """All slots start and end together: one step of prompts, then output - 1 of decodes, again and again.

    With sums of powers of two for costs every time is exact, so is the comparison.
    """
    slots, rounds = 16, 25
    cost = Line(fixed=1.0, prefill=1 / 64, decode=1 / 16, context=1 / 1024, behind=1 / 2048)
    engine = Engine(cost, 10**6, 10**6, batch_tokens=4096, running=slots, block=16)
    workload = Workload.of([prompt] * slots * rounds, [output] * slots * rounds, clients=slots)
    run = recorded(engine, POLICIES[name](slots), workload)
    prompts = 1.0 + slots * prompt / 64
    decodes = (output - 1) * (1.0 + slots / 16) + sum(slots * (prompt + t) for t in range(1, output)) / 1024
    assert run.requests["finished"].max() == rounds * (prompts + decodes)
    rate = summarise(run, "all").output_rate.value
    assert rate == pytest.approx(slots * output / (prompts + decodes), rel=1e-12)
    assert run.requests["finished"].tolist() == [
        (prompts + decodes) * (1 + id // slots) for id in range(slots * rounds)
    ]
