"""A card from a model's shape, a GPU and a degree of parallelism, without measuring."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.card import DERIVED_CARD, Card, ExpectedError, Number, Provenance
from headgate.cost.derive.correct import deployment_of, distil, fit_corrections, shapes, table
from headgate.cost.derive.gpus import ASSUMED, GIGA, H200, MEASURED, PUBLISHED, Gpu
from headgate.cost.derive.step import OF_H200, Corrections, Deployment, step_seconds
from headgate.cost.derive.wanted import (
    BF16,
    BLOCK,
    FP8,
    SUM_CONSTANT,
    SUM_PER_REQUEST,
    UTILISATION,
    WORKSPACE,
    Resolved,
    WantedCard,
    host_prior,
    kv_error,
    kv_tokens,
    most_running,
    resolve,
    weight_bytes,
    with_host,
    with_synchronous_host,
)
from headgate.cost.fit.fit import LARGEST_GRAPH, region
from headgate.cost.fit.steps import Floats
from headgate.cost.laws.terms import HostTerms
from headgate.cost.laws.work import WorkTerms

MOST_TOKENS = 16384  # in one step
ASYNCHRONOUS = (
    "The host is that of the calibrated cards (slow cores, asynchronous scheduling, vLLM's default from 0.14 "
    "on). An engine without it takes the sum of GPU and host: add :sync to the card's name."
)
SYNCHRONOUS = "GPU and host add up, the host as in 90 public runs of vLLM 0.12 on 2 to 8 H100."
SOURCE = (
    "headgate card derive: the model's config.json, the GPU's data sheet, and laws fitted to "
    "AIConfigurator's operator tables for vLLM 0.24"
)


def derive_card(wanted: WantedCard, correct: Sequence[Card] = (), name: str = "") -> Card:
    """The laws on the grid of a calibration, as a card; `correct` are calibrated cards of the same GPU."""
    resolved = resolve(wanted)
    at = resolved.at
    measured = [(deployment_of(card, at.gpu), card) for card in correct]
    lost = fit_corrections(measured) if measured else OF_H200
    tokens = kv_tokens(at, wanted.utilisation)
    running = most_running(tokens)
    steps = shapes(tokens, running, MOST_TOKENS)
    seconds = [step_seconds(at, step.decodes, step.context, step.chunks, lost) for step in steps]
    terms, errors = distil(steps, seconds, (at.model.experts, at.model.experts_per_token))
    host = None if wanted.synchronous else host_prior(at.model, at.graph)
    work = with_host(terms, host) if host else with_synchronous_host(terms)
    names = ", ".join(card.name for card in correct)
    corrected = f"calibrated card {names}" if correct else "cal-h200-qwen3-8b"
    basis = Basis(work, host, lost, corrected, wanted.utilisation)
    gpus = at.gpu.name if at.gpus == 1 else f"{at.gpus} x {at.gpu.name}"
    return Card(
        name=name or wanted.name,
        gpu=gpus,
        model=resolved.model,
        description=f"Derived, not measured: {resolved.model} on {gpus}, by laws of its operators.",
        kv_tokens=tokens,
        block=BLOCK,
        max_model_len=min(at.model.longest, tokens),
        max_running=running,
        max_batch_tokens=MOST_TOKENS,
        work=work,
        host=host,
        region=region(table(steps, seconds)),
        expected_error=expected_error(
            at, kv_error(at, tokens), wanted.approximate and bool(resolved.doubts), wanted.synchronous
        ),
        provenance=_provenance(wanted, resolved, basis, errors, tokens),
    )


def _provenance(
    wanted: WantedCard, resolved: Resolved, basis: Basis, errors: Floats, tokens: int
) -> Provenance:
    at = resolved.at
    off = {"mean": round(float(np.abs(errors).mean()), 4), "most": round(float(np.abs(errors).max()), 4)}
    limits = {"kv_tokens": tokens, "block": BLOCK, "max_batch_tokens": MOST_TOKENS}
    limits |= {"max_running": most_running(tokens), "max_model_len": min(at.model.longest, tokens)}
    return Provenance(
        source=SOURCE,
        measured=f"nothing on this engine; corrections for what an engine loses are from {basis.corrected}",
        date="derived when asked for",
        versions={},
        residuals={"law of work against laws of operators": off},
        assumptions=_assumptions(wanted, resolved),
        extrapolated=["everything: no step of this card was timed"],
        settings=_settings(wanted, at),
        model_shape=at.model.shape(),
        numbers=origins(at, basis, limits),
    )


def _settings(wanted: WantedCard, at: Deployment) -> dict[str, str]:
    """As vLLM has them, so that a card is refused on another engine."""
    return {
        "dtype": "bfloat16",
        "tensor parallel": str(at.tensor),
        "quantization": "fp8" if at.model.bytes_per_weight == 1 else "None",
        "KV data type": wanted.kv_dtype,
        LARGEST_GRAPH: str(at.graph),
        "asynchronous scheduling": str(not wanted.synchronous),
    }


def _assumptions(wanted: WantedCard, resolved: Resolved) -> list[str]:
    at = resolved.at
    notes = [
        SYNCHRONOUS if wanted.synchronous else ASYNCHRONOUS,
        "What an engine loses against operators timed alone is that of an H200 with Qwen3-8B."
        if "H200" not in at.gpu.name
        else "",
        f"{WORKSPACE / 1e9:g} GB of each GPU for activations and CUDA graphs, as on an H200.",
        f"Efficiencies of operators {at.gpu.source}." if at.gpu.origin == "assumed" else "",
        "The router sends tokens to all experts alike. Trained routers prefer some."
        if at.model.experts
        else "",
        "KV of layers with a window is counted in full." if at.model.window else "",
        "fp8 products at the bf16 laws' efficiencies." if at.fp8 else "",
        *(f"Approximated: {doubt}." for doubt in resolved.doubts),
    ]
    return [note for note in notes if note]


# -- names of derived cards: `derived:MODEL@GPU:tp4:fp8`

FORM = (
    "write derived:MODEL@GPU, then :tp4, :ep4, :fp8, :kv-fp8, :util0.9, :graph1024, :sync or :approximate as "
    "needed"
)
NUMBER = {"tp": "tensor", "pp": "pipeline", "ep": "expert", "graph": "graph"}
WORDS: dict[str, dict[str, Any]] = {
    **{dtype: {"dtype": dtype} for dtype in (BF16, FP8)},
    **{f"kv-{FP8}": {"kv_dtype": FP8}, "sync": {"synchronous": True}, "approximate": {"approximate": True}},
}
LONGEST = 500  # characters of a name


@lru_cache(maxsize=64)
def card_named(text: str) -> Card:
    """The card of that name; derived once, which takes some 50 ms."""
    return derive_card(parse(text))


def parse(text: str) -> WantedCard:
    """What a name asks for."""
    rest = text.removeprefix(DERIVED_CARD)
    model, at, place = rest.rpartition("@")
    if not at or not model or not place or len(text) > LONGEST:
        raise InputError(f"card {text[:80]!r} is not complete; {FORM}")
    gpu, *words = place.split(":")
    wanted = WantedCard(model, gpu)
    for word in words:
        wanted = _with(wanted, word, text)
    return wanted


def _with(wanted: WantedCard, word: str, text: str) -> WantedCard:
    degree = re.fullmatch(r"(tp|pp|ep|graph)(\d{1,5})", word)
    share = re.fullmatch(r"util(0?\.\d{1,6}|1(?:\.0*)?)", word)
    changed = WORDS.get(word)
    if degree:
        changed = {NUMBER[degree[1]]: int(degree[2])}
    elif share:
        changed = {"utilisation": float(share[1])}
    if changed is None:
        raise InputError(f"card {text[:80]!r}: {word[:40]!r} is not known; {FORM}")
    return replace(wanted, **changed)


# -- how far a derived card may be off

SLOW_LINK = 100 * GIGA  # bytes/s of an all-reduce; NVLink is faster


# `python -m studies.cards.derived` prints the figures behind these: nine in ten errors of engines of which
# nothing was fitted, every engine weighing alike. Nine steps in ten of decode, prefill and mixed are within
# these, relative; saturated throughput within the last.
HELD_OUT = ((0.08, 0.10, 0.10, 0.08), "leave-one-out over three calibrated H200 cards")
OTHER_GPU = (
    (0.15, 0.15, 0.13, 0.15),
    "public steps of vLLM on 1 to 8 B300, and runs on RTX PRO 6000, none of them fitted",
)
OVER_PCIE = ((0.18, 0.15, 0.13, 0.25), "a public run on 2 RTX PRO 6000, not fitted")
DATA_SHEET = (
    (0.20, 0.55, 0.55, 0.40),
    "six GPUs each by the efficiencies of the other five, a B300, a run on an RTX 4090",
)
FP8_BARS = ((0.20, 0.20, 0.20, 0.20), "fp8 products, which follow no one law")
SYNC_BARS = ((0.10, 0.10, 0.10, 0.10), "90 public runs on 2 to 8 H100, each degree from the others' host")
SHARED_EXPERTS = ((0.20, 0.26, 0.26, 0.25), "busiest GPU of uneven expert routing, published tables")
ROUGH = ((0.5, 0.5, 0.5, 0.5), "--approximate: laws used for what they were not fitted to; a guess")


def expected_error(at: Deployment, kv: float, approximate: bool, synchronous: bool = False) -> ExpectedError:
    """The widest of the bars that apply; that of KV memory is its own."""
    on_h200 = at.gpu is H200 and at.tensor == 1
    bars = [HELD_OUT if on_h200 else OTHER_GPU]
    bars += [OVER_PCIE] if at.tensor > 1 and at.gpu.links[at.tensor].speed < SLOW_LINK else []
    bars += [DATA_SHEET] if at.gpu.origin == ASSUMED else []
    bars += [FP8_BARS] if at.fp8 or at.model.bytes_per_weight < 2 else []
    bars += [SHARED_EXPERTS] if at.whole_experts and at.tensor > 1 else []
    bars += [SYNC_BARS] if synchronous else []
    bars += [ROUGH] if approximate else []
    widest = [max(kind) for kind in zip(*(numbers for numbers, _ in bars), strict=True)]
    errors = dict(zip(("decode", "prefill", "mixed", "throughput"), widest, strict=True))
    return ExpectedError(**errors, kv=float(f"{kv:.2g}"), source="; ".join(source for _, source in bars))


# -- where each number comes from

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
class Basis:
    """What a card was made from, beside model and GPU."""

    terms: WorkTerms
    host: HostTerms | None  # None: a synchronous one, in the prices
    lost: Corrections
    corrected: str  # by which card
    utilisation: float


def origins(at: Deployment, basis: Basis, limits: dict[str, int]) -> dict[str, Number]:
    """By the place of the number in the card; those it rests on by gpu., model., memory. and engine."""
    how = f"memory at this utilisation less {weight_bytes(at) / 1e9:.1f} GB of weights and the workspace"
    every: list[Named] = [("kv_tokens", limits["kv_tokens"], PUBLISHED, how)]
    every += [(name, limits[name], *known) for name, known in LIMITS.items()]
    every += [*_prices(at, basis), *_gpu(at), *_engine(at, basis)]
    every += [(f"model.{name}", value, PUBLISHED, "config.json") for name, value in at.model.shape().items()]
    return {
        name: Number.model_validate({"value": float(f"{value:.6g}"), "origin": origin, "source": source})
        for name, value, origin, source in every
    }


def _prices(at: Deployment, basis: Basis) -> Iterator[Named]:
    """A price is as well known as the weakest efficiency in it."""
    kinds = (at.gpu.origin, at.gpu.expert_origin if at.model.experts else at.gpu.origin)
    weakest = ASSUMED if ASSUMED in kinds else MEASURED
    laws = f"law of work nearest to laws of operators, {weakest}"
    for field in fields(basis.terms):
        value = getattr(basis.terms, field.name)
        of_host = field.name.startswith("host_") or field.name == "graph"
        if value:
            yield f"work.{field.name}", value, *((ASSUMED, PRIOR) if of_host else (weakest, laws))
    for field in fields(basis.host) if basis.host else ():
        yield f"host.{field.name}", getattr(basis.host, field.name), ASSUMED, PRIOR
    if basis.host is None:
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


def _engine(at: Deployment, basis: Basis) -> Iterator[Named]:
    same_gpu = at.gpu is H200 or "calibrated card" in basis.corrected
    usual = basis.utilisation == UTILISATION
    yield "memory.workspace", WORKSPACE, MEASURED if at.gpu is H200 else ASSUMED, "three cards of an H200"
    how = (PUBLISHED, "vLLM's default from 0.22 on") if usual else (ASSUMED, "as given")
    yield "memory.utilisation", basis.utilisation, *how
    for field in fields(basis.lost):
        value = getattr(basis.lost, field.name)
        yield f"engine.{field.name}", value, MEASURED if same_gpu else ASSUMED, f"from {basis.corrected}"
