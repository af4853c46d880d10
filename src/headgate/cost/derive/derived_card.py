"""A card from a model's shape, a GPU and a degree of parallelism, without measuring."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls  # type: ignore[import-untyped]

from headgate.core.errors import InputError, unknown
from headgate.cost.card import DERIVED_CARD, Card, ExpectedError, Number, Provenance
from headgate.cost.derive.gpus import ASSUMED, GIGA, H200, MEASURED, PUBLISHED, Gpu, gpu_named
from headgate.cost.derive.step import MOST, OF_H200, SCALES, Corrections, Deployment, step_seconds
from headgate.cost.derive.transformer import Transformer, model_named, read_config
from headgate.cost.fit.fit import LARGEST_GRAPH, region
from headgate.cost.fit.solve import LEAST_TOKENS, PER_EXPERT, Law, gpu_columns
from headgate.cost.fit.steps import Floats, StepTable
from headgate.cost.laws.terms import HostTerms
from headgate.cost.laws.work import WorkTerms
from headgate.cost.model import Chunk, Shape

AUTO, BF16, FP8 = "auto", "bf16", "fp8"
MOST_TOKENS = 16384  # in one step
ASYNCHRONOUS = (
    "The host is that of the calibrated cards (slow cores, asynchronous scheduling, vLLM's default from 0.14 "
    "on). An engine without it takes the sum of GPU and host: add :sync to the card's name."
)
CORRECTED = "cal-h200-qwen3-8b"  # the card of OF_H200
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
    limits: dict[str, Any] = {"kv_tokens": tokens, "block": BLOCK, "max_batch_tokens": MOST_TOKENS}
    limits |= {"max_running": most_running(tokens), "max_model_len": min(at.model.longest, tokens)}
    steps = shapes(tokens, limits["max_running"], MOST_TOKENS)
    seconds = [step_seconds(at, step.decodes, step.context, step.chunks, lost) for step in steps]
    terms, errors = distil(steps, seconds, (at.model.experts, at.model.experts_per_token))
    if wanted.synchronous:  # GPU and host add up
        per_decode = terms.per_decode + SUM_PER_REQUEST
        host, work = None, replace(terms, constant=terms.constant + SUM_CONSTANT, per_decode=per_decode)
    else:
        host = host_prior(at.model, at.graph)
        ungraphed = float(f"{SHOWN_UNGRAPHED * host.ungraphed:.4g}")
        work = replace(terms, **SHOWN, host_ungraphed=ungraphed, graph=host.graph)
    corrected = f"calibrated card {', '.join(card.name for card in correct)}" if correct else CORRECTED
    basis = Basis(work, host, lost, corrected, wanted.utilisation)
    kv_off = min(1.0, WORKSPACE_OFF / (tokens * _kv_bytes(at)))
    gpus = at.gpu.name if at.gpus == 1 else f"{at.gpus} x {at.gpu.name}"
    return Card(
        name=name or wanted.name,
        gpu=gpus,
        model=resolved.model,
        description=f"Derived, not measured: {resolved.model} on {gpus}, by laws of its operators.",
        **limits,
        work=work,
        host=host,
        region=region(table(steps, seconds)),
        expected_error=expected_error(
            at, kv_off, wanted.approximate and bool(resolved.doubts), wanted.synchronous
        ),
        provenance=_provenance(wanted, resolved, basis, errors, limits),
    )


def _provenance(
    wanted: WantedCard, resolved: Resolved, basis: Basis, errors: Floats, limits: dict[str, int]
) -> Provenance:
    at = resolved.at
    how = f"memory at this utilisation less {weight_bytes(at) / 1e9:.1f} GB of weights and the workspace"
    every: list[Named] = [("kv_tokens", limits["kv_tokens"], PUBLISHED, how)]
    every += [(name, limits[name], *known) for name, known in LIMITS.items()]
    every += [*_prices(at, basis), *_gpu(at), *_engine(at, basis)]
    every += [(f"model.{name}", value, PUBLISHED, "config.json") for name, value in at.model.shape().items()]
    numbers = {
        name: Number.model_validate({"value": float(f"{value:.6g}"), "origin": origin, "source": source})
        for name, value, origin, source in every
    }
    off = {"mean": round(float(np.abs(errors).mean()), 4), "most": round(float(np.abs(errors).max()), 4)}
    return Provenance(
        source=SOURCE,
        measured=f"nothing on this engine; corrections for what an engine loses are from {basis.corrected}",
        date="derived when asked for",
        versions={},
        residuals={"law of work against laws of operators": off},
        assumptions=_assumptions(wanted, resolved),
        extrapolated=["everything: no step of this card was timed"],
        settings={
            "dtype": "bfloat16",
            "tensor parallel": str(at.tensor),
            "quantization": "fp8" if at.model.bytes_per_weight == 1 else "None",
            "KV data type": wanted.kv_dtype,
            LARGEST_GRAPH: str(at.graph),
            "asynchronous scheduling": str(not wanted.synchronous),
        },
        model_shape=at.model.shape(),
        numbers=numbers,
    )


def _assumptions(wanted: WantedCard, resolved: Resolved) -> list[str]:
    at = resolved.at
    loses = "What an engine loses against operators timed alone is that of an H200 with Qwen3-8B."
    notes = {
        SYNCHRONOUS if wanted.synchronous else ASYNCHRONOUS: True,
        loses: "H200" not in at.gpu.name,
        f"{WORKSPACE / 1e9:g} GB of each GPU for activations and CUDA graphs, as on an H200.": True,
        f"Efficiencies of operators {at.gpu.source}.": at.gpu.origin == "assumed",
        "The router sends tokens to all experts alike. Trained routers prefer some.": at.model.experts,
        "KV of layers with a window is counted in full.": at.model.window,
        "fp8 products at the bf16 laws' efficiencies.": at.fp8,
    }
    said = [note for note, holds in notes.items() if holds]
    return said + [f"Approximated: {doubt}." for doubt in resolved.doubts]


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
    rest = text.removeprefix(DERIVED_CARD)
    model, at, place = rest.rpartition("@")
    if not at or not model or not place or len(text) > LONGEST:
        raise InputError(f"card {text[:80]!r} is not complete; {FORM}")
    gpu, *words = place.split(":")
    settings: dict[str, Any] = {}
    for word in words:
        if degree := re.fullmatch(r"(tp|pp|ep|graph)(\d{1,5})", word):
            settings[NUMBER[degree[1]]] = int(degree[2])
        elif share := re.fullmatch(r"util(0?\.\d{1,6}|1(?:\.0*)?)", word):
            settings["utilisation"] = float(share[1])
        elif word in WORDS:
            settings |= WORDS[word]
        else:
            raise InputError(f"card {text[:80]!r}: {word[:40]!r} is not known; {FORM}")
    return WantedCard(model, gpu, **settings)


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


# -- where each number comes from: by its place in the card, or by gpu., model., memory. and engine.

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
    terms: WorkTerms
    host: HostTerms | None  # None: a synchronous one, in the prices
    lost: Corrections
    corrected: str  # by which card
    utilisation: float


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


# -- corrections from calibrated cards

JITTER = 0.05  # errors beyond it count less


def fit_corrections(measured: Sequence[tuple[Deployment, Card]]) -> Corrections:
    """Least squares on relative errors of the cards' grids; every card weighs alike."""
    timed = []
    for at, card in measured:
        grid = shapes(card.kv_tokens, card.max_running, card.max_batch_tokens)
        steps = [step for step in grid if not card.region.misses(step)]
        cost = card.cost.unhosted()
        timed.append((at, steps, np.array([cost.seconds(step) for step in steps])))

    def off(scaled: Floats) -> Floats:
        lost = Corrections(*(scaled * SCALES))
        errors = []
        for at, steps, real in timed:
            priced = np.array([step_seconds(at, s.decodes, s.context, s.chunks, lost) for s in steps])
            errors.append((priced / real - 1) / np.sqrt(len(steps)))
        return np.concatenate(errors)

    start = np.array(astuple(OF_H200)) / SCALES
    most = np.array(MOST) / SCALES
    done = least_squares(off, start, bounds=(0.0, most), loss="soft_l1", f_scale=JITTER)
    return Corrections(*(float(f"{value:.4g}") for value in done.x * SCALES))


def deployment_of(card: Card, gpu: Gpu) -> Deployment:
    shape, settings = card.provenance.model_shape or {}, card.provenance.settings or {}
    needed = ("layers", "hidden", "heads", "kv_heads", "head_size", "inner", "vocabulary")
    if card.work is None or card.expected_error or not all(name in shape for name in needed):
        raise InputError(f"--correct {card.name}: not a calibrated card; give one of headgate calibrate")
    if gpu.name not in card.gpu and card.gpu not in gpu.name:
        raise InputError(
            f"--correct {card.name} is of {card.gpu}, not of {gpu.name}; corrections hold for one GPU"
        )
    layers, hidden, heads, kv_heads, head, inner, words = (shape[name] for name in needed)
    model = replace(
        Transformer(layers, hidden, heads, kv_heads, head, inner, words),
        experts=shape.get("experts", 0),
        experts_per_token=shape.get("experts_per_token", 0),
        expert_feed_forward=shape.get("expert_inner", 0),
    )
    return Deployment(model, gpu, int(settings.get("tensor parallel", "1")))


# -- the grid: steps of a calibration, on paper

DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)  # of one decode
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BEHIND = (4096, 8192, 14336)
MIXED = ((16, 64, 128, 256, 512), (256, 1024, 2048, 8192), (512, 2048))  # decodes, prompt, context


def shapes(kv_tokens: int, running: int, budget: int) -> list[Shape]:
    """Decodes alone within KV and slots, prompts alone (one, four, a piece behind KV), both."""
    alone = [
        Shape(decodes, decodes * context)
        for decodes, context in product(DECODES, CONTEXTS)
        if decodes <= running and (decodes * context <= kv_tokens or decodes == 1)
    ]
    prompts = [[Chunk(0, size)] * count for size in PROMPTS for count in (1, 4) if count * size <= budget]
    prompts += [[Chunk(start, min(2048, budget))] for start in BEHIND]
    mixed = [
        _shape(decodes, decodes * context, [Chunk(0, tokens)])
        for decodes, tokens, context in product(*MIXED)
        if decodes * context <= kv_tokens and decodes + tokens <= budget and decodes <= running
    ]
    return [*alone, *(_shape(0, 0, chunks) for chunks in prompts), *mixed]


def _shape(decodes: int, context: int, chunks: list[Chunk]) -> Shape:
    tokens, behind = sum(chunk.tokens for chunk in chunks), sum(chunk.start for chunk in chunks)
    return Shape(decodes, context, tokens, behind, tuple(chunks))


def table(steps: Sequence[Shape], seconds: Sequence[float]) -> StepTable:
    pairs = [sum(chunk.tokens * (chunk.start + chunk.tokens / 2) for chunk in step.chunks) for step in steps]
    columns = {name: np.array([getattr(step, name) for step in steps]) for name in Shape._fields[:4]}
    prompts = np.array([len(step.chunks) for step in steps])
    return StepTable.from_columns(
        {**columns, "seconds": np.array(seconds), "prompts": prompts, "attention": np.array(pairs)}
    )


# -- laws of operators as a law of work

EXTRAS = ("per_context", "per_attention", "prompt_constant", "mixed_constant", "mixed_per_context")
TILES = (1, 16, 64, 128)


def distil(
    steps: Sequence[Shape], seconds: Sequence[float], experts: tuple[int, int] = (0, 0)
) -> tuple[WorkTerms, Floats]:
    """The law of the family nearest to these times, and its relative errors.

    The family's terms are given instead of chosen: times from laws have no noise, so there is nothing to
    overfit. Sizes of tile and least batch are the best of those tried.
    """
    timed = table(steps, seconds)
    real = timed.seconds
    extras = (*EXTRAS, PER_EXPERT) if experts[0] else EXTRAS
    best: tuple[float, Law, Floats, Floats] | None = None
    for tile in TILES:
        for least in (0, *LEAST_TOKENS):
            law = Law(extras, least, tile, experts=experts)
            relative = gpu_columns(timed, law) / real[:, None]
            scale = np.linalg.norm(relative, axis=0)
            scale[scale == 0] = 1.0
            solved, left = nnls(relative / scale, np.ones(len(real)))
            if best is None or left < best[0]:
                best = left, law, solved / scale, relative @ (solved / scale) - 1
    assert best is not None
    _, law, coefficients, errors = best
    terms = law.terms(coefficients)
    return (terms if terms.per_expert else replace(terms, experts=0, experts_per_token=0)), errors


# -- which card: from flags or from a name; its KV memory and its host

DTYPES = (AUTO, BF16, FP8)
KV_DTYPES = (BF16, FP8)
DEGREES = (1, 2, 4, 8)
QUARTER = 0.5  # bytes of a weight in four bits
UTILISATION = 0.92  # vLLM's default from 0.22 on
GRAPH = 512  # tokens of vLLM's largest CUDA graph, from 256 slots on


@dataclass(frozen=True)
class WantedCard:
    model: str
    gpu: str
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    dtype: str = AUTO
    kv_dtype: str = BF16
    utilisation: float = UTILISATION
    graph: int = GRAPH  # tokens of the engine's largest CUDA graph
    approximate: bool = False
    synchronous: bool = False  # the engine composes a step only when the one before it has ended
    called: str = ""  # the model of a file

    @property
    def name(self) -> str:
        model = self.model if self.from_file else model_named(self.model)[0]
        parts = [f"derived:{model}@{gpu_named(self.gpu)[0]}"]
        degrees = (("tp", self.tensor), ("pp", self.pipeline), ("ep", self.expert))
        parts += [f"{word}{degree}" for word, degree in degrees if degree > 1]
        parts += [self.dtype] if self.dtype != AUTO else []
        parts += [f"kv-{self.kv_dtype}"] if self.kv_dtype != BF16 else []
        parts += [f"util{self.utilisation:g}"] if self.utilisation != UTILISATION else []
        parts += [f"graph{self.graph}"] if self.graph != GRAPH else []
        parts += ["sync"] if self.synchronous else []
        parts += ["approximate"] if self.approximate else []
        return ":".join(parts)

    @property
    def from_file(self) -> bool:
        return self.model.endswith(".json")


@dataclass(frozen=True)
class Resolved:
    at: Deployment
    model: str
    doubts: tuple[str, ...]


def resolve(wanted: WantedCard) -> Resolved:
    """Refuses what the laws do not cover, in one line; with `approximate` it becomes a doubt instead."""
    _, gpu = gpu_named(wanted.gpu)
    if wanted.from_file:
        model, doubts, stored_fp8 = read_config(wanted.model)
        file = Path(wanted.model).resolve()
        name = wanted.called or (file.parent.name if file.name == "config.json" else file.stem)
    else:
        name, model = model_named(wanted.model)
        doubts, stored_fp8 = [], False
    _check(wanted, name, model.heads, model.experts)
    fp8 = wanted.dtype == FP8 or (wanted.dtype == AUTO and stored_fp8)
    if wanted.pipeline > 1:
        doubts.append("pipeline parallelism (one batch in flight is priced, so throughput is a lower bound)")
    if fp8 and not gpu.fp8:
        doubts.append(f"fp8 weights on {gpu.name}, which multiplies in bf16")
    if doubts and not wanted.approximate:
        raise InputError(
            f"{name}: the laws do not cover {', '.join(doubts)}; --approximate derives it anyway"
        )
    if fp8:
        model = replace(model, bytes_per_weight=1)
    elif any(doubt.startswith("quantised") for doubt in doubts):
        model = replace(model, bytes_per_weight=QUARTER)
    if wanted.kv_dtype == FP8:
        model = replace(model, bytes_per_kv=1)
    whole, native = wanted.expert > 1, fp8 and gpu.fp8
    at = Deployment(model, gpu, wanted.tensor, wanted.pipeline, whole, native, wanted.graph)
    return Resolved(at, name, tuple(doubts))


def _check(wanted: WantedCard, name: str, heads: int, experts: int) -> None:
    if wanted.dtype not in DTYPES:
        raise unknown("data type", wanted.dtype, DTYPES)
    if wanted.kv_dtype not in KV_DTYPES:
        raise unknown("data type of KV", wanted.kv_dtype, KV_DTYPES)
    if wanted.tensor not in DEGREES:
        raise InputError(
            f"tp {wanted.tensor}: all-reduce is known for 2, 4 and 8 GPUs; choose one of these, or 1"
        )
    if heads % wanted.tensor:
        raise InputError(
            f"tp {wanted.tensor}: {name} has {heads} heads, which it does not divide; choose another"
        )
    if not 1 <= wanted.pipeline <= 64:
        raise InputError(f"pp {wanted.pipeline}: choose 1 to 64")
    if wanted.expert > 1 and not experts:
        raise InputError(f"ep {wanted.expert}: {name} has no experts; drop it")
    if wanted.expert not in (1, wanted.tensor):
        raise InputError(
            f"ep {wanted.expert}: vLLM spreads whole experts over the GPUs of tp; choose 1 or {wanted.tensor}"
        )
    if not 1 <= wanted.graph <= 65536:
        raise InputError(f"graph {wanted.graph}: tokens of the largest CUDA graph are 1 to 65,536")
    if not 0.1 <= wanted.utilisation <= 1:
        raise InputError(f"utilisation {wanted.utilisation:g}: the share of memory vLLM may take is 0.1 to 1")


# -- how many KV tokens and requests a deployment holds

WORKSPACE = 2.5e9  # bytes of activations and CUDA graphs on one GPU; 2.3 to 2.7 on the three calibrated cards
BLOCK = 16
WORKSPACE_OFF = 1.5e9  # bytes by which that was off at most on eight engines: studies/cards/derived.py
MOST_RUNNING = 1024  # decodes of the largest step that was ever compared with a measurement


def weight_bytes(at: Deployment) -> float:
    model = at.model
    ends = model.weights - model.body_weights  # embedding and head stay in bf16
    return (model.body_weights * model.bytes_per_weight + ends * 2) / at.gpus


def kv_tokens(at: Deployment, utilisation: float) -> int:
    """KV tokens that fit beside the weights, in whole blocks.

    KV heads fewer than GPUs are copied, so their bytes do not shrink further. Layers with a window are
    counted like the others.
    """
    room = utilisation * at.gpu.memory - WORKSPACE - weight_bytes(at)
    tokens = int(room / _kv_bytes(at)) // BLOCK * BLOCK
    if tokens < 16 * BLOCK:
        need = (weight_bytes(at) + WORKSPACE) / utilisation
        raise InputError(
            f"the weights leave no room for KV on {at.gpus} x {at.gpu.name}: {need / 1e9:.0f} GB needed on "
            f"each, {at.gpu.memory / 1e9:.0f} GB there; use more GPUs (--tp), fp8 weights or a larger GPU"
        )
    return tokens


def most_running(tokens: int) -> int:
    """Requests that may run at once: vLLM takes any `max_num_seqs` for which every request has a block."""
    return min(MOST_RUNNING, tokens // BLOCK)


def _kv_bytes(at: Deployment) -> float:
    model = at.model
    return 2 * model.bytes_per_kv * model.layers / at.pipeline * at.kv_heads * model.head_size


# -- the host: a prior, for it cannot be derived

# About the middle of the three calibrated cards, whose host has slow cores.
CONSTANT, PER_REQUEST, WITH_PROMPTS = 3e-3, 20e-6, 10e-3
DENSE_LAYER, EXPERT_LAYER = 0.8e-3, 1.5e-3  # seconds to launch a layer kernel by kernel
# The same, seen in step times
SHOWN: dict[str, Any] = {"host_constant": 4e-3, "host_per_request": 24e-6, "host_prompts": 7e-3}
SHOWN_UNGRAPHED = 0.5  # of launching kernel by kernel, seen in step times
# What the host of a synchronous engine adds to every step, from the 90 public runs on 2 to 8 H100 of
# studies/cards/derived.py: the same seconds on 2, 4 and 8 GPUs.
SUM_CONSTANT, SUM_PER_REQUEST = 1.2e-3, 61e-6


def host_prior(model: Transformer, graph: int) -> HostTerms:
    """What an asynchronous engine's host takes for a step. Synchronous engines add it to the GPU's time."""
    dense = model.layers - model.expert_layers
    ungraphed = DENSE_LAYER * dense + EXPERT_LAYER * model.expert_layers
    return HostTerms(CONSTANT, PER_REQUEST, WITH_PROMPTS, float(f"{ungraphed:.4g}"), graph)
