"""Hand-worked schedules of RAD, SLAI and others (set TOY, unlimited KV, times in ms).

The TOY cost rounds each request up to whole tiles, which a Shape cannot say. So the engine replays the
published batch times in order, and the test works each of them out again from the batch that really ran.
"""

from __future__ import annotations

import copy
from math import ceil

import pytest
from toy_schedules import (
    RAD,
    RAD_CYCLES,
    REQUEST_LEVEL,
    SARATHI,
    SARATHI_SHORTEST,
    SLAI_ARRIVAL,
    SLAI_SHORTEST,
    TWO_PHASES,
    VLLM,
)

from headgate.core.policy import BatchPolicy
from headgate.core.request import Slo
from headgate.cost.model import StepCost
from headgate.methods.eb.exclusive import PrefillFirst, RequestLevel
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.mixed.sarathi import Sarathi, ShortestFirst
from headgate.methods.rad import Rad, TwoPhaseRad
from headgate.methods.slai import Slai
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.stats.gaps import Gaps
from headgate.workloads.workload import Kind, Workload
from worlds import Batch, Line, batches

ARRIVAL = [0, 0, 5, 20, 21, 60, 300]
PROMPT = [9, 4, 12, 3, 6, 10, 5]
OUTPUT = [4, 3, 3, 5, 3, 2, 1]
KINDS = (Kind("free", Slo(between_tokens=100), 1), Kind("paying", Slo(between_tokens=40), 0))
KIND = [0, 1, 0, 0, 1, 0, 0]

Table = list[tuple[list[str], float, float]]


def read(text: str) -> Table:
    rows = [line.split() for line in text.splitlines() if line]
    return [(sorted(row[:-2]), float(row[-2]), float(row[-1])) for row in rows]


class Scripted(StepCost):
    """Takes the published times one after the other, whatever the step is."""

    def __init__(self, times: list[float]) -> None:
        self.left = iter(times)

    def seconds(self, shape):
        return next(self.left)

    def decode_line(self, decodes):
        return next(self.left), 0.0

    def span(self, decodes, context, steps):
        raise AssertionError("one step at a time, please")


def toy_seconds(batch: Batch) -> float:
    """6.1: T = 6⌈τ/4⌉ + τ/2 + Σ_DI ½⌈i/4⌉ + Σ_PI 2⌈c/4⌉⌈(i+c−1)/4⌉."""
    tokens = len(batch.decodes) + sum(length for _, _, length in batch.chunks)
    decodes = sum(0.5 * ceil(place / 4) for _, place in batch.decodes)
    prompts = sum(2 * ceil(c / 4) * ceil((first + c - 1) / 4) for _, first, c in batch.chunks)
    return 6 * ceil(tokens / 4) + tokens / 2 + decodes + prompts


def words(batch: Batch) -> list[str]:
    """The batch in the notation of `toy_schedules`."""
    prompts = [f"P{id + 1}[{first}..{first + length - 1}]" for id, first, length in batch.chunks]
    return sorted([*prompts, *(f"D{id + 1}@{place}" for id, place in batch.decodes)])


def slai(order: str, offset: float) -> Slai:
    """The paper's rule: mean steps, a fixed offset, β = 3."""
    rule = {"pace": "average", "shrink": False, "ageing": 0.0, "crowded_offset": offset}
    return Slai(slots=4, budget=8, cost=Line(), order=order, decodes=3, offset=offset, **rule)


CASES = {
    "sarathi": (Mixed(slots=4, budget=8), 8, 4, SARATHI),
    "sarathi with watermark": (Sarathi(slots=4, budget=8), 8, 4, SARATHI),
    "sarathi-spf": (ShortestFirst(slots=4, budget=8), 8, 4, SARATHI_SHORTEST),
    "slai": (slai("shortest", offset=2), 8, 4, SLAI_SHORTEST),
    "slai, all critical": (slai("shortest", offset=5), 8, 4, SARATHI_SHORTEST),
    "slai by arrival": (slai("arrival", offset=2), 8, 4, SLAI_ARRIVAL),
    "rad": (Rad(slots=4, tile=4, chunk=4), 8, 4, RAD),
    "rad in cycles": (Rad(slots=4, tile=4, chunk=4, cycle=4), 8, 4, RAD_CYCLES),
    "rad in two phases": (TwoPhaseRad(4, 4, 4, cycle=6, hold_first_token=False), 8, 6, TWO_PHASES),
    "vllm": (PrefillFirst(slots=4), 24, 4, VLLM),
    "request-level": (RequestLevel(slots=3), 24, 3, REQUEST_LEVEL),
}


def toy_run(policy: BatchPolicy, batch_tokens: int, running: int, table: Table) -> tuple[list[Batch], Run]:
    cost = Scripted([seconds for _, seconds, _ in table])
    engine = Engine(cost, 10**6, 10**6, batch_tokens, running, block=1)
    recorder = Recorder(tuple(kind.name for kind in KINDS))
    workload = Workload.of(PROMPT, OUTPUT, arrival=ARRIVAL, kinds=KINDS, kind=KIND)
    ran = batches(engine, copy.deepcopy(policy), workload, (recorder,), leases=False)
    assert next(cost.left, None) is None, "a published batch did not run"
    return ran, Run({}, **recorder.tables())


@pytest.mark.parametrize("name", CASES)
def test_batches_are_the_published_ones(name):
    policy, batch_tokens, running, text = CASES[name]
    table = read(text)
    ran, _ = toy_run(policy, batch_tokens, running, table)
    assert [words(batch) for batch in ran] == [content for content, _, _ in table]
    assert [toy_seconds(batch) for batch in ran] == [seconds for _, seconds, _ in table]
    assert [batch.ends for batch in ran] == [(end,) for _, _, end in table]
    assert not any(batch.evicted for batch in ran)


# TTFT and finish of R1 to R7: RAD, Sarathi and SLAI as printed, the others read off their batches.
PER_REQUEST = {
    "sarathi": (
        [50, 50, 102, 87, 145, 135.5, 22.5],
        [135, 107, 166, 206.5, 206.5, 206.5, 322.5],
    ),
    "slai": (
        [51, 20, 171.5, 58, 57, 67, 22.5],
        [188.5, 78, 198.5, 198.5, 127, 176.5, 322.5],
    ),
    "rad": (
        [34.5, 44.5, 75.5, 70, 116.5, 112.5, 20.5],
        [185.5, 116.5, 116.5, 194.5, 194.5, 185.5, 320.5],
    ),
    "rad in cycles": (
        [34.5, 44.5, 75.5, 70, 133.5, 129.5, 20.5],
        [126, 116.5, 116.5, 133.5, 206.5, 199, 320.5],
    ),
    "vllm": (
        [50.5, 50.5, 97, 82, 165.5, 126.5, 22.5],
        [199.5, 128.5, 128.5, 208.5, 208.5, 199.5, 322.5],
    ),
    "request-level": (
        [50.5, 50.5, 147, 132, 131, 170.5, 22.5],
        [77.5, 69.5, 174.5, 189.5, 174.5, 238.5, 322.5],
    ),
}


@pytest.mark.parametrize("name", PER_REQUEST)
def test_first_token_and_finish_of_each_request(name):
    policy, batch_tokens, running, text = CASES[name]
    _, run = toy_run(policy, batch_tokens, running, read(text))
    ttft, finish = PER_REQUEST[name]
    assert (run.requests["first_token"] - run.requests["arrival"]).tolist() == ttft
    assert run.requests["finished"].tolist() == finish
    assert run.requests["output"].tolist() == OUTPUT


def gaps(name: str) -> list[list[float]]:
    policy, batch_tokens, running, text = CASES[name]
    _, run = toy_run(policy, batch_tokens, running, read(text))
    return Gaps(run).lists()


def test_times_between_tokens_of_sarathi():
    found = gaps("sarathi")
    assert found[0] == [30.5, 26.5, 28]
    assert found[3] == [28, 31, 29.5, 11]
    assert found[6] == []


def test_times_between_tokens_of_slai_keep_every_promise():
    found = gaps("slai")
    assert found[0] == [76, 49.5, 12]
    assert found[1] == [31, 27]
    assert found[3] == [49, 49.5, 12, 10]
    assert found[4] == [25, 24]
    assert found[5] == [49.5]
    for row, kind in zip(found, KIND, strict=True):
        assert all(gap <= KINDS[kind].slo.between_tokens for gap in row)


def test_gaps_of_rad_are_a_whole_stretch_of_prompts():
    """R1 waits for all prompts of the first fill; R1 and R4 for those of R5 and R6; two phases for all."""
    assert gaps("rad")[0] == [68.5, 13.5, 69]
    assert gaps("rad")[3][2] == 69
    assert gaps("rad in two phases")[0][0] == 124.5
