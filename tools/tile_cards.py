"""Makes the two cards of the tile model: one from a published sweep, one from matrices and a data sheet.

`pub-rtx-ada-6000-mistral-7b` restates a calibration against the chunk-size sweep in the public code of
arXiv 2508.01002 (single prompts of 2,048 tokens, no queue). `derived-h200-qwen3-8b` is computed from the
model's matrices and the GPU's data sheet; three numbers that no data sheet has are set so that it agrees with
our measured card, and the report says how well it does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from headgate.cost.card import Card, ExpectedError, Provenance, Region, load_card
from headgate.cost.laws.tiles import TileCost, TileTerms
from headgate.cost.model import Chunk, Shape, StepCost
from headgate_papers.slai.tile_model import (
    MISTRAL_7B,
    QWEN3_8B,
    TileGpu,
    batch_seconds,
    body_pairs,
    derive,
    head_pairs,
)

CARDS = Path(__file__).resolve().parent.parent / "src" / "headgate" / "cards"
TILE, VECTOR_TILE = (128, 128, 32), (64, 64)
PROMPT = 2048
SWEEP = {
    64: 724.3,
    128: 386.3,
    256: 238.8,
    384: 243.9,
    512: 212.2,
    768: 204.9,
    1024: 201.5,
}  # chunk: TTFT, ms
COLUMN = 0.01033  # seconds of all linear layers per 128 tokens, fitted to the sweep: 176 TFLOP/s
H200 = TileGpu(690e12, 4.8e12, TILE, VECTOR_TILE, kv_share=0.92)  # of 989.4e12 in bf16 without sparsity
# Decodes, and prompts of 512 tokens: where the derived card is compared with the measured one.
SHAPES = (
    *((decodes, 0) for decodes in (1, 16, 64, 128, 256, 512)),
    *((0, prompts) for prompts in (1, 4, 16, 32)),
    *((256, 2), (512, 1)),
)
CONTEXT = 700  # tokens each of those decodes reads


def ada_terms() -> TileTerms:
    """The fitted numbers; attention per pair follows from the column's price, kappa from a serving run."""
    pairs = body_pairs(MISTRAL_7B, TILE) + head_pairs(MISTRAL_7B, TILE)
    return TileTerms(
        layers=MISTRAL_7B.layers,
        width=MISTRAL_7B.width,
        tile=TILE,
        vector_tile=VECTOR_TILE,
        per_column=COLUMN,
        per_token=5e-6,
        per_pair=COLUMN / pairs,
        per_vector_pair=3.90625e-9,
        constant=0.0079,
        floor=0.0148,
    )


def first_token(terms: TileTerms, chunk: int) -> float:
    """Seconds until a lone prompt has run in chunks of that many tokens."""
    starts = range(0, PROMPT, chunk)
    return sum(batch_seconds(terms, [Chunk(start, min(chunk, PROMPT - start))], []) for start in starts)


def ada_card() -> Card:
    """RTX 6000 Ada and Mistral-7B."""
    terms = ada_terms()
    errors = {f"chunk {size}": six(first_token(terms, size) * 1e3 / ms - 1) for size, ms in SWEEP.items()}
    return Card(
        name="pub-rtx-ada-6000-mistral-7b",
        gpu="NVIDIA RTX 6000 Ada 48 GB",
        model="Mistral-7B-Instruct-v0.2",
        description="Tile model calibrated on the published chunk-size sweep of arXiv 2508.01002's code.",
        kv_tokens=224_000,
        max_model_len=8_192,
        max_running=256,
        max_batch_tokens=8_192,
        tiles=terms,
        region=Region(decodes=(1, 1), context=(2_049, 2_049), prefill=(64, 1_024)),
        provenance=Provenance(
            source="Bari, Hegde, de Veciana, arXiv 2508.01002; the sweep in its public code (agrimUT/SLAI)",
            measured="median TTFT of single 2,048-token prompts by chunk size, a decode step after each; "
            "constant and per_column fitted to chunks of 256 and more, floor to those of 64 and 128",
            date="2025",
            versions={"engine": "a fork of Sarathi-Serve"},
            residuals={"TTFT of the sweep, relative": errors},
            assumptions=[
                "per_token 5 us; tiles 128 x 128 x 32 and 64 x 64",
                "per_vector_pair: 0.25 us per context token, chosen so that Sarathi's median TTFT is 0.5 s "
                "at 1.15 requests/s of the paper's workload; memory speed alone would be 0.137 us",
                "kv_tokens: 14,000 blocks, what is left of 48 GB",
                "the head is charged for every token, as in the paper",
            ],
            extrapolated=[
                "more than one decode in a step, and any context but 2,049: never measured",
                "steps of more than 1,024 prompt tokens, several prompts in one step",
            ],
        ),
    )


def h200_card() -> Card:
    """H200 and Qwen3-8B, limits as on the measured card."""
    measured = load_card("linear-h200-qwen3-8b")
    terms = rounded(derive(QWEN3_8B, H200, constant=2.3e-3, per_token=3e-6))
    errors = {label: six(error) for label, error in compared(TileCost(terms), measured.cost)}
    return Card(
        name="derived-h200-qwen3-8b",
        expected_error=ExpectedError(
            decode=0.07,
            prefill=0.12,
            mixed=0.17,
            throughput=0.06,
            source="nine in ten steps on the grid of cal-h200-qwen3-8b, and saturated simulations on both",
        ),
        gpu=measured.gpu,
        model=measured.model,
        description="Tile model derived from the model's matrices and the GPU's data sheet, not measured.",
        kv_tokens=measured.kv_tokens,
        block=measured.block,
        max_model_len=measured.max_model_len,
        max_running=measured.max_running,
        max_batch_tokens=measured.max_batch_tokens,
        tiles=terms,
        region=Region(decodes=(0, 0), context=(0, 0), prefill=(0, 0)),
        provenance=Provenance(
            source="Qwen3-8B's configuration (36 layers of 4,096, 32/8 heads of 128, 12,288, 151,936 words) "
            "and the H200's data sheet (989.4 TFLOP/s bf16, 4.8 TB/s)",
            measured="nothing: computed by tools/tile_cards.py",
            date="2026",
            versions={},
            residuals={"against linear-h200-qwen3-8b, relative": errors},
            assumptions=[
                "69.7 % of the peak in large products, 92 % of the memory's speed when KV is read",
                "2.3 ms per step beside its work, 3 us of non-linear work per token",
                "these four are set so that the card agrees with linear-h200-qwen3-8b",
                "tiles 128 x 128 x 32 and 64 x 64; the head runs on sampled positions only",
                "KV, slots and step size as on linear-h200-qwen3-8b",
            ],
            extrapolated=["everything: no step of this card was timed"],
        ),
    )


def compared(derived: StepCost, measured: StepCost) -> list[tuple[str, float]]:
    """How much longer or shorter steps are than on the measured card."""
    found = []
    for decodes, prompts in SHAPES:
        chunks = (Chunk(0, 512),) * prompts
        shape = Shape(decodes, decodes * CONTEXT, 512 * prompts, 0, chunks)
        label = f"{decodes} decodes, {512 * prompts} prompt tokens"
        found.append((label, derived.seconds(shape) / measured.seconds(shape) - 1))
    return found


def rounded(terms: TileTerms) -> TileTerms:
    """Six digits: the same on every machine."""
    numbers: dict[str, Any] = {each.name: getattr(terms, each.name) for each in fields(terms)}
    short: dict[str, Any] = {name: six(x) for name, x in numbers.items() if isinstance(x, float)}
    return replace(terms, **short)


def six(value: float) -> float:
    """Six significant digits."""
    return float(f"{value:.6g}")


def report(cards: Sequence[Card]) -> str:
    """What each card was compared with, and how far it is off."""
    lines = []
    for card in cards:
        lines.append(card.name)
        for what, errors in card.provenance.residuals.items():
            lines.append(f"  {what}")
            lines += [f"    {label:36s} {error:+7.1%}" for label, error in errors.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Write the two cards of the tile model and say how well they agree with measurements.",
        epilog="example: python tools/tile_cards.py --check",
    )
    parser.add_argument("--out", type=Path, default=CARDS, help="folder to write to")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a card would change")
    options = parser.parse_args(arguments)
    cards = (ada_card(), h200_card())
    print(report(cards))
    same = True
    for card in cards:
        path = options.out / f"{card.name}.json"
        if options.check:
            same &= path.read_text(encoding="utf-8") == card.text()
        else:
            card.save(path)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
