"""Figure 4 and tables 14 to 16 of the EB paper: requests/s over a grid of (B, N), its best and its spread."""

from __future__ import annotations

from math import isfinite, nan
from typing import NamedTuple

import numpy as np

from headgate.workloads.lengths import Uniform
from headgate_papers.eb.lengths import DATA_SETS
from headgate_papers.eb.published import CARDS, H200, RTX
from headgate_papers.eb.published_figures import FIGURE4, SYNTHETIC, TABLE14, TABLE16
from headgate_papers.report import Cell, Count, Report, Row, Section, sign_pairs, spread
from headgate_papers.serving import Job, Load, Options, Outcomes

NAME = "eb-grid"
ABOUT = "requests/s over (B, N): the best (Figure 4, Table 16) and how much it matters (Tables 14, 15); 8B"
BUDGETS, SLOTS = (4096, 16384), (256, 512, 1024, 2048)
QUICK_BUDGETS, QUICK_SLOTS = (4096, 16384), (256, 1024)
WAYS = {"v0": "v0", "v1": "mixed", "EB": "eb-online"}
GPUS = (RTX, H200)
REQUESTS, LONG_REQUESTS, CLIENTS, LONG = 2000, 500, 2048, "NuminaMath"
METRICS = ("CV %", "max/min", "B-Sens %", "N-Sens %")


def jobs(options: Options) -> list[Job]:
    """Every point of the grid for every lengths, GPU and scheduler."""
    return [
        Job((gpu, name, way, budget, slots), CARDS[gpu, "8B"], load, policy, {}, slots, budget)
        for gpu in GPUS
        for name, load in _loads(options).items()
        for way, policy in WAYS.items()
        for budget in Grid.of(options).budgets
        for slots in Grid.of(options).slots
    ]


class Grid(NamedTuple):
    """The sizes of B and N."""

    budgets: tuple[int, ...]
    slots: tuple[int, ...]

    @classmethod
    def of(cls, options: Options) -> Grid:
        return cls(QUICK_BUDGETS, QUICK_SLOTS) if options.quick else cls(BUDGETS, SLOTS)


class Runs(NamedTuple):
    """The outcomes on their grid."""

    outcomes: Outcomes
    grid: Grid

    def rates(self, gpu: str, name: str, way: str) -> np.ndarray:
        """Requests/s, budgets down, slots across."""
        figure, (budgets, tried) = self.outcomes.figure, self.grid
        return np.array(
            [[figure((gpu, name, way, budget, slots), "requests") for slots in tried] for budget in budgets]
        )


def _loads(options: Options) -> dict[str, Load]:
    found = {}
    for name, (prompt, output) in SYNTHETIC.items():
        found[name] = Load(options.requests(REQUESTS), CLIENTS, Uniform(prompt), Uniform(output))
    for name, data in DATA_SETS.items():
        many = options.requests(LONG_REQUESTS if name == LONG else REQUESTS)
        found[name] = Load(many, CLIENTS, data.prompt, data.forced or data.output)
    return found


def judge(outcomes: Outcomes, options: Options) -> Report:
    """The best of each grid, where it lies, and four figures of how much B and N matter."""
    runs = Runs(outcomes, Grid.of(options))
    best = [
        Section(
            f"{gpu}, card {CARDS[gpu, '8B']}: requests/s of the best (B, N) (Figure 4)",
            "lengths",
            tuple(WAYS),
            tuple(Row(name, tuple(_best_cell(runs, gpu, name, way) for way in WAYS)) for name in SYNTHETIC),
        )
        for gpu in GPUS
    ]
    tables = [_sensitivity(runs, gpu, way) for gpu in GPUS for way in WAYS]
    rows = [row for section in best for row in section.rows]
    return Report(
        NAME,
        "how much the step budget B and the slots N matter",
        (
            f"Closed loop of {CLIENTS} clients, {options.requests(REQUESTS)} requests ({LONG}: "
            f"{options.requests(LONG_REQUESTS)}); B in {_many(runs.grid.budgets)}, N in "
            f"{_many(runs.grid.slots)}. The paper: 4000 requests, B from 4096 to 18432 in six sizes, N from "
            "256 to 2048 in five; the cards were measured up to 16384 tokens a step.",
            "CV: deviation over mean of requests/s. B-Sens: the CV over B, averaged over N; N-Sens the other "
            "way round. Lengths of the data sets as in eb-table2, forced outputs.",
        ),
        (*best, *tables, *_where(runs)),
        (
            Count.of_pairs(
                "Figure 4: EB above or below v1 (published differences above 1 %)",
                sign_pairs([(row.cells[1], row.cells[2]) for row in rows]),
            ),
            Count.of_pairs("Figure 4: the best of the three", [(_top(row, 0), _top(row, 1)) for row in rows]),
            _more_by_slots(runs),
            _same_slots(runs),
        ),
        _remarks(runs, best),
    )


def _many(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _best(runs: Runs, gpu: str, name: str, way: str) -> tuple[float, int, int]:
    grid = runs.rates(gpu, name, way)
    if not np.isfinite(grid).any():
        return nan, 0, 0
    row, column = np.unravel_index(int(np.nanargmax(grid)), grid.shape)
    return float(grid[row, column]), runs.grid.budgets[row], runs.grid.slots[column]


def _best_cell(runs: Runs, gpu: str, name: str, way: str) -> Cell:
    return Cell(FIGURE4[gpu, name][tuple(WAYS).index(way)], _best(runs, gpu, name, way)[0])


def _figures(runs: Runs, gpu: str, name: str, way: str) -> tuple[float, float, float, float]:
    grid = runs.rates(gpu, name, way)
    if not np.isfinite(grid).all():
        return (nan,) * 4

    def varies(axis: int | None) -> float:
        return float(np.mean(grid.std(axis) / grid.mean(axis))) * 100

    return varies(None), float(grid.max() / grid.min()), varies(0), varies(1)


def _sensitivity(runs: Runs, gpu: str, way: str) -> Section:
    rows = tuple(
        Row(
            name,
            tuple(
                Cell(published, ours)
                for published, ours in zip(
                    TABLE14[gpu, way, name][2:], _figures(runs, gpu, name, way), strict=True
                )
            ),
        )
        for name in DATA_SETS
    )
    number = 14 if gpu == RTX else 15
    return Section(f"{gpu}, {way}: spread over the grid (Table {number})", "lengths", METRICS, rows)


def _where(runs: Runs) -> list[Section]:
    """N of the best run with synthetic lengths."""
    found = []
    for gpu in GPUS:
        rows = tuple(
            Row(
                name,
                tuple(
                    Cell(float(published), float(ours))
                    for way in ("v1", "EB")
                    for published, ours in zip(
                        TABLE16[gpu, way, name], _best(runs, gpu, name, way)[1:], strict=True
                    )
                ),
            )
            for name in SYNTHETIC
        )
        columns = ("v1 B", "v1 N", "EB B", "EB N")
        found.append(Section(f"{gpu}: where the best run lies (Table 16)", "lengths", columns, rows))
    return found


def _top(row: Row, ours: int) -> str:
    values = [cell.ours if ours else cell.published for cell in row.cells]
    return tuple(WAYS)[values.index(max(values))]


def _more_by_slots(runs: Runs) -> Count:
    pairs: list[tuple[object, object]] = []
    for (gpu, way, name), numbers in TABLE14.items():
        _, _, budget, slots = _figures(runs, gpu, name, way)
        if isfinite(budget) and abs(numbers[5] - numbers[4]) >= 1:
            pairs.append((numbers[5] > numbers[4], slots > budget))
    return Count.of_pairs("Tables 14, 15: N matters more than B, or less (where 1 % apart)", pairs)


def _same_slots(runs: Runs) -> Count:
    pairs: list[tuple[object, object]] = []
    for (gpu, way, name), (_, slots) in TABLE16.items():
        ours = runs.rates(gpu, name, way).max(axis=0)
        if np.isfinite(ours).all():
            nearest = int(np.argmin(np.abs(np.array(runs.grid.slots) - slots)))
            pairs.append((True, bool(ours[nearest] >= 0.99 * ours.max())))
    return Count.of_pairs("Table 16: the published N is within 1 % of our best", pairs)


def _remarks(runs: Runs, best: list[Section]) -> tuple[str, ...]:
    ratios = {section.title.split(",")[0]: spread(section.ratios()) for section in best}
    flat = [_figures(runs, gpu, name, way)[2] for gpu, way, name in TABLE14]
    return (
        "Figure 4, ours / published: " + "; ".join(f"{gpu} {text}" for gpu, text in ratios.items()) + ".",
        f"B-Sens is {np.nanmin(flat):.1f} to {np.nanmax(flat):.1f} % here: steps of 4096 tokens are full "
        "already, and the price per token does not depend on the step.",
        "The published cards have no price per context token, so more slots never make a decode step dearer "
        "by its context; the published losses with many slots come from there and from evictions.",
        "30B halves of Tables 14 and 15: the published mixed price is missing. Gemma-3-1B: no coefficients.",
    )
