"""What a run says of its prefix caches: tokens, seconds by the card, evictions, by class and by engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import headgate
from headgate.cost.model import Chunk, Shape
from headgate.stats.metrics import prefix_hits, summarise
from headgate.workloads.workload import Contents

CARD = "cal-h200-qwen3-8b"


def run(blocks: int = 1000, **options):
    """A prompt of 640 three times, once of class `b`; then another; memory for `blocks` blocks."""
    engine = headgate.card_engine(CARD, slots=8)._replace(kv_tokens=16 * blocks, max_model_len=1000)
    pieces = [[(1, 640)], [(1, 640)], [(2, 800)], [(1, 640)]]
    kinds = (headgate.Kind("a"), headgate.Kind("b"))
    workload = headgate.Workload.of(
        [640, 640, 800, 640],
        [2] * 4,
        arrival=[0.0, 10.0, 20.0, 30.0],
        kind=[0, 0, 1, 1],
        kinds=kinds,
        contents=Contents.of(pieces),
    )
    made = headgate.simulate(engine, "mixed", workload, **options)
    return replace(made, meta={**made.meta, "card": CARD})


def test_tokens_seconds_and_classes():
    found = prefix_hits(run())
    assert found.all.tokens == 2 * 624 and found.all.share == pytest.approx(1248 / 2720)
    assert [each.tokens for each in found.kinds.values()] == [624, 624]
    seconds = headgate.load_card(CARD).cost.seconds
    whole, rest = Shape(0, 0, 640, 0, (Chunk(0, 640),)), Shape(0, 0, 16, 624, (Chunk(624, 16),))
    each = seconds(whole) - seconds(rest)
    assert found.all.saved == pytest.approx(2 * each)
    assert found.kinds["b"].saved == pytest.approx(each)
    assert found.evicted == 0


def test_evictions_take_what_would_be_found():
    # 41 blocks are cached when the third request, of 51, comes: it evicts 30 and leaves the first 11. The
    # fourth takes 30: the one that is blank, and 29 of the third.
    found = prefix_hits(run(blocks=62))
    assert found.evicted == 30 + 29
    assert found.all.tokens == 624 + 16 * 11


def test_a_run_without_a_cache_says_nothing_of_it():
    engine = headgate.card_engine(CARD, slots=8)
    plain = headgate.simulate(engine, "mixed", headgate.Workload.of([640] * 2, [2] * 2))
    assert prefix_hits(plain) is None
    assert "prefix_cache" not in summarise(plain).as_dict()


def test_hits_of_a_live_run_count_without_evictions_and_without_a_card():
    made = run()
    meta = {name: value for name, value in made.meta.items() if name not in ("prefix_evicted", "card")}
    found = prefix_hits(replace(made, meta=meta))
    assert found.evicted is None and found.all.saved is None and found.all.tokens == 1248
    none = {**made.requests, "cached": np.zeros(4, dtype=np.int64)}
    assert prefix_hits(replace(made, meta=meta, requests=none)) is None


def test_json_has_it():
    document = summarise(run()).as_dict()["prefix_cache"]
    assert document["all"]["tokens"] == 1248 and document["kinds"]["a"]["share"] == pytest.approx(624 / 1280)
