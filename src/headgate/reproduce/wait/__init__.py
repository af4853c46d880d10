"""Experiments of the WAIT paper."""

from headgate.reproduce.experiment import Experiment
from headgate.reproduce.wait import fig6, high, lmsys, low, memory, nested, runs, study, theorems, tiny

EXPERIMENTS = {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, runs.carry_out, study.SOURCE)
    for part in (low, high, nested, lmsys, tiny)
} | {
    part.NAME: Experiment(part.ABOUT, part.jobs, part.judge, part.carry_out, study.SOURCE)
    for part in (fig6, memory, theorems)
}
