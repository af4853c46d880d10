"""Streaming input on the bare scheduler: a session that has answered waits for its next input."""

from __future__ import annotations

from collections import deque

import pytest
from policies import gated
from schedulers import EngineShape, free_blocks, request, scheduler
from vllm.v1.outputs import ModelRunnerOutput

from headgate.methods.eb.exclusive import PrefillFirst
from headgate.methods.mixed.mixed import Mixed
from worlds import EveryOther

TURNS, TOKENS = 3, 4
MAKE = {
    "plain": scheduler,
    "mixed": lambda shape: gated(shape, Mixed(16, 256)),
    "eb": lambda shape: gated(shape, PrefillFirst(16)),
    "every other": lambda shape: gated(shape, EveryOther()),
}


def sample(made, output) -> ModelRunnerOutput:
    """A token for each request whose prompt is complete with this step."""
    names = list(output.num_scheduled_tokens)
    said = [[] if made.requests[name].is_prefill_chunk else [7] for name in names]
    return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, said)


@pytest.mark.parametrize("ahead", [False, True], ids=["in-step", "ahead"])
@pytest.mark.parametrize("pause", [0, 30], ids=["the next input is there", "the next input comes later"])
@pytest.mark.parametrize("how", MAKE)
def test_each_input_is_answered(how, pause, ahead):
    shape = EngineShape(ahead=ahead, runner=2)
    made = MAKE[how](shape)
    said = {"a": 0, "b": 0, "plain": 0}
    inputs = {name: deque([[5] * 20] * TURNS + [None]) for name in "ab"}
    due = dict.fromkeys(inputs, 0)
    made.add_request(request("plain", [9] * 50, 30))
    flying = deque()
    for step in range(400):
        for name, left in inputs.items():
            if left and step >= due[name] and (pause == 0 or said[name] == TOKENS * (TURNS + 1 - len(left))):
                tokens = left.popleft()
                made.add_request(request(name, tokens or [1], TOKENS, resumable=tokens is not None))
                due[name] = step + pause
        if made.has_requests():
            output = made.schedule()
            flying.append((output, sample(made, output)))
        if flying and len(flying) > ahead:
            for answer in made.update_from_output(*flying.popleft()).values():
                for one in answer.outputs:
                    said[one.request_id] += len(one.new_token_ids)
        if not made.requests:
            break
    assert said == {"a": TOKENS * TURNS, "b": TOKENS * TURNS, "plain": 30}
    assert not made.requests and free_blocks(made) == shape.blocks
    if how != "plain":
        assert made._headgate.fallen is None and not made._headgate_hooks.broken
        assert not made._headgate_books.entries and not made._headgate_books._unready
