"""For every number of a derived card, and every number it rests on: measured, published or assumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from headgate.cost.card import Number
from headgate.cost.derive.corrections import Corrections
from headgate.cost.derive.gpus import ASSUMED, H200, MEASURED, PUBLISHED, Gpu
from headgate.cost.derive.host import SUM_CONSTANT, SUM_PER_REQUEST
from headgate.cost.derive.memory import UTILISATION, WORKSPACE, weight_bytes
from headgate.cost.derive.step import Deployment
from headgate.cost.derive.wanted import Resolved
from headgate.cost.laws.host import HostTerms
from headgate.cost.laws.work import WorkTerms

Named = tuple[str, float, str, str]  # place, value, origin, source

PUBLIC_RUNS = "fitted to 90 public runs of vLLM 0.12 on 2 to 8 H100"
PRIOR = "the host of three calibrated cards; vLLM's largest CUDA graph"
LIMITS = {
    "block": (ASSUMED, "vLLM's usual block"),
    "max_batch_tokens": (ASSUMED, "the largest step of the grid"),
    "max_model_len": (PUBLISHED, "positions of the model's config, at most what KV holds"),
    "max_running": (ASSUMED, "KV blocks, at most 1,024"),
}


@dataclass(frozen=True)
class Rests:
    """What a card was made from, beside model and GPU."""

    terms: WorkTerms
    host: HostTerms | None  # None: a synchronous one, in the prices
    lost: Corrections
    corrected: str  # by which card
    utilisation: float


def origins(found: Resolved, rests: Rests, limits: dict[str, int]) -> dict[str, Number]:
    """By the place of the number in the card; those it rests on by gpu., model., memory. and engine."""
    at = found.at
    every = [*_limits(at, limits), *_prices(at, rests), *_gpu(at), *_engine(at, rests)]
    every += [(f"model.{name}", value, PUBLISHED, "config.json") for name, value in at.model.shape().items()]
    return {
        name: Number(value=float(f"{value:.6g}"), origin=_checked(origin), source=source)
        for name, value, origin, source in every
    }


def _checked(origin: str) -> Any:
    """One of the three words a card allows."""
    assert origin in (MEASURED, PUBLISHED, ASSUMED)
    return origin


def _limits(at: Deployment, limits: dict[str, int]) -> Iterator[Named]:
    how = f"memory at this utilisation less {weight_bytes(at) / 1e9:.1f} GB of weights and the workspace"
    yield "kv_tokens", limits["kv_tokens"], PUBLISHED, how
    for name, (origin, source) in LIMITS.items():
        yield name, limits[name], origin, source


def _prices(at: Deployment, rests: Rests) -> Iterator[Named]:
    """A price is as well known as the weakest efficiency in it."""
    kinds = (at.gpu.origin, at.gpu.expert_origin if at.model.experts else at.gpu.origin)
    weakest = ASSUMED if ASSUMED in kinds else MEASURED
    laws = f"law of work nearest to laws of operators, {weakest}"
    for field in fields(rests.terms):
        value = getattr(rests.terms, field.name)
        of_host = field.name.startswith("host_") or field.name == "graph"
        if value:
            yield f"work.{field.name}", value, *((ASSUMED, PRIOR) if of_host else (weakest, laws))
    for field in fields(rests.host) if rests.host else ():
        yield f"host.{field.name}", getattr(rests.host, field.name), ASSUMED, PRIOR
    if rests.host is None:
        yield "host.added_to_a_step", SUM_CONSTANT, PUBLISHED, PUBLIC_RUNS
        yield "host.added_for_a_request", SUM_PER_REQUEST, PUBLISHED, PUBLIC_RUNS


def _gpu(at: Deployment) -> Iterator[Named]:
    gpu = at.gpu
    yield "gpu.peak", gpu.peak, PUBLISHED, "data sheet, FLOP/s in bf16 without sparsity"
    yield "gpu.bandwidth", gpu.bandwidth, PUBLISHED, "data sheet, bytes/s"
    yield "gpu.memory", gpu.memory, PUBLISHED, "as the driver reports it, bytes"
    yield from _efficiencies(gpu, ("gemm", "decode", "prompt"), gpu.origin)
    if at.model.experts:
        yield from _efficiencies(gpu, ("experts",), gpu.expert_origin)
    if at.tensor > 1:
        link = gpu.links[at.tensor]
        yield "gpu.all_reduce.c0", link.c0, gpu.origin, gpu.source
        yield "gpu.all_reduce.speed", link.speed, gpu.origin, gpu.source


def _efficiencies(gpu: Gpu, parts: tuple[str, ...], origin: str) -> Iterator[Named]:
    for part in parts:
        law = getattr(gpu, part)
        for field in fields(law):
            yield f"gpu.{part}.{field.name}", getattr(law, field.name), origin, gpu.source


def _engine(at: Deployment, rests: Rests) -> Iterator[Named]:
    same_gpu = at.gpu is H200 or "calibrated card" in rests.corrected
    usual = rests.utilisation == UTILISATION
    yield "memory.workspace", WORKSPACE, MEASURED if at.gpu is H200 else ASSUMED, "three cards of an H200"
    how = (PUBLISHED, "vLLM's default from 0.22 on") if usual else (ASSUMED, "as given")
    yield "memory.utilisation", rests.utilisation, *how
    for field in fields(rests.lost):
        value = getattr(rests.lost, field.name)
        yield f"engine.{field.name}", value, MEASURED if same_gpu else ASSUMED, f"from {rests.corrected}"
