"""The answer with the other arrival times: a trace's own beside Poisson, or Poisson beside its own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from headgate.advisor.capacity.search import Progress, Search
from headgate.advisor.capacity.slo import Level
from headgate.advisor.capacity.traffic import own_rate
from headgate.advisor.capacity.trials import Case, Contender, remembered, search_rates
from headgate.advisor.set_up import set_up, without_load
from headgate.advisor.settings import SearchSettings
from headgate.experiment.build import make_workload
from headgate.experiment.settings import Experiment
from headgate.experiment.workers import Workers

APART = 0.2  # of the answer: from here on both are shown
PRECISION = 0.05  # of the other answer's bracket
REQUESTS = 3000  # of a run with the other times, or as many as the first one had


class OtherTimes(NamedTuple):
    """What one policy, or one kind of fleet, answers with either arrival times."""

    name: str
    recorded: bool  # whether the other times are the trace's own
    answer: float
    other: float
    faster: float  # how many times as fast as it was recorded the trace runs

    @property
    def apart(self) -> bool:
        """Whether a user must see both."""
        return self.answer > 0 and abs(self.other / self.answer - 1) > APART


class Question(NamedTuple):
    """What is asked once more."""

    settings: Experiment
    options: SearchSettings
    own: float  # the trace's own rate


def other_question(settings: Experiment, options: SearchSettings, requests: int) -> Question | None:
    """The same with the other times and one seed; None where a trace has none, or the user chose a law.

    A trace is asked for its first `requests`, for a run of few drawn ones says little of its bursts.
    """
    if settings.trace is None or settings.arrivals or settings.burstiness:
        return None
    others = options.model_copy(update={"as_recorded": not options.as_recorded, "seeds": 1})
    trace, _ = make_workload(without_load(settings).model_copy(update={"requests": None}))
    if not trace.arrival[-1] > trace.arrival[0]:
        return None
    if others.as_recorded:
        first = min(len(trace), max(requests, REQUESTS))
        settings, trace = settings.model_copy(update={"requests": first}), trace.head(first)
    return Question(settings, others, own_rate(trace))


def other_rate(
    question: Question,
    levels: tuple[Level, ...],
    found: tuple[str, float],
    contender: Contender,
    progress: Progress,
    folder: Path | None = None,
) -> OtherTimes:
    """The rate of the policy that was found, searched again from where it was."""
    settings, options, own = question
    start = set_up(without_load(settings), levels, options, REQUESTS)
    (name, rate), top, seed = found, start.bounds()[0].rate, start.settings.seed
    search = Search(top, PRECISION, rate / top)
    case = Case(start.engine, start.traffic, start.settings.watchdog, start.asynchronous)
    memory = remembered(folder, case)
    search_rates(case, {name: contender}, {(name, seed): search}, Workers(), progress, memory)
    if search.next() is not None:
        raise KeyboardInterrupt
    recorded = search.answer if options.as_recorded else rate
    return OtherTimes(name, options.as_recorded, rate, search.answer, recorded / own)
