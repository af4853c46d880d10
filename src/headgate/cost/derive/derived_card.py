"""A card from a model's shape, a GPU and a degree of parallelism, without measuring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headgate.cost.card import Card, Provenance, Region
from headgate.cost.derive.correct import deployment_of, fit_corrections
from headgate.cost.derive.corrections import OF_H200, Corrections
from headgate.cost.derive.distil import distil
from headgate.cost.derive.expected import expected_error
from headgate.cost.derive.grid import shapes
from headgate.cost.derive.host import host_prior, with_host, with_synchronous_host
from headgate.cost.derive.memory import BLOCK, WORKSPACE, kv_error, kv_tokens, most_running
from headgate.cost.derive.origins import Rests, origins
from headgate.cost.derive.step import Deployment, step_seconds
from headgate.cost.derive.wanted import Resolved, Wanted, resolve
from headgate.cost.fit.fit import LARGEST_GRAPH
from headgate.cost.laws.host import HostTerms
from headgate.cost.laws.work import WorkTerms
from headgate.cost.model import Shape

MOST_TOKENS = 16384  # in one step
ASYNCHRONOUS = (
    "The host is that of the calibrated cards (slow cores, asynchronous scheduling, vLLM's default from 0.14 "
    "on). An engine without it takes the sum of GPU and host: add :sync to the card's name."
)
SYNCHRONOUS = "GPU and host add up, the host as in 90 public runs of vLLM 0.12 on 2 to 8 H100."
SOURCE = (
    "headgate card derive: the model's config.json, the GPU's data sheet, and laws fitted to "
    "AIConfigurator's operator tables for vLLM 0.24"
)


def derive_card(wanted: Wanted, correct: Sequence[Card] = (), name: str = "") -> Card:
    """The laws on the grid of a calibration, as a card; `correct` are calibrated cards of the same GPU."""
    found = resolve(wanted)
    at = found.at
    measured = [(deployment_of(card, at.gpu), card) for card in correct]
    lost = fit_corrections(measured) if measured else OF_H200
    tokens = kv_tokens(at, wanted.utilisation)
    running = most_running(tokens)
    steps = shapes(tokens, running, MOST_TOKENS)
    seconds = [step_seconds(at, step.decodes, step.context, step.chunks, lost) for step in steps]
    terms, errors = distil(steps, seconds, (at.model.experts, at.model.experts_per_token))
    host = None if wanted.synchronous else host_prior(at.model, at.graph)
    work = with_host(terms, host) if host else with_synchronous_host(terms)
    names = ", ".join(card.name for card in correct)
    corrected = f"calibrated card {names}" if correct else "cal-h200-qwen3-8b"
    return Card(
        name=name or wanted.name,
        gpu=at.gpu.name if at.gpus == 1 else f"{at.gpus} x {at.gpu.name}",
        model=found.model,
        description=_description(found),
        kv_tokens=tokens,
        block=BLOCK,
        max_model_len=min(at.model.longest, tokens),
        max_running=running,
        max_batch_tokens=MOST_TOKENS,
        work=work,
        host=host,
        region=_region(steps),
        expected_error=expected_error(
            at, kv_error(at, tokens), wanted.approximate and bool(found.doubts), wanted.synchronous
        ),
        provenance=_provenance(wanted, found, work, host, lost, corrected, errors, tokens, running),
    )


def _region(steps: list[Shape]) -> Region:
    """The grid."""

    def span(values: list[int]) -> tuple[int, int]:
        there = [value for value in values if value]
        return min(there), max(there)

    return Region(
        decodes=span([step.decodes for step in steps]),
        context=span([step.context for step in steps]),
        prefill=span([step.prefill for step in steps]),
    )


def _description(found: Resolved) -> str:
    at = found.at
    many = "" if at.gpus == 1 else f"{at.gpus} x "
    return f"Derived, not measured: {found.model} on {many}{at.gpu.name}, by laws of its operators."


def _provenance(
    wanted: Wanted,
    found: Resolved,
    terms: WorkTerms,
    host: HostTerms | None,
    lost: Corrections,
    corrected: str,
    errors: np.ndarray[tuple[int], np.dtype[np.float64]],
    tokens: int,
    running: int,
) -> Provenance:
    at = found.at
    limits = {"kv_tokens": tokens, "block": BLOCK, "max_running": running, "max_batch_tokens": MOST_TOKENS}
    limits["max_model_len"] = min(at.model.longest, tokens)
    return Provenance(
        source=SOURCE,
        measured=f"nothing on this engine; corrections for what an engine loses are from {corrected}",
        date="derived when asked for",
        versions={},
        residuals={
            "law of work against laws of operators": {
                "mean": round(float(np.mean(np.abs(errors))), 4),
                "most": round(float(np.max(np.abs(errors))), 4),
            }
        },
        assumptions=_assumptions(wanted, found),
        extrapolated=["everything: no step of this card was timed"],
        settings=_settings(wanted, at),
        model_shape=at.model.shape(),
        numbers=origins(found, Rests(terms, host, lost, corrected, wanted.utilisation), limits),
    )


def _settings(wanted: Wanted, at: Deployment) -> dict[str, str]:
    """As vLLM has them, so that a card is refused on another engine."""
    return {
        "dtype": "bfloat16",
        "tensor parallel": str(at.tensor),
        "quantization": "fp8" if at.model.bytes_per_weight == 1 else "None",
        "KV data type": wanted.kv_dtype,
        LARGEST_GRAPH: str(at.graph),
        "asynchronous scheduling": str(not wanted.synchronous),
    }


def _assumptions(wanted: Wanted, found: Resolved) -> list[str]:
    at = found.at
    notes = [
        SYNCHRONOUS if wanted.synchronous else ASYNCHRONOUS,
        "What an engine loses against operators timed alone is that of an H200 with Qwen3-8B."
        if "H200" not in at.gpu.name
        else "",
        f"{WORKSPACE / 1e9:g} GB of each GPU for activations and CUDA graphs, as on an H200.",
        f"Efficiencies of operators {at.gpu.source}." if at.gpu.origin == "assumed" else "",
        "The router sends tokens to all experts alike. Trained routers prefer some."
        if at.model.experts
        else "",
        "KV of layers with a window is counted in full." if at.model.window else "",
        "fp8 products at the bf16 laws' efficiencies." if at.fp8 else "",
        *(f"Approximated: {doubt}." for doubt in found.doubts),
    ]
    return [note for note in notes if note]
