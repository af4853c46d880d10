"""The laws that ship with headgate: compiled code calls them without Python objects in between."""

from __future__ import annotations

from abc import abstractmethod

from headgate.core.build import mypyc_attr
from headgate.cost.model import Shape, StepCost


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Law(StepCost):
    """A `StepCost` for which drivers need not go through Python's calls."""

    @abstractmethod
    def seconds(self, shape: Shape) -> float:
        """One step of any shape."""

    @abstractmethod
    def decode_line(self, decodes: int) -> tuple[float, float]:
        """(fixed, per_context) of a decode-only step of that many."""
