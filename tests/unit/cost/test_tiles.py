"""The tile model: known answers batch by batch, the derived coefficients, and the step cost made of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.cost.laws.tiles import TileCost, TileTerms
from headgate.cost.model import Chunk, Shape
from headgate_papers.slai.tile_model import (
    MISTRAL_7B,
    QWEN3_8B,
    TileGpu,
    batch_parts,
    batch_seconds,
    body_pairs,
    derive,
    head_pairs,
)

ROOT = Path(__file__).resolve().parents[3]
MS = 1e-3
TOY = TileTerms(1, 4, (4, 4, 4), (4, 4), 6.0, 0.5, 1.0, 0.25)
REF = TileTerms(32, 4096, (128, 128, 32), (64, 64), 10.415616 * MS, 5e-6, 6e-9, 4e-9)
ADA = load_card("pub-rtx-ada-6000-mistral-7b").tiles
assert ADA is not None

# Batch, then linear, non-linear, decode attention, prompt attention and all of it, in milliseconds.
KNOWN = [
    (REF, [Chunk(0, 512)], [], (41.662464, 2.560, 0, 0.786432, 45.008896)),
    (REF, [Chunk(512, 512)], [], (41.662464, 2.560, 0, 1.572864, 45.795328)),
    (REF, [Chunk(0, 513)], [], (52.078080, 2.565, 0, 1.136640, 55.779720)),
    (REF, [Chunk(0, 128), Chunk(128, 128)], [], (20.831232, 1.280, 0, 0.147456, 22.258688)),
    (REF, [Chunk(0, 2048)], [], (166.649856, 10.240, 0, 12.582912, 189.472768)),
    (REF, [], [1000] * 128, (10.415616, 0.640, 33.554432, 0, 44.610048)),
    (REF, [], [1000] * 129, (20.831232, 0.645, 33.816576, 0, 55.292808)),
    (REF, [], [64, 65], (10.415616, 0.010, 0.049152, 0, 10.474768)),
    (REF, [], [1], (10.415616, 0.005, 0.016384, 0, 10.437000)),
    (REF, [Chunk(1024, 448)], [2000] * 64, (41.662464, 2.560, 33.554432, 2.310144, 80.087040)),
    (ADA, [Chunk(0, 512)], [], (41.32, 2.56, 0, 0.779968, 52.559968)),
    (ADA, [], [2049], (14.8, 0.005, 0.528, 0, 23.233)),
    (ADA, [], [2500] * 128, (14.8, 0.64, 81.92, 0, 105.26)),
    (ADA, [Chunk(1024, 472)], [2500] * 40, (41.32, 2.56, 25.6, 2.315529, 79.695529)),
]


@pytest.mark.parametrize(("terms", "chunks", "positions", "answer"), KNOWN)
def test_known_batches(terms, chunks, positions, answer):
    parts = batch_parts(terms, chunks, positions)
    found = (parts.linear, parts.other, parts.decodes, parts.prompts, parts.total)
    assert [x / MS for x in found] == pytest.approx(answer, abs=6e-7)


def test_toy_in_closed_form():
    # 6 ceil(t/4) + t/2 + sum ceil(i/4)/2 + sum 2 ceil(c/4) ceil((i+c-1)/4)
    assert batch_seconds(TOY, [Chunk(3, 6)], [10, 5]) == 12 + 4 + 1.5 + 1 + 2 * 2 * 3
    assert batch_seconds(TOY, [], []) == 0


def test_a_lone_prompt_on_the_published_card():
    def first_token(prompt: int) -> list[float]:
        starts = range(0, prompt, 512)
        return [batch_seconds(ADA, [Chunk(s, min(512, prompt - s))], []) / MS for s in starts]

    assert first_token(1730) == pytest.approx([52.560, 53.340, 54.120, 30.883], abs=5e-4)
    assert sum(first_token(1730)) == pytest.approx(190.903, abs=1e-3)
    assert sum(first_token(2048)) == pytest.approx(214.920, abs=1e-3)


SWEEP = {64: 724.3, 128: 386.3, 256: 238.8, 384: 243.9, 512: 212.2, 768: 204.9, 1024: 201.5}


@pytest.mark.parametrize("chunk", SWEEP)
def test_the_published_sweep_within_four_percent(chunk):
    starts = range(0, 2048, chunk)
    ours = sum(batch_seconds(ADA, [Chunk(s, min(chunk, 2048 - s))], []) for s in starts)
    assert ours / MS == pytest.approx(SWEEP[chunk], rel=0.04)


def test_masked_tiles_are_charged_so_smaller_chunks_look_cheaper():
    whole = batch_parts(REF, [Chunk(0, 2048)], []).prompts / MS
    parts = sum(batch_parts(REF, [Chunk(s, 128)], []).prompts for s in range(0, 2048, 128)) / MS
    assert (whole, parts) == pytest.approx((12.58, 6.68), abs=5e-3)


def test_chunks_of_one_column_beat_chunks_of_the_common_multiple():
    wide = replace(REF, tile=(256, 128, 32))
    by_column, by_multiple = (
        sum(wide.prompt_pairs(start, size) for start in range(0, 2048, size)) for size in (128, 256)
    )
    assert (by_column, by_multiple) == (17_920, 18_432)


def test_coefficients_from_matrices():
    tile = (128, 128, 32)
    assert (MISTRAL_7B.body_weights, MISTRAL_7B.head_weights) == (6_979_321_856, 131_072_000)
    assert (QWEN3_8B.body_weights, QWEN3_8B.head_weights) == (6_945_767_424, 622_329_856)
    assert (body_pairs(MISTRAL_7B, tile), head_pairs(MISTRAL_7B, tile)) == (1_703_936, 32_000)
    assert (body_pairs(QWEN3_8B, tile), head_pairs(QWEN3_8B, tile)) == (1_695_744, 151_936)
    assert (MISTRAL_7B.kv_bytes, QWEN3_8B.kv_bytes) == (131_072, 147_456)
    slow, fast = TileGpu(176e12, 960e9), TileGpu(176e12, 960e9, kv_share=0.55)
    mistral, qwen = (derive(model, slow, 0.0, 0.0, sampled_head=False) for model in (MISTRAL_7B, QWEN3_8B))
    assert (mistral.per_column / MS, qwen.per_column / MS) == pytest.approx((10.34, 11.01), abs=5e-3)
    assert derive(QWEN3_8B, slow, 0.0, 0.0).per_column / MS == pytest.approx(10.10, abs=5e-3)
    assert (mistral.floor / MS, qwen.floor / MS) == pytest.approx((14.81, 15.77), abs=5e-3)
    assert (mistral.per_context, qwen.per_context) == pytest.approx((0.137e-6, 0.154e-6), abs=5e-10)
    assert derive(MISTRAL_7B, fast, 0.0, 0.0).per_context == pytest.approx(0.25e-6, rel=0.01)
    assert (mistral.per_square, qwen.per_square) == pytest.approx((1.489e-9, 1.676e-9), abs=1e-12)


def test_a_head_on_sampled_positions_is_the_rest_of_the_column():
    apart, inside = (derive(QWEN3_8B, TileGpu(176e12, 960e9), 0.0, 0.0, head) for head in (True, False))
    assert apart.per_column + apart.head_per_column == pytest.approx(inside.per_column)
    batch = [Chunk(0, 300, last=False), Chunk(0, 84)], [500] * 128
    parts = batch_parts(apart, *batch)
    assert parts.head == pytest.approx(2 * apart.head_per_column)  # 128 decodes and one finished prompt
    cost = TileCost(apart)
    shape = Shape(128, 64_000, 384, 0, tuple(batch[0]))
    finished = shape._replace(chunks=(Chunk(0, 300), Chunk(0, 84)))
    assert cost.seconds(shape) == cost.seconds(finished)  # still two tiles of sampled positions
    none = shape._replace(chunks=(Chunk(0, 300, False), Chunk(0, 84, False)))
    assert cost.seconds(shape) - cost.seconds(none) == pytest.approx(apart.head_per_column)


def test_a_tile_taller_than_a_head_is_refused():
    with pytest.raises(InputError, match=r"256 rows is taller than a head of 128; .* choose a tile"):
        derive(QWEN3_8B, TileGpu(1e14, 1e12, tile=(256, 128, 32)), 0.0, 0.0)


chunks = st.lists(st.builds(Chunk, st.integers(0, 5000), st.integers(1, 3000), st.booleans()), max_size=4)


@pytest.mark.parametrize("name", ["derived-h200-qwen3-8b", "pub-rtx-ada-6000-mistral-7b"])
@given(chunks=chunks, tiles=st.lists(st.integers(1, 100), max_size=30))
def test_the_step_cost_is_the_model_where_tiles_divide(name, chunks, tiles):
    card = load_card(name)
    positions = [64 * each for each in tiles]  # whole tiles: the half tile charged on top is known
    sizes = sum(chunk.tokens for chunk in chunks), sum(chunk.start for chunk in chunks)
    found = card.cost.seconds(Shape(len(positions), sum(positions), *sizes, tuple(chunks)))
    extra = card.tiles.per_context * 31.5 * len(positions)
    assert found == pytest.approx(batch_seconds(card.tiles, chunks, positions) + extra, rel=1e-12)


def test_half_a_tile_is_the_mean_over_positions():
    positions = range(1000, 1000 + 640)
    exact = sum(batch_seconds(REF, [], [position]) for position in positions)
    assert sum(TileCost(REF).span(1, 1000, 640)) == pytest.approx(exact, rel=1e-12)


def test_prompts_without_chunks_are_one_prompt():
    cost = TileCost(REF)
    assert cost.seconds(Shape(3, 900, 700, 256)) == cost.seconds(Shape(3, 900, 700, 256, (Chunk(256, 700),)))


def test_equal_by_value():
    again = TileCost(replace(REF))
    assert again == TileCost(REF)
    assert hash(again) == hash(TileCost(REF))
    assert again != TileCost(TOY)
    assert again != "a cost"
    assert "per_column=6.0" in repr(TileCost(TOY))


@pytest.mark.parametrize(
    "bad", [{"layers": 0}, {"tile": (4, 4, 0)}, {"vector_tile": (0, 4)}, {"floor": -1.0}]
)
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        replace(TOY, **bad)


def test_the_cards_are_what_the_tool_makes():
    command = [sys.executable, str(ROOT / "tools" / "tile_cards.py"), "--check"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
