"""The steps a derived card is made from and compared on: those of a calibration, on paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headgate.cost.fit.steps import StepTable
from headgate.cost.model import Chunk, Shape

DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)  # of one decode
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BEHIND = (4096, 8192, 14336)
MIXED = ((16, 64, 128, 256, 512), (256, 1024, 2048, 8192), (512, 2048))  # decodes, prompt, context


def shapes(kv_tokens: int, running: int, budget: int) -> list[Shape]:
    """Decodes alone within KV and seats, prompts alone (one, four, a piece behind KV), both."""
    return [*_decodes(kv_tokens, running), *_prompts(budget), *_mixed(kv_tokens, running, budget)]


def _decodes(kv_tokens: int, running: int) -> Iterator[Shape]:
    for decodes in DECODES:
        for context in CONTEXTS:
            if decodes <= running and (decodes * context <= kv_tokens or decodes == 1):
                yield Shape(decodes, decodes * context)


def _prompts(budget: int) -> Iterator[Shape]:
    for tokens in PROMPTS:
        if tokens <= budget:
            yield _shape(0, 0, [Chunk(0, tokens)])
        if 4 * tokens <= budget:
            yield _shape(0, 0, [Chunk(0, tokens)] * 4)
    for start in BEHIND:
        yield _shape(0, 0, [Chunk(start, min(2048, budget))])


def _mixed(kv_tokens: int, running: int, budget: int) -> Iterator[Shape]:
    for decodes in MIXED[0]:
        for tokens in MIXED[1]:
            for context in MIXED[2]:
                fits = decodes * context <= kv_tokens and decodes + tokens <= budget and decodes <= running
                if fits:
                    yield _shape(decodes, decodes * context, [Chunk(0, tokens)])


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
