"""Between derived and calibrated cards: corrections from calibrated ones, and operators as a law of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from scipy.optimize import least_squares, nnls  # type: ignore[import-untyped]

from headgate.core.errors import InputError
from headgate.cost.card import Card
from headgate.cost.derive.gpus import Gpu
from headgate.cost.derive.step import (
    MOST,
    OF_H200,
    SCALES,
    Corrections,
    Deployment,
    corrections,
    step_seconds,
)
from headgate.cost.derive.transformer import Transformer
from headgate.cost.fit.family import LEAST_TOKENS, PER_EXPERT, Law, gpu_columns
from headgate.cost.fit.steps import Floats, StepTable
from headgate.cost.laws.work import WorkTerms
from headgate.cost.model import Chunk, Shape

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

    start = np.array(OF_H200.values()) / SCALES
    most = np.array(MOST) / SCALES
    done = least_squares(off, start, bounds=(0.0, most), loss="soft_l1", f_scale=JITTER)
    return corrections(done.x * SCALES)


def deployment_of(card: Card, gpu: Gpu) -> Deployment:
    """What a calibrated card was measured on, if the laws know it."""
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
    """Those steps as if they had been timed."""
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
