"""How much of the prompts a run found in its prefix caches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headgate.record.tables import Floats, Run


class PrefixHits(NamedTuple):
    """Shares of the prompt tokens of admitted requests, over the whole run."""

    tokens: int
    share: float
    evicted: int  # cached blocks that were taken for other content
    by_kind: dict[str, float]
    by_engine: dict[int, float]


def prefix_hits(run: Run) -> PrefixHits | None:
    """None: the requests shared nothing that was known, or the engine had no cache."""
    evicted = run.meta.get("prefix_evicted")
    if evicted is None:
        return None
    rows = run.requests
    served = np.isfinite(rows["admitted"])
    cached, prompt = rows["cached"][served], rows["prompt"][served]
    kinds = {each["name"]: rows["kind"][served] == place for place, each in enumerate(run.kinds)}
    engines = {int(each): rows["replica"][served] == each for each in np.unique(rows["replica"][served])}
    return PrefixHits(
        tokens=int(cached.sum()),
        share=_share(cached, prompt),
        evicted=int(evicted),
        by_kind={name: _share(cached[part], prompt[part]) for name, part in kinds.items()},
        by_engine={engine: _share(cached[part], prompt[part]) for engine, part in engines.items()},
    )


def _share(cached: Floats, prompt: Floats) -> float:
    whole = float(prompt.sum())
    return float(cached.sum()) / whole if whole else 0.0
