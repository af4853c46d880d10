"""What SGLang's scheduler can run as it is meant, and what is refused with one line that says why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headgate.core.errors import InputError
from headgate.live.engine.settings import AUTO

MIXED_CHUNK = "--enable-mixed-chunk"
# Prompts alone in a step, or decodes alone.
EXCLUSIVE = frozenset(("eb", "eb-online", "v0", "request-level", "rad"))
# Decodes beside prompts: without the flag SGLang has no graphs for such steps.
MIXING = frozenset(("mixed", "sarathi", "sarathi-spf", "look-ahead", "eb+", "keep", AUTO))
_NAMED = "names the decodes of a step, and SGLang runs all of them or none"
UNFIT = {
    "slai": _NAMED,
    "wait": _NAMED,
    "nested-wait": _NAMED,
    "fairbatching": _NAMED,
    **dict.fromkeys(("qoserve", "ppas", "prefill-interval"), "was not tried in SGLang"),
    "rad-smooth": "keeps several prompts half done, and SGLang keeps one",
}


def mixes(policy: str) -> bool:
    """Whether it may run decodes beside prompts; of a policy of the user's own that is not known."""
    return policy not in EXCLUSIVE and policy not in UNFIT


def check_fit(policy: str, mixed_chunk: bool) -> None:
    """Refuse a policy by its name. One of the user's own gets the nearest that SGLang can do."""
    if policy in UNFIT:
        raise InputError(f"policy {policy} {UNFIT[policy]}; choose eb, eb+, mixed or keep, or run it in vLLM")
    if policy in MIXING and not mixed_chunk:
        raise InputError(
            f"policy {policy} runs decodes beside prompts; start SGLang with {MIXED_CHUNK} or choose eb"
        )


def check_engine(scheduler: Any) -> None:
    """Refuse what was not tried: a schedule that is not what was asked for is worse than none."""
    for what, found in _untried(scheduler):
        if found:
            raise InputError(f"SGLang with {what} is not supported; drop it, or unset HEADGATE_CONFIG")


def _untried(scheduler: Any) -> Iterator[tuple[str, bool]]:
    yield "--use-ray", bool(getattr(scheduler.server_args, "use_ray", False))
    yield "pipeline parallelism", scheduler.pp_group.world_size > 1
    yield "DP attention", bool(scheduler.require_mlp_sync)
    yield "speculative decoding", not scheduler.spec_algorithm.is_none()
    yield "prefill/decode disaggregation", scheduler.disaggregation_mode.value not in ("null", None)
    yield "PD multiplexing", bool(getattr(scheduler, "enable_pdmux", False))
    yield "a diffusion model", scheduler.dllm_config is not None
    yield "a model that does not generate text", not scheduler.is_generation
    yield "--chunked-prefill-size -1", scheduler.chunked_prefill_size is None
    yield "dynamic chunking", getattr(scheduler, "dynamic_chunk_sizer", None) is not None
    hybrid = getattr(scheduler, "is_hybrid_swa", False) or getattr(scheduler, "is_hybrid_ssm", False)
    yield "a model with sliding windows or state space layers", bool(hybrid)
    yield "HiSparse", bool(getattr(scheduler, "enable_hisparse", False))
