"""Any step cost as straight lines: those nearest to it over the sizes a plan is about."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headgate.cost.model import Chunk, Shape, StepCost

SIZES = 9  # numbers of decodes, from half the seats on, that a line is laid through
PROMPTS = 8  # from one prompt to so many in a step
POINTS = 16


class Lines(NamedTuple):
    """Seconds of steps: (fixed, per decode and its context), (fixed, per prompt token), and both together."""

    decode: tuple[float, float]
    prefill: tuple[float, float]
    mixed: tuple[float, float, float]  # fixed, per prompt token, per decode


def nearest_lines(cost: StepCost, prompt: float, context: float, slots: int, cached: float = 0.0) -> Lines:
    """Least-squares lines through steps of mean requests.

    Decodes from half the seats to all of them, each with `context`; one to eight prompts of `prompt` tokens,
    each behind `cached` ones, the last one cut so that tiles are met at all their sides. None of the numbers
    is negative.
    """
    sizes = np.unique(np.linspace(max(1, slots // 2), slots, SIZES).round().astype(int)).tolist()
    totals = np.linspace(max(prompt, 1), PROMPTS * max(prompt, 1), POINTS).round().astype(int).tolist()
    prompts = [mean_prompts(total, prompt, cached) for total in totals]
    decode = _line(sizes, [cost.seconds(Shape(n, round(n * context))) for n in sizes])
    prefill = _line(totals, [cost.seconds(shape) for shape in prompts])
    rows, times = [], []
    for n in sizes[:: max(1, len(sizes) // 2)]:
        for shape in prompts:
            rows.append((1.0, shape.prefill, n))
            times.append(cost.seconds(shape._replace(decodes=n, context=round(n * context))))
    fixed, each, beside = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)[0].tolist()
    return Lines(decode, prefill, (max(fixed, 0.0), max(each, 0.0), max(beside, 0.0)))


def mean_prompts(tokens: float, prompt: float, cached: float = 0.0) -> Shape:
    """A step of that many prompt tokens, in prompts of mean length and a rest, each behind cached ones."""
    total, each, behind = max(1, round(tokens)), max(1, round(prompt)), round(cached)
    whole, rest = divmod(total, each)
    chunks = (Chunk(behind, each),) * whole + ((Chunk(behind, rest),) if rest else ())
    return Shape(prefill=total, behind=behind * len(chunks), chunks=chunks)


def _line(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """(fixed, each) with fixed above zero wherever a step takes time; one size alone has no slope."""
    if len(sizes) == 1:
        return times[0], 0.0
    each, fixed = np.polyfit(sizes, times, 1).tolist()
    if fixed > 0 and each >= 0:
        return fixed, each
    return min(times), max(0.0, (times[-1] - times[0]) / (sizes[-1] - sizes[0]))
