"""Experiments of the gate-and-route paper."""

from headgate_papers.experiment import Experiment
from headgate_papers.fluid import (
    dolly,
    fig2,
    fig4,
    fig6,
    fig7,
    fig8,
    fig9,
    fig10,
    network_runs,
    path,
    published,
)

EXPERIMENTS = {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, network_runs.run, published.SOURCE)
    for part in (fig2, fig4, fig6, fig7, fig8, fig9, fig10, dolly)
} | {path.NAME: Experiment(path.ABOUT, path.jobs, path.judge, path.run, published.SOURCE)}
