"""Figure 5 of the EB paper: TPOT and TTFT of v1 and EB(k̂*) in Table 2's runs, where the text prints them."""

from __future__ import annotations

from math import isfinite, nan

from headgate_papers.eb import table2
from headgate_papers.eb.lengths import DATA_SETS
from headgate_papers.eb.published import CARDS, FIGURE5
from headgate_papers.report import Cell, Count, Report, Row, Section, sign_pairs, spread
from headgate_papers.serving import Job, Key, Options, Outcomes

NAME = "eb-fig5"
ABOUT = "TPOT and TTFT of v1 and EB on the data sets of Table 2, 8B"
WAYS = {"v1": "mixed", "EB": "eb-online"}
UNITS = {"TPOT": ("ms", 1e3), "TTFT": ("s", 1.0)}


def jobs(options: Options) -> list[Job]:
    """Those of Table 2, with the lengths its runs forced where they did."""
    wanted = {key for gpu, name, _ in FIGURE5 for policy in WAYS.values() for key in _keys(gpu, name, policy)}
    return [job for job in table2.jobs(options) if job.key in wanted]


def _keys(gpu: str, name: str, policy: str) -> list[Key]:
    forced = DATA_SETS[name].forced is not None
    return [(CARDS[gpu, "8B"], name, forced, policy, point) for point in table2.grid_of(name)]


def judge(outcomes: Outcomes, options: Options) -> Report:
    """Latencies at the grid point that serves most, which is what Table 2 reports."""
    rows = []
    for (gpu, name, metric), published in FIGURE5.items():
        unit, scale = UNITS[metric]
        cells = tuple(
            Cell(number, scale * _best(outcomes, _keys(gpu, name, policy), metric.lower()))
            for number, policy in zip(published, WAYS.values(), strict=True)
        )
        rows.append(Row(f"{gpu}, {name}, {metric} {unit}", cells))
    pairs = sign_pairs([(row.cells[0], row.cells[1]) for row in rows])
    ratios = {way: [row.cells[place].ratio for row in rows] for place, way in enumerate(WAYS)}
    return Report(
        NAME,
        "latency on real lengths, Qwen3-8B",
        (
            "Runs of eb-table2 at the grid point that serves most; LongBench and NuminaMath with the 20 and "
            "4000 output tokens that the authors' scripts force.",
        ),
        (Section("Mean latency", "run", tuple(WAYS), tuple(rows)),),
        (Count.of_pairs("latency of EB above or below that of v1", pairs),),
        (
            f"v1 is at {spread(ratios['v1'])} of the published, EB at {spread(ratios['EB'])}. Latency of a "
            "closed loop follows from what is served and from the number of slots at the best grid point; "
            "the paper does not say which point it plots, and eb-table2 lists why rates differ.",
        ),
    )


def _best(outcomes: Outcomes, keys: list[Key], figure: str) -> float:
    known = [key for key in keys if isfinite(outcomes.figure(key, "requests"))]
    if not known:
        return nan
    return outcomes.figure(max(known, key=lambda key: outcomes.figure(key, "requests")), figure)
