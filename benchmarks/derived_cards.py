"""How far derived cards are off: held-out calibrated cards, published steps, GPUs left out.

`python -m benchmarks.derived_cards` prints the tables of docs/derive.md; `headgate.cost.derive.expected` has
the error bars that rest on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import headgate
from headgate.cost.card import Card, load_card
from headgate.cost.derive.correct import deployment_of, fit_corrections
from headgate.cost.derive.derived_card import derive_card
from headgate.cost.derive.distil import distil
from headgate.cost.derive.gpus import GPUS, H200, TABLE, left_out
from headgate.cost.derive.grid import shapes
from headgate.cost.derive.models import MODELS
from headgate.cost.derive.step import Deployment, step_seconds
from headgate.cost.derive.wanted import Wanted
from headgate.cost.fit.about import About
from headgate.cost.fit.family import seconds
from headgate.cost.fit.fit import fit
from headgate.cost.fit.quality import measure
from headgate.cost.fit.steps import StepTable
from headgate.cost.laws.work import WorkCost
from headgate.cost.model import Chunk, Shape
from headgate.sim.engine.of_card import engine_of_card

Floats = NDArray[np.float64]

GRID = Path(__file__).parent / "h200" / "results" / "grid"
UNSEEN = {
    "llama-3.1-8b": "derived:llama-3.1-8b@h200:graph1024",
    "qwen3-8b-fp8": "derived:qwen3-8b@h200:fp8:graph1024",
}
CALIBRATED = ("qwen3-8b", "qwen3-4b", "qwen3-30b-a3b")
KINDS = ("decode", "prefill", "mixed")
GRAPH = 1024  # tokens of the largest CUDA graph of the calibrated engines
LENGTHS = ((512, 512), (1024, 128), (128, 1024), (4096, 256))  # mean prompt and output, uniform
SEATS = (128, 512)
SMALLEST_KV = 750_000  # the same on both sides, so that only step times differ

# Medians of the sweep in github.com/ai-dynamo/aiconfigurator (Apache-2.0), fpm_golden_runs/
# fpm_upfront_qwen32_full_once_20260613_194007/tp*_ep1_past4096/fpm_metrics_phase.csv: Qwen3-32B in bf16 with
# vLLM 0.20.1 on B300, seen by the engine; the GPU is named in collector/layerwise/fpm_ground_truth.
PUBLISHED_STEPS = {
    Shape(0, 0, 128, 0, (Chunk(0, 128),)): {1: 16.05, 2: 11.05, 4: 7.96, 8: 7.53},
    Shape(0, 0, 1024, 0, (Chunk(0, 1024),)): {1: 53.1, 2: 33.4, 4: 23.6, 8: 17.6},
    Shape(0, 0, 4096, 0, (Chunk(0, 4096),)): {1: 204.6, 2: 114.8, 4: 70.4, 8: 49.2},
    Shape(1, 4100): {1: 13.5, 2: 8.95, 4: 6.07, 8: 4.52},
    Shape(4, 16400): {1: 14.4, 2: 9.35, 4: 6.38, 8: 4.64},
    Shape(14, 57386): {1: 16.37, 2: 10.16, 4: 6.78, 8: 5.02},
    Shape(6, 24584, 8186, 4089, (Chunk(4089, 7), Chunk(0, 4096), Chunk(0, 4083))): {
        1: 410.5,
        2: 236.5,
        4: 138.6,
        8: 96.7,
    },
}


class Errors(NamedTuple):
    """Signed relative errors of steps, by kind."""

    decode: Floats
    prefill: Floats
    mixed: Floats

    @property
    def every(self) -> Floats:
        """All of them."""
        return np.concatenate(self)

    def line(self) -> str:
        """Median and nine in ten of each kind, in percent."""
        each = [f"{100 * np.median(abs(own)):.1f} / {100 * np.quantile(abs(own), 0.9):.1f}" for own in self]
        return " | ".join([*each, f"{100 * np.median(abs(self.every)):.1f}"])


def by_kind(steps: list[Shape], errors: Floats) -> Errors:
    """Errors of those steps, sorted."""
    kind = np.array([0 if not step.prefill else 2 if step.decodes else 1 for step in steps])
    return Errors(*(errors[kind == number] for number in range(3)))


def calibrated() -> dict[str, Card]:
    """The three cards that were measured on a grid."""
    return {name: load_card(f"cal-h200-{name}") for name in CALIBRATED}


def leave_one_out(held: str) -> Errors:
    """A derived card, corrected by the other two, against the GPU part of the calibrated one on the grid."""
    cards = calibrated()
    others = [(deployment_of(cards[name], H200), cards[name]) for name in CALIBRATED if name != held]
    lost, at = fit_corrections(others), deployment_of(cards[held], H200)
    card = cards[held]
    steps = [step for step in shapes(card.kv_tokens, card.max_running, card.max_batch_tokens)]
    steps = [step for step in steps if not card.region.misses(step)]
    said = [step_seconds(at, step.decodes, step.context, step.chunks, lost) for step in steps]
    terms, _ = distil(steps, said, (at.model.experts, at.model.experts_per_token))
    mine, real = WorkCost(terms), card.cost.unhosted()
    return by_kind(steps, np.array([mine.seconds(step) / real.seconds(step) - 1 for step in steps]))


def throughput(held: str, asynchronous: bool, requests: int = 500) -> Floats:
    """Saturated throughput on the derived card, corrected by the other two, against the calibrated one."""
    cards = calibrated()
    others = [cards[name] for name in CALIBRATED if name != held]
    mine = derive_card(Wanted(held, "h200", graph=GRAPH), others)
    return np.array(list(_against(cards[held], mine, asynchronous, requests)))


def _against(real: Card, mine: Card, asynchronous: bool, requests: int) -> Iterator[float]:
    for means in LENGTHS:
        for seats in SEATS:
            count = requests * seats // 256
            spent = [_makespan(card, means, seats, asynchronous, count) for card in (real, mine)]
            yield spent[0] / spent[1] - 1


def _makespan(card: Card, means: tuple[int, int], seats: int, asynchronous: bool, requests: int) -> float:
    prompt, output = (headgate.length_law("uniform", mean) for mean in means)
    engine = engine_of_card(card, slots=seats, budget=8192, kv_tokens=SMALLEST_KV)
    asked = headgate.generate(requests, prompt=prompt, output=output, seed=1)
    run = headgate.simulate(engine, "mixed", asked, asynchronous=asynchronous)
    return float(run.requests["finished"].max())


def published(degree: int) -> Errors:
    """Laws against published steps of Qwen3-32B on that many B300s, of which only the data sheet is used."""
    at = Deployment(MODELS["qwen3-32b"], GPUS["b300"], degree, graph=512)
    steps = list(PUBLISHED_STEPS)
    errors = [
        1e3 * step_seconds(at, step.decodes, step.context, step.chunks) / times[degree] - 1
        for step, times in PUBLISHED_STEPS.items()
    ]
    return by_kind(steps, np.array(errors))


def scaling(degree: int) -> tuple[float, float]:
    """How much faster a prompt of 4,096 tokens is on that many GPUs than on one: derived and published."""
    step = next(step for step in PUBLISHED_STEPS if step.prefill == 4096)
    at = Deployment(MODELS["qwen3-32b"], GPUS["b300"], graph=512)
    one, many = (step_seconds(replace(at, tensor=count), 0, 0, step.chunks) for count in (1, degree))
    return one / many, PUBLISHED_STEPS[step][1] / PUBLISHED_STEPS[step][degree]


def left_out_gpus(model: str) -> Iterator[tuple[str, Errors]]:
    """Each GPU of the table by its data sheet and the others' efficiencies, against its own."""
    steps = shapes(400_000, 512, 16384)
    for name, gpu in TABLE.items():
        own, other = (Deployment(MODELS[model], each, graph=512) for each in (gpu, left_out(name)))
        pairs = [
            [step_seconds(at, step.decodes, step.context, step.chunks) for step in steps]
            for at in (own, other)
        ]
        yield name, by_kind(steps, np.array(pairs[1]) / np.array(pairs[0]) - 1)


def real_steps(name: str, derived: str, number: int = 1) -> dict[str, dict[str, float]]:
    """Errors of a derived card on timed steps of a grid, by kind; nothing of them was fitted."""
    table = StepTable.load(GRID / f"{name}.{number}.steps.npz")
    card = load_card(derived)
    assert card.work is not None
    return measure(table, seconds(card.work, table)).regions


def unseen_throughput(name: str, derived: str) -> Floats:
    """Saturated throughput on a derived card against the card fitted to timed steps of that engine."""
    said = json.loads((GRID / f"{name}.about.json").read_text(encoding="utf-8"))
    real = fit(StepTable.load(GRID / f"{name}.1.steps.npz"), About(**said)).card()
    return np.array(list(_against(real, load_card(derived), True, 500)))


def main() -> None:
    """All tables."""
    print("Held-out calibrated card: median / nine in ten, % of decodes | prompts | mixed | median of all")
    for held in CALIBRATED:
        print(f"  {held:<16}{leave_one_out(held).line()}")
    print("Saturated throughput on the same, %: median, worst (known largest graph, prior host)")
    for held in CALIBRATED:
        for asynchronous in (False, True):
            off = 100 * throughput(held, asynchronous)
            kind = "asynchronous" if asynchronous else "synchronous"
            print(f"  {held:<16}{kind:<14}{np.median(abs(off)):.1f}, {off[np.argmax(abs(off))]:+.1f}")
    print("Timed steps of the grids, corrections as shipped, %: medians")
    for held, number in (("qwen3-8b", 1), ("qwen3-4b", 1), ("qwen3-30b-a3b", 2)):
        regions = real_steps(held, f"derived:{held}@h200:graph{GRAPH}", number)
        print(
            f"  {held:<16}"
            + ", ".join(f"{kind} {100 * each['median']:.1f}" for kind, each in regions.items())
        )
    print("Timed steps that no law has seen, %: median, of the total; KV tokens; throughput: median, worst")
    for name, derived in UNSEEN.items():
        card, regions = load_card(derived), real_steps(name, derived)
        each = [f"{k} {100 * e['median']:.1f}, {100 * e['total']:+.1f}" for k, e in regions.items()]
        off = 100 * unseen_throughput(name, derived)
        served = f"{np.median(abs(off)):.1f}, {off[np.argmax(abs(off))]:+.1f}"
        print(f"  {name:<16}{' | '.join(each)}; {card.kv_tokens:,}; {served}")
    print("Published steps of Qwen3-32B on B300, by tensor parallel degree; speed-up of a prompt of 4,096")
    for degree in (1, 2, 4, 8):
        mine, theirs = scaling(degree)
        print(f"  tp {degree}            {published(degree).line()}; {mine:.2f}, published {theirs:.2f}")
    print("GPUs by data sheet and the efficiencies of the others")
    for model in ("llama-3.1-8b", "mixtral-8x7b"):
        for name, errors in left_out_gpus(model):
            print(f"  {model:<14}{name:<14}{errors.line()}")


if __name__ == "__main__":
    main()
