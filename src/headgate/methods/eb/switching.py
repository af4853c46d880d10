"""EB's two tests before a refill: are enough seats idle, and is enough KV free?"""

from __future__ import annotations

from headgate.core.errors import InputError


def refill_due(slots: int, refill: int, decoding: int, waiting: int) -> bool:
    """Whether to leave decode for a refill: SWITCH of section 2.2, in whole numbers.

    With a long queue: N - n >= k. With a short one, the prompts that could enter must be k / N of the batch
    they would make, so that a threshold tuned for a full engine still makes sense in a half-empty one. An
    empty batch refills as soon as anybody waits.
    """
    if not 1 <= refill <= slots:
        raise InputError(f"refill={refill}, slots={slots}; need 1 <= refill <= slots, choose k <= N")
    if decoding == 0:
        return waiting > 0
    fillable = min(waiting, max(0, slots - decoding))
    return fillable >= 1 and fillable * (slots - refill) >= decoding * refill


def kv_reserve(slots: int, output: float, capacity: float, scale: float = 0.5, extra: float = 0.0) -> float:
    """The share of KV that must be free before a refill, from 0.05 to 0.6: f_KV of equation (23).

    Room for half the output of every seat by default. The paper's rule; it ignores the prompts about to enter
    and starves the batch when outputs are long (erratum E10).
    """
    if not (slots >= 1 and output > 0 and capacity > 0):
        raise InputError(f"slots={slots}, output={output}, capacity={capacity}; need >= 1, > 0 and > 0")
    return min(0.6, max(0.05, slots * output * scale / capacity + extra))
