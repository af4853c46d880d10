"""How long a decode step seems to take, by what the host launches meanwhile.

`python -m studies.fidelity.launches --help`
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.card import Card, load_card
from headgate.cost.fit.fit import waiting
from headgate.cost.fit.solve import seconds
from headgate.cost.fit.steps import Floats, StepTable
from headgate.cost.laws.work import WorkCost
from headgate.cost.model import Chunk, Shape
from studies.cards.step_logs import read_steps

BANDS = ((0, 100), (100, 400), (400, 700), (700, 1100))  # requests in the step that is launched
KINDS = ("decodes alone", "prompts, within a graph", "prompts, beyond graphs")


def options(argv: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.launches", description=__doc__)
    parser.add_argument("steps", nargs="+", type=Path, help="step tables, .npz")
    parser.add_argument("--card", required=True, help="one with a host: a name or a file")
    parser.add_argument("--graph", type=int, help="tokens of the largest CUDA graph (default: the card's)")
    return parser.parse_args(argv)


class Waits(NamedTuple):
    """Decode steps after decode steps, in milliseconds, and the steps launched while they ran."""

    real: Floats
    gpu: Floats
    host: Floats
    then: StepTable


def waits(table: StepTable, card: Card, graph: int) -> Waits:
    """What was seen, and what the card says."""
    if card.work is None or card.host is None:
        raise InputError(f"card {card.name} has no host; calibrate it on an asynchronous engine")
    first = waiting(table)
    gpu = 1e3 * seconds(WorkCost(card.work).unhosted().terms, table)[first]
    real, then = 1e3 * table.seconds[first], table.take(first + 1)
    count = np.nan_to_num(then.prompts, nan=1.0).astype(int)
    shapes = [
        Shape(int(d), 0, int(p), 0, (Chunk(0, 1),) * n)
        for d, p, n in zip(then.decodes, then.prefill, count, strict=True)
    ]
    law = replace(card.host, graph=graph)
    return Waits(real, gpu, 1e3 * np.array([law.seconds(shape) for shape in shapes]), then)


def scatter(table: StepTable, card: Card, graph: int) -> str:
    """How far single hosts are from the law, where by the law it is they who were waited for."""
    real, gpu, host, then = waits(table, card, graph)
    rows = (then.prefill > 0) & (host > gpu)
    ten, half, ninety = np.quantile(real[rows] / host[rows], (0.1, 0.5, 0.9))
    return (
        f"{rows.sum()} waited for prompts, seen / law: 10 % {ten:.2f}, median {half:.2f}, 90 % {ninety:.2f}"
    )


def lines(table: StepTable, card: Card, graph: int) -> list[str]:
    """By the kind of the step launched meanwhile, and its requests."""
    real, gpu, host, then = waits(table, card, graph)
    kind = (then.prefill > 0).astype(int) + ((then.prefill > 0) & (then.tokens > graph))
    requests = then.decodes + then.prompts
    found = ["| launched meanwhile | requests in it | steps | GPU | host | seen: 10 %, median, 90 % |"]
    found.append("|" + "---|" * 6)
    for number, name in enumerate(KINDS):
        for low, high in BANDS:
            rows = (kind == number) & (requests > low) & (requests <= high)
            if rows.sum() < 3:
                continue
            ten, half, ninety = np.quantile(real[rows], (0.1, 0.5, 0.9))
            found.append(
                f"| {name} | {low + 1} to {high} | {rows.sum()} | {np.median(gpu[rows]):.1f} | "
                f"{np.median(host[rows]):.1f} | {ten:.1f}, {half:.1f}, {ninety:.1f} |"
            )
    return found


def main(argv: list[str]) -> None:
    """The table."""
    asked = options(argv)
    try:
        card = load_card(asked.card)
        graph = asked.graph or (card.host.graph if card.host else 0)
        table = read_steps(asked.steps)
        print("\n".join([*lines(table, card, graph), "", scatter(table, card, graph)]))
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
