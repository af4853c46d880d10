"""How far derived cards are off: held-out calibrated cards, published steps, GPUs left out.

`python -m studies.cards.derived` prints the tables; docs/cards.md has their summary, and
`headgate.cost.derive.derived_card` the error bars that rest on them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import headgate
from headgate.cost.card import Card, load_card
from headgate.cost.derive.derived_card import (
    SUM_CONSTANT,
    SUM_PER_REQUEST,
    WantedCard,
    deployment_of,
    derive_card,
    distil,
    fit_corrections,
    kv_tokens,
    shapes,
)
from headgate.cost.derive.gpus import (
    AS_L40S,
    ASSUMED,
    GPUS,
    H200,
    OPERATORS,
    TABLE,
    AllReduce,
    Gpu,
    median_gpu,
)
from headgate.cost.derive.step import Deployment, step_seconds
from headgate.cost.derive.transformer import MODELS
from headgate.cost.fit.fit import fit, measure
from headgate.cost.fit.solve import seconds
from headgate.cost.fit.steps import About, StepTable
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.cost.model import Chunk, Shape
from headgate.sim.engine.engine import engine_of_card
from headgate.workloads.arrivals import Poisson

Floats = NDArray[np.float64]
Priced = Callable[[int, float, float], tuple[WorkTerms, int]]

GRID = Path(__file__).parents[1] / "h200" / "results" / "grid"
UNSEEN = {
    "llama-3.1-8b": "derived:llama-3.1-8b@h200:graph1024",
    "qwen3-8b-fp8": "derived:qwen3-8b@h200:fp8:graph1024",
}
CALIBRATED = ("qwen3-8b", "qwen3-4b", "qwen3-30b-a3b")
KINDS = ("decode", "prefill", "mixed")
GRAPH = 1024  # tokens of the largest CUDA graph of the calibrated engines
LENGTHS = ((512, 512), (1024, 128), (128, 1024), (4096, 256))  # mean prompt and output, uniform
SLOTS = (128, 512)
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


# Steps of three runs in github.com/casys-kaist/LLMServingSim: 300 requests of ShareGPT lengths at 10/s, 2,048
# tokens a step. From seconds of bench/examples/RTXPRO6000/*/vllm/timeseries.csv and, for the RTX 4090,
# bench/results/llama-3.1-8b-rtx4090/timeseries.csv in which only decodes ran, and from steps full of prompts;
# contexts from the KV in use. vLLM 0.28 (4090: 0.19), asynchronous; the two GPUs with NCCL, vLLM's own
# all-reduce switched off.
def _prompts(decodes: int, context: int, tokens: int) -> Shape:
    return Shape(decodes, context, tokens, 0, (Chunk(0, tokens),))


PUBLIC_STEPS: dict[tuple[str, str, int, int], dict[Shape, float]] = {
    ("qwen3-32b", "rtx-pro-6000", 2, 256): {
        Shape(128, 120_000): 50.0,
        Shape(128, 137_000): 51.7,
        Shape(128, 157_000): 53.5,
        Shape(46, 59_600): 36.1,
        Shape(30, 45_800): 34.1,
        Shape(1, 1_500): 27.8,
        _prompts(30, 30_000, 2018): 272.0,
        _prompts(70, 60_000, 1978): 282.0,
    },
    ("llama-3.1-8b", "rtx-pro-6000", 1, 256): {Shape(128, 139_000): 26.7, Shape(1, 1_500): 11.5},
    ("llama-3.1-8b", "rtx-4090", 1, 512): {
        Shape(40, 41_300): 26.0,
        Shape(28, 41_000): 25.3,
        Shape(16, 23_000): 20.2,
        Shape(15, 23_200): 20.0,
        _prompts(18, 20_000, 2030): 172.0,
    },
}
# The same runs as a whole: mean prompt (less what the prefix cache had) and output tokens, slots, KV tokens,
# seconds until all were served.
PUBLIC_SERVED = {
    "derived:llama-3.1-8b@rtx-pro-6000:graph256": (857, 653, 128, 574_608, 66.0),
    "derived:qwen3-32b@rtx-pro-6000:tp2:graph256": (794, 665, 128, 462_144, 134.0),
    "derived:llama-3.1-8b@rtx-4090:util0.9": (857, 653, 256, 41_408, 184.0),
}
REAL_KV = {  # KV tokens that vLLM found room for; the first five were measured here
    "derived:qwen3-8b@h200": 812_144,
    "derived:qwen3-4b@h200": 870_688,
    "derived:qwen3-30b-a3b@h200": 762_464,
    "derived:llama-3.1-8b@h200": 914_592,
    "derived:qwen3-8b@h200:fp8": 859_216,
    "derived:llama-3.1-8b@rtx-pro-6000": 574_608,
    "derived:qwen3-32b@rtx-pro-6000:tp2": 462_144,
    "derived:llama-3.1-8b@rtx-4090:util0.9": 41_408,
}
DEGREES = (2, 4, 8)
# Mean TPOT in ms of closed loops with Qwen3-32B in bf16 on 2, 4 and 8 H100, vLLM 0.12.0 (synchronous
# scheduling): src/aiconfigurator/systems/silicon_sample.csv of AIConfigurator, all rows of its source
# data/h100_sxm/vllm/0.12.0/Qwen_Qwen3-32B.csv.
PUBLIC_RUNS = Path(__file__).parent / "public" / "h100_qwen3_32b_vllm012.csv"


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
    mine = derive_card(WantedCard(held, "h200", graph=GRAPH), others)
    return np.array(list(_against(cards[held], mine, asynchronous, requests)))


def _against(real: Card, mine: Card, asynchronous: bool, requests: int) -> Iterator[float]:
    for means in LENGTHS:
        for slots in SLOTS:
            count = requests * slots // 256
            spent = [_makespan(card, means, slots, asynchronous, count) for card in (real, mine)]
            yield spent[0] / spent[1] - 1


def _makespan(card: Card, means: tuple[int, int], slots: int, asynchronous: bool, requests: int) -> float:
    prompt, output = (headgate.length_law("uniform", mean) for mean in means)
    engine = engine_of_card(card, slots=slots, budget=8192, kv_tokens=SMALLEST_KV)
    asked = headgate.generate(requests, prompt=prompt, output=output, seed=1)
    run = headgate.simulate(engine, "mixed", asked, asynchronous=asynchronous)
    return float(run.requests["finished"].max())


def published(degree: int, starts: float = 1.0, slowness: float = 1.0) -> Errors:
    """Laws against published steps of Qwen3-32B on that many B300s, of which only the data sheet is used."""
    gpu = _linked(GPUS["b300"], starts, slowness)
    at = Deployment(MODELS["qwen3-32b"], gpu, degree, graph=512)
    steps = list(PUBLISHED_STEPS)
    errors = [
        1e3 * step_seconds(at, step.decodes, step.context, step.chunks) / times[degree] - 1
        for step, times in PUBLISHED_STEPS.items()
    ]
    return by_kind(steps, np.array(errors))


def _linked(gpu: Gpu, starts: float, slowness: float) -> Gpu:
    """The GPU with all-reduces that start and send so many times as slowly."""
    links = {count: AllReduce(starts * own.c0, own.speed / slowness) for count, own in gpu.links.items()}
    return replace(gpu, links=links)


def scaling(degree: int) -> tuple[float, float]:
    """How much faster a prompt of 4,096 tokens is on that many GPUs than on one: derived and published."""
    step = next(step for step in PUBLISHED_STEPS if step.prefill == 4096)
    at = Deployment(MODELS["qwen3-32b"], GPUS["b300"], graph=512)
    one, many = (step_seconds(replace(at, tensor=count), 0, 0, step.chunks) for count in (1, degree))
    return one / many, PUBLISHED_STEPS[step][1] / PUBLISHED_STEPS[step][degree]


def left_out(name: str) -> Gpu:
    """A GPU of the table as if only its data sheet and links were known: the others' median."""
    others = median_gpu([gpu for key, gpu in TABLE.items() if key != name])
    return replace(TABLE[name], origin=ASSUMED, **{part: getattr(others, part) for part in OPERATORS})


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


def public_engines() -> dict[str, Errors]:
    """Published steps of engines that no law has seen: real over derived, less one, as a bar has it."""
    found = {
        f"b300 tp {degree}": Errors(*(1 / (1 + own) - 1 for own in published(degree)))
        for degree in (1, *DEGREES)
    }
    for (model, gpu, degree, graph), steps in PUBLIC_STEPS.items():
        found[f"{gpu} tp {degree}"] = _public(
            Deployment(MODELS[model], GPUS[gpu], degree, graph=graph), steps
        )
    return found


def before_its_run() -> Errors:
    """The RTX 4090 as it was derived before its run was looked at: by the efficiencies of an L40S."""
    steps = PUBLIC_STEPS["llama-3.1-8b", "rtx-4090", 1, 512]
    return _public(Deployment(MODELS["llama-3.1-8b"], AS_L40S, graph=512), steps)


def tabled() -> list[Errors]:
    """Engines of GPUs with tables, and of several GPUs: none of their steps was fitted."""
    return [errors for name, errors in public_engines().items() if not name.startswith("rtx-4090")]


def by_sheet() -> list[Errors]:
    """GPUs by their data sheet: the six of the table without their own efficiencies, a B300, the RTX 4090."""
    models = [[errors for _, errors in left_out_gpus(model)] for model in ("llama-3.1-8b", "mixtral-8x7b")]
    six = [
        Errors(*(1 / (1 + np.concatenate(own)) - 1 for own in zip(*pair, strict=True)))
        for pair in zip(*models, strict=True)
    ]
    return [*six, public_engines()["b300 tp 1"], before_its_run()]


def _public(at: Deployment, steps: dict[Shape, float]) -> Errors:
    said = np.array([step_seconds(at, step.decodes, step.context, step.chunks) for step in steps])
    return by_kind(list(steps), np.array(list(steps.values())) / (1e3 * said) - 1)


def nine_in_ten(engines: list[Floats]) -> float:
    """What nine in ten absolute errors are within, every engine weighing alike."""
    engines = [own for own in engines if len(own)]
    size = np.abs(np.concatenate(engines))
    weight = np.concatenate([np.full(len(own), 1 / len(own)) for own in engines]) / len(engines)
    order = np.argsort(size)
    return float(size[order][np.searchsorted(np.cumsum(weight[order]), 0.9 - 1e-9)])


def real_kv() -> dict[str, tuple[float, float]]:
    """Error of the derived KV tokens and the card's bar, both relative to the card."""
    found = {}
    for name, real in REAL_KV.items():
        card = load_card(name)
        assert card.expected_error is not None and card.expected_error.kv is not None
        found[name] = real / card.kv_tokens - 1, card.expected_error.kv
    return found


def served() -> dict[str, float]:
    """Throughput of those runs, real over derived less one; lengths are drawn uniformly about their means."""
    found = {}
    for name, (prompt, output, slots, kv, real) in PUBLIC_SERVED.items():
        engine = headgate.Engine(load_card(name).cost, kv, 32768, 2048, slots)
        prompts, outputs = headgate.length_law("uniform", prompt), headgate.length_law("uniform", output)
        spent = []
        for seed in range(3):
            asked = headgate.generate(300, seed=seed, arrivals=Poisson(10.0), prompt=prompts, output=outputs)
            spent.append(float(headgate.simulate(engine, "mixed", asked).requests["finished"].max()))
        found[name] = float(np.mean(spent)) / real - 1
    return found


class PublicRun(NamedTuple):
    """A closed loop: prompt and output tokens, clients, and seconds per output token."""

    prompt: int
    output: int
    clients: int
    tpot: float


def public_runs(degree: int) -> list[PublicRun]:
    """Those on that many H100."""
    with PUBLIC_RUNS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        PublicRun(
            int(row["prompt"]), int(row["output"]), int(row["clients"]), float(row[f"tp{degree}"]) / 1e3
        )
        for row in rows
    ]


def run_errors(terms: WorkTerms, kv: int, runs: list[PublicRun]) -> Floats:
    """Derived over real TPOT, less one: how far the real rate is off the derived one."""
    found = []
    for each in runs:
        engine = headgate.Engine(WorkCost(terms), kv, 40960, 8192, 256)
        count = 3 * each.clients
        asked = headgate.Workload.of(
            [each.prompt] * count, [each.output] * count, clients=[each.clients] * count
        )
        done = headgate.simulate(engine, "mixed", asked, asynchronous=False).requests
        mine = np.mean((done["finished"] - done["first_token"]) / (each.output - 1))
        found.append(float(mine) / each.tpot - 1)
    return np.array(found)


def _h100(degree: int, starts: float = 1.0, slowness: float = 1.0) -> tuple[WorkTerms, int]:
    """Prices of the GPUs alone, all-reduces with other starts and speeds; KV tokens."""
    at = Deployment(MODELS["qwen3-32b"], _linked(GPUS["h100-sxm"], starts, slowness), degree, graph=512)
    kv = kv_tokens(at, 0.9)
    steps = shapes(kv, 1024, 16384)
    terms, _ = distil(steps, [step_seconds(at, step.decodes, step.context, step.chunks) for step in steps])
    return terms, kv


def _hosted(degree: int, constant: float, per_request: float) -> tuple[WorkTerms, int]:
    """The same with what a synchronous host adds."""
    terms, kv = _h100(degree)
    paid = terms.per_decode + per_request
    return replace(terms, constant=terms.constant + constant, per_decode=paid), kv


def explained() -> Iterator[tuple[int, str, tuple[float, float], Floats]]:
    """Two numbers fitted to two of the degrees, and the errors on the third: communication, and a host.

    Simulated times are nearly linear in both, so the fit is one of differences; the errors are simulated.
    """
    ways: dict[str, tuple[Priced, tuple[float, float], tuple[float, float]]] = {
        "all-reduce: starts, slowness": (_h100, (1.0, 1.0), (3.0, 1.0)),
        "host: seconds a step, a request": (_hosted, (0.0, 0.0), (SUM_CONSTANT, SUM_PER_REQUEST)),
    }
    for way, (priced, base, step) in ways.items():
        moved = [base, (base[0] + step[0], base[1]), (base[0], base[1] + step[1])]
        seen = {d: [run_errors(*priced(d, *at), public_runs(d)) for at in moved] for d in DEGREES}
        for held in DEGREES:
            parts = [seen[degree] for degree in DEGREES if degree != held]
            slopes = np.concatenate([np.stack([own[1] - own[0], own[2] - own[0]], axis=1) for own in parts])
            moves = np.linalg.lstsq(slopes, -np.concatenate([own[0] for own in parts]), rcond=None)[0]
            found = (base[0] + moves[0] * step[0], base[1] + moves[1] * step[1])
            yield held, way, found, run_errors(*priced(held, *found), public_runs(held))


def main() -> None:
    """All tables."""
    _public_tables()
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


def _public_tables() -> None:
    print("Public steps of engines that no law has seen, real over derived less one, %: all of each kind")
    for name, errors in public_engines().items():
        shown = (" ".join(f"{100 * each:+.0f}" for each in own) or "-" for own in errors)
        print(f"  {name:<18}{' | '.join(shown)}")
    print("Nine in ten are within, every engine alike, %: decodes, prompts, mixed")
    for name, group in (("other GPUs", tabled()), ("data sheet", by_sheet())):
        print(
            f"  {name:<18}" + ", ".join(f"{100 * nine_in_ten([e[k] for e in group]):.0f}" for k in range(3))
        )
    print("KV tokens, real over derived less one, and the bar, %")
    for name, (error, bar) in real_kv().items():
        print(f"  {name:<40}{100 * error:+.1f}, ±{100 * bar:.1f}")
    print("Throughput of three public runs, real over derived less one, %")
    for name, error in served().items():
        print(f"  {name:<46}{100 * error:+.0f}")
    print("90 public runs on H100: TPOT derived over real less one, %: mean, nine in ten, worst")
    for degree in DEGREES:
        print(f"  tp {degree}, the GPUs alone: {_line(run_errors(*_h100(degree), public_runs(degree)))}")
    for held, way, found, left in explained():
        print(f"  tp {held}, {way} {found[0]:.2g}, {found[1]:.2g} from the others: {_line(left)}")
        if way.startswith("all-reduce"):
            print(f"        steps on {held} B300 with those: {_line(published(held, *found).every)}")


def _line(errors: Floats) -> str:
    worst = errors[np.argmax(abs(errors))]
    return f"{100 * errors.mean():+.1f}, {100 * np.quantile(abs(errors), 0.9):.1f}, {100 * worst:+.1f}"


if __name__ == "__main__":
    main()
