"""Requests per second of mixed and of exclusive batching, and where the two cross."""

from __future__ import annotations

from math import ceil, erfc, expm1, log1p, sqrt

from headgate.cost.model import Shape, StepCost
from headgate.methods.eb.costs import Lengths, checked_lengths, mean_prompts
from headgate.methods.eb.thresholds import Threshold

FEW = 1e-3  # steps that come about this rarely are not counted


def mixed_rate(cost: StepCost, lengths: Lengths, running: float, budget: int) -> float:
    """Mixed batching with `running` requests in the engine all the time.

    Each takes one step for its prompt and its output in decode steps, so running / (output + 1) prompts enter
    in a step. They bunch: requests end independently, so the number that enters is nearly Poisson. The share
    1 - exp(-entering) of the steps holds prompts, and the others are pure decodes: the paper charges the
    price of a mixed token to every step. Where prompts do not fit into the budget, decodes wait for them.
    """
    checked_lengths(lengths)
    running = min(max(1.0, running), budget / (1 + lengths.computed / lengths.output))
    entering = running / (lengths.output + 1)
    decodes = entering * lengths.output
    arriving = entering * lengths.computed  # prompt tokens per step
    tokens = min(arriving / -expm1(-entering), budget - decodes)  # in a step that has any
    share = arriving / tokens
    alone = Shape(round(decodes), round(decodes * lengths.context))
    prompts = mean_prompts(tokens, lengths.computed, lengths.cached)
    with_prompts = prompts._replace(decodes=alone.decodes, context=alone.context)
    return entering / (share * cost.seconds(with_prompts) + (1 - share) * cost.seconds(alone))


def exclusive_rate(cost: StepCost, lengths: Lengths, slots: float, share: float, budget: int) -> float:
    """Exclusive batching with `slots`, a `share` of which is refilled at once.

    A cycle refills share * slots requests, and half of those that leave in one step more: the phase ends with
    a step. A request leaves at the end of one of its steps, with 1 / output in each, so N become N - r after
    (output - 1/2) * (1/N + 1/(N-1) + ...) steps, r terms, nearly a logarithm; with a whole output, refills of
    short ones came 2 % late. Each refilled request decodes for its mean output of the phase.
    Unlike equation (4), every step is priced by the cost itself, knees and context included.
    """
    checked_lengths(lengths)
    slots = max(1.0, slots)
    refilled = min(max(1.0, share * slots) + slots / (2 * lengths.output), max(1.0, 0.99 * slots))
    phase = log1p(refilled / (slots - refilled + 0.5)) * (lengths.output - 0.5)
    decodes = min(refilled * lengths.output / phase, slots)
    decode = phase * cost.seconds(Shape(round(decodes), round(decodes * lengths.context)))
    tokens = refilled * lengths.computed
    steps = prefill_steps(lengths, refilled, budget)
    prompts = mean_prompts(tokens / steps, lengths.computed, lengths.cached)
    return refilled / (decode + steps * cost.seconds(prompts))


def prefill_steps(lengths: Lengths, refilled: float, budget: float) -> float:
    """How many steps of `budget` tokens a refill takes on average; its prompts' sum is taken as normal."""
    mean, spread = refilled * lengths.computed, sqrt(2 * refilled) * lengths.computed_sd
    if not spread:
        return float(ceil(mean / budget))
    full = max(0, int((mean - 4 * spread) / budget))  # these are certain
    steps, more = float(full), 1.0
    while more > FEW:  # the chance that the prompts need another step
        steps += more
        full += 1
        more = 0.5 * erfc((full * budget - mean) / spread)
    return steps


def whole_steps(plan: Threshold, lengths: Lengths, overhead: float, budget: float) -> Threshold:
    """The plan, or one whose refill just fills its last prefill step, where that costs less per slot.

    The paper's (3) takes a refill as one step. Each step of it costs `overhead` (in decode
    iterations), so a nearly empty last one is paid for little: up to 2 % with published costs. We
    look at the refills that fill the planned number of steps or one less, with a deviation of the prompts to
    spare and half an iteration's leavers on top (so many more than k are idle when the phase ends).
    """
    slots, extra = plan.slots, plan.slots / (2 * lengths.output)

    def cost(refill: int) -> float:
        phase = -log1p(-min(refill / slots, 0.99)) * lengths.output
        refilled = min(refill + extra, slots)
        return (phase + overhead * prefill_steps(lengths, refilled, budget)) / refilled

    last = ceil((plan.refill + extra) * lengths.computed / budget)
    choices = [plan.refill]
    for steps in (last - 1, last):
        root = sqrt(lengths.computed_sd**2 + 4 * lengths.computed * steps * budget) - lengths.computed_sd
        choices.append(int((root / (2 * lengths.computed)) ** 2 - extra))
    refill = min((choice for choice in choices if 1 <= choice <= slots), key=cost)
    return Threshold(refill / slots, refill, slots)


def wants_exclusive(gain: float, margin: float, exclusive: bool) -> bool:
    """EB+'s choice, rule (8) with hysteresis: change only if the other mode is better by more than `margin`.

    A negative margin favours exclusive batches, and so throughput: it enters at a small loss already and
    leaves at three times that loss. The paper's rule is one-sided, `gain > δ` with δ = 1e-5 s/token, at
    27,000 tok/s a quarter of the whole cost.
    """
    return gain >= margin - 2 * abs(margin) if exclusive else gain > margin
