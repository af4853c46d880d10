"""Corrections from calibrated cards of the same GPU: the five numbers that make the laws agree with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from headgate.core.errors import InputError
from headgate.cost.card import Card
from headgate.cost.derive.corrections import MOST, OF_H200, SCALES, Corrections, corrections
from headgate.cost.derive.gpus import Gpu
from headgate.cost.derive.grid import shapes
from headgate.cost.derive.step import Deployment, step_seconds
from headgate.cost.derive.transformer import Transformer
from headgate.cost.fit.steps import Floats
from headgate.cost.model import Shape

JITTER = 0.05  # errors beyond it count less


def fit_corrections(measured: Sequence[tuple[Deployment, Card]]) -> Corrections:
    """Least squares on relative errors of the cards' grids; every card weighs alike."""
    parts = [(at, *_timed(card)) for at, card in measured]

    def off(scaled: Floats) -> Floats:
        lost = Corrections(*(scaled * SCALES))
        found = []
        for at, steps, real in parts:
            said = np.array([step_seconds(at, s.decodes, s.context, s.chunks, lost) for s in steps])
            found.append((said / real - 1) / np.sqrt(len(steps)))
        return np.concatenate(found)

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
    model = Transformer(
        layers,
        hidden,
        heads,
        kv_heads,
        head,
        inner,
        words,
        experts=shape.get("experts", 0),
        experts_per_token=shape.get("experts_per_token", 0),
        expert_feed_forward=shape.get("expert_inner", 0),
    )
    return Deployment(model, gpu, int(settings.get("tensor parallel", "1")))


def _timed(card: Card) -> tuple[list[Shape], Floats]:
    """The card's grid and what its GPU takes for each step."""
    steps = list(_inside(card))
    cost = card.cost.unhosted()
    return steps, np.array([cost.seconds(step) for step in steps])


def _inside(card: Card) -> Iterator[Shape]:
    for step in shapes(card.kv_tokens, card.max_running, card.max_batch_tokens):
        if not card.region.misses(step):
            yield step
