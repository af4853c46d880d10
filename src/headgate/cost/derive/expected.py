"""How far a derived card may be off, from every measurement it could be held against."""

from __future__ import annotations

from dataclasses import dataclass

from headgate.cost.card import ExpectedError
from headgate.cost.derive.gpus import ASSUMED, GIGA, H200
from headgate.cost.derive.step import Deployment

SLOW_LINK = 100 * GIGA  # bytes/s of an all-reduce; NVLink is faster


@dataclass(frozen=True)
class Bars:
    """Nine steps in ten are within these, relative; saturated throughput within the last."""

    decode: float
    prefill: float
    mixed: float
    throughput: float
    source: str


# `python -m studies.cards.derived` prints the figures behind these: nine in ten errors of engines of which
# nothing was fitted, every engine weighing alike.
HELD_OUT = Bars(0.08, 0.10, 0.10, 0.08, "leave-one-out over three calibrated H200 cards")
OTHER_GPU = Bars(
    0.15,
    0.15,
    0.13,
    0.15,
    "public steps of vLLM on 1 to 8 B300, and runs on RTX PRO 6000, none of them fitted",
)
OVER_PCIE = Bars(0.18, 0.15, 0.13, 0.25, "a public run on 2 RTX PRO 6000, not fitted")
DATA_SHEET = Bars(
    0.20,
    0.55,
    0.55,
    0.40,
    "six GPUs each by the efficiencies of the other five, a B300, a run on an RTX 4090",
)
FP8 = Bars(0.20, 0.20, 0.20, 0.20, "fp8 products, which follow no one law")
SYNCHRONOUS = Bars(0.10, 0.10, 0.10, 0.10, "90 public runs on 2 to 8 H100, each degree from the others' host")
SHARED_EXPERTS = Bars(0.20, 0.26, 0.26, 0.25, "busiest GPU of uneven expert routing, published tables")
ROUGH = Bars(0.5, 0.5, 0.5, 0.5, "--approximate: laws used for what they were not fitted to; a guess")


def expected_error(at: Deployment, kv: float, approximate: bool, synchronous: bool = False) -> ExpectedError:
    """The widest of the bars that apply; that of KV memory is its own."""
    on_h200 = at.gpu is H200 and at.tensor == 1
    bars = [HELD_OUT if on_h200 else OTHER_GPU]
    bars += [OVER_PCIE] if at.tensor > 1 and at.gpu.links[at.tensor].speed < SLOW_LINK else []
    bars += [DATA_SHEET] if at.gpu.origin == ASSUMED else []
    bars += [FP8] if at.fp8 or at.model.bytes_per_weight < 2 else []
    bars += [SHARED_EXPERTS] if at.whole_experts and at.tensor > 1 else []
    bars += [SYNCHRONOUS] if synchronous else []
    bars += [ROUGH] if approximate else []
    widest = {
        name: max(getattr(bar, name) for bar in bars) for name in ("decode", "prefill", "mixed", "throughput")
    }
    return ExpectedError(**widest, kv=float(f"{kv:.2g}"), source="; ".join(bar.source for bar in bars))
