"""For every number of a derived card, and every number it rests on: measured, published or assumed."""

from __future__ import annotations

from dataclasses import fields

from headgate.cost.card import Number
from headgate.cost.derive.corrections import Corrections
from headgate.cost.derive.gpus import ASSUMED, H200, MEASURED, PUBLISHED
from headgate.cost.derive.memory import WORKSPACE
from headgate.cost.derive.wanted import Resolved
from headgate.cost.laws.host import HostTerms
from headgate.cost.laws.work import WorkTerms

Known = tuple[float, str, str]  # value, origin, source

PRIOR = "the host of three calibrated cards; vLLM's largest CUDA graph"
LIMITS = {
    "block": (ASSUMED, "vLLM's usual block"),
    "max_batch_tokens": (ASSUMED, "the largest step of the grid"),
    "max_model_len": (PUBLISHED, "positions of the model's config, at most what KV holds"),
    "max_running": (ASSUMED, "KV tokens over 256, at most 1,024"),
}


def origins(
    found: Resolved,
    terms: WorkTerms,
    host: HostTerms,
    lost: Corrections,
    corrected: str,
    limits: dict[str, int],
    memory: str,
    more: dict[str, Known],
) -> dict[str, Number]:
    """By the place of the number in the card; those it rests on by gpu., model. and engine."""
    at = found.at
    efficiencies = at.gpu.origin if not at.model.experts else _weaker(at.gpu.origin, at.gpu.expert_origin)
    same_gpu = at.gpu is H200
    rests: dict[str, Known] = {
        "gpu.peak": (at.gpu.peak, PUBLISHED, "data sheet, FLOP/s in bf16 without sparsity"),
        "gpu.bandwidth": (at.gpu.bandwidth, PUBLISHED, "data sheet, bytes/s"),
        "gpu.memory": (at.gpu.memory, PUBLISHED, "as the driver reports it, bytes"),
        "engine.workspace": (WORKSPACE, MEASURED if same_gpu else ASSUMED, "three calibrated cards of an H200"),
    }
    for part in ("gemm", "decode", "prompt", "experts"):
        if part != "experts" or at.model.experts:
            origin = at.gpu.expert_origin if part == "experts" else at.gpu.origin
            for field in fields(getattr(at.gpu, part)):
                value = getattr(getattr(at.gpu, part), field.name)
                rests[f"gpu.{part}.{field.name}"] = (value, origin, at.gpu.source)
    if at.tensor > 1:
        link = at.gpu.links[at.tensor]
        for name in ("c0", "speed"):
            rests[f"gpu.all_reduce.{name}"] = (getattr(link, name), at.gpu.origin, at.gpu.source)
    for field in fields(lost):
        origin = MEASURED if same_gpu or "calibrated card" in corrected else ASSUMED
        rests[f"engine.{field.name}"] = (getattr(lost, field.name), origin, f"corrections from {corrected}")
    for name, value in at.model.shape().items():
        rests[f"model.{name}"] = (value, PUBLISHED, "the model's config.json")
    said: dict[str, Known] = {"kv_tokens": (limits["kv_tokens"], PUBLISHED, memory)}
    said |= {name: (limits[name], *known) for name, known in LIMITS.items()}
    laws = f"law of work nearest to laws of operators, {efficiencies}"
    for field in fields(terms):
        if value := getattr(terms, field.name):
            of_host = field.name.startswith("host_") or field.name == "graph"
            said[f"work.{field.name}"] = (value, ASSUMED, PRIOR) if of_host else (value, efficiencies, laws)
    for field in fields(host):
        said[f"host.{field.name}"] = (getattr(host, field.name), ASSUMED, PRIOR)
    every = said | {f"memory.{name}": known for name, known in more.items()} | rests
    return {
        name: Number(value=float(f"{value:.6g}"), origin=origin, source=source)  # type: ignore[arg-type]
        for name, (value, origin, source) in every.items()
    }


def _weaker(one: str, other: str) -> str:
    return ASSUMED if ASSUMED in (one, other) else one
