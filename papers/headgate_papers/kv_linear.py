"""A step whose time is linear in the KV tokens its batch touches, with or without a price for new tokens."""

from __future__ import annotations

from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms


def kv_linear(fixed: float, per_kv: float, per_new: float = 0.0) -> LinearCost:
    """Seconds of a step: fixed + per_kv × (KV tokens of the batch) + per_new × (tokens computed in it).

    A prompt's KV is its own tokens and what lies behind them, a decode's is all it has read and written.
    Requests that are held back keep their KV and cost nothing. Source: Ao, Luo, Simchi-Levi, Wang,
    "Optimizing LLM Inference: Fluid-Guided Online Scheduling with Memory Constraints" (2025), equation (1),
    its d0 and d1. We add `per_new` (d2): the paper charges a prompt token like a cached one, which makes
    computing a prompt again almost free.
    """
    return LinearCost(
        DecodeTerms(fixed, per_new, per_kv),
        PrefillTerms(fixed, per_kv + per_new, per_kv),
        MixedTerms(
            constant=fixed,
            per_prefill=per_kv + per_new,
            per_decode=per_new,
            per_context=per_kv,
            per_behind=per_kv,
        ),
    )
