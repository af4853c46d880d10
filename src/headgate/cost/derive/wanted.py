"""Wanted: which card to derive, from flags or from a name; and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from headgate.core.errors import InputError, unknown
from headgate.cost.derive.config import read_config
from headgate.cost.derive.gpus import gpu_named
from headgate.cost.derive.host import GRAPH
from headgate.cost.derive.memory import UTILISATION
from headgate.cost.derive.models import model_named
from headgate.cost.derive.step import Deployment

AUTO, BF16, FP8 = "auto", "bf16", "fp8"
DTYPES = (AUTO, BF16, FP8)
KV_DTYPES = (BF16, FP8)
DEGREES = (1, 2, 4, 8)
QUARTER = 0.5  # bytes of a weight in four bits


@dataclass(frozen=True)
class Wanted:
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
        """The model is a config.json."""
        return self.model.endswith(".json")


@dataclass(frozen=True)
class Resolved:
    """What was asked for as a deployment, the model's name, and what is approximated."""

    at: Deployment
    model: str
    gpu: str
    doubts: tuple[str, ...]


def resolve(wanted: Wanted) -> Resolved:
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


def _check(wanted: Wanted, name: str, heads: int, experts: int) -> None:
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
