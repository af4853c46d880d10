"""What the host of an asynchronous engine takes for a step, from the steps it kept waiting."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from headgate.cost.fit.family import seconds
from headgate.cost.fit.steps import DECODE, Floats, StepTable
from headgate.cost.laws.host import HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms

Whole = NDArray[np.intp]

FEWEST = 8  # steps of a kind that are launched; with fewer its time is a guess
JITTER = 0.1  # errors beyond it count less and less
START = (0.002, 2e-5, 0.01, 0.03)  # seconds; where the search begins, and its scale


def fit_host(table: StepTable, terms: WorkTerms, graph: int = 0) -> HostTerms | None:
    """The law of `HostTerms`, beside what the GPU takes by `terms`; None where the table does not show it.

    A decode step after a decode step ends when the GPU has done it or when the host, busy with the next step,
    looks, whichever is later (see `drivers.ahead`): its time is max(c, H of the next step). Before decodes
    alone that is hardly ever the host, before prompts mostly. Steps before decodes, before prompts that fit
    a CUDA graph and before others weigh alike; where there are too few of one of the last two, prompts are
    of one kind and the law has no graph. Least squares on logarithms, for hosts scatter by a quarter and
    relative errors would pull the law down; none negative, outliers counting less.
    """
    first = waiting(table)
    then = table.take(first + 1)
    gpu = seconds(WorkCost(terms).unhosted().terms, table)[first]
    columns, groups = _columns(then, graph)
    if graph and columns[:, 2:].sum(axis=0).min() < FEWEST:  # too few of one kind to separate the two
        graph = 0
        columns, groups = _columns(then, graph)
    if columns[:, 2:].sum() < FEWEST:
        return None
    real = table.seconds[first]
    weight = np.sqrt(1.0 / np.bincount(groups)[groups])
    scale = np.array(START[: columns.shape[1]])

    def off(found: Floats) -> Floats:
        errors: Floats = weight * np.log(np.maximum(gpu, columns @ found) / real)
        return errors

    done = least_squares(
        off, scale, loss="soft_l1", f_scale=JITTER * float(weight.mean()), bounds=(0.0, 1.0), x_scale=scale
    )
    found = [float(f"{value:.4g}") for value in done.x]
    return HostTerms(found[0], found[1], found[2], found[3] if graph else 0.0, graph)


def waiting(table: StepTable) -> Whole:
    """Decode steps after decode steps, in an engine that was ahead before and after them."""
    quiet = (table.kind[:-1] == DECODE) & (table.before[:-1] == DECODE) & (table.before[1:] == DECODE)
    found: Whole = np.flatnonzero(quiet & table.busy[:-1] & table.busy[1:])
    return found


def _columns(table: StepTable, graph: int) -> tuple[Floats, Whole]:
    """One row per step, one column per coefficient; and which of three kinds the step is."""
    prompting = table.prefill > 0
    prompts = np.where(np.isnan(table.prompts), prompting, table.prompts)
    beyond = prompting & (table.tokens > graph) & (graph > 0)
    columns = [np.ones(len(table)), table.decodes + prompts, prompting & ~beyond]
    found = np.column_stack((*columns, beyond) if graph else columns).astype(np.float64)
    return found, prompting.astype(np.intp) + beyond
