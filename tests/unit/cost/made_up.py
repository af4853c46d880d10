"""Made-up engines: a grid of steps timed by a known law, with noise, outliers and late looks at the clock."""

from __future__ import annotations

from itertools import product

import numpy as np

from headgate.cost.fit.steps import About, StepTable
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.cost.model import Chunk, Shape

ABOUT = About("made-up", "no GPU", "no model", 800_000, 40_960, 512, 16_384, versions={"vllm": "0.26.0"})
DECODES = (1, 4, 16, 48, 96, 160, 256, 384, 512)
CONTEXTS = (64, 600, 2_000)
PROMPTS = ((256, 1), (1_000, 1), (2_000, 4), (4_000, 1), (8_000, 8), (8_000, 1), (16_000, 2))
MIXTURES = ((16, 600), (64, 2_000), (256, 512), (256, 6_000), (480, 200), (480, 1_500))


def cells() -> list[list[Shape]]:
    """The shapes of a grid, cell by cell: steps of decodes, of prompts, of both, and changes of phase."""
    grid = []
    for decodes, context in product(DECODES, CONTEXTS):
        grid.append([Shape(decodes, decodes * (context + step)) for step in range(10)])
    for tokens, prompts in PROMPTS:
        grid.append([_prompts(tokens, prompts, behind=0)] * 6)
    for behind in (1_000, 4_000, 12_000):
        grid.append([_prompts(2_048, 1, behind)] * 6)
    for (decodes, tokens), context in product(MIXTURES, (128, 1_500)):
        shape = _prompts(tokens, -(-tokens // 1_000), 0)
        grid.append([shape._replace(decodes=decodes, context=decodes * context)] * 8)
    for decodes in (64, 256, 480):
        turn = [_prompts(3_000, 3, 0), *[Shape(decodes, decodes * 500)] * 3]
        grid.append(turn * 5)
    return grid


def timed(terms: WorkTerms, noise: float = 0.0, outliers: float = 0.0, late: float = 0.0, seed: int = 0):
    """The grid as an engine of this law would time it.

    `late`: seconds by which the end of a step is seen late while the next one, with prompts, is launched.
    """
    draw = np.random.default_rng(seed)
    cost = WorkCost(terms)
    rows, part, labels = [], [], []
    for number, shapes in enumerate(cells()):
        delay = late * draw.random() if shapes[0].prefill else 0.0
        for place, shape in enumerate(shapes):
            seconds = exact(cost, shape, shapes[place - 1] if place else None)
            seconds *= 1 + noise * draw.standard_normal()
            if draw.random() < outliers:
                seconds *= 5
            following = shapes[place + 1] if place + 1 < len(shapes) else shape
            then = late * draw.random() if following.prefill else 0.0
            seconds, delay = seconds + then - delay, then
            rows.append((max(seconds, 1e-4), shape))
            part.append(number)
        labels.append(f"cell {number}")
    return table(rows, part, labels)


def exact(cost: WorkCost, shape: Shape, before: Shape | None) -> float:
    """A step's true time, with the change of phase."""
    turned = before is not None and not before.decodes and not shape.prefill
    return cost.seconds(shape) + (cost.switch if turned else 0.0)


def table(rows: list[tuple[float, Shape]], part: list[int], labels: list[str]) -> StepTable:
    """Columns from shapes."""
    shapes = [shape for _, shape in rows]
    columns = {
        "seconds": [seconds for seconds, _ in rows],
        "decodes": [shape.decodes for shape in shapes],
        "context": [shape.context for shape in shapes],
        "prefill": [shape.prefill for shape in shapes],
        "behind": [shape.behind for shape in shapes],
        "prompts": [len(shape.chunks) for shape in shapes],
        "attention": [sum(c.tokens * (c.start + c.tokens / 2) for c in shape.chunks) for shape in shapes],
        "part": part,
    }
    return StepTable.from_columns(columns, labels)


def _prompts(tokens: int, prompts: int, behind: int) -> Shape:
    each, rest = divmod(tokens, prompts)
    sizes = [each + (number < rest) for number in range(prompts)]
    return Shape(0, 0, tokens, behind * prompts, tuple(Chunk(behind, size) for size in sizes))
