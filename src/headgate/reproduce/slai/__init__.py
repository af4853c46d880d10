"""Experiments of the RAD and SLAI paper."""

from headgate.reproduce.experiment import Experiment
from headgate.reproduce.slai import bounds, fig5, figures

EXPERIMENTS = {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, part.carry_out, part.SOURCE)
    for part in (fig5, *figures.FIGURES, bounds)
}
