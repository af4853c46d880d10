"""Figure 6 of the WAIT paper: Nested WAIT on ten requests, batch by batch."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import NamedTuple

from headgate.core.plan import ALL, NONE, Plan
from headgate.core.policy import Observer, Steps
from headgate.core.request import Request
from headgate.methods.wait.wait import NestedWait
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Workload
from headgate_papers.kv_linear import kv_linear
from headgate_papers.report import Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes

NAME = "wait-fig6"
ABOUT = "Nested WAIT's worked example (Figure 6): ten requests, two segments of one stage, thresholds 3 and 3"
PROMPT, THRESHOLD = 2, 3
ARRIVALS = (0, 0, 1, 5, 5, 7, 7, 11, 14, 14)
LONG = {3, 5, 6, 7, 8}  # these have one decode iteration, the others none
COST = kv_linear(1.0, 0.1)

# After each batch: requests that have left, and those that wait for the second segment. The figure keeps P6
# there in its last row, though P3, P5 and P6 were in the same batch.
PUBLISHED = ((2, 1), (3, 3), (6, 3))


class Look(NamedTuple):
    """The state when a batch has ended."""

    batch: tuple[int, ...]
    seconds: float
    held: int  # KV tokens while it ran
    left: int
    waiting: int  # for the second segment


class Watch(Observer):
    """Writes down every batch."""

    def __init__(self) -> None:
        self.looks: list[Look] = []
        self.failures: dict[object, str] = {}
        self._batch: list[int] = []
        self._decoding: dict[int, None] = {}
        self._left = 0
        self._step: Steps | None = None

    def stepped(self, steps: Steps) -> None:
        """A batch has run; who leaves with it is told next."""
        self.close()
        self._step = steps

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        """Who is in the batch that begins."""
        self.close()
        decodes = self._decoding if plan.decode is ALL else {} if plan.decode is NONE else plan.decode
        self._batch = [*decodes, *plan.prefill]

    def prefilled(self, request: Request, now: float) -> None:
        """It waits for the second segment, or leaves at once."""
        self._decoding[request.id] = None

    def finished(self, request: Request, now: float, how: object) -> None:
        self._decoding.pop(request.id, None)
        self._left += 1

    def close(self) -> None:
        """The newest batch is over and everybody has been told."""
        if self._step is None:
            return
        span = self._step.ends[-1] - self._step.start
        self.looks.append(
            Look(
                tuple(id + 1 for id in sorted(self._batch)),
                span,
                self._step.kv,
                self._left,
                len(self._decoding),
            )
        )
        self._batch, self._step = [], None


class FigureJob(NamedTuple):
    """One run, of ten requests."""

    key: str = "figure 6"


def jobs(options: Options) -> list[FigureJob]:
    """The one."""
    return [FigureJob()]


def run(job: FigureJob, seed: int) -> Watch:
    """The last two requests of the second segment leave by patience, long after the figure ends."""
    watch = Watch()
    outputs = [1 + (number in LONG) for number in range(1, len(ARRIVALS) + 1)]
    workload = Workload.of([PROMPT] * len(outputs), outputs, arrival=list(ARRIVALS))
    policy = NestedWait(100, COST, f"{THRESHOLD}/{THRESHOLD}", "0/1", max_pause=1e3, max_wait=1e3)
    Simulator(Engine(COST, 1000, 1000, 1000, 100, block=1), policy, workload, (watch,)).run()
    watch.close()
    return watch


def judge(outcomes: Outcomes, options: Options) -> Report:
    """The figure's counts beside ours, and the batches."""
    (watch,) = outcomes.every(FigureJob().key)
    shown = watch.looks[: len(PUBLISHED)]
    rows, batches = [], []
    for number, ((left, waiting), look) in enumerate(zip(PUBLISHED, shown, strict=True), 1):
        who = " ".join(f"P{id}" for id in look.batch)
        rows.append(Row(f"batch {number}", (Cell(left, look.left), Cell(waiting, look.waiting))))
        batches.append(Row(who, (Cell(nan, look.seconds), Cell(nan, look.held))))
    pairs: list[tuple[object, object]] = [
        ((left, waiting), (look.left, look.waiting))
        for (left, waiting), look in zip(PUBLISHED, shown, strict=True)
    ]
    return Report(
        NAME,
        "ten requests, two segments",
        (
            "Prompts of 2 tokens, d0 = 1 s, d1 = 0.1 s; P3, P5, P6, P7 and P8 have one decode iteration, "
            "the others none. The figure shows who is where, no times.",
        ),
        (
            Section("After each batch", "batch", ("left", "wait for segment 2"), tuple(rows)),
            Section("What ran", "batch", ("seconds", "KV tokens"), tuple(batches)),
        ),
        (Count.of_pairs("batches after which everybody is where the figure has them", pairs),),
        (
            "The figure's last row keeps P6 in the second segment, though it ran with P3 and P5 and all "
            "three need the same number of iterations: they leave together.",
        ),
    )
