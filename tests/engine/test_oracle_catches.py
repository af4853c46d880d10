"""The oracle would notice: schedulers and messages that are wrong in one place must be found out."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from audits import audit
from memory import Wrong
from oracle import Oracle
from policies import gated
from schedulers import EngineShape, scheduler
from traffic import draw_traffic

from headgate.core.plan import ALL, NONE, Plan
from headgate.core.policy import BatchPolicy
from headgate.methods.eb.exclusive import PrefillFirst

SHAPE = EngineShape(block=4, blocks=60, running=6, budget=24, longest=90, caching=True)


def served(shape: EngineShape, spoil: Callable[[Any, Any], None], seed: int = 7) -> Oracle:
    """Plain vLLM, except that every message to the worker goes through other hands first."""
    made = scheduler(shape)
    compose = made.schedule

    def schedule(throttle: bool = False) -> Any:
        output = compose(throttle)
        spoil(made, output)
        return output

    made.schedule = schedule
    return Oracle(made, shape, draw_traffic(Random(seed), shape, calm=True)).run()


def nothing(made: Any, output: Any) -> None:
    """The message as it is."""


def blocks_swapped(made: Any, output: Any) -> None:
    """Somebody's first two blocks in the wrong order."""
    for new in output.scheduled_new_reqs:
        if len(new.block_ids[0]) > 1:
            new.block_ids[0][:2] = new.block_ids[0][1::-1]


def blocks_of_another(made: Any, output: Any) -> None:
    """Two requests are told the same block."""
    if len(output.scheduled_new_reqs) > 1:
        first, second = output.scheduled_new_reqs[:2]
        second.block_ids[0][-1] = first.block_ids[0][-1]


def a_block_forgotten(made: Any, output: Any) -> None:
    """The worker is not told of a new block."""
    cached = output.scheduled_cached_reqs
    cached.new_block_ids[:] = [None] * len(cached.new_block_ids)


def one_token_skipped(made: Any, output: Any) -> None:
    """A prompt begins one token late."""
    for new in output.scheduled_new_reqs:
        if output.num_scheduled_tokens[new.req_id] > 1:
            new.num_computed_tokens += 1
            output.num_scheduled_tokens[new.req_id] -= 1


def never_finished(made: Any, output: Any) -> None:
    """The worker is not told who has finished."""
    output.finished_req_ids.clear()


@pytest.mark.parametrize("runner", [1, 2])
def test_messages_as_they_are_are_right(runner):
    served(SHAPE._replace(runner=runner), nothing)


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize(
    "spoil", [blocks_swapped, blocks_of_another, a_block_forgotten, one_token_skipped, never_finished]
)
def test_wrong_messages_are_noticed(spoil, runner):
    with pytest.raises(Wrong):
        served(SHAPE._replace(runner=runner), spoil)


def test_first_runner_needs_the_tokens_of_whoever_was_held():
    """vLLM sends them when a request was not in the step before; without them it would read the unknown."""

    class Alternating(BatchPolicy):
        """Decodes only in every other step."""

        def __init__(self) -> None:
            self.asked = 0

        def plan(self, view):
            self.asked += 1
            slots = view.limits.running - len(view.decoding) - len(view.prefilling)
            prompts = (*view.prefilling, *[*view.waiting][:slots])
            return Plan(NONE if self.asked % 3 == 0 and prompts else ALL, prompts)

    shape = SHAPE._replace(ahead=True, runner=1)
    traffic = draw_traffic(Random(7), shape, calm=True)
    Oracle(gated(shape, Alternating()), shape, traffic, audit).run()
    made = gated(shape, Alternating())
    compose = made.schedule

    def schedule(throttle: bool = False) -> Any:
        output = compose(throttle)
        sent = output.scheduled_cached_reqs.all_token_ids
        sent.update((name, [0] * len(tokens)) for name, tokens in sent.items())
        return output

    made.schedule = schedule
    with pytest.raises(Wrong, match="should be"):
        Oracle(made, shape, traffic, audit).run()


def test_leaks_and_hangs_are_noticed(monkeypatch):
    made = scheduler(SHAPE)
    traffic = draw_traffic(Random(7), SHAPE, calm=True)
    free = made._free_blocks
    kept = []
    made._free_blocks = lambda request: kept.append(request) if not kept else free(request)
    with pytest.raises(Wrong, match="left behind"):
        Oracle(made, SHAPE, traffic).run()
    monkeypatch.setattr("oracle.MOST_STEPS", 100)
    stuck = scheduler(SHAPE)
    stuck.max_num_active_reqs = stuck.max_num_running_reqs = 0
    with pytest.raises(Wrong, match="hangs"):
        Oracle(stuck, SHAPE, traffic).run()


def test_false_books_are_noticed():
    """One tick too many, once, and the audit says so."""
    made = gated(SHAPE, PrefillFirst(slots=6))
    late = Oracle(made, SHAPE, draw_traffic(Random(7), SHAPE, calm=True), audit)
    late.look = lambda oracle: (oracle.step == 20 and made._headgate.ledger.ticks(1, 0.0), audit(oracle))
    with pytest.raises(Wrong, match="headgate says"):
        late.run()
