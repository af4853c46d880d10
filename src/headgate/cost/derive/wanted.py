"""Which card to derive, from flags or from a name; what is refused; its KV memory and its host."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from headgate.core.errors import InputError, unknown
from headgate.cost.derive.gpus import gpu_named
from headgate.cost.derive.step import Deployment
from headgate.cost.derive.transformer import Transformer, model_named, read_config
from headgate.cost.laws.terms import HostTerms
from headgate.cost.laws.work import WorkTerms

AUTO, BF16, FP8 = "auto", "bf16", "fp8"
DTYPES = (AUTO, BF16, FP8)
KV_DTYPES = (BF16, FP8)
DEGREES = (1, 2, 4, 8)
QUARTER = 0.5  # bytes of a weight in four bits
UTILISATION = 0.92  # vLLM's default from 0.22 on
GRAPH = 512  # tokens of vLLM's largest CUDA graph, from 256 slots on


@dataclass(frozen=True)
class WantedCard:
    """A model (a name of the table, or a config.json), a GPU, and how they are used."""

    model: str
    gpu: str
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    dtype: str = AUTO
    kv_dtype: str = BF16
    utilisation: float = UTILISATION
    graph: int = GRAPH  # tokens of the engine's largest CUDA graph
    approximate: bool = False
    synchronous: bool = False  # the engine composes a step only when the one before it has ended

    @property
    def name(self) -> str:
        """The name under which `load_card` derives it again."""
        model = self.model if self.from_file else model_named(self.model)[0]
        parts = [f"derived:{model}@{gpu_named(self.gpu)[0]}"]
        degrees = (("tp", self.tensor), ("pp", self.pipeline), ("ep", self.expert))
        parts += [f"{word}{degree}" for word, degree in degrees if degree > 1]
        parts += [self.dtype] if self.dtype != AUTO else []
        parts += [f"kv-{self.kv_dtype}"] if self.kv_dtype != BF16 else []
        parts += [f"util{self.utilisation:g}"] if self.utilisation != UTILISATION else []
        parts += [f"graph{self.graph}"] if self.graph != GRAPH else []
        parts += ["sync"] if self.synchronous else []
        parts += ["approximate"] if self.approximate else []
        return ":".join(parts)

    @property
    def from_file(self) -> bool:
        return self.model.endswith(".json")


@dataclass(frozen=True)
class Resolved:
    """What was asked for as a deployment, the model's name, and what is approximated."""

    at: Deployment
    model: str
    gpu: str
    doubts: tuple[str, ...]


def resolve(wanted: WantedCard) -> Resolved:
    """Refuses what the laws do not cover, in one line; with `approximate` it becomes a doubt instead."""
    gpu_name, gpu = gpu_named(wanted.gpu)
    if wanted.from_file:
        model, doubts, stored_fp8 = read_config(wanted.model)
        name = Path(wanted.model).resolve().parent.name or wanted.model
    else:
        name, model = model_named(wanted.model)
        doubts, stored_fp8 = [], False
    _check(wanted, name, model.heads, model.experts)
    fp8 = wanted.dtype == FP8 or (wanted.dtype == AUTO and stored_fp8)
    if wanted.pipeline > 1:
        doubts.append("pipeline parallelism (one batch in flight is priced, so throughput is a lower bound)")
    if fp8 and not gpu.fp8:
        doubts.append(f"fp8 weights on {gpu.name}, which multiplies in bf16")
    if doubts and not wanted.approximate:
        raise InputError(
            f"{name}: the laws do not cover {', '.join(doubts)}; --approximate derives it anyway"
        )
    if fp8:
        model = replace(model, bytes_per_weight=1)
    elif any(doubt.startswith("quantised") for doubt in doubts):
        model = replace(model, bytes_per_weight=QUARTER)
    if wanted.kv_dtype == FP8:
        model = replace(model, bytes_per_kv=1)
    at = Deployment(
        model, gpu, wanted.tensor, wanted.pipeline, wanted.expert > 1, fp8 and gpu.fp8, wanted.graph
    )
    return Resolved(at, name, gpu_name, tuple(doubts))


def _check(wanted: WantedCard, name: str, heads: int, experts: int) -> None:
    if wanted.dtype not in DTYPES:
        raise unknown("data type", wanted.dtype, DTYPES)
    if wanted.kv_dtype not in KV_DTYPES:
        raise unknown("data type of KV", wanted.kv_dtype, KV_DTYPES)
    if wanted.tensor not in DEGREES:
        raise InputError(
            f"tp {wanted.tensor}: all-reduce is known for 2, 4 and 8 GPUs; choose one of these, or 1"
        )
    if heads % wanted.tensor:
        raise InputError(
            f"tp {wanted.tensor}: {name} has {heads} heads, which it does not divide; choose another"
        )
    if not 1 <= wanted.pipeline <= 64:
        raise InputError(f"pp {wanted.pipeline}: choose 1 to 64")
    if wanted.expert > 1 and not experts:
        raise InputError(f"ep {wanted.expert}: {name} has no experts; drop it")
    if wanted.expert not in (1, wanted.tensor):
        raise InputError(
            f"ep {wanted.expert}: vLLM spreads whole experts over the GPUs of tp; choose 1 or {wanted.tensor}"
        )
    if not 1 <= wanted.graph <= 65536:
        raise InputError(f"graph {wanted.graph}: tokens of the largest CUDA graph are 1 to 65,536")
    if not 0.1 <= wanted.utilisation <= 1:
        raise InputError(f"utilisation {wanted.utilisation:g}: the share of memory vLLM may take is 0.1 to 1")


# -- how many KV tokens and requests a deployment holds

WORKSPACE = 2.5e9  # bytes of activations and CUDA graphs on one GPU; 2.3 to 2.7 on the three calibrated cards
BLOCK = 16
WORKSPACE_OFF = 1.5e9  # bytes by which that was off at most on eight engines: studies/cards/derived.py
MOST_RUNNING = 1024  # decodes of the largest step that was ever compared with a measurement


def weight_bytes(at: Deployment) -> float:
    """On one GPU."""
    model = at.model
    ends = model.weights - model.body_weights  # embedding and head stay in bf16
    return (model.body_weights * model.bytes_per_weight + ends * 2) / at.gpus


def kv_tokens(at: Deployment, utilisation: float) -> int:
    """KV tokens that fit beside the weights, in whole blocks.

    KV heads fewer than GPUs are copied, so their bytes do not shrink further. Layers with a window are
    counted like the others.
    """
    room = utilisation * at.gpu.memory - WORKSPACE - weight_bytes(at)
    tokens = int(room / _kv_bytes(at)) // BLOCK * BLOCK
    if tokens < 16 * BLOCK:
        need = (weight_bytes(at) + WORKSPACE) / utilisation
        raise InputError(
            f"the weights leave no room for KV on {at.gpus} x {at.gpu.name}: {need / 1e9:.0f} GB needed on "
            f"each, {at.gpu.memory / 1e9:.0f} GB there; use more GPUs (--tp), fp8 weights or a larger GPU"
        )
    return tokens


def kv_error(at: Deployment, tokens: int) -> float:
    """Relative error of those KV tokens if the workspace is off as far as it ever was."""
    return min(1.0, WORKSPACE_OFF / (tokens * _kv_bytes(at)))


def most_running(tokens: int) -> int:
    """Requests that may run at once: vLLM takes any `max_num_seqs` for which every request has a block."""
    return min(MOST_RUNNING, tokens // BLOCK)


def _kv_bytes(at: Deployment) -> float:
    """Of one token on one GPU."""
    model = at.model
    return 2 * model.bytes_per_kv * model.layers / at.pipeline * at.kv_heads * model.head_size


# -- the host: a prior, for it cannot be derived

# About the middle of the three calibrated cards, whose host has slow cores.
CONSTANT, PER_REQUEST, PROMPTS = 3e-3, 20e-6, 10e-3
DENSE_LAYER, EXPERT_LAYER = 0.8e-3, 1.5e-3  # seconds to launch a layer kernel by kernel
# The same, seen in step times
SHOWN = {"host_constant": 4e-3, "host_per_request": 24e-6, "host_prompts": 7e-3}
SHOWN_UNGRAPHED = 0.5  # of launching kernel by kernel, seen in step times
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
