"""What a mixed step costs beyond its two halves: `python -m benchmarks.fidelity.interference STEPS.npz`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.fitting.steps import DECODE, PREFILL, StepTable

NEAR = 0.25  # context of the decodes alone, relative to that in the mixed step


class Row(NamedTuple):
    """One mixed shape and its halves, in seconds; nan where a half was not measured."""

    decodes: int
    context: int  # of one decode
    prefill: int
    together: float
    decode: float  # the decodes alone
    prompts: float  # the prompts alone
    constant: float  # the shortest step there was: paid once in a mixed step, twice in two

    @property
    def share(self) -> float:
        """Decodes among the tokens."""
        return self.decodes / (self.decodes + self.prefill)

    @property
    def extra(self) -> float:
        """Beyond both halves run one after the other, as a share of them; negative: mixing saves."""
        return self.together / (self.decode + self.prompts) - 1

    @property
    def extra_work(self) -> float:
        """The same with the constant of a step counted once: the interference."""
        return self.together / (self.decode + self.prompts - self.constant) - 1


def rows(table: StepTable) -> list[Row]:
    """Every mixed shape beside what its halves took alone; medians over all visits."""
    alone = table.take(table.kind == DECODE)
    alone = alone.take(alone.before == DECODE)
    constant = float(np.median(alone.seconds[alone.decodes == 1]))
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
            found.append(Row(number, round(context), tokens, together, half, whole, constant))
    return sorted(found, key=lambda row: (row.decodes + row.prefill, row.share, row.context))


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


def table_of(found: list[Row]) -> str:
    """In markdown."""
    names = (
        "tokens",
        "decodes",
        "share",
        "context",
        "together, ms",
        "decodes + prompts, ms",
        "extra",
        "work",
    )
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in found:
        lines.append(
            f"| {row.decodes + row.prefill} | {row.decodes} | {row.share:.2f} | {row.context} "
            f"| {1e3 * row.together:.2f} | {1e3 * row.decode:.2f} + {1e3 * row.prompts:.2f} "
            f"| {100 * row.extra:+.1f} % | {100 * row.extra_work:+.1f} % |"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Print the table; with --json the rows, for a figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.interference", description=__doc__)
    parser.add_argument("steps", type=Path, help="what a calibration kept: CARD.steps.npz")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    try:
        found = rows(StepTable.load(asked.steps))
    except InputError as error:
        sys.exit(f"error: {error}")
    if asked.json:
        said = [row._asdict() | {"share": row.share, "extra": row.extra} for row in found]
        asked.json.write_text(json.dumps(said, indent=1) + "\n")
    print(table_of(found))


if __name__ == "__main__":
    main(sys.argv[1:])
