"""An engine that at random gives less than was asked, as a real one may: a policy must bear it."""

from __future__ import annotations

from collections.abc import Callable

from headgate.core.errors import RunError
from headgate.core.ledger import Entry
from headgate.core.policy import BatchPolicy, Observer
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.replica import VirtualEngine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Workload

REFUSES = 1 / 3  # of the prompts that ask for a slot
HALVES = 1 / 2  # of the steps get half of their tokens


class StingyEngine(VirtualEngine):
    """Halves the tokens of some steps and refuses some slots; decodes always get their token."""

    mood: Callable[[], float]  # uniform on [0, 1)
    refused = False  # any request, since the policy was last asked

    def ask(self) -> None:
        self.refused = False
        super().ask()

    def _budget(self) -> int:
        budget = super()._budget()
        least = len(self.ledger.decoding) * self.ledger.limits.decode_width + 1
        return max(least, budget // 2) if self.mood() < HALVES else budget

    def _admit(self, entry: Entry) -> bool:
        if self.mood() < REFUSES:
            self.refused = True
            return False
        return super()._admit(entry)


def serve_stingily(
    engine: Engine,
    policy: BatchPolicy,
    workload: Workload,
    observers: tuple[Observer, ...],
    mood: Callable[[], float],
) -> None:
    simulator = Simulator(engine, policy, workload, observers, kind=StingyEngine)
    miser = simulator.replica
    assert isinstance(miser, StingyEngine)
    miser.mood = mood
    while True:
        try:
            return simulator.run()
        except RunError:
            if not miser.refused:  # else nothing ran because of our spite: ask again
                raise
            miser.lease.ended = True
