"""Experiments of the WAIT paper."""

from headgate_papers.experiment import Experiment
from headgate_papers.wait import fig6, high, lmsys, low, memory, nested, runs, study, theorems, tiny

EXPERIMENTS = {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, runs.serve, study.SOURCE)
    for part in (low, high, nested, lmsys, tiny)
} | {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, part.run, study.SOURCE)
    for part in (fig6, memory, theorems)
}
