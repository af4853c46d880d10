"""What pure and mixed batches cost as straight lines, as EB's formulas want it, from a card."""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.laws.linear import LinearCost
from headgate.cost.model import Chunk, Shape, StepCost


class Lengths(NamedTuple):
    """Means and standard deviations of prompt and output. mu_L, mu_O, sigma_L, sigma_O of the EB paper.

    Outputs are decode iterations, one less than output tokens (the prefill emits the first).
    With a prefix cache a prompt costs time by the tokens that are computed, and memory by all of them:
    `uncached` has mean and deviation of the former, None where they are the prompt's.
    """

    prompt: float
    output: float
    prompt_sd: float = 0.0
    output_sd: float = 0.0
    uncached: tuple[float, float] | None = None

    @property
    def computed(self) -> float:
        """Mean prompt tokens that no cache has."""
        return self.prompt if self.uncached is None else self.uncached[0]

    @property
    def computed_sd(self) -> float:
        return self.prompt_sd if self.uncached is None else self.uncached[1]

    @property
    def cached(self) -> float:
        return self.prompt - self.computed

    def as_dict(self) -> dict[str, float]:
        plain: dict[str, Any] = self._asdict()
        del plain["uncached"]
        if self.uncached is not None:
            plain |= {"computed": self.computed, "computed_sd": self.computed_sd}
        return plain

    def longer(self, tokens: float) -> Lengths:
        computed = None if self.uncached is None else (self.uncached[0] + tokens, self.uncached[1])
        return self._replace(prompt=self.prompt + tokens, uncached=computed)

    @property
    def context(self) -> float:
        """KV tokens one decode reads on average: mu_L + E[O^2] / (2 mu_O)."""
        return self.prompt + (self.output_sd**2 + self.output**2) / (2 * self.output)

    @property
    def total(self) -> float:
        return self.computed + self.output


class PhaseCosts(NamedTuple):
    """Seconds of an iteration by what it holds.

    In the order given: alpha_p, beta_p, alpha_d, beta_d, alpha_MB, and the polynomial beta_MB(r) in the
    decode share r of the EB paper (arXiv 2606.00516, section 3).

    `prefill_fixed` should be what a whole change of phase costs, not a kernel's intercept: the latter is
    several times too small.
    """

    prefill_fixed: float
    prefill_per_token: float
    decode_fixed: float
    decode_per_request: float
    mixed_fixed: float = 0.0
    mixed_by_share: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def overhead(self) -> float:
        """The fixed cost of a refill in decode iterations: g = alpha_p / alpha_d."""
        return self.prefill_fixed / self.decode_fixed

    def mixed_per_token(self, share: float) -> float:
        """The price of a token in a mixed batch with that share of decodes: beta_MB(r)."""
        constant, linear, square = self.mixed_by_share
        return constant + share * (linear + share * square)


def checked_costs(costs: PhaseCosts) -> PhaseCosts:
    """The same, or an InputError: decode_fixed > 0, the other plain coefficients >= 0, all finite."""
    for name, value in zip(costs._fields[:5], costs[:5], strict=True):
        if not (isfinite(value) and value >= 0):
            raise InputError(f"{name}={value}; need a finite number >= 0, calibrate again")
    if not costs.decode_fixed > 0:
        raise InputError(
            "decode_fixed=0; need > 0, the thresholds compare fixed costs: calibrate small batches"
        )
    if not all(isfinite(x) for x in costs.mixed_by_share):
        raise InputError(
            f"mixed_by_share={list(costs.mixed_by_share)}; need three finite numbers, calibrate again"
        )
    return costs


def checked_lengths(lengths: Lengths) -> Lengths:
    """The same, or an InputError: prompts > 0, outputs >= 1 iteration, deviations >= 0, all finite."""
    bounds = (("prompt", lengths.computed > 0, "> 0"), ("output", lengths.output >= 1, ">= 1"))
    spreads = (("prompt_sd", lengths.prompt_sd >= 0, ">= 0"), ("output_sd", lengths.output_sd >= 0, ">= 0"))
    for name, fine, bound in (*bounds, *spreads):
        value = getattr(lengths, name)
        if not (fine and isfinite(value)):
            raise InputError(
                f"mean lengths: {name}={value}; need a finite number {bound}, check the workload"
            )
    return lengths


class IterationCost(StepCost):
    """An engine with speculation as one whose decodes get a token in each iteration, as EB takes it.

    An iteration is one of the `tokens` that a decode gets in a step, and takes that share of the step's time.
    So outputs, ages and KV stay in tokens. Prompts beside decodes take what they add to a step.
    """

    def __init__(self, cost: StepCost, tokens: float) -> None:
        self.by_chunk, self.switch, self.host = cost.by_chunk, cost.switch, cost.host
        self._cost, self._tokens = cost, tokens

    def seconds(self, shape: Shape) -> float:
        if not shape.decodes:
            return self._cost.seconds(shape)
        decodes = self._cost.seconds(Shape(shape.decodes, shape.context))
        return decodes / self._tokens + (self._cost.seconds(shape) - decodes if shape.prefill else 0.0)

    def decode_line(self, decodes: int) -> tuple[float, float]:
        fixed, per_context = self._cost.decode_line(decodes)
        return fixed / self._tokens, per_context / self._tokens

    def decode_floor(self, decodes: int) -> float:
        return self._cost.decode_floor(decodes) / self._tokens


def phase_costs(cost: StepCost, lengths: Lengths, slots: int) -> PhaseCosts:
    """A cost card's steps as straight lines in the number of requests, for this workload and batch size.

    Two things bend a step's price that EB's formulas take as straight. Context: each decode is charged for
    the mean context of the workload. The knee (decodes that ride for free): we take the card's line at a full
    batch. With the knee below, decode_fixed is what that line has at zero, less than the card's own constant:
    the free decodes are a credit. Should the credit exceed the constant, the line from an empty batch is used
    instead, which is never negative. What earlier chunks of a prompt cost (per_behind) is left out; it is
    about one per cent for 128K prompts in chunks of 8K. A cost that is not made of lines, such as the tile
    model's stairs, gives the nearest ones.
    """
    checked_lengths(lengths)
    if not isinstance(cost, LinearCost):
        return nearest_costs(cost, lengths, slots)
    decode, prefill, mixed = cost.decode, cost.prefill, cost.mixed
    fixed, each = _line(decode.constant, decode.per_decode, decode.free_decodes, slots)
    together, beside = _line(mixed.constant, mixed.per_decode, mixed.free_decodes, slots)
    constant, linear, square = mixed.by_share
    of_decodes = beside + mixed.per_context * lengths.context
    return checked_costs(
        PhaseCosts(
            prefill_fixed=prefill.constant,
            prefill_per_token=prefill.per_token,
            decode_fixed=fixed,
            decode_per_request=each + decode.per_context * lengths.context,
            mixed_fixed=together,
            mixed_by_share=(constant + mixed.per_prefill, linear + of_decodes - mixed.per_prefill, square),
        )
    )


def _line(constant: float, each: float, free: int, slots: int) -> tuple[float, float]:
    """(fixed, per request) of constant + each * max(n - free, 0) at so many slots."""
    if slots <= free:
        return constant, 0.0
    fixed = constant - each * free
    return (fixed, each) if fixed > 0 else (constant, each * (slots - free) / slots)


# -- any step cost as straight lines

SIZES = 9  # numbers of decodes, from half the slots on, that a line is laid through
PROMPTS = 8  # from one prompt to so many in a step
POINTS = 16


def nearest_costs(cost: StepCost, lengths: Lengths, slots: int) -> PhaseCosts:
    """Least-squares lines through steps of mean requests.

    Decodes from half the slots to all of them, each with the mean context; one to eight mean prompts behind
    their cached tokens, the last one cut so that tiles are met at all their sides. No price is negative.
    """
    prompt, context = lengths.computed, lengths.context
    sizes = np.unique(np.linspace(max(1, slots // 2), slots, SIZES).round().astype(int)).tolist()
    totals = np.linspace(max(prompt, 1), PROMPTS * max(prompt, 1), POINTS).round().astype(int).tolist()
    prompts = [mean_prompts(total, prompt, lengths.cached) for total in totals]
    decode = _nearest_line(sizes, [cost.seconds(Shape(n, round(n * context))) for n in sizes])
    prefill = _nearest_line(totals, [cost.seconds(shape) for shape in prompts])
    rows, times = [], []
    for n in sizes[:: max(1, len(sizes) // 2)]:
        for shape in prompts:
            rows.append((1.0, shape.prefill, n))
            times.append(cost.seconds(shape._replace(decodes=n, context=round(n * context))))
    fixed, each, beside = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)[0].tolist()
    each = max(each, 0.0)
    return checked_costs(
        PhaseCosts(
            prefill_fixed=prefill[0] + cost.switch,  # of the whole change, not of a kernel
            prefill_per_token=prefill[1],
            decode_fixed=decode[0],
            decode_per_request=decode[1],
            mixed_fixed=max(fixed, 0.0),
            mixed_by_share=(each, max(beside, 0.0) - each, 0.0),
        )
    )


def mean_prompts(tokens: float, prompt: float, cached: float = 0.0) -> Shape:
    """A step of that many prompt tokens, in prompts of mean length and a rest, each behind cached ones."""
    total, each, behind = max(1, round(tokens)), max(1, round(prompt)), round(cached)
    whole, rest = divmod(total, each)
    chunks = (Chunk(behind, each),) * whole + ((Chunk(behind, rest),) if rest else ())
    return Shape(prefill=total, behind=behind * len(chunks), chunks=chunks)


def _nearest_line(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """(fixed, each) with fixed above zero wherever a step takes time; one size alone has no slope."""
    if len(sizes) == 1:
        return times[0], 0.0
    each, fixed = np.polyfit(sizes, times, 1).tolist()
    if fixed > 0 and each >= 0:
        return fixed, each
    return min(times), max(0.0, (times[-1] - times[0]) / (sizes[-1] - sizes[0]))
