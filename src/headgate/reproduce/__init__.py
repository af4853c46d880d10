"""Experiments of the literature again: the published number, ours, the ratio, and why they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from headgate.core.errors import unknown
from headgate.reproduce import gamma_shift, table2, table3, table10, table11, table13, table18
from headgate.reproduce.report import Report
from headgate.reproduce.serving import Job, Options, Outcomes, carry_out

__all__ = ["EXPERIMENTS", "Experiment", "Options", "Report", "find", "reproduce"]


class Experiment(NamedTuple):
    """The runs it takes, and what is made of them."""

    about: str
    jobs: Callable[[Options], list[Job]]
    judge: Callable[[Outcomes, Options], Report]


EXPERIMENTS = {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge)
    for part in (table2, table3, table10, table11, table13, gamma_shift, table18)
}


def find(name: str) -> Experiment:
    """An experiment by name."""
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def reproduce(
    name: str, options: Options, jobs: list[Job], progress: Callable[[int], None] = lambda done: None
) -> Report:
    """Carry out an experiment's jobs and judge them; runs that could not go on are named in the remarks."""
    outcomes = carry_out(jobs, options.seed, progress)
    report = find(name).judge(outcomes, options)
    stopped = outcomes.failures
    if not stopped:
        return report
    key, why = next(iter(stopped.items()))
    line = f"No number for {len(stopped)} of {len(jobs)} runs, which stopped. The first, {key}: {why}"
    return replace(report, remarks=(*report.remarks, line.split(";")[0] + "."))
