"""Fits the calibrated cards of the H200 again, from the steps of its grids and, for Qwen3-8B, of 34 runs.

`python tools/calibrated_cards.py` writes them; `--check` writes nothing and fails if one would change.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from headgate.cost.card import Card, load_card  # noqa: E402
from headgate.cost.fit.fit import (  # noqa: E402
    LARGEST_GRAPH,
    METHOD,
    Fitted,
    fit,
    fit_drafts,
    fit_host,
)
from headgate.cost.fit.steps import About, StepTable  # noqa: E402
from studies.cards.step_logs import read_steps  # noqa: E402  # needs the path

CARDS = ROOT / "src" / "headgate" / "cards"
RESULTS = ROOT / "studies" / "h200" / "results"
MODELS = {"qwen3-8b": "Qwen3-8B", "qwen3-4b": "Qwen3-4B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
WITH_RUNS = ("qwen3-8b",)  # models that were also served for minutes, in studies/h200
LONG_PROMPTS = {"qwen3-8b": (0, 100_000)}  # checked in studies/h200/results/context, not fitted
DENSE = "Weights were made up; the times of a dense model do not depend on them."
MADE_UP = {
    "qwen3-8b": DENSE,
    "qwen3-4b": DENSE,
    "qwen3-30b-a3b": "Weights were made up, so the router sends tokens to all experts alike. Trained routers "
    "prefer some: small batches then read fewer experts and take less, large ones wait for the busiest.",
}

DRAFTS = {"qwen3-8b": "k3"}  # models that were also timed with drafts, in results/drafts
DRAFTED = (
    "Drafts: one grid of 45 s with a drafter of one layer and 3 drafts, synchronous, V1 model runner, for "
    "vLLM 0.26 runs draft models so: what its host takes between two steps is in them. Passes and steps were "
    "not told apart, because one number of drafts was timed.",
    "The drafter's own prompts are not priced: steps of prompts alone took 2 to 3 ms more.",
)


def fitted(model: str) -> Fitted:
    """The law of one model, from all its steps."""
    grids = logs = sorted((RESULTS / "grid").glob(f"{model}.*.steps.npz"))
    source = f"headgate calibrate: {', '.join(log.name for log in logs)} in studies/h200/results/grid"
    if model in WITH_RUNS:
        logs = [*grids, *sorted((RESULTS / "steps").glob("*.npz"))]
        source += "; 34 runs in studies/h200/results/steps"
    said = json.loads((RESULTS / "grid" / f"{model}.about.json").read_text(encoding="utf-8"))
    graph = int(said["settings"][LARGEST_GRAPH])
    if model in WITH_RUNS:
        said["settings"][LARGEST_GRAPH] = "512 or 1024"  # it was that of the slots
    about = replace(About(**said), name=f"cal-h200-{model}", model=MODELS[model], source=source)
    found = fit(read_steps(logs), about)
    return replace(found, host=fit_host(read_steps(grids), found.terms, graph))  # grids had one graph size


def card_of(found: Fitted, model: str) -> Card:
    """The card, with what only we know."""
    card = found.card()
    known = card.provenance
    said = known.model_copy(update={"assumptions": [*known.assumptions, MADE_UP[model]]})
    region = card.region.model_copy(update={"behind": LONG_PROMPTS.get(model)})
    return card.model_copy(update={"provenance": said, "region": region})


def drafted(card: Card, model: str) -> Card:
    """The model's card with what drafts take, for an engine that is not ahead."""
    name = f"{model}.{DRAFTS[model]}"
    said = json.loads((RESULTS / "drafts" / f"{name}.about.json").read_text(encoding="utf-8"))
    steps = StepTable.load(RESULTS / "drafts" / f"{name}.steps.npz")
    assert card.work is not None
    drafting = fit_drafts(steps, card.work, said["settings"][METHOD])
    known = card.provenance
    told = {
        "source": f"{known.source}; {name}.steps.npz in studies/h200/results/drafts",
        "assumptions": [*known.assumptions, *DRAFTED],
        "settings": said["settings"],
        "date": said["date"],
        "grid": [],  # that of the card it is made from
    }
    limits = {limit: said[limit] for limit in ("kv_tokens", "max_running", "max_batch_tokens")}
    update = limits | {"name": f"{card.name}-{DRAFTS[model]}", "host": None, "speculation": drafting}
    return card.model_copy(update=update | {"provenance": known.model_copy(update=told)})


def main(argv: list[str]) -> None:
    """All of them, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*MODELS], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args(argv)
    for model in asked.models:
        found = fitted(model)
        cards = [card_of(found, model)]
        cards += [drafted(card, model) for card in cards if model in DRAFTS]
        print("\n".join([", ".join(card.name for card in cards), *found.lines(), ""]))
        for card in cards:
            path = CARDS / f"{card.name}.json"
            if not asked.check:
                card.save(path)
            elif load_card(path) != card:
                sys.exit(f"{path} would change; run without --check")


if __name__ == "__main__":
    main(sys.argv[1:])
