"""What both are given: closed loops, Poisson arrivals, a real trace, and too little memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headgate.workloads.lengths import Uniform
from headgate.workloads.traces import bundled

SEED = 23
DRAWN = 12_000  # requests of a closed loop; more than any scene serves
TRACE = "azure-conv"
TRACE_BEGINS = 120.0  # seconds into it
MIDDLE = "closed-512"  # the scene whose throughput is called the capacity

Lengths = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scene:
    """One load. Lengths are uniform on half to one and a half times their means.

    Exactly one of `clients` (closed loop), `share` (Poisson, of the capacity) and `faster` (the trace, so
    many times as fast) is not zero. `kv` is the KV the engine may use, in tokens; 0: all of it.
    """

    name: str
    seconds: float
    prompt: int = 256
    output: int = 256
    clients: int = 0
    share: float = 0.0
    faster: float = 0.0
    kv: int = 0


SCENES = (  # the most important first
    Scene(MIDDLE, 22, clients=512),
    Scene("poisson-70", 24, share=0.70),
    Scene("azure", 24, faster=3.0),
    Scene("closed-2048", 30, output=128, clients=2048),
    Scene("pressure", 24, output=512, clients=512, kv=160_000),
    Scene("poisson-95", 26, share=0.95),
    Scene("closed-64", 12, prompt=512, clients=64),
)


@dataclass(frozen=True)
class Demand:
    """The requests of a scene in the order in which they are sent; in a closed loop they have no times."""

    arrival: Times
    prompt: Lengths
    output: Lengths


def demand(scene: Scene, slots: int, rate: float, shrink: int = 1) -> Demand:
    """Draw a scene; the same for every arm. `rate` is the capacity in requests per second."""
    rng = np.random.default_rng([SEED, *scene.name.encode()])
    if scene.faster:
        return _trace(scene, shrink)
    count = DRAWN if scene.clients else max(1, rng.poisson(scene.share * rate * scene.seconds))
    prompt = Uniform(max(2, scene.prompt // shrink)).draw(count, rng)
    output = Uniform(max(2, scene.output // shrink)).draw(count, rng)
    if not scene.clients:
        return Demand(np.sort(rng.uniform(0, scene.seconds, count)), prompt, output)
    under_way = min(scene.clients, slots)
    left = rng.integers(1, output[:under_way], endpoint=True)
    prompt[:under_way] += output[:under_way] - left  # what it has put out stands in its prompt
    output[:under_way] = left
    return Demand(np.full(count, np.nan), prompt, output)


def _trace(scene: Scene, shrink: int) -> Demand:
    whole = bundled(TRACE)
    part = whole.between(TRACE_BEGINS, TRACE_BEGINS + scene.faster * scene.seconds).scale_rate(scene.faster)
    return Demand(
        np.array(part.arrival),
        np.maximum(1, part.prompt // shrink),
        np.maximum(1, part.output // shrink),
    )
