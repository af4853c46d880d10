"""Mixed cells of a grid beside their halves, no law: `python -m studies.cards.mixed_cells STEPS.npz`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.fit.steps import DECODE, PREFILL, StepTable

GRAPH = 1024  # tokens of the largest CUDA graph of our grids
NEAR = 0.25  # context of the decodes alone, relative to that in the mixed step


class Row(NamedTuple):
    """One mixed shape and its halves, in seconds."""

    decodes: int
    context: int  # of one decode
    prefill: int
    together: float
    decode: float  # the decodes alone
    prompts: float  # the prompts alone

    @property
    def tokens(self) -> int:
        """Decodes and prompt tokens."""
        return self.decodes + self.prefill

    @property
    def share(self) -> float:
        """Decodes among the tokens."""
        return self.decodes / self.tokens

    @property
    def extra(self) -> float:
        """Beyond both halves run one after the other, as a share of them; negative: mixing saves."""
        return self.together / (self.decode + self.prompts) - 1


def rows(table: StepTable) -> list[Row]:
    """Every mixed shape beside what its halves took alone; medians over all visits."""
    alone = table.take(table.kind == DECODE)
    alone = alone.take(alone.before == DECODE)
    prompts: dict[int, list[float]] = {}
    mixed: dict[tuple[int, int, int], list[tuple[float, float]]] = {}  # label, decodes, tokens: context, time
    for visit in visits(table):
        each, decodes = per_step(visit, alone), visit.decodes[-1]
        if each is None or visit.prompts[-1] > 1 or visit.behind.max() > 0:
            continue
        if not decodes:
            prompts.setdefault(int(visit.prefill[-1]), []).append(each)
        else:
            key = int(visit.part[-1]), int(decodes), int(visit.prefill[-1])
            mixed.setdefault(key, []).append((visit.context[-1] / decodes, each))
    found = []
    for (_, number, tokens), seen in mixed.items():
        context, together = np.median(seen, axis=0).tolist()
        half = decode_alone(alone, number, context)
        if half is not None and tokens in prompts:
            whole = float(np.median(prompts[tokens]))
            found.append(Row(number, round(context), tokens, together, half, whole))
    return sorted(found, key=lambda row: (row.tokens, row.share, row.context))


def visits(table: StepTable) -> Iterator[StepTable]:
    """Stretches of one cell: a step of decodes alone, then steps with prompts, all of one shape."""
    edges = np.flatnonzero(np.diff(table.part, prepend=-1, append=-1))
    for begin, end in pairwise(edges.tolist()):
        visit = table.take(np.arange(begin, end))
        kinds = visit.kind
        one_shape = len(np.unique(visit.prefill[1:])) == 1
        if len(visit) > 1 and kinds[0] == DECODE and np.all(kinds[1:] >= PREFILL) and one_shape:
            yield visit


def per_step(visit: StepTable, alone: StepTable) -> float | None:
    """Seconds of one of its steps with prompts.

    The end of a step is seen late while the next one is launched, so single times are wrong and their sum
    is right: the sum, less what the decodes before the prompts take alone.
    """
    lead = decode_alone(alone, int(visit.decodes[0]), float(visit.context[0] / visit.decodes[0]))
    return None if lead is None else (float(visit.seconds.sum()) - lead) / (len(visit) - 1)


def decode_alone(alone: StepTable, number: int, context: float) -> float | None:
    """Median time of so many decodes at about that context, after another step of decodes."""
    same = (alone.decodes == number) & (np.abs(alone.context / alone.decodes / context - 1) < NEAR)
    return float(np.median(alone.seconds[same])) if same.any() else None


def lines(found: list[Row]) -> list[str]:
    """Cell by cell, then medians on either side of the largest graph."""
    said = [" tokens  decodes  share  context   together        halves, ms     extra"]
    for row in found:
        halves = f"{1e3 * row.decode:.2f} + {1e3 * row.prompts:.2f}"
        said.append(
            f"{row.tokens:>7}{row.decodes:>9}{row.share:>7.2f}{row.context:>9}{1e3 * row.together:>11.2f}"
            f"{halves:>18}{100 * row.extra:>+8.1f} %"
        )
    bands = {
        f"up to {GRAPH} tokens": [row.extra for row in found if row.tokens <= GRAPH],
        f"to {2 * GRAPH}": [row.extra for row in found if GRAPH < row.tokens < 2 * GRAPH],
        "more": [row.extra for row in found if row.tokens >= 2 * GRAPH],
    }
    known = {name: extras for name, extras in bands.items() if extras}
    return said + [
        f"{name}: median {100 * float(np.median(extras)):+.1f} %, {len(extras)} cells"
        for name, extras in known.items()
    ]


def main(argv: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m studies.cards.mixed_cells", description=__doc__)
    parser.add_argument("steps", type=Path, help="what a calibration kept: CARD.steps.npz")
    asked = parser.parse_args(argv)
    try:
        found = rows(StepTable.load(asked.steps))
    except InputError as error:
        sys.exit(f"error: {error}")
    if not found:
        sys.exit(f"error: {asked.steps}: no mixed cell whose halves were timed alone; take a newer grid")
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
