"""Experiments of the EB paper."""

from headgate_papers.eb import (
    fig3,
    fig5,
    gamma_shift,
    grid,
    split_runs,
    table2,
    table3,
    table10,
    table11,
    table13,
    table18,
    table19,
    table20,
)
from headgate_papers.eb.published import SOURCE
from headgate_papers.experiment import Experiment
from headgate_papers.serving import run_job

EXPERIMENTS = {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, run_job, SOURCE)
    for part in (table2, table3, table10, table11, table13, gamma_shift, table18, fig3, fig5, grid)
} | {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, split_runs.run_split, SOURCE)
    for part in (table19, table20)
}
