"""Greedy tokens under every arm against plain vLLM's, and how near the tie was where they part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from studies.h200.arms import PLAIN, fallen
from studies.h200.figures import Numbers
from studies.h200.scenes import Line, Session

SHUFFLED = "plain, other order"
CHOICES = 10  # log probabilities kept for each token: the likeliest


class Answer(NamedTuple):
    """What one request got."""

    tokens: list[int]
    choices: list[dict[int, float]]  # log probability by token, the likeliest few


Prompts = list[tuple[list[int], int]]


def compare(session: Session, arms: list[str], count: int, tiny: bool) -> Iterator[Line]:
    """Serve the same requests under every arm; the first line is plain vLLM with them in another order.

    The order changes which requests share a batch, and with it the rounding. That line says how many
    differences are plain vLLM's own. With VLLM_BATCH_INVARIANT=1 there should be none in any line.
    """
    prompts = requests(session.vocabulary, count, 4 if tiny else 1)
    session.switch(PLAIN)
    expected = serve(session, prompts, list(range(count)))
    order = np.random.default_rng(1).permutation(count).tolist()
    yield {"arm": SHUFFLED, **differences(expected, serve(session, prompts, order))}
    for arm in arms:
        session.empty()
        session.record.forget()
        session.switch(arm)
        found = differences(expected, serve(session, prompts, list(range(count))))
        rows = session.record.rows
        mixed = sum(1 for row in rows if row.decodes and row.prefill)
        stopped = fallen(session.core.scheduler)
        yield {"arm": arm, **found, "steps": len(rows), "mixed_steps": mixed, "fallen": stopped}


def requests(vocabulary: int, count: int, shrink: int) -> Prompts:
    """Prompts of 16 to 1,024 tokens, outputs of 1 to 128."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(16, 1024 // shrink, count, endpoint=True)
    limits = rng.integers(1, max(2, 128 // shrink), count, endpoint=True)
    return [
        (rng.integers(2, vocabulary, length).tolist(), int(limit))
        for length, limit in zip(lengths, limits, strict=True)
    ]


def serve(session: Session, prompts: Prompts, order: list[int]) -> dict[int, Answer]:
    """All at once, in this order; answers by place in `prompts`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    place: dict[str, int] = {}
    for number in order:
        tokens, limit = prompts[number]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=limit,
            ignore_eos=True,
            detokenize=False,
            logprobs=CHOICES,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        place[session.queue_tokens(tokens, params)] = number
    answers: dict[int, Answer] = {}
    while len(answers) < len(prompts):
        for output in session.llm.llm_engine.step():
            if output.finished:
                session.alive.discard(output.request_id)
                answers[place[output.request_id]] = _answer(output.outputs[0])
    return answers


def _answer(output: Any) -> Answer:
    choices = [{token: each.logprob for token, each in step.items()} for step in output.logprobs]
    return Answer(list(output.token_ids), choices)


def differences(expected: dict[int, Answer], found: dict[int, Answer]) -> Line:
    """How many answers are alike, and of the others where they part and by how little.

    At the first token that differs both saw the same text. The tie is near if each run gave the other's token
    almost the likelihood of its own; `unexplained` counts tokens the other run did not even consider.
    """
    parted, gaps, unexplained = [], [], 0
    for number, wanted in expected.items():
        got = found[number]
        if wanted.tokens == got.tokens:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(wanted.tokens, got.tokens, strict=False)) if a != b), None
        )
        if at is None:  # one is a part of the other: no tie explains that
            unexplained += 1
            continue
        parted.append(at)
        gap = max(_gap(wanted, got.tokens[at], at), _gap(got, wanted.tokens[at], at))
        gaps.append(gap)
        unexplained += not np.isfinite(gap)
    finite: Numbers = np.array([gap for gap in gaps if np.isfinite(gap)])
    return {
        "requests": len(expected),
        "tokens": sum(len(each.tokens) for each in expected.values()),
        "distinct_tokens": len({token for each in expected.values() for token in each.tokens}),
        "identical": len(expected) - sum(expected[i].tokens != found[i].tokens for i in expected),
        "first_difference_median": float(np.median(parted)) if parted else None,
        "gap_median": float(np.median(finite)) if len(finite) else None,
        "gap_largest": float(finite.max()) if len(finite) else None,
        "usual_gap_median": float(np.median(_usual(expected))),
        "unexplained": unexplained,
    }


def _gap(answer: Answer, other: int, at: int) -> float:
    """By how much this run preferred its own token to the other's, in log probability."""
    choices = answer.choices[at]
    return choices[answer.tokens[at]] - choices[other] if other in choices else float("inf")


def _usual(answers: dict[int, Answer]) -> list[float]:
    """The lead of the first choice over the second, over all tokens."""
    best = (sorted(step.values()) for each in answers.values() for step in each.choices)
    return [likely[-1] - likely[-2] for likely in best]
