"""How much slower than its card the host launches steps, learned from the steps that had to wait for it."""

from __future__ import annotations

from headgate.core.build import mypyc_attr

FIRST = 1.5  # behind an HTTP server on an H200, at the 90th percentile of launches
MOST = 2.5
STEADY = 1.3  # up to here the host is as the card says
SHARE = 0.02  # of the launches that may take longer than what is planned with
PACE = 0.1  # how far one launch moves it
NEAR = 1.02  # a launch is as long as planned
CLEARLY = 1.1  # times the GPU's time of a decode step: up to here a launch hides behind it


@mypyc_attr(serializable=True)
class SlowHost:
    """A high quantile of the host's time over the card's, `factor`.

    On an asynchronous engine tokens of a decode step are seen when the host has launched the step after it.
    If that launch is longer than the decode step, the time of the step is the time of the launch. Each such
    step moves the quantile up a lot or down a little, so that it comes to rest where `SHARE` are above.
    """

    def __init__(self) -> None:
        self.factor = FIRST
        self.overlaps = False  # a step was seen to end after the next one was composed

    @property
    def steady(self) -> bool:
        """Nothing waits for a launch, or launches take about what the card says."""
        return not self.overlaps or self.factor <= STEADY

    def hides(self, launch: float, gpu: float) -> bool:
        """Would a slow launch end before a decode step of `gpu` seconds, or a little after?"""
        return self.factor * launch <= CLEARLY * gpu

    def saw(self, seconds: float, launch: float, gpu: float) -> None:
        """A decode step took `seconds`, on the GPU `gpu`; the step after it usually takes `launch`.

        A slow launch that would hide behind the GPU is not seen, and need not be.
        """
        if self.hides(launch, gpu):
            return
        above = seconds > NEAR * self.factor * launch
        moved = self.factor + PACE * (1 - SHARE if above else -SHARE)
        self.factor = min(MOST, max(1.0, moved))
