"""Says where a promised gap leaves no time for launches beyond CUDA graphs."""

from __future__ import annotations

from headgate.cost.model import Chunk, Shape, StepCost
from headgate.methods.keep.host import FIRST

MOST_SPENT = 0.5  # of the gap: a graph whose step takes longer confines little


def confined(cost: StepCost, gap: float) -> str | None:
    """What `keep` does there, and the remedy.

    None where such launches fit the gap, or steps from the largest graph fill it. Launches are reckoned as
    slow as `keep` reckons them before it has seen any.
    """
    host = cost.host
    if host is None or not host.graph:
        return None
    tokens = host.graph + 1
    step = Shape(0, 0, tokens, 0, (Chunk(0, tokens, True),))
    launch = FIRST * host.seconds(step)
    if launch <= gap or cost.unhosted().seconds(step) > MOST_SPENT * gap:
        return None
    return (
        f"keep runs prompts in steps of at most {host.graph:,} tokens, the largest CUDA graph: beyond it a "
        f"launch may take the host {1000 * launch:.0f} ms, and gaps must stay below {1000 * gap:.0f} ms; a "
        "larger --max-cudagraph-capture-size lets it take more"
    )
