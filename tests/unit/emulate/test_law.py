"""The emulator's engine on a virtual clock, with jobs given beforehand, is the simulator's, bit by bit."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.experiment.library import card_engine
from headgate.live.emulate.clock import VirtualClock
from headgate.live.emulate.engine import EmulatedEngine, EmulatedJob
from headgate.live.emulate.text import Text
from headgate.methods.make import make_policy
from headgate.record.recorder import Recorder
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.arrivals import Poisson
from headgate.workloads.lengths import Geometric, Uniform
from headgate.workloads.sessions import SharedPrefix, as_sessions
from headgate.workloads.synthetic import generate


class Counted:
    """Hears of every token."""

    streams = True

    def __init__(self):
        self.seen = 0
        self.ended = 0

    def tokens(self, job):
        self.seen += 1
        assert job.made == self.seen

    def end(self, job):
        self.ended += 1


def emulate(engine, policy, workload, asynchronous):
    recorder = Recorder([kind.name for kind in workload.kinds])
    sinks = [Counted() for _ in range(len(workload))]
    contents = workload.pieces()
    if contents is None:  # the simulator has no cache then: not even a preempted request finds its own blocks
        engine = engine._replace(prefix_cache=False)

    async def run():
        emulated = EmulatedEngine(
            engine, policy, VirtualClock(), asynchronous=asynchronous, observers=(recorder,)
        )
        emulated.begun.clear()
        for i, sink in enumerate(sinks):
            length, limit = int(workload.output[i]), int(workload.limit[i])
            job = EmulatedJob(int(workload.prompt[i]), length, limit, Text(i), sink)
            if contents is not None:
                job.content = contents[i]
            emulated.submit(job, float(workload.arrival[i]))
        emulated.begun.set()
        task = asyncio.create_task(emulated.run())
        while (emulated.replica.occupied or not all(sink.ended for sink in sinks)) and not task.done():
            await asyncio.sleep(0)
        for _ in range(5):  # the step under way, of an engine that composes ahead, is told of
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert emulated.dead is None, emulated.dead
        assert emulated.kv_usage == 0 and emulated.running == 0 and emulated.waiting == 0
        return emulated

    emulated = asyncio.run(run())
    assert emulated.tally.generation_tokens == int(recorder.tables()["requests"]["output"].sum())
    for sink, output in zip(sinks, recorder.tables()["requests"]["output"], strict=True):
        assert sink.ended == 1
        assert sink.seen == max(0, output - 1)  # the last one comes with the end
    return recorder.tables()


def simulate(engine, policy, workload, asynchronous):
    recorder = Recorder([kind.name for kind in workload.kinds])
    Simulator(engine, policy, workload, (recorder,), asynchronous=asynchronous).run()
    return recorder.tables()


def same(one, two, asynchronous):
    names = ("arrival", "admitted", "first_token", "finished", "prompt", "output", "evictions", "how")
    for name in (*names, "cached", "wasted"):
        np.testing.assert_array_equal(one["requests"][name], two["requests"][name], err_msg=name)
    assert one["steps"]["count"].sum() == two["steps"]["count"].sum()
    assert one["steps"]["prefill"].sum() == two["steps"]["prefill"].sum()
    if asynchronous:  # the simulator takes equal decode steps together; those with prompts are single ones
        for name in one["steps"]:
            ours, theirs = (each["steps"][name][each["steps"]["prefill"] > 0] for each in (one, two))
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


POLICIES = ("mixed", "eb:refill=8", "eb+", "slai", "sarathi", "rad", "v0")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_schedule_is_the_simulators(policy, asynchronous):
    engine = card_engine("cal-h200-qwen3-8b", slots=32, budget=2048, kv_tokens=20_000)
    workload = generate(150, seed=5, arrivals=Poisson(30.0), prompt=Uniform(400, 0.9), output=Geometric(60))
    name, _, rest = policy.partition(":")
    settings = dict(part.split("=") for part in filter(None, rest.split(",")))
    one = emulate(engine, make_policy(name, settings, engine)[0], workload, asynchronous)
    two = simulate(engine, make_policy(name, settings, engine)[0], workload, asynchronous)
    same(one, two, asynchronous)


@given(
    seed=st.integers(0, 10_000),
    rate=st.floats(1, 200),
    slots=st.integers(1, 24),
    kv=st.integers(60, 400),
    policy=st.sampled_from(("mixed", "eb+", "slai")),
    asynchronous=st.booleans(),
)
def test_with_little_memory_too(seed, rate, slots, kv, policy, asynchronous):
    engine = card_engine("cal-h200-qwen3-8b", slots=slots, budget=256, kv_tokens=kv * 16)
    workload = generate(25, seed=seed, arrivals=Poisson(rate), prompt=Uniform(200, 0.9), output=Geometric(40))
    one = emulate(engine, make_policy(policy, {}, engine)[0], workload, asynchronous)
    two = simulate(engine, make_policy(policy, {}, engine)[0], workload, asynchronous)
    same(one, two, asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_requests_that_come_with_their_kv_never_block_each_other(seed, asynchronous):
    """Memory full of KV that waits for a slot, and an evicted request before it: everybody is served."""
    chance = np.random.default_rng(seed)
    engine = card_engine("cal-h200-qwen3-8b", slots=4, budget=256, kv_tokens=32 * 16)
    sinks = [Counted() for _ in range(14)]

    async def main():
        emulated = EmulatedEngine(
            engine, make_policy("mixed", {}, engine)[0], VirtualClock(), asynchronous=asynchronous
        )
        emulated.begun.clear()
        for number, sink in enumerate(sinks):
            job = EmulatedJob(
                100 + int(chance.integers(60)), 500, 60 + int(chance.integers(90)), Text(number), sink
            )
            job.loaded = job.prompt - 1 if number % 4 else 0
            emulated.submit(job, float(chance.random() * 0.1))
        emulated.begun.set()
        task = asyncio.create_task(emulated.run())
        for _ in range(200_000):
            if all(sink.ended for sink in sinks):
                break
            await asyncio.sleep(0)
        assert all(sink.ended for sink in sinks) and emulated.dead is None, emulated.replica.state()
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert emulated.kv_usage == 0 and emulated.tally.preemptions > 0

    asyncio.run(main())


@given(
    seed=st.integers(0, 10_000),
    kv=st.integers(150, 900),
    turns=st.sampled_from((1.0, 4.0)),
    policy=st.sampled_from(("mixed", "eb+", "slai")),
    asynchronous=st.booleans(),
)
def test_hits_and_evictions_are_the_simulators(seed, kv, turns, policy, asynchronous):
    engine = card_engine("cal-h200-qwen3-8b", slots=8, budget=256, kv_tokens=kv * 16)
    drawn = generate(25, seed=seed, arrivals=Poisson(30.0), prompt=Uniform(100, 0.9), output=Geometric(30))
    workload = as_sessions(drawn, seed=seed, turns=turns, think=0.5, prefixes=(SharedPrefix(100, 2),))
    one = emulate(engine, make_policy(policy, {}, engine)[0], workload, asynchronous)
    two = simulate(engine, make_policy(policy, {}, engine)[0], workload, asynchronous)
    same(one, two, asynchronous)
    assert turns == 1.0 or two["requests"]["cached"].sum() > 0
