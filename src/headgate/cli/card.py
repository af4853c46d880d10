"""Commands for cost cards: `card` derives, lists and shows them; `calibrate` measures one."""

from __future__ import annotations

import json as json_module
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headgate.cli.help import Application, Text, Texts
from headgate.cli.help import panelled as _option
from headgate.cli.output import Json, bar, json_option, said_to, write_json, write_text
from headgate.core.errors import InputError, RunError

if TYPE_CHECKING:
    from headgate.cost.card import Card
    from headgate.cost.fit.steps import About, StepTable


card = Application(help="Derive a cost card without measuring; list and show cards.")
CardJson = Annotated[Text, json_option("the card as JSON, to a file or - for stdout")]


@card.command()
def derive(
    gpu: Annotated[
        str, typer.Option(help="a GPU, such as h100-sxm (headgate card list), or 312tf-2.04tb-80gb")
    ],
    model: Annotated[Text, typer.Option(help="a model of headgate card list; with --config its name")] = None,
    config: Annotated[Text, typer.Option(help="or the config.json of any decoder")] = None,
    tp: Annotated[int, typer.Option(help="tensor parallel: 1, 2, 4 or 8 GPUs")] = 1,
    pp: Annotated[int, typer.Option(help="pipeline parallel; above 1 only with --approximate")] = 1,
    ep: Annotated[int, typer.Option(help="expert parallel: 1, or as many as --tp")] = 1,
    dtype: Annotated[str, typer.Option(help="of the weights: auto, bf16 or fp8")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="of KV: bf16 or fp8")] = "bf16",
    utilisation: Annotated[float, typer.Option(help="vLLM's --gpu-memory-utilization")] = 0.92,
    graph: Annotated[int, typer.Option(help="tokens of the engine's largest CUDA graph")] = 512,
    correct: Annotated[
        Texts, typer.Option(help="a calibrated card of the same GPU (may be repeated)")
    ] = None,
    approximate: Annotated[bool, typer.Option(help="derive also what the laws do not cover")] = False,
    out: Annotated[Text, typer.Option(help="the card to write (default: only show it)")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a card that exists")] = False,
    json: CardJson = None,
) -> None:
    """Derive a cost card from a model's config, a GPU and parallelism.

    Nothing is measured. Matrix products, attention, experts and all-reduce are priced by laws fitted to
    public operator tables, corrected by a calibrated card; the host is a prior. The card carries its expected
    error, and every command that uses it prints that. The same card by name, without a file, wherever --card
    is taken: derived:MODEL@GPU:tp4 (then :ep4, :fp8, :kv-fp8, :util0.9, :graph1024).

    Examples:
      headgate card derive --model llama-3.1-70b --gpu h100-sxm --tp 4 --out my.json
      headgate card derive --config config.json --gpu l40s --dtype fp8
      headgate card derive --model qwen3-14b --gpu h200 --correct cal-h200-qwen3-8b
      headgate simulate --card derived:llama-3.1-70b@h100-sxm:tp4 --clients 64
    """
    from headgate.cost.card import load_card
    from headgate.cost.derive.derived_card import WantedCard, derive_card

    if not (model or config):
        raise InputError("card derive needs --model NAME or --config config.json")
    place = None if out is None else card_file(out, overwrite)
    what, called = (config, model or "") if config else (str(model), "")
    if config and not config.endswith(".json"):
        if Path(config).is_file():
            raise InputError(f"--config {config} is no .json file; give the config.json of a model")
        what = str(Path(config) / "config.json")
    how = tp, pp, ep, dtype, kv_dtype, utilisation, graph, approximate
    wanted = WantedCard(what, gpu, *how, called=called)
    found = derive_card(wanted, [*map(load_card, correct or ())], name=place.stem if place else "")
    say = said_to(json)
    print(*_lines(found), sep="\n", file=say)
    if place is not None:
        write_text("--out", place, found.text())
        print(f"card: {place}", file=say)
    elif not (correct or called):
        print(f"by name: --card {found.name}", file=say)
    write_json(json, json_module.loads(found.text()))


@card.command(name="list")
def list_all(json: Json = None) -> None:
    """List cards, and the models and GPUs to derive cards for."""
    from headgate.cost.card import list_cards, load_card
    from headgate.cost.derive.gpus import GPUS, MEASURED
    from headgate.cost.derive.transformer import MODELS

    cards = {name: load_card(name).description for name in list_cards()}
    models = {name: {"parameters": each.weights, "kv_bytes": each.kv_bytes} for name, each in MODELS.items()}
    gpus = {name: {"gpu": each.name, "efficiencies": each.origin} for name, each in GPUS.items()}
    say = said_to(json)
    print("Cards that ship", *(f"  {name:<32}{text}" for name, text in cards.items()), sep="\n", file=say)
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
    json: CardJson = None,
) -> None:
    """Show step times, limits, origin and expected error of a card."""
    from headgate.cost.card import load_card

    found = load_card(name)
    print(*_lines(found), sep="\n", file=said_to(json))
    write_json(json, json_module.loads(found.text()))


STEPS = ((1, 1024, 0), (64, 1024, 0), (256, 1024, 0), (0, 0, 512), (0, 0, 8192), (64, 1024, 2048))


def _lines(found: Any) -> list[str]:
    from collections import Counter

    from headgate.cost.likeness import error_bar
    from headgate.cost.model import Shape

    limits = f"{found.kv_tokens:,} KV tokens, at most {found.max_running:,} requests at once, "
    limits += f"{found.max_model_len:,} tokens each"
    head = "decodes  context of each  prompt tokens  step, ms (GPU)"
    lines = [f"{found.name}: {found.model} on {found.gpu}", found.description, limits, "", head]
    for decodes, context, prompt in STEPS:
        if decodes * context <= found.kv_tokens and decodes <= found.max_running:
            step = 1000 * found.cost.unhosted().seconds(Shape(decodes, decodes * context, prompt))
            lines.append(f"{decodes:>7}{context if decodes else '-':>17}{prompt:>15}{step:>16.2f}")
    lines.append("")
    if numbers := found.provenance.numbers:
        counts = Counter(number.origin for number in numbers.values())
        told = ", ".join(f"{counts[kind]} {kind}" for kind in ("measured", "published", "assumed"))
        lines.append(f"Numbers in it and behind it: {told} (provenance.numbers of the card names each).")
    lines += [f"Assumed: {text}" for text in found.provenance.assumptions]
    return [*lines, *error_bar(found)]


# -- calibrate

FILES = ("--from-trace", "--from-steps", "--from-bench", "--from-passes")


class _MeasuredSteps(NamedTuple):
    table: StepTable
    about: About
    notes: tuple[str, ...] = ()
    failed: str | None = None


ENGINE, FROM, SAYS = "Measure an engine", "Or take steps that exist", "What the card says"


def calibrate(
    model: Annotated[Text, typer.Argument(help="a model vLLM knows, a folder, or a config.json")] = None,
    out: Annotated[str, typer.Option(help="the card to write")] = "card.json",
    seconds: Annotated[float, _option("time to measure for, without the start", ENGINE)] = 180.0,
    grid: Annotated[str, _option("full or quick", ENGINE)] = "full",
    slots: Annotated[int, _option("largest batch of decodes, your --max-num-seqs", ENGINE)] = 512,
    budget: Annotated[int, _option("tokens in one step, your --max-num-batched-tokens", ENGINE)] = 8192,
    longest: Annotated[int, _option("tokens of one request, your --max-model-len", ENGINE)] = 16384,
    dummy: Annotated[bool, _option("make weights up (a config.json is enough)", ENGINE, "--dummy")] = False,
    seed: Annotated[int, _option("of the order of the grid", ENGINE)] = 0,
    engine: Annotated[Texts, _option("more for vLLM's engine, NAME=VALUE", ENGINE)] = None,
    from_trace: Annotated[Text, _option("a trace of `headgate serve --trace`", FROM)] = None,
    from_steps: Annotated[Texts, _option("CARD.steps.npz, once for each", FROM)] = None,
    from_bench: Annotated[Text, _option("a `vllm bench serve --save-detailed` result", FROM)] = None,
    from_passes: Annotated[Text, _option("SGLang's forward passes, recorded", FROM)] = None,
    like: Annotated[Text, _option("a card of the same engine, for what the file does not say", FROM)] = None,
    rescale: Annotated[
        bool | None,
        _option(
            "scale --like's prices instead of fitting (default: if it is derived, but not for steps)", FROM
        ),
    ] = None,
    name: Annotated[Text, _option("name of the card (default: from --out)", SAYS)] = None,
    gpu: Annotated[Text, _option("name of the GPU (default: asked from the driver)", SAYS)] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a card that exists")] = False,
    json: Annotated[Text, json_option("quality and steps as JSON, to a file or -")] = None,
) -> None:
    """Measure how long steps take on your GPU and write a cost card.

    With MODEL, a vLLM engine is started in this process and taken through a grid of batch shapes (decodes,
    prompts, both, changes between them) in some minutes. Or take steps that exist: a live trace, saved steps,
    SGLang's forward passes, or what `vllm bench serve --save-detailed` wrote. Steps are kept beside the card
    (CARD.steps.npz), also when the engine dies or you interrupt; --from-steps fits them again.

    Examples:
      headgate calibrate Qwen/Qwen3-8B --out my-card.json --slots 512
      headgate calibrate shape/config.json --grid quick --seconds 90
      headgate calibrate Qwen/Qwen3-32B --engine tensor_parallel_size=2
      headgate calibrate --from-trace serve.jsonl --gpu H200 --out live.json
      headgate calibrate --from-bench result.json --like cal-h200-qwen3-8b
      headgate calibrate --from-bench result.json --like derived:llama-3.1-70b@h100-sxm:tp4
      headgate calibrate --from-passes passes.jsonl --gpu H200 --out sglang.json
      headgate calibrate --from-steps card.steps.npz
    """
    from headgate.cost.card import load_card
    from headgate.live.calibrate.steps import PASS_LIMITS, steps_of_passes

    sources = zip(FILES, (from_trace, from_steps, from_bench, from_passes), strict=True)
    named = [*(["MODEL"] if model else []), *(flag for flag, value in sources if value)]
    if len(named) != 1:
        what = " and ".join(named) if named else "nothing to measure"
        raise InputError(f"{what}: give one of MODEL, {', '.join(FILES[:-1])} and {FILES[-1]}")
    card = card_file(out, overwrite)
    if model:
        if grid not in ("full", "quick"):
            raise InputError(f"--grid {grid}: choose from full, quick")
        words, ground = _engine_words(engine), (slots, budget, longest, grid == "quick")
        found = _measured(model, card, ground=ground, seconds=seconds, seed=seed, dummy=dummy, more=words)
    elif from_trace:
        found = _traced(from_trace, like)
    elif from_bench:
        found = _benched(from_bench, budget, like)
    elif from_passes:
        table = steps_of_passes(from_passes)
        source = f"forward passes of SGLang {Path(from_passes).name}"
        found = _MeasuredSteps(table, replace(_facts(table, like), source=source), PASS_LIMITS)
    else:
        found = _saved(from_steps or [], like)
    found = found._replace(about=replace(found.about, name=name or card.stem, gpu=gpu or found.about.gpu))
    derived = load_card(like) if like else None
    is_derived = derived is not None and bool(derived.expected_error and derived.work)
    if rescale and not is_derived:
        raise InputError("--rescale needs --like with a derived card, such as --like derived:qwen3-14b@h200")
    by_itself = is_derived and not from_steps  # steps of a grid are enough for a fit
    if derived is not None and (by_itself if rescale is None else rescale):
        _rescale(found, derived, card, json)
    else:
        _write_calibrated(found, card, json)


def _write_calibrated(found: _MeasuredSteps, card: Path, json: str | None) -> None:
    from headgate.cost.fit.fit import fit

    say = said_to(json)
    fitted = fit(found.table, found.about)
    text = fitted.card().text()
    write_text("--out", card, text)
    print(*fitted.lines(), *(f"note: {note}" for note in found.notes), f"card: {card}", sep="\n", file=say)
    if not fitted.quality.good_enough():
        print("note: errors above 3 %; measure longer, or on a quieter machine", file=say)
    document = {"card": json_module.loads(text), "steps": len(found.table), "notes": [*found.notes]}
    write_json(json, document)
    if found.failed is not None:
        raise RunError(f"{found.failed}; the card rests on the {len(found.table)} steps measured before")


def _rescale(found: _MeasuredSteps, derived: Card, card: Path, json: str | None) -> None:
    from headgate.cost.card import Card, Number
    from headgate.cost.derive.rescale import rescale

    about = found.about
    limits = {name: getattr(about, name) for name in ("kv_tokens", "block", "max_model_len")}
    numbers = dict(derived.provenance.numbers or {})
    for name, value in limits.items():  # the card gets the memory and lengths of the engine that was timed
        if value != getattr(derived, name):
            numbers[name] = Number(value=value, origin="measured", source="as the engine says")
    provenance = derived.provenance.model_copy(update={"numbers": numbers})
    kept = {field: getattr(derived, field) for field in Card.model_fields}
    on_engine = Card(**kept | limits | {"provenance": provenance})
    done = rescale(on_engine, found.table, about.name, about.source)
    write_text("--out", card, done.card.text())
    notes = (f"note: {note}" for note in found.notes)
    print(*done.lines(), *notes, f"card: {card}", sep="\n", file=said_to(json))
    figures = {"factors": done.factors, "added": done.added, "before": done.before, "after": done.after}
    write_json(json, {"card": json_module.loads(done.card.text()), **figures, "steps": len(found.table)})


def card_file(out: str, overwrite: bool) -> Path:
    card = Path(out)
    if card.suffix != ".json":
        raise InputError(f"--out {out}: a card is a JSON file; name it {card.with_suffix('.json').name}")
    if not card.resolve().parent.is_dir():
        raise InputError(f"--out {out}: its folder does not exist; create it or name another")
    if card.is_dir():
        raise InputError(f"--out {out} is a folder; name a file")
    if card.exists() and not overwrite:
        raise InputError(f"--out {out}: that card exists; name another, or replace it with --overwrite")
    return card


def _engine_words(given: list[str] | None) -> dict[str, Any]:
    from headgate.cli.flags import named_values

    words: dict[str, Any] = {}
    for name, value in named_values(given or [], "--engine", "tensor_parallel_size=2").items():
        try:
            words[name.replace("-", "_")] = json_module.loads(value)
        except ValueError:
            words[name.replace("-", "_")] = value
    return words


def _measured(model: str, card: Path, **how: Any) -> _MeasuredSteps:
    from headgate.live.calibrate.campaign import measured

    file = card.with_suffix(".steps.npz")
    with bar("measuring", 1000) as progress:

        def report(done: float, total: float, doing: str) -> None:
            progress(round(1000 * done / max(1, total)))

        table, about, outcome, failed = measured(model, steps_file=file, report=report, **how)
    card.with_suffix(".about.json").write_text(json_module.dumps(asdict(about), indent=2) + "\n")
    notes = (f"{len(table)} steps in {file}: {outcome}",)
    return _MeasuredSteps(table, about, notes, outcome if failed else None)


def _traced(file: str, like: str | None) -> _MeasuredSteps:
    from headgate.live.calibrate.steps import steps_of_trace
    from headgate.live.sglang import SGLANG
    from headgate.live.vllm import VLLM

    table, header = steps_of_trace(file)
    facts, limits = _facts(table, like), header.get("engine", {})
    names, block = (SGLANG, "page_size") if header.get("driver") == SGLANG.name else (VLLM, "block_size")
    words = {"max_model_len": names.longest, "max_running": names.slots, "block": block}
    words |= {"max_batch_tokens": names.budget}
    known = {name: limits[word] for name, word in words.items() if limits.get(word)}
    known |= {name: header[name] for name in ("model", "kv_tokens") if header.get(name)}
    versions = {str(name): str(value) for name, value in header.get("versions", {}).items()} or facts.versions
    date = str(header.get("date", "unknown"))
    about = replace(facts, **known, versions=versions, date=date, source=f"live trace {Path(file).name}")
    note = "a live trace has the shapes of its traffic only; beyond them the card extrapolates"
    return _MeasuredSteps(table, about, (note,))


def _benched(file: str, budget: int, like: str | None) -> _MeasuredSteps:
    from headgate.live.calibrate.steps import LIMITS, steps_of_bench

    table, words = steps_of_bench(file, budget)
    about = replace(_facts(table, like), source=f"vllm bench serve result {Path(file).name}")
    if words.get("model_id"):
        about = replace(about, model=str(words["model_id"]))
    return _MeasuredSteps(table, replace(about, date=str(words.get("date") or "unknown")), LIMITS)


def _saved(files: list[str], like: str | None) -> _MeasuredSteps:
    from headgate.cost.fit.fit import METHOD
    from headgate.cost.fit.steps import StepTable, concat

    table = concat(StepTable.load(file) for file in files)
    about = (None if like else _beside(files[0])) or _facts(table, like)
    for file in files:
        with suppress(InputError):  # it is asked for one word only
            other = _beside(file)
            if other is not None and METHOD in other.settings:
                settings = {**about.settings, METHOD: other.settings[METHOD]}
                return _MeasuredSteps(table, replace(about, settings=settings))
    return _MeasuredSteps(table, about)


def _beside(steps: str) -> About | None:
    from headgate.cost.fit.steps import About

    file = Path(steps.removesuffix(".steps.npz") + ".about.json")
    if not file.is_file():
        return None
    try:
        return About(**json_module.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError):
        raise InputError(f"{file}: not what headgate calibrate wrote; pass --like CARD") from None


def _facts(table: StepTable, like: str | None) -> About:
    from headgate.cost.card import load_card
    from headgate.cost.fit.fit import LARGEST_GRAPH
    from headgate.cost.fit.steps import About

    if like is not None:
        card = load_card(like)
        names = ("kv_tokens", "max_model_len", "block", "max_running", "max_batch_tokens")
        limits = {name: getattr(card, name) for name in names}
        known, facts = card.provenance, About(card.name, card.gpu, card.model, **limits)
        shape, settings = known.model_shape or {}, known.settings or {}
        if card.host and card.host.graph:  # the settings of a card of several engines may name several
            settings = settings | {LARGEST_GRAPH: str(card.host.graph)}
        return replace(facts, versions=known.versions, model_shape=shape, settings=settings)
    if not len(table):
        raise InputError("no timed step at all; measure longer")
    most = int(table.context.max() + table.behind.max() + table.tokens.max())
    running, tokens = max(1, int(table.decodes.max())), int(table.tokens.max())
    return About("card", "unknown", "unknown", most, most, running, tokens)
