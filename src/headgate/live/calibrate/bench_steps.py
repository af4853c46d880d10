"""Steps guessed from what clients saw (`vllm bench serve --save-detailed`), to fit a cost card to."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.fit.steps import StepTable
from headgate.record.tables import Floats, Integers

NEEDED = ("input_lens", "ttfts", "itls", "start_times")
SAME_STEP = 0.25  # of the median gap between tokens: tokens nearer than that came from one step
LABEL_EVERY = 100  # steps that make a part
NUMBERS = {int, float}  # of a JSON file
LIMITS = (
    "steps are told apart by when tokens came: those that bring none (pieces of prompts, nobody decodes) "
    "count with the next",
    "a prompt is put into the step of its first token, what exceeds the budget into the steps before",
    "network, detokenisation and front end are part of every time; host cannot be told from GPU",
    "prefix caching, preemption and speculation cannot be told: use runs without them",
)


def steps_of_bench(path: str | Path, budget: int) -> tuple[StepTable, dict[str, Any]]:
    """The steps a result file lets one guess, and the file's own words; `LIMITS` says what cannot be known.

    Tokens of all requests are put on one clock. A step is a bunch of tokens that came together; its decodes
    are those that were not first tokens, their contexts the prompts and outputs so far; its time is the
    distance to the bunch before. A bunch after a pause in which nobody was served has no time and is left
    out.
    """
    result = _read(path)
    time, of, place = _tokens(result)
    prompts = np.array(result["input_lens"], dtype=np.int64)
    step = _bunches(time, place)
    count = int(step[-1]) + 1
    end = np.zeros(count)
    np.maximum.at(end, step, time)
    later = place > 0
    decodes = np.bincount(step[later], minlength=count)
    context = np.bincount(step[later], (prompts[of] + place)[later], minlength=count)
    prefill, number, pairs = _prompts(step[~later], prompts[of[~later]], decodes, budget)
    seconds = np.diff(end, prepend=np.nan)
    served = _served(result, end)
    good = served & (decodes + prefill > 0)
    parts = np.arange(int(good.sum())) // LABEL_EVERY
    columns = {
        "seconds": seconds[good],
        "decodes": decodes[good],
        "context": context[good],
        "prefill": prefill[good],
        "prompts": number[good],
        "attention": pairs[good],
        "part": parts,
    }
    labels = [f"steps from {LABEL_EVERY * part}" for part in range(int(parts.max(initial=0)) + 1)]
    words = {name: value for name, value in result.items() if not isinstance(value, list)}
    return StepTable.from_columns(columns, labels), words


def _read(path: str | Path) -> dict[str, Any]:
    remedy = "give a file of `vllm bench serve --save-result --save-detailed`"
    try:
        result: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"bench result {path}: {error.strerror}; {remedy}") from None
    except (ValueError, RecursionError):
        raise InputError(f"bench result {path}: not JSON; {remedy}") from None
    missing = [name for name in NEEDED if not isinstance(result, dict) or not result.get(name)]
    if missing:
        raise InputError(f"bench result {path} has no {missing[0]}, so steps cannot be told; {remedy}")
    lengths = {len(result[name]) if isinstance(result[name], list) else -1 for name in NEEDED}
    if len(lengths) > 1 or -1 in lengths:
        raise InputError(f"bench result {path}: {', '.join(NEEDED)} are no lists of one length; {remedy}")
    for number, row in enumerate(zip(*(result[name] for name in NEEDED), strict=True)):
        if not _makes_sense(*row):
            raise InputError(
                f"bench result {path}: request {number} has times or lengths of nonsense; {remedy}"
            )
    return dict(result)


def _makes_sense(prompt: Any, first: Any, gaps: Any, start: Any) -> bool:
    """Whether one request's words are numbers; one that failed has no first token."""
    if type(prompt) not in NUMBERS or not 0 <= prompt < inf:
        return False
    if not first:
        return True
    return isinstance(gaps, list) and {type(first), type(start), *map(type, gaps)} <= NUMBERS


def _tokens(result: dict[str, Any]) -> tuple[Floats, Integers, Integers]:
    """Every token in order of time: when it came, whose it was, and the how-manieth of that request."""
    times, owners, places = [], [], []
    for number, (start, first, gaps) in enumerate(
        zip(result["start_times"], result["ttfts"], result["itls"], strict=True)
    ):
        if not first:  # it failed
            continue
        came = start + first + np.cumsum([0.0, *gaps])
        times.append(came)
        owners.append(np.full(len(came), number))
        places.append(np.arange(len(came)))
    if not times:
        raise InputError("no request of the bench result got a token; nothing can be fitted to it")
    time, of, place = np.concatenate(times), np.concatenate(owners), np.concatenate(places)
    order = np.argsort(time, kind="stable")
    return time[order], of[order], place[order]


def _bunches(time: Floats, place: Integers) -> Integers:
    """The number of the step each token came from."""
    gaps = np.diff(time)
    if not len(gaps) or not np.any(place):
        raise InputError("every request of the bench result has one token; decodes cannot be told")
    spread = np.diff(np.unique(np.round(time, 4)))
    limit = SAME_STEP * float(np.median(spread[spread > 0.001])) if np.any(spread > 0.001) else 0.0
    return np.concatenate(([0], np.cumsum(gaps > limit)))


def _prompts(
    step: Integers, prompts: Integers, decodes: Integers, budget: int
) -> tuple[Integers, Integers, Floats]:
    """Prompt tokens, prompts and pairs of each step; what a step has no room for goes to the one before."""
    tokens = np.zeros(len(decodes), np.int64)
    number = np.zeros(len(decodes), np.int64)
    pairs = np.zeros(len(decodes))
    for at, length in zip(step.tolist(), prompts.tolist(), strict=True):
        left = int(length)
        while left > 0 and at >= 0:
            room = max(0, budget - int(decodes[at] + tokens[at]))
            taken = min(left, room) if at else left
            if taken:
                left -= taken
                tokens[at] += taken
                number[at] += 1
                pairs[at] += taken * (left + taken / 2)
            at -= 1
    return tokens, number, pairs


def _served(result: dict[str, Any], end: Floats) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Steps before which somebody was being served all the time since the step before."""
    starts = np.array(result["start_times"], dtype=np.float64)
    first = np.array([each or 0.0 for each in result["ttfts"]])
    ends = starts + first + np.array([sum(gaps) for gaps in result["itls"]])
    before = np.concatenate(([-np.inf], end[:-1]))
    come = np.searchsorted(np.sort(starts), before, side="right")
    gone = np.searchsorted(np.sort(ends), before + 1e-9, side="right")
    return np.asarray((come > gone) & np.isfinite(before))
