"""Experiments of the literature again: the published number, ours, the ratio, and why they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from headgate.core.errors import unknown
from headgate.reproduce import (
    gamma_shift,
    gr_dolly,
    gr_fig2,
    gr_fig4,
    gr_fig6,
    gr_fig7,
    gr_fig8,
    gr_fig9,
    gr_fig10,
    network_runs,
    published_fleet,
    slai_bounds,
    slai_figures,
    split_runs,
    table2,
    table3,
    table10,
    table11,
    table13,
    table18,
    table19,
    table20,
    wait_fig6,
    wait_high,
    wait_lmsys,
    wait_low,
    wait_memory,
    wait_nested,
    wait_runs,
    wait_study,
    wait_tiny,
)
from headgate.reproduce.eb.published import SOURCE
from headgate.reproduce.report import Report
from headgate.reproduce.serving import INTERRUPTED, Options, carry_out

__all__ = ["EXPERIMENTS", "Experiment", "Options", "Report", "find", "reproduce"]


class Experiment(NamedTuple):
    """The runs it takes, and what is made of them."""

    about: str
    jobs: Callable[[Options], list[Any]]
    judge: Callable[[Any, Options], Report]
    carry_out: Callable[..., Any] = carry_out
    source: str = SOURCE


EXPERIMENTS = {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge)
    for part in (table2, table3, table10, table11, table13, gamma_shift, table18)
}
EXPERIMENTS |= {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, split_runs.carry_out)
    for part in (table19, table20)
}
EXPERIMENTS |= {  # these run traffic of their own
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, part.carry_out, part.SOURCE)
    for part in (*slai_figures.FIGURES, slai_bounds)
}
EXPERIMENTS |= {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, wait_runs.carry_out, wait_study.SOURCE)
    for part in (wait_low, wait_high, wait_nested, wait_lmsys, wait_tiny)
}
EXPERIMENTS |= {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, part.carry_out, wait_study.SOURCE)
    for part in (wait_fig6, wait_memory)
}
EXPERIMENTS |= {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, network_runs.carry_out, published_fleet.SOURCE)
    for part in (gr_fig2, gr_fig4, gr_fig6, gr_fig7, gr_fig8, gr_fig9, gr_fig10, gr_dolly)
}


def find(name: str) -> Experiment:
    """An experiment by name."""
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def reproduce(
    name: str, options: Options, jobs: list[Any], progress: Callable[[int], None] = lambda done: None
) -> Report:
    """Carry out an experiment's jobs and judge them; runs that could not go on are named in the remarks."""
    experiment = find(name)
    outcomes = experiment.carry_out(jobs, options.seed, progress)
    report = experiment.judge(outcomes, options)
    stopped = outcomes.failures
    if not stopped:
        return report
    key, why = next(iter(stopped.items()))
    line = f"No number for {len(stopped)} of {len(jobs)} runs, which stopped. The first, {key}: {why}"
    remarks = (*report.remarks, line.split(";")[0] + ".")
    return replace(report, remarks=remarks, interrupted=INTERRUPTED in stopped.values())
