"""What a run found in its prefix caches: prompt tokens, the seconds they would have cost, and evictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.card import recorded_card
from headgate.cost.model import Chunk, Shape
from headgate.record.tables import Flags, Floats, Integers, Run


@dataclass(frozen=True)
class Found:
    """Of the prompt tokens of admitted requests, those that were found when they were first admitted."""

    tokens: int
    share: float
    saved: float | None  # seconds by the card: whole prompts alone, less their rest behind what was found


@dataclass(frozen=True)
class PrefixHits:
    """Over the whole run; `evicted` are cached blocks that were taken for other content, None: not known."""

    all: Found
    evicted: int | None
    kinds: dict[str, Found]
    engines: dict[int, Found]
    evicted_by_engine: dict[int, int]


def prefix_hits(run: Run) -> PrefixHits | None:
    """None: the requests shared nothing that was known, or the engine had no cache."""
    rows, prompt = run.requests, run.requests["prompt"]
    cached = np.where(rows["cached"] < prompt, rows["cached"], 0)  # a whole prompt is KV from another engine
    evicted: Sequence[int] | None = run.meta.get("prefix_evicted")
    if evicted is None and not cached.any():
        return None
    served, saved = np.isfinite(rows["admitted"]), _saved(run, cached)

    def found(part: Flags) -> Found:
        tokens, whole = int(cached[part].sum()), int(prompt[part].sum())
        seconds = None if saved is None else float(saved[part].sum())
        return Found(tokens, tokens / whole if whole else 0.0, seconds)

    engines = [int(each) for each in np.unique(rows["replica"][served])]
    kinds = {str(each["name"]): place for place, each in enumerate(run.kinds)}
    return PrefixHits(
        all=found(served),
        evicted=None if evicted is None else sum(evicted),
        kinds={name: found(served & (rows["kind"] == place)) for name, place in kinds.items()},
        engines={engine: found(served & (rows["replica"] == engine)) for engine in engines},
        evicted_by_engine=dict(enumerate(evicted or ())),
    )


def _saved(run: Run, cached: Integers) -> Floats | None:
    """Seconds of prefill that each request was spared; None where the card is not there any more."""
    try:
        seconds = recorded_card(run.meta["card"]).cost.seconds
    except (InputError, KeyError, TypeError):
        return None
    saved = np.zeros(len(cached))
    prices: dict[tuple[int, int], float] = {}
    for row in np.flatnonzero(cached).tolist():
        prompt, there = pair = int(run.requests["prompt"][row]), int(cached[row])
        if pair not in prices:
            whole = Shape(prefill=prompt, chunks=(Chunk(0, prompt),))
            rest = Shape(prefill=prompt - there, behind=there, chunks=(Chunk(there, prompt - there),))
            prices[pair] = seconds(whole) - seconds(rest)
        saved[row] = prices[pair]
    return saved
