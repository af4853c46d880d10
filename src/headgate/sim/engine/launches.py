"""When the GPU has done a step that a host composes and launches while the step before it runs."""

from __future__ import annotations

from math import inf

from headgate.cost.model import Shape, StepCost
from headgate.sim.engine.steps import Pace


class Launches(Pace):
    """The times of an asynchronous engine, step after step; `Ahead` has the equations.

    Kernels run while later ones are launched: a step takes its time from the end of the step before it or
    from its composing on, and is not done before the last of it has been launched.
    """

    __slots__ = ("_busy", "_host", "launched")

    def __init__(self, cost: StepCost) -> None:
        host = cost.host
        super().__init__(cost.unhosted() if host else cost)
        self._host = host
        self._busy = -inf  # until then the GPU has work
        self.launched = 0.0  # when the host was done with the newest step
        self.by_chunk = self.by_chunk or host is not None  # it counts prompts

    def prompts_end(self, start: float, shape: Shape) -> float:
        """A step with prompts, composed at `start`."""
        return self._launch(start, shape, super().prompts_end(max(start, self._busy), shape))

    def decode_ends(self, decodes: int, context: int, most: int, start: float, stop: float) -> list[float]:
        """One decode step, composed at `start`."""
        end = super().decode_ends(decodes, context, 1, max(start, self._busy), stop)[0]
        return [self._launch(start, Shape(decodes, context), end)]

    def _launch(self, start: float, shape: Shape, end: float) -> float:
        self.launched = start if self._host is None else start + self._host.seconds(shape)
        self._busy = max(end, self.launched)
        return self._busy
