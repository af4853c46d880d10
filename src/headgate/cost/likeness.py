"""Is a card about this engine? What differs in model, release, GPU and settings, as far as both sides say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headgate.cost.card import DERIVED_CARD, Card, differ

Value = TypeVar("Value", int, str)

SHAPE = {  # our words for what a model's config.json says
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "inner": "intermediate_size",
    "vocabulary": "vocab_size",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_inner": "moe_intermediate_size",
}
DECISIVE = ("tensor parallel", "quantization")  # settings that change step times by far


@dataclass(frozen=True)
class Likeness:
    model_shape: Mapping[str, int] = field(default_factory=dict)  # layers, hidden, heads, ...
    vllm: str = ""
    gpu: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


def shape_of(config: Any) -> dict[str, int]:
    found = {ours: getattr(config, theirs, None) for ours, theirs in SHAPE.items()}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def other_model(card: Card, model: str, remedy: str) -> str:
    if not differ(model, card.model):
        return ""
    return f"card {card.name} is of another model ({card.model}), not of {model}; {remedy}"


def refusals(card: Card, engine: Likeness) -> list[str]:
    """Why the card's prices must be wrong here: another model, or another number of GPUs. One line each."""
    known = card.provenance
    found = _differing(known.model_shape or {}, engine.model_shape)
    other = [f"{name} {theirs} instead of {ours}" for name, (theirs, ours) in found.items()]
    faults = [f"card {card.name} is of another model ({card.model}): {', '.join(other)}"] if other else []
    for name, (theirs, ours) in _differing(known.settings or {}, engine.settings).items():
        if name in DECISIVE:
            faults.append(f"card {card.name} was measured with {name} {theirs}, this engine has {ours}")
    return [f"{fault}; calibrate again, or give --any-card" for fault in faults]


def doubts(card: Card, engine: Likeness) -> list[str]:
    known, faults = card.provenance, error_bar(card)
    theirs = known.versions.get("vllm", "")
    if theirs and engine.vllm and _release(theirs) != _release(engine.vllm):
        faults.append(f"card {card.name} was measured on vLLM {theirs}, this is {engine.vllm}")
    words, here = set(card.gpu.lower().split()), set(engine.gpu.lower().split())
    if engine.gpu and not (words <= here or here <= words):
        faults.append(f"card {card.name} was measured on {card.gpu}, this is {engine.gpu}")
    for name, (measured, ours) in _differing(known.settings or {}, engine.settings).items():
        if name not in DECISIVE:
            faults.append(f"card {card.name} was measured with {name} {measured}, this engine has {ours}")
    return [f"{fault}; calibrate again if steps take other times" for fault in faults]


def _differing(theirs: Mapping[str, Value], ours: Mapping[str, Value]) -> dict[str, tuple[Value, Value]]:
    return {
        name: (theirs[name], ours[name]) for name in theirs if name in ours and theirs[name] != ours[name]
    }


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


# -- error bars as commands print them

NARROW = "a minute of traffic narrows it: headgate calibrate --from-bench FILE --like CARD"
ASYNCHRONOUS = " (of an engine with asynchronous scheduling; without it, add :sync to the card's name)"


def error_bar(card: Card) -> list[str]:
    found = card.expected_error
    if found is None:
        return []
    kinds = (("decodes", found.decode), ("prompts", found.prefill), ("mixed", found.mixed))
    steps = ", ".join(f"{name} {_percent(bar)}" for name, bar in kinds)
    engine = ASYNCHRONOUS if card.host and card.name.startswith(DERIVED_CARD) else ""
    memory = f", KV memory within ±{100 * found.kv:.2g} %" if found.kv else ""
    return [
        f"card {card.name} is derived, not measured: expect step times within {steps}, throughput within "
        f"{_percent(found.throughput)}{memory}{engine}; {NARROW}"
    ]


def throughput_error(card: Card) -> float:
    return card.expected_error.throughput if card.expected_error else 0.0


def _percent(bar: float) -> str:
    return f"±{100 * bar:.0f} %"
