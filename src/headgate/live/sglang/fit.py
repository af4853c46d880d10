"""What SGLang's scheduler can run as it is meant, and what is refused with one line that says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headgate.core.errors import InputError
from headgate.live.engine.settings import AUTO
from headgate.live.sglang.seams import RELEASES
from headgate.settings_base import flag_of

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
# Settings of SGLang whose other values were not tried: a schedule that is not what was asked for is worse
# than none.
TRIED: dict[str, Any] = {
    "use_ray": False,  # it loads no plug-ins
    "pp_size": 1,
    "attn_dp_size": 1,
    "enable_dp_attention": False,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "enable_pdmux": False,
    "dllm_algorithm": None,
    "enable_hisparse": False,
}
ALIASES = {"pipeline_parallel_size": "pp_size", "attention_data_parallel_size": "attn_dp_size"}
BUDGET = "chunked_prefill_size"
NEEDED = ("pp_size", "speculative_algorithm", "disaggregation_mode")  # both releases have them


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


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse by SGLang's settings, before it loads the model."""
    for name, tried in TRIED.items():
        value = given.get(name, tried)
        if str(value).lower() != str(tried).lower():
            raise _untried(flag_of(name) if value is True else f"{flag_of(name)} {value}")
    if str(given.get(BUDGET)) in ("-1", "0"):
        raise _untried(f"{flag_of(BUDGET)} {given[BUDGET]}")


def read_arguments(server_args: Any) -> dict[str, Any]:
    """For `check_arguments`; a release that renamed one of NEEDED would pass what was never tried."""
    if gone := [name for name in NEEDED if not hasattr(server_args, name)]:
        raise InputError(
            f"this SGLang has no setting {gone[0]}, so headgate cannot tell what it runs; {RELEASES.remedy}"
        )
    names = (*TRIED, BUDGET)
    return {name: getattr(server_args, name) for name in names if hasattr(server_args, name)}


def arguments(words: list[str]) -> dict[str, Any]:
    """Those of a command line, by SGLang's names; a flag without a value is True."""
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            continue
        name = name[2:].replace("-", "_")
        after = value if equals else "".join(words[place + 1 : place + 2])
        found[ALIASES.get(name, name)] = True if after.startswith("--") or not after else after
    return found


def check_engine(scheduler: Any) -> None:
    """Refuse what only the model, or SGLang's own choice, says."""
    hybrid = getattr(scheduler, "is_hybrid_swa", False) or getattr(scheduler, "is_hybrid_ssm", False)
    unknown_before = {
        "DP attention": scheduler.require_mlp_sync,
        "a model that does not generate text": not scheduler.is_generation,
        "a model whose prompts it runs in one piece": scheduler.chunked_prefill_size is None,
        "a model with sliding windows or state space layers": hybrid,
    }
    for what, found in unknown_before.items():
        if found:
            raise _untried(what)


def _untried(what: str) -> InputError:
    return InputError(f"SGLang with {what} is not supported; drop it, or start SGLang without headgate")
