"""`headgate card`: a cost card for a model and a GPU without measuring; what there is to choose from."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from headgate.cli.help import Application
from headgate.cli.output import check_json, write_json
from headgate.cli.pages import said_to
from headgate.core.errors import InputError
from headgate.record.whole_file import write_whole

card = Application(
    help="Derive a cost card without measuring; list and show cards.",
)

DERIVE = """Derive a cost card from a model's config, a GPU and parallelism.

Nothing is measured. Matrix products, attention, experts and all-reduce are
priced by laws fitted to public operator tables, corrected by a calibrated card;
the host is a prior. The card carries its expected error, and every command that
uses it prints that. The same card by name, without a file, wherever --card is
taken: derived:MODEL@GPU:tp4 (then :ep4, :fp8, :kv-fp8, :util0.9, :graph1024).

\b
Examples:
  headgate card derive --model llama-3.1-70b --gpu h100-sxm --tp 4 --out my.json
  headgate card derive --config config.json --gpu l40s --dtype fp8
  headgate card derive --model qwen3-14b --gpu h200 --correct cal-h200-qwen3-8b
  headgate simulate --card derived:llama-3.1-70b@h100-sxm:tp4 --clients 64
"""


@card.command(help=DERIVE)
def derive(
    gpu: Annotated[
        str, typer.Option(help="a GPU, such as h100-sxm (headgate card list), or 312tf-2.04tb-80gb")
    ],
    model: Annotated[str | None, typer.Option(help="a model of the table; see headgate card list")] = None,
    config: Annotated[str | None, typer.Option(help="or the config.json of any decoder")] = None,
    tp: Annotated[int, typer.Option(help="tensor parallel: 1, 2, 4 or 8 GPUs")] = 1,
    pp: Annotated[int, typer.Option(help="pipeline parallel; above 1 only with --approximate")] = 1,
    ep: Annotated[int, typer.Option(help="expert parallel: 1, or as many as --tp")] = 1,
    dtype: Annotated[str, typer.Option(help="of the weights: auto, bf16 or fp8")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="of KV: bf16 or fp8")] = "bf16",
    utilisation: Annotated[float, typer.Option(help="vLLM's --gpu-memory-utilization")] = 0.92,
    graph: Annotated[int, typer.Option(help="tokens of the engine's largest CUDA graph")] = 512,
    correct: Annotated[
        list[str] | None, typer.Option(help="a calibrated card of the same GPU (may be repeated)")
    ] = None,
    approximate: Annotated[bool, typer.Option(help="derive also what the laws do not cover")] = False,
    out: Annotated[str | None, typer.Option(help="the card to write (default: only show it)")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a card that exists")] = False,
    json: Annotated[str | None, typer.Option(help="the card as JSON, to a file or - for stdout")] = None,
) -> None:
    """Derive, say what comes out, and write it where asked."""
    from headgate.cli.calibrate import card_file
    from headgate.cost.card import load_card
    from headgate.cost.derive.derived_card import derive_card
    from headgate.cost.derive.wanted import Wanted

    check_json(json)
    if (model is None) == (config is None):
        raise InputError("card derive needs one of --model NAME and --config config.json")
    place = None if out is None else card_file(out, overwrite)
    what = model or str(config)
    if config is not None and not config.endswith(".json"):
        what = str(Path(config) / "config.json")
    wanted = Wanted(what, gpu, tp, pp, ep, dtype, kv_dtype, utilisation, graph, approximate)
    measured = [load_card(name) for name in correct or ()]
    found = derive_card(wanted, measured, name=place.stem if place else "")
    say = said_to(json)
    for line in _lines(found):
        print(line, file=say)
    if place is not None:
        _write(place, found.text())
        print(f"card: {place}", file=say)
    elif not correct:
        print(f"by name: --card {found.name}", file=say)
    write_json(json, json_module.loads(found.text()))


@card.command(name="list")
def list_all(
    json: Annotated[str | None, typer.Option(help="as JSON, to a file or - for stdout")] = None,
) -> None:
    """List cards, and the models and GPUs to derive cards for."""
    from headgate.cost.card import list_cards, load_card
    from headgate.cost.derive.gpus import GPUS, MEASURED
    from headgate.cost.derive.models import MODELS

    check_json(json)
    cards = {name: load_card(name).description for name in list_cards()}
    models = {name: {"parameters": each.weights, "kv_bytes": each.kv_bytes} for name, each in MODELS.items()}
    gpus = {name: {"gpu": each.name, "efficiencies": each.origin} for name, each in GPUS.items()}
    say = said_to(json)
    print("Cards that ship", file=say)
    for name, text in cards.items():
        print(f"  {name:<32}{text}", file=say)
    print("\nModels to derive for (parameters, KV bytes per token)", file=say)
    for name, model in MODELS.items():
        print(f"  {name:<20}{model.weights / 1e9:>8.1f} B{model.kv_bytes:>10,.0f}", file=say)
    print("\nGPUs to derive for", file=say)
    for name, gpu in GPUS.items():
        known = "operators measured" if gpu.origin == MEASURED else "data sheet only, wider error"
        print(f"  {name:<16}{gpu.name:<46}{known}", file=say)
    write_json(json, {"cards": cards, "models": models, "gpus": gpus})


@card.command()
def show(
    name: Annotated[str, typer.Argument(help="a card by name, path or derived:MODEL@GPU")],
    json: Annotated[str | None, typer.Option(help="the card as JSON, to a file or - for stdout")] = None,
) -> None:
    """Show step times, limits, origin and expected error of a card."""
    from headgate.cost.card import load_card

    check_json(json)
    found = load_card(name)
    for line in _lines(found):
        print(line, file=said_to(json))
    write_json(json, json_module.loads(found.text()))


STEPS = ((1, 1024, 0), (64, 1024, 0), (256, 1024, 0), (0, 0, 512), (0, 0, 8192), (64, 1024, 2048))


def _lines(found: Any) -> list[str]:
    """A card for a terminal."""
    from collections import Counter

    from headgate.cost.error_bar import error_bar
    from headgate.cost.model import Shape

    lines = [f"{found.name}: {found.model} on {found.gpu}", found.description]
    lines.append(
        f"{found.kv_tokens:,} KV tokens, at most {found.max_running:,} requests at once, "
        f"{found.max_model_len:,} tokens each"
    )
    lines += ["", "decodes  context of each  prompt tokens  step, ms (GPU)"]
    cost = found.cost.unhosted()
    for decodes, context, prompt in STEPS:
        if decodes * context > found.kv_tokens or decodes > found.max_running:
            continue
        seconds = cost.seconds(Shape(decodes, decodes * context, prompt))
        lines.append(f"{decodes:>7}{context if decodes else '-':>17}{prompt:>15}{1000 * seconds:>16.2f}")
    lines.append("")
    numbers = found.provenance.numbers
    if numbers:
        counts = Counter(number.origin for number in numbers.values())
        told = ", ".join(f"{counts[kind]} {kind}" for kind in ("measured", "published", "assumed"))
        lines.append(f"Numbers in it and behind it: {told} (provenance.numbers of the card names each).")
    lines += [f"Assumed: {text}" for text in found.provenance.assumptions]
    return [*lines, *error_bar(found)]


def _write(place: Path, text: str) -> None:
    try:
        write_whole(place, text)
    except OSError as error:
        raise InputError(f"--out {place}: {error.strerror}; name a file that can be written") from None
