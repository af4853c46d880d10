"""One experiment of a paper: the runs it takes, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from headgate_papers.report import Report
from headgate_papers.serving import Options


class Experiment(NamedTuple):
    """`jobs` lists the runs, `run` carries out one, `judge` compares all with the published numbers."""

    about: str
    jobs: Callable[[Options], list[Any]]
    judge: Callable[[Any, Options], Report]
    run: Callable[[Any, int], Any]
    source: str
    spread: bool = False  # over processes, where there are many jobs
