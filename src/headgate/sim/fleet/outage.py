"""An engine of a fleet that is away for a while."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from headgate.core.errors import InputError


class Outage(NamedTuple):
    """One engine takes nothing from `start` to `end`.

    If it drains, what runs there ends there. If it fails, its requests and those whose KV it holds go back to
    the heads of their queues and are served elsewhere; KV is lost. In the stochastic network they begin anew;
    at token level the tokens they have are prefilled again with their prompt.
    """

    engine: int
    start: float
    end: float
    drain: bool = False

    def checked(self, engines: int) -> Outage:
        if not 0 <= self.engine < engines:
            raise InputError(f"an outage of engine {self.engine}; there are {engines}, numbered from 0")
        if not 0 <= self.start < self.end < inf:
            raise InputError(f"an outage from {self.start:g} to {self.end:g} s; it must end after it begins")
        return self


def check_outages(outages: Sequence[Outage], engines: int) -> None:
    last: dict[int, Outage] = {}
    for outage in sorted(outages, key=lambda outage: outage.start):
        before = last.get(outage.checked(engines).engine)
        if before is not None and outage.start < before.end:
            raise InputError(
                f"two outages of engine {outage.engine} at {outage.start:g} s; the first must end before the "
                "second begins"
            )
        last[outage.engine] = outage
