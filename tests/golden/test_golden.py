"""Schedules as text, one file per policy and world. `pytest --update-golden` rewrites them; read the diff.

One line per run of equal steps: the number of the first, how many, how many decodes in each, when the last
one ended, and the prompts as id:tokens. `out` names who was evicted just before.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.core.policy import BatchPolicy
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload
from headgate_papers.wait.lookahead import LookAhead
from worlds import Batch, Line, batches

FOLDER = Path(__file__).parent
SLOTS = 4
LONGEST_FILE = 60

# Sums of powers of two: every time is exact, and prints the same everywhere.
COST = Line(fixed=1.0, prefill=1 / 64, decode=1 / 8, context=1 / 1024, behind=1 / 2048)


def engine(kv_tokens: int = 4096, batch_tokens: int = 64) -> Engine:
    return Engine(COST, kv_tokens, max_model_len=1024, batch_tokens=batch_tokens, running=SLOTS, block=16)


def saturated() -> tuple[Engine, Workload]:
    """Closed loop of 8 clients on 4 slots: somebody always waits."""
    prompt = [20, 31, 17, 40, 25, 36, 22, 28, 33, 19, 27, 38]
    output = [9, 4, 12, 6, 3, 1, 10, 7, 5, 8, 2, 11]
    return engine(), Workload.of(prompt, output, clients=8)


def light() -> tuple[Engine, Workload]:
    """Open loop with light load: mostly one request at a time, now and then two or three."""
    arrival = np.cumsum([0.5, 12.0, 1.0, 30.0, 2.5, 0.25, 50.0, 20.0])
    return engine(), Workload.of([30, 12, 45, 20, 80, 16, 60, 24], [6, 8, 3, 9, 4, 5, 1, 7], arrival=arrival)


def pressure() -> tuple[Engine, Workload]:
    """Seven blocks of KV for slots that want more: prompts wait for memory, decodes are evicted."""
    return engine(kv_tokens=112), Workload.of([14, 30, 15, 20, 40, 10], [20, 24, 21, 5, 12, 30])


def lengths() -> tuple[Engine, Workload]:
    """Short and long prompts: a long one takes several steps of 48 tokens and is cut between them."""
    arrival = [0.0, 0.0, 1.0, 1.5, 4.0, 6.0, 9.0, 30.0, 30.0]
    prompt = [10, 200, 6, 150, 8, 12, 90, 5, 130]
    return engine(batch_tokens=48), Workload.of(prompt, [12, 4, 9, 6, 1, 7, 3, 14, 2], arrival=arrival)


WORLDS = {"saturated": saturated, "light": light, "pressure": pressure, "lengths": lengths}
PAPER = {"pace": "average", "shrink": False, "ageing": 0.0}
PARAMETERS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "eb-1": {"refill": 1},
    "eb-2": {"refill": 2},
    "eb-4": {"refill": 4},
    "eb-online": {"warm": 3, "review": 2, "window": 8, "prior": 6.0},
    "eb+": {"light": 2, "dwell": 0.0, "review": 2, "margin": 0.0},
    "v0": {},
    "request-level": {},
    "sarathi": {},
    "sarathi-spf": {},
    "slai": {"between_tokens": 4.0},
    "slai:paper": {"between_tokens": 4.0, "offset": 2.0, **PAPER},
    "rad": {"tile": 4, "chunk": 16},
    "rad-smooth": {"tile": 4, "chunk": 16},
    "wait": {"thresholds": "2", "max_pause": 4.0, "max_wait": 6.0},
    "nested-wait": {"thresholds": "2/1.5", "ends": "4/30", "max_pause": 4.0, "max_wait": 6.0},
    "look-ahead": {"output": 12.0},
    "sglang": {"clip": 12, "conservativeness": 0.1},
    "sglang:flags": {"clip": 30, "mixed_chunk": True, "prefill_decode_interval": 1, "interval_min_bs": 3},
    "keep": {"ttft": 12.0, "tbt": 4.0},
    "keep:tight": {"ttft": 6.0, "tbt": 2.0, "patience": 0.0},
    "fairbatching": {"ttft": 4.0, "tbt": 1.5},
    "qoserve": {"ttft": 6.0, "tbt": 1.5},
    "ppas": {"cap": 24},
    "prefill-interval": {"interval": 3},
}
NEWER = ("fairbatching", "qoserve", "ppas", "prefill-interval")
CASES = [(policy, world) for policy in PARAMETERS for world in WORLDS]


def make(name: str, engine: Engine) -> BatchPolicy:
    parameters = dict(PARAMETERS[name], slots=SLOTS)
    known = "eb" if name in ("eb-1", "eb-2", "eb-4") else name.partition(":")[0]
    if known in ("mixed", "sarathi", "sarathi-spf", "slai", "look-ahead", "eb+", "keep", "sglang", *NEWER):
        parameters["budget"] = engine.batch_tokens
    if known in ("slai", "wait", "nested-wait", "eb-online", "eb+", "keep", "fairbatching", "qoserve"):
        parameters["cost"] = COST
    return (LookAhead if known == "look-ahead" else BATCH[known])(**parameters)


def schedule(policy: str, world: str) -> str:
    engine, workload = WORLDS[world]()
    rows = [row for batch in batches(engine, make(policy, engine), workload) for row in each_step(batch)]
    lines = [f"{policy}, {WORLDS[world].__doc__}", "step    x  decode          end  prefill"]
    number = 1
    for (decodes, prompts), run in groupby(rows, key=lambda row: row[:2]):
        ends = [end for _, _, end in run]
        count = str(decodes) if decodes else "-"
        lines.append(f"{number:4}{len(ends):5}{count:>8}{ends[-1]:13.4f}  {prompts}")
        number += len(ends)
    return "\n".join(lines) + "\n"


def each_step(batch: Batch) -> list[tuple[int, str, float]]:
    prompts = " ".join(f"{id}:{tokens}" for id, _, tokens in batch.chunks) or "-"
    out = f"  out {' '.join(map(str, batch.evicted))}" if batch.evicted else ""
    first, *later = batch.ends
    decodes = len(batch.decodes)
    return [(decodes, prompts + out, first), *((decodes, prompts, end) for end in later)]


def file_name(policy: str, world: str) -> str:
    return f"{policy.replace(':', '-')}.{world}.txt"


@pytest.mark.parametrize(("policy", "world"), CASES)
def test_schedule_is_the_golden_one(policy, world, request):
    file = FOLDER / file_name(policy, world)
    found = schedule(policy, world)
    assert found.count("\n") <= LONGEST_FILE
    if request.config.getoption("--update-golden"):
        file.write_text(found, encoding="utf-8")
    assert file.exists(), "no such golden file; run pytest --update-golden and read it"
    assert found.splitlines() == file.read_text(encoding="utf-8").splitlines()


def test_no_golden_file_is_left_over():
    assert {file.name for file in FOLDER.glob("*.txt")} == {
        file_name(policy, world) for policy, world in CASES
    }


def body(policy: str, world: str) -> list[str]:
    return schedule(policy, world).splitlines()[1:]


@pytest.mark.parametrize("world", WORLDS)
def test_k_1_is_v0_and_k_n_is_request_level(world):
    assert body("eb-1", world) == body("v0", world)
    assert body("eb-4", world) == body("request-level", world)


def test_the_worlds_are_what_they_say():
    assert all("  out " in schedule(policy, "pressure") for policy in ("mixed", "eb-1", "eb-2", "eb-4"))
    for policy in PARAMETERS:
        ran = batches(*one("saturated", policy))
        assert max(len(batch.decodes) for batch in ran) == SLOTS
        assert any(
            id == 1 and first > 1
            for batch in batches(*one("lengths", policy))
            for id, first, _ in batch.chunks
        )
    # eb-1, eb-4 and mixed under other names; where memory suffices looking ahead changes nothing; eb+ mixes,
    # and fairbatching, where no decode can wait
    alike = {"v0", "request-level", "sarathi", "look-ahead", "eb+", "fairbatching"}
    assert len({schedule(policy, "saturated").split("\n", 1)[1] for policy in PARAMETERS}) == len(
        PARAMETERS
    ) - len(alike)


def one(world: str, policy: str) -> tuple[Engine, BatchPolicy, Workload]:
    engine, workload = WORLDS[world]()
    return engine, make(policy, engine), workload
