"""Experiments of the RAD and SLAI paper."""

from headgate.reproduce.experiment import Experiment
from headgate.reproduce.slai import bounds, fig5, figures
from headgate.reproduce.slai.chat_runs import serve
from headgate.reproduce.slai.published import PAPER

EXPERIMENTS = {fig5.NAME: Experiment(fig5.ABOUT, fig5.jobs, fig5.judge, fig5.run, PAPER)} | {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, serve, PAPER, spread=True)
    for part in (*figures.FIGURES, bounds)
}
