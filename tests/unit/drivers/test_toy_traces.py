"""The hand-worked schedules of spec/rad-slai.md 6.5 (set TOY, unlimited KV, times in ms).

The TOY cost rounds each request up to whole tiles, which a Shape cannot say. So the engine replays the
published batch times in order, and the test works each of them out again from the batch that really ran.
"""

from __future__ import annotations

import copy
from math import ceil

import pytest

from headgate.core.policy import BatchPolicy
from headgate.drivers.engine import Engine
from headgate.policies import Mixed, PrefillFirst, RequestLevel
from headgate.results.gaps import Gaps
from headgate.results.recorder import Recorder
from headgate.results.tables import Run
from headgate.workloads.workload import Workload
from worlds import Batch, batches

ARRIVAL = [0, 0, 5, 20, 21, 60, 300]
PROMPT = [9, 4, 12, 3, 6, 10, 5]
OUTPUT = [4, 3, 3, 5, 3, 2, 1]

SARATHI = """
P1[1..8]                        24    24
P1[9..9] P2[1..4] P3[1..3]      26    50
D1@10 D2@5 P3[4..9]             30.5  80.5
D1@11 D2@6 P3[10..12] P4[1..3]  26.5  107
D1@12 D3@13 D4@4 P5[1..5]       28    135
D3@14 D4@5 P5[6..6] P6[1..5]    31    166
D4@6 D5@7 P6[6..10]             29.5  195.5
D4@7 D5@8 D6@11                 11    206.5
P7[1..5]                        22.5  322.5
"""
VLLM = """
P1[1..9] P2[1..4]            50.5  50.5
P3[1..12] P4[1..3]           51.5  102
D1@10 D2@5 D3@13 D4@4        13    115
D1@11 D2@6 D3@14 D4@5        13.5  128.5
P5[1..6] P6[1..10]           58    186.5
D1@12 D4@6 D5@7 D6@11        13    199.5
D4@7 D5@8                    9     208.5
P7[1..5]                     22.5  322.5
"""
REQUEST_LEVEL = """
P1[1..9] P2[1..4]            50.5  50.5
D1@10 D2@5                   9.5   60
D1@11 D2@6                   9.5   69.5
D1@12                        8     77.5
P3[1..12] P4[1..3] P5[1..6]  74.5  152
D3@13 D4@4 D5@7              11    163
D3@14 D4@5 D5@8              11.5  174.5
D4@6                         7.5   182
D4@7                         7.5   189.5
P6[1..10]                    41    230.5
D6@11                        8     238.5
P7[1..5]                     22.5  322.5
"""

Table = list[tuple[list[str], float, float]]


def read(text: str) -> Table:
    rows = [line.split() for line in text.strip().splitlines()]
    return [(sorted(row[:-2]), float(row[-2]), float(row[-1])) for row in rows]


class Scripted:
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
    """The batch in the notation of 6.4."""
    prompts = [f"P{id + 1}[{first}..{first + length - 1}]" for id, first, length in batch.chunks]
    return sorted([*prompts, *(f"D{id + 1}@{place}" for id, place in batch.decodes)])


CASES = {
    "sarathi": (Mixed(slots=4, budget=8), 8, 4, SARATHI),
    "vllm": (PrefillFirst(slots=4), 24, 4, VLLM),
    "request-level": (RequestLevel(slots=3), 24, 3, REQUEST_LEVEL),
}


def toy_run(policy: BatchPolicy, batch_tokens: int, running: int, table: Table) -> tuple[list[Batch], Run]:
    cost = Scripted([seconds for _, seconds, _ in table])
    engine = Engine(cost, 10**6, 10**6, batch_tokens, running, block=1)
    recorder = Recorder(len(PROMPT))
    workload = Workload.of(PROMPT, OUTPUT, arrival=ARRIVAL)
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


# TTFT and finish of R1 to R7: Sarathi as printed, the others read off their batches.
PER_REQUEST = {
    "sarathi": (
        [50, 50, 102, 87, 145, 135.5, 22.5],
        [135, 107, 166, 206.5, 206.5, 206.5, 322.5],
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


@pytest.mark.parametrize("name", CASES)
def test_first_token_and_finish_of_each_request(name):
    policy, batch_tokens, running, text = CASES[name]
    _, run = toy_run(policy, batch_tokens, running, read(text))
    ttft, finish = PER_REQUEST[name]
    assert (run.requests["first_token"] - run.requests["arrival"]).tolist() == ttft
    assert run.requests["finished"].tolist() == finish
    assert run.requests["output"].tolist() == OUTPUT


def test_times_between_tokens_of_sarathi():
    policy, batch_tokens, running, text = CASES["sarathi"]
    _, run = toy_run(policy, batch_tokens, running, read(text))
    gaps = Gaps(run).lists()
    assert gaps[0] == [30.5, 26.5, 28]
    assert gaps[3] == [28, 31, 29.5, 11]
    assert gaps[6] == []


def test_toy_formula_knows_the_printed_batches():
    """RAD's batches of 6.5, which no policy here runs, price the formula itself."""

    def price(decodes=(), chunks=()):
        return toy_seconds(Batch(0.0, (), tuple(decodes), tuple(chunks), ()))

    assert price(chunks=[(1, 1, 4)]) == 10
    assert price(chunks=[(1, 5, 4)]) == 12
    assert price(chunks=[(1, 9, 1)]) == 12.5
    assert price(decodes=[(1, 10), (2, 5), (3, 13), (4, 4)]) == 13
    assert price(decodes=[(1, 12), (4, 6)]) == 9.5
