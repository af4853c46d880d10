"""The host of a derived card: a prior, for it cannot be derived."""

from __future__ import annotations

from dataclasses import fields, replace

from headgate.cost.derive.transformer import Transformer
from headgate.cost.laws.host import HostTerms
from headgate.cost.laws.work import WorkTerms

# About the middle of the three calibrated cards, whose host has slow cores.
CONSTANT, PER_REQUEST, PROMPTS = 3e-3, 20e-6, 10e-3
DENSE_LAYER, EXPERT_LAYER = 0.8e-3, 1.5e-3  # seconds to launch a layer kernel by kernel
SHOWN = {
    "host_constant": 4e-3,
    "host_per_request": 24e-6,
    "host_prompts": 7e-3,
}  # the same, seen in step times
SHOWN_UNGRAPHED = 0.5  # of launching kernel by kernel, seen in step times
GRAPH = 512  # tokens of vLLM's largest CUDA graph, from 256 seats on


# What the host of a synchronous engine adds to every step, from the 90 public runs on 2 to 8 H100 of
# studies/cards/derived.py: the same seconds on 2, 4 and 8 GPUs.
SUM_CONSTANT, SUM_PER_REQUEST = 1.2e-3, 61e-6


def host_prior(model: Transformer, graph: int) -> HostTerms:
    """What an asynchronous engine's host takes for a step. Synchronous engines add it to the GPU's time."""
    dense = model.layers - model.expert_layers
    ungraphed = DENSE_LAYER * dense + EXPERT_LAYER * model.expert_layers
    return HostTerms(CONSTANT, PER_REQUEST, PROMPTS, float(f"{ungraphed:.4g}"), graph)


def with_synchronous_host(terms: WorkTerms) -> WorkTerms:
    """Prices of an engine that composes a step when the one before it has ended: GPU and host add up."""
    return replace(
        terms, constant=terms.constant + SUM_CONSTANT, per_decode=terms.per_decode + SUM_PER_REQUEST
    )


def with_host(terms: WorkTerms, host: HostTerms) -> WorkTerms:
    """Prices for runs that do not follow the host beside the GPU: a step takes the longer of the two."""
    own = {field.name: getattr(terms, field.name) for field in fields(terms)}
    ungraphed = float(f"{SHOWN_UNGRAPHED * host.ungraphed:.4g}")
    return WorkTerms(**(own | SHOWN | {"host_ungraphed": ungraphed, "graph": host.graph}))
