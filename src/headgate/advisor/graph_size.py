"""The largest CUDA graph that vLLM should capture where gaps between tokens are promised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headgate.advisor.capacity.slo import Level, promised_gap
from headgate.advisor.flags import Flag
from headgate.experiment.settings import Experiment
from headgate.methods.keep.confined import confined
from headgate.sim.engine.engine import Engine

FLAG = "--max-cudagraph-capture-size"
LARGEST, MULTIPLE = 4096, 16  # the largest size measured; vLLM captures every 16 tokens
WHY = (
    "steps with prompts then run from CUDA graphs; vLLM's own limit is 512 tokens. On an H200 a launch "
    "beyond it took the host 40 ms, from a graph 15 ms or less, and single launches of 100 ms made gaps "
    "late. Graphs up to 4,096 tokens took 27 s more at the start and 1.6 GiB."
)


def graph_flag(budget: int, largest: int | None = None) -> Flag:
    """For steps of up to `budget` tokens; `largest` is what was simulated."""
    return Flag(FLAG, min(-(-budget // MULTIPLE) * MULTIPLE, largest or LARGEST), WHY)


def with_graphs(settings: Experiment, levels: Sequence[Level]) -> Experiment:
    """Simulated with the graphs that are advised where a gap is promised, unless the user names others."""
    if settings.graph or promised_gap(levels) is None:
        return settings
    return settings.model_copy(update={"graph": LARGEST})


def graphs_said(settings: Experiment, engine: Engine, levels: Sequence[Level]) -> list[str]:
    """With which graphs the gaps of a promise were simulated, where the card tells that they matter."""
    if not settings.graph or promised_gap(levels) is None or engine.cost.host is None:
        return []
    return [f"steps run from CUDA graphs of up to {settings.graph:,} tokens (vLLM: {FLAG}; here: --graph)"]


def small_graphs(engine: Engine, levels: Sequence[Level], policies: Iterable[str]) -> list[str]:
    """Where graphs of the simulated size make `keep` run prompts in small steps."""
    gap = promised_gap(levels)
    said = confined(engine.cost, gap) if gap is not None and "keep" in policies else None
    return [f"{said} (here: --graph)"] if said else []
