"""The fluid path of gate-and-route from an empty fleet, beside the stochastic network."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.methods.fluid.plan import FluidPlan
from headgate.methods.fluid.planner import plan_fluid
from headgate_papers.fluid.published import two_classes
from headgate_papers.network.counts import HANDOFF, MIXED, PREFILLING, SOLO, WAITING
from headgate_papers.network.run import run_network
from headgate_papers.report import LIMIT, Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes

NAME = "gr-path"
ABOUT = "the fluid path from an empty fleet beside the stochastic network, stretch by stretch"
TIMES = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 150.0, 250.0)
ENGINES, QUICK_ENGINES, RUNS = (20, 200), (5, 20), range(2)
ROUTERS = {"literal": "gate-and-route", "GG-SP+": "gate-and-route+"}
LEVELS = {
    "Decoding": ("decoding", (MIXED, SOLO)),
    "Prefilling": ("prefilling", (PREFILLING,)),
    "Waiting for prefill": ("waiting", (WAITING,)),
    "Waiting for a decode slot": ("handoff", (HANDOFF,)),
}
NEAR = 0.1
STEP = 0.01  # seconds
Floats = NDArray[np.float64]


class PathJob(NamedTuple):
    """One run from an empty fleet."""

    key: tuple[str, int, int]
    plan: FluidPlan
    router: str
    engines: int


class Levels(NamedTuple):
    """Requests per engine by level, all classes, stretch by stretch."""

    decoding: tuple[float, ...]
    prefilling: tuple[float, ...]
    waiting: tuple[float, ...]
    handoff: tuple[float, ...]


def jobs(options: Options) -> list[PathJob]:
    """Both gates, a small fleet and a large one."""
    plan = plan_fluid(two_classes())
    return [
        PathJob((name, engines, run), plan, router, engines)
        for name, router in ROUTERS.items()
        for engines in (QUICK_ENGINES if options.quick else ENGINES)
        for run in RUNS
    ]


def run(job: PathJob, seed: int) -> Levels:
    """One of them."""
    windows = run_network(job.plan, job.router, job.engines, seed + job.key[2], TIMES[:-1], TIMES[-1])
    return Levels(
        **{
            name: tuple(
                max(0.0, float(sum(window.mean(level).sum() for level in levels))) for window in windows
            )
            for name, levels in LEVELS.values()
        }
    )


def _mean(outcomes: Outcomes, name: str, engines: int, level: str, place: int) -> float:
    """Over the seeds."""
    found = [getattr(each, level)[place] for run in RUNS for each in outcomes.every((name, engines, run))]
    return float(np.mean(found)) if found else float("nan")


def judge(outcomes: Outcomes, options: Options) -> Report:
    """Each level stretch by stretch: the path, and both gates in two sizes."""
    plan = plan_fluid(two_classes())
    path = fluid_path(plan, TIMES[-1])
    sizes = QUICK_ENGINES if options.quick else ENGINES
    sections = tuple(_section(outcomes, path, title, sizes) for title in LEVELS)
    decoding = sections[0]
    near = [abs(cell.ratio - 1) <= NEAR for row in decoding.rows for cell in row.cells[1::2]]
    closer = [
        abs(row.cells[at + 1].ratio - 1) <= abs(row.cells[at].ratio - 1)
        for row in decoding.rows
        for at in (0, 2)
    ]
    last = mean(path, "decoding", TIMES[-2], TIMES[-1]).sum()
    planned = sum(plan.mixed) + sum(plan.solo)
    return Report(
        NAME,
        "from an empty fleet to the plan",
        (
            "Base instance (section 6.2), 16 slots, 0.5 arrivals per second, engine and class. 'fluid' is "
            "the path of the balance equations under the plan's gates, "
            f"averaged over each stretch of time; the network has {sizes[0]} and {sizes[1]} engines, two "
            "seeds.",
            "Columns: so many engines under the literal gate; with a + under ours, GG-SP+.",
        ),
        sections,
        (
            Count(
                f"decodes of the larger fleet within {100 * NEAR:.0f} % of the path",
                sum(near),
                len(near),
                LIMIT,
            ),
            Count("the larger fleet is nearer to the path than the smaller", sum(closer), len(closer), LIMIT),
        ),
        (
            f"The path ends at {last:.2f} decodes per engine, the plan has {planned:.2f}: a decode of the "
            "longer class takes some 25 s, so the fleet needs about 150 s to fill.",
            "Queues of small fleets are longer than the path's: they come from chance, which the fluid limit "
            "has not.",
        ),
    )


def mean(path: Path, name: str, start: float, end: float) -> Floats:
    """Of each class, over a stretch of time."""
    inside = (path.time >= start) & (path.time < end)
    return np.asarray(getattr(path, name)[inside].mean(axis=0))


def _section(outcomes: Outcomes, path: Path, title: str, sizes: tuple[int, int]) -> Section:
    level = LEVELS[title][0]
    columns = tuple(f"{sign}{size}" for sign in ("", "+") for size in sizes)
    rows = []
    for place, (start, end) in enumerate(pairwise(TIMES)):
        fluid = max(0.0, round(float(mean(path, level, start, end).sum()), 6))
        cells = (Cell(fluid, _mean(outcomes, name, size, level, place)) for name in ROUTERS for size in sizes)
        rows.append(Row(f"{start:g} to {end:g} s", tuple(cells)))
    return Section(f"{title}, requests per engine", "time", columns, tuple(rows), shared=True, against=LIMIT)


# -- the path of a fleet from its start, (24) to (32)


class Path(NamedTuple):
    """Per engine and class (columns), at the ends of steps (rows); seconds from an empty fleet."""

    time: Floats
    waiting: Floats  # for prefill
    prefilling: Floats
    handoff: Floats  # waiting for a decode slot
    decoding: Floats  # on mixed and solo engines


def fluid_path(plan: FluidPlan, seconds: float, step: float = STEP) -> Path:
    """The path under the plan's gates: class i prefills on at most x_i* engines, as soon as it has requests;
    decodes take solo slots first, then mixed ones, all classes alike.

    The paper's fluid limit has the same terms in integral form. Steps are explicit: those at which requests
    give up and decodes finish must be well below 1 per `step`; prompts may be shorter.
    """
    instance, pace = plan.instance, plan.instance.pace
    rate = np.array([flow.rate for flow in instance.flows])
    gives_up = np.array([flow.impatience for flow in instance.flows])
    output = np.array([flow.output for flow in instance.flows])
    prefill = 1 / np.array(instance.seconds())
    share = np.array(plan.prefill)
    turns = step * prefill  # prompts that one engine completes in a step
    solo = pace.slots * (1 - share.sum())
    slots = solo + (pace.slots - 1) * share.sum()
    q, x, d, y = (np.zeros(len(rate)) for _ in range(4))
    rows: list[tuple[Floats, Floats, Floats, Floats]] = []
    count = max(1, round(seconds / step))
    for _ in range(count):
        q = q + step * (rate - gives_up * q)
        enters = np.minimum(q, np.maximum(share * np.maximum(turns, 1.0) - x, 0.0))
        q, x = q - enters, x + enters
        done = x * np.minimum(turns, 1.0)
        runs = done / turns
        x, d = x - done, d + done
        d = d - step * gives_up * d
        room = max(0.0, slots - float(y.sum()))
        starts = d if d.sum() <= room else d * (room / float(d.sum()))
        d, y = d - starts, y + starts
        total = float(y.sum())
        on_solo = min(1.0, solo / total) if total else 1.0
        speed = on_solo * pace.solo_speed + (1 - on_solo) / pace.mixed_step
        y = y - step * speed / output * y
        rows.append((q, runs, d, y))
    time = step * np.arange(1, count + 1, dtype=np.float64)
    return Path(time, *(np.array([row[place] for row in rows]) for place in range(4)))
