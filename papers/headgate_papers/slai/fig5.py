"""Figure 5 of the SLAI paper: a prompt of 2,048 tokens alone, by chunk size, from the card."""

from __future__ import annotations

from math import nan
from typing import NamedTuple

import numpy as np

from headgate.experiment.library import card_engine, simulate
from headgate.methods.mixed.mixed import Mixed
from headgate.workloads.workload import Workload
from headgate_papers.report import Cell, Count, Report, Row, Section, spread
from headgate_papers.serving import Options, Outcomes
from headgate_papers.slai.published import SWEEP_BATCH, SWEEP_TTFT

NAME = "slai-fig5"
ABOUT = "TTFT and mean step of a 2,048-token prompt alone, by chunk size"
CARD, PROMPT, REQUESTS, APART = "pub-rtx-ada-6000-mistral-7b", 2048, 20, 5.0
WITHIN = 0.04


class ChunkJob(NamedTuple):
    """Prompts one after the other, in chunks of this size."""

    key: int
    requests: int


class Sweep(NamedTuple):
    """Median TTFT and mean step, s; a step of a prompt alone."""

    ttft: float
    step: float
    chunk_step: float


def jobs(options: Options) -> list[ChunkJob]:
    """Every chunk size of the sweep."""
    return [ChunkJob(chunk, max(2, REQUESTS // 10 if options.quick else REQUESTS)) for chunk in SWEEP_TTFT]


def run(job: ChunkJob, seed: int) -> Sweep:
    """One of them; nothing is random: prompts do not meet."""
    engine = card_engine(CARD, slots=16, budget=job.key)
    count = job.requests
    requests = Workload.of([PROMPT] * count, [2] * count, arrival=np.arange(count) * APART)
    found = simulate(engine, Mixed(16, job.key), requests)
    table, steps = found.requests, found.steps
    seconds = steps["seconds"] / steps["count"]
    return Sweep(
        float(np.median(table["first_token"] - table["arrival"])),
        float(np.average(seconds, weights=steps["count"])),
        float(seconds[steps["prefill"] > 0].mean()),
    )


def judge(outcomes: Outcomes, options: Options) -> Report:
    """TTFT is what the card was fitted to; the mean step is not."""
    rows = tuple(
        Row(
            f"chunk {chunk}",
            (
                Cell(SWEEP_TTFT[chunk], 1e3 * outcomes.figure(chunk, "ttft")),
                Cell(SWEEP_BATCH[chunk], 1e3 * outcomes.figure(chunk, "step")),
                Cell(nan, 1e3 * outcomes.figure(chunk, "chunk_step")),
            ),
        )
        for chunk in SWEEP_TTFT
    )
    order = list(SWEEP_TTFT)
    pairs: list[tuple[object, object]] = [
        (SWEEP_TTFT[a] > SWEEP_TTFT[b], outcomes.figure(a, "ttft") > outcomes.figure(b, "ttft"))
        for place, a in enumerate(order)
        for b in order[place + 1 :]
    ]
    ttft = [row.cells[0].ratio for row in rows]
    step = [row.cells[1].ratio for row in rows]
    return Report(
        NAME,
        "one prompt alone, by chunk size, RTX 6000 Ada, Mistral-7B",
        (
            f"Prompts of {PROMPT} tokens, one at a time, two output tokens: so many steps of a chunk and one "
            f"decode step each. Card {CARD}, whose constant, price per column of tiles and floor were fitted "
            "to the published TTFTs of this sweep.",
        ),
        (Section("ms", "size", ("TTFT", "mean step", "chunk step"), rows),),
        (
            Count("TTFT within 4 %", sum(abs(ratio - 1) <= WITHIN for ratio in ttft), len(ttft)),
            Count.of_pairs("which of two chunk sizes has the higher TTFT", pairs),
        ),
        (
            f"TTFT comes out at {spread(ttft)} of the published: that is the residual of the fit, and "
            f"no evidence. The mean step, {spread(step)} of the published, is the TTFT and one decode step "
            "over the number of steps: it follows from the same fit.",
            "The published mean step contains one decode step a request: a step of 512 prompt "
            "tokens takes a quarter of the TTFT, as 'chunk step' shows.",
        ),
    )
