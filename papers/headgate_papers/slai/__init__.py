"""Experiments of the RAD and SLAI paper."""

from headgate_papers.experiment import Experiment
from headgate_papers.slai import bounds, fig5, figures
from headgate_papers.slai.chat_runs import serve
from headgate_papers.slai.published import PAPER

EXPERIMENTS = {fig5.NAME: Experiment(fig5.ABOUT, fig5.jobs, fig5.judge, fig5.run, PAPER)} | {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, serve, PAPER, spread=True)
    for part in (*figures.FIGURES, bounds)
}
