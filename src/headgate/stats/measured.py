"""One run and what is worked out from its tables, each part once, for whoever asks for it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from headgate.record.tables import Floats, Run
from headgate.stats import flow
from headgate.stats.gaps import Gaps, Sample
from headgate.stats.promises import Latencies, Promises
from headgate.stats.windows import Window, choose

if TYPE_CHECKING:
    from headgate.stats.fleet import FleetFigures
    from headgate.stats.metrics import Metrics


class Measured:
    """A run with its window, latencies, gaps and figures. Terminal, JSON and HTML are given this object.

    Nothing is computed before it is asked for, and nothing twice. The tables must not change meanwhile.
    """

    def __init__(self, run: Run, window: str = "middle") -> None:
        self.run = run
        self.window_name = window

    @classmethod
    def of(cls, run: Run | Measured, window: str = "middle") -> Measured:
        """The run as it was measured before, or to be measured in this window."""
        if isinstance(run, Measured):
            return run if run.window_name == window else cls(run.run, window)
        return cls(run, window)

    @cached_property
    def window(self) -> Window:
        """The part of the run that figures are taken from."""
        return choose(self.run, self.window_name)

    @cached_property
    def latencies(self) -> Latencies:
        return Latencies.of(self.run)

    @cached_property
    def gaps(self) -> Gaps:
        """Between the tokens of every request."""
        return Gaps(self.run)

    @cached_property
    def longest(self) -> Floats:
        """The longest gap of every request."""
        return self.gaps.longest()

    @cached_property
    def gap_sample(self) -> Sample:
        """All gaps of the requests in the window."""
        return self.gaps.sample(self.window.keep)

    @cached_property
    def promises(self) -> Promises | None:
        """Which requests got what they were promised; None where nothing was."""
        return Promises.of(self.run, self.latencies, self.longest)

    @cached_property
    def trend(self) -> flow.Judged:
        """Whether the run is stationary, and if not, in which way."""
        return flow.judge(self.run)

    @cached_property
    def metrics(self) -> Metrics:
        """All figures of the run."""
        from headgate.stats.metrics import compute_metrics

        return compute_metrics(self)

    @cached_property
    def fleet(self) -> FleetFigures | None:
        """Its engines one by one; None for a run of one engine without a router."""
        from headgate.stats.fleet import compute_fleet

        return compute_fleet(self)
