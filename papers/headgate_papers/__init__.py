"""Experiments of the literature again: the published number, ours, the ratio, and why they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headgate.core.errors import unknown
from headgate_papers.eb import EXPERIMENTS as EB
from headgate_papers.experiment import Experiment
from headgate_papers.fluid import EXPERIMENTS as FLUID
from headgate_papers.page import published_page
from headgate_papers.report import Report
from headgate_papers.serving import INTERRUPTED, Options, carry_out
from headgate_papers.slai import EXPERIMENTS as SLAI
from headgate_papers.wait import EXPERIMENTS as WAIT

__all__ = ["EXPERIMENTS", "Experiment", "Options", "Report", "find", "published_page", "reproduce"]

EXPERIMENTS: dict[str, Experiment] = EB | SLAI | WAIT | FLUID


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
    outcomes = carry_out(experiment.run, jobs, options.seed, progress, experiment.spread)
    report = experiment.judge(outcomes, options)
    stopped = outcomes.failures
    if not stopped:
        return report
    key, why = next(iter(stopped.items()))
    line = f"No number for {len(stopped)} of {len(jobs)} runs, which stopped. The first, {key}: {why}"
    remarks = (*report.remarks, line.split(";")[0] + ".")
    return replace(report, remarks=remarks, interrupted=INTERRUPTED in stopped.values())
