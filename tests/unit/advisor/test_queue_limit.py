"""vLLM's queue limit in the simulator."""

import numpy as np

from headgate import Workload, card_engine, simulate
from headgate.advisor.flags import QueueLimited
from headgate.core.policy import End
from headgate.record.tables import ENDS

ENGINE = card_engine("cal-h200-qwen3-8b", slots=2, budget=512)


def test_requests_behind_a_full_queue_are_turned_away():
    requests = Workload.of([100] * 10, [50] * 10)  # all at once: 2 run, the others queue
    run = simulate(ENGINE, QueueLimited(2, 512, 400), requests)
    away = np.flatnonzero(run.requests["how"] == ENDS.index(End.REFUSED))
    assert away.tolist() == [4, 5, 6, 7, 8, 9]


def test_a_limit_that_is_never_reached_changes_nothing():
    requests = Workload.of([100] * 10, [50] * 10)
    limited, plain = (
        simulate(ENGINE, QueueLimited(2, 512, 10_000), requests),
        simulate(ENGINE, "mixed", requests),
    )
    assert np.array_equal(limited.requests["finished"], plain.requests["finished"])
