"""What clients of EB(k) feel: time per token, the longest gap, time to the first token."""

from __future__ import annotations

from math import ceil, log1p
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.methods.eb.costs import Lengths, PhaseCosts, checked_costs, checked_lengths


class Latency(NamedTuple):
    """Means of a saturated EB(k) engine, in seconds."""

    cycle: float  # one decode phase and one refill
    per_token: float  # TPOT
    longest_gap: float  # between two tokens of a request: a whole refill
    first_token: float  # TTFT, in a closed loop


def exclusive_latency(
    costs: PhaseCosts, lengths: Lengths, slots: int, refill: int, clients: int, budget: float | None = None
) -> Latency:
    """Closed forms: a phase of zeta mu_O iterations, and the first token by Little's law.

    Ours; the paper gives throughput only. `clients` always have a request in the engine, at least one per
    slot. With `budget` tokens per iteration a refill takes several, else one.
    """
    checked_costs(costs)
    checked_lengths(lengths)
    if not 1 <= refill < slots:
        raise InputError(
            f"refill={refill}, slots={slots}; need 1 <= refill < slots, the fluid phase must end"
        )
    if clients < slots:
        raise InputError(f"clients={clients} < slots={slots}; need clients >= slots, else slots stay empty")
    iterations = -log1p(-refill / slots) * lengths.output
    prompts = refill * lengths.prompt
    chunks = ceil(prompts / budget) if budget else 1
    pause = chunks * costs.prefill_fixed + costs.prefill_per_token * prompts
    decode = iterations * costs.decode_fixed + costs.decode_per_request * refill * lengths.output
    cycle = decode + pause
    per_token = cycle / iterations
    return Latency(cycle, per_token, pause, clients * cycle / refill - lengths.output * per_token)
