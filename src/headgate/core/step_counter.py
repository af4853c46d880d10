"""An observer of steps for whom nothing is laid out: compiled code calls it without a Python object."""

from __future__ import annotations

from headgate.core.build import mypyc_attr
from headgate.core.policy import Observer, Steps


@mypyc_attr(allow_interpreted_subclasses=True)
class StepCounter(Observer):
    """It needs of a run of steps the first end and the last, so that long runs need not list the others."""

    def stepped(self, steps: Steps) -> None:
        start, ends, decodes, context, prefill, behind, kv = steps
        self.ran(start, ends[0], ends[-1], len(ends), decodes, context, prefill, behind, kv)

    def ran(
        self,
        start: float,
        first: float,
        last: float,
        count: int,
        decodes: int,
        context: int,
        prefill: int,
        behind: int,
        kv: int,
    ) -> None:
        """The engine ran so many steps; when the first and the last of them ended."""
