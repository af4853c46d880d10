"""The host of an asynchronous engine: how long a step keeps it from looking at the one before."""

from __future__ import annotations

from dataclasses import dataclass

from headgate.cost.model import Shape, Terms


@dataclass(frozen=True)
class HostTerms(Terms):
    """Seconds in which a host books the tokens it has just seen, composes the next step and launches it.

    `constant` and `per_request` (decodes and prompts) in every step; `prompts` more where prompts are in it,
    or `ungraphed` more where its tokens are also more than the largest CUDA graph, `graph` (0: none is
    known): its kernels are then launched one by one. `drivers.ahead` says what follows from it.
    """

    constant: float
    per_request: float = 0.0
    prompts: float = 0.0
    ungraphed: float = 0.0
    graph: int = 0

    def seconds(self, shape: Shape) -> float:
        """For a step of that shape; with chunks unknown, prompts count as one."""
        decodes, _, prefill, _, chunks = shape
        requests = decodes + (len(chunks) or bool(prefill))
        spent = self.constant + self.per_request * requests
        if not prefill:
            return spent
        beyond = 0 < self.graph < decodes + prefill
        return spent + (self.ungraphed if beyond else self.prompts)
