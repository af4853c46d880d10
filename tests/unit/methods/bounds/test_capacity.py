"""The rate no policy exceeds: known answers of the tile model, prices of straight lines, and theorem 2."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import betaincinv

from headgate.core.errors import InputError
from headgate.cost.card import list_cards, load_card
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.cost.laws.tiles import TileCost, TileTerms
from headgate.cost.laws.work import WorkCost
from headgate.cost.model import Shape
from headgate.methods.bounds import (
    Need,
    Requests,
    StepRoom,
    engine_bound,
    ideal_bound,
    least_prices,
    linear_bound,
    tile_bound,
)
from headgate.workloads.traces import bundled
from headgate_papers.slai.bounds import cycle_requests, slowest_request
from worlds import Line

MS = 1e-3
TOY = TileTerms(1, 4, (4, 4, 4), (4, 4), 6.0, 0.5, 1.0, 0.25)
REF = TileTerms(32, 4096, (128, 128, 32), (64, 64), 10.415616 * MS, 5e-6, 6e-9, 4e-9)
ADA = load_card("pub-rtx-ada-6000-mistral-7b").tiles
TOY_PROMPTS, TOY_OUTPUTS = np.array([9, 4, 12, 3, 6, 10, 5]), np.array([4, 3, 3, 5, 3, 2, 1])
STOP = 1  # the paper counts the iteration that samples the stop token


@pytest.fixture(scope="module")
def chat() -> tuple[np.ndarray, np.ndarray]:
    table = bundled("sharegpt-8k")
    return table.prompt, table.output


def seconds(terms, prompts, outputs, stop, weights=None) -> float:
    return tile_bound(terms, Requests.of(prompts, np.asarray(outputs) - 1 + stop, weights)).seconds


def test_toy_requests():
    bound = tile_bound(TOY, Requests.of([8], [4]))
    parts = bound.prompt_tokens + bound.output_tokens, bound.output_attention, bound.prompt_attention
    assert parts == (24, 6, 6)
    assert seconds(TOY, [8], [4], 0) == 32.5
    assert seconds(TOY, TOY_PROMPTS, TOY_OUTPUTS, STOP) == pytest.approx(29.348214, abs=5e-7)
    assert seconds(TOY, TOY_PROMPTS, TOY_OUTPUTS, 0) == pytest.approx(25.919643, abs=5e-7)


@pytest.mark.parametrize(
    ("prompts", "outputs", "weights", "parts", "without_stop"),
    [
        ([2048], [256], None, (199.001088, 144.703488, 6.684672), 349.713052),
        ([1024, 4096], [512, 128], [0.7, 0.3], (202.317773, 161.585562, 9.024307), 372.241615),
    ],
)
def test_reference_requests(prompts, outputs, weights, parts, without_stop):
    bound = tile_bound(REF, Requests.of(prompts, outputs, weights))
    tokens = bound.prompt_tokens + bound.output_tokens
    found = np.array([tokens, bound.output_attention, bound.prompt_attention]) / MS
    assert found == pytest.approx(parts, abs=1e-6)
    assert bound.seconds == pytest.approx(sum(found) * MS)
    assert seconds(REF, prompts, outputs, 0, weights) / MS == pytest.approx(without_stop, abs=1.5e-6)


def test_chat_requests(chat):
    prompts, outputs = chat
    with_stop, without = (tile_bound(REF, Requests.of(prompts, outputs - 1 + stop)) for stop in (STOP, 0))
    assert (with_stop.seconds / MS, without.seconds / MS) == pytest.approx((561.079, 560.273), abs=1e-3)
    assert (with_stop.rate, without.rate) == pytest.approx((1.7823, 1.7848), abs=1e-4)
    assert with_stop.error == pytest.approx(0.0029, abs=1e-4)
    three = tile_bound(REF, Requests.of(prompts, outputs), nodes=3)
    assert three.rate == pytest.approx(3 * with_stop.rate)


def test_chat_requests_on_the_published_card_and_a_split(chat):
    prompts, outputs = chat
    assert seconds(ADA, prompts, outputs, STOP) / MS == pytest.approx(551.926, abs=1e-3)
    bound = tile_bound(ADA, Requests.of(prompts, outputs - 1))
    found = (bound.seconds / MS, bound.prefill / MS, bound.decode / MS)
    assert found == pytest.approx((551.138, 215.63, 335.51), abs=5e-3)
    assert bound.rate == pytest.approx(1.8144, abs=1e-4)
    rates = {
        (p, d): min(p / bound.prefill, d / bound.decode) for p, d in ((1, 1), (1, 2), (2, 2), (2, 3), (3, 5))
    }
    assert rates[1, 1] == pytest.approx(2.98, abs=5e-3)
    shares = [rate / sum(pools) * bound.seconds for pools, rate in rates.items()]
    assert shares == pytest.approx([0.82, 0.85, 0.82, 0.99, 0.96], abs=5e-3)


def test_beta_lengths_on_a_grid_of_quantiles():
    middle = (np.arange(1000) + 0.5) / 1000
    prompt = np.rint(8192 * betaincinv(0.597, 1.487, middle)).clip(1)
    output = np.rint(1025 * betaincinv(1.097, 1.464, middle)).clip(1, 1024)
    prompts, outputs = (x.ravel() for x in np.meshgrid(prompt, output, indexing="ij"))
    prompts = np.minimum(prompts, 8192 - outputs)
    assert seconds(REF, prompts, outputs, STOP) / MS == pytest.approx(556.678, abs=2e-3)


@pytest.mark.parametrize(("name", "rate"), [("beta", 1.796), ("lognormal", 1.689)])
def test_drawn_lengths(name, rate):
    draw = np.random.default_rng(5)
    if name == "beta":
        prompts = np.rint(8192 * draw.beta(0.597, 1.487, 200_000)).clip(1)
        outputs = np.rint(1025 * draw.beta(1.097, 1.464, 200_000)).clip(1, 1024)
    else:
        prompts = np.rint(np.exp(7.45588 + 0.92984 * draw.standard_normal(200_000))).clip(1)
        outputs = np.rint(np.exp(6.02828 + 0.54462 * draw.standard_normal(200_000))).clip(1, 1024)
    bound = tile_bound(REF, Requests.of(np.minimum(prompts, 8192 - outputs), outputs))
    assert bound.rate == pytest.approx(rate, abs=4 * bound.error / bound.seconds * rate + 1e-3)


def test_cycles_of_theorem_two(chat):
    bound = tile_bound(REF, Requests.of(*chat))
    assert slowest_request(REF, 8192) == pytest.approx(94.0227, abs=5e-5)
    found = [cycle_requests(REF, bound, 8192, spare) for spare in (0.2, 0.1, 0.05)]
    assert found == [106_411, 212_821, 425_641]  # the first whole numbers above 106,410, 212,820, 425,640
    toy = tile_bound(TOY, Requests.of(TOY_PROMPTS, TOY_OUTPUTS))
    assert slowest_request(TOY, 17) == 133
    assert cycle_requests(TOY, toy, 17, 0.2) == 68
    with pytest.raises(InputError, match="spare=1"):
        cycle_requests(TOY, toy, 17, 1)


def test_limits_make_the_bound_sharper_but_never_lower_than_what_is_reached(chat):
    lengths = Requests.of(chat[0], chat[1] - 1)
    free = tile_bound(ADA, lengths)
    rates = [tile_bound(ADA, lengths, batch_tokens=size).rate for size in (128, 512, 1024, 8192)]
    assert rates == sorted(rates)
    assert rates[-1] < free.rate
    ideal = replace(ADA, constant=0.0, floor=0.0)
    assert tile_bound(ideal, lengths, batch_tokens=512).rate == pytest.approx(free.rate)


def test_averaged_attention_is_exact_over_whole_tiles():
    lengths = Requests.of([64, 640], [64, 128])
    exact, averaged = (tile_bound(REF, lengths, averaged=way).seconds for way in (False, True))
    assert averaged == pytest.approx(exact, rel=1e-12)


def test_a_head_on_sampled_positions_is_paid_by_output():
    lengths = Requests.of([1000], [99])
    plain, headed = (tile_bound(replace(REF, head_per_column=head), lengths) for head in (0.0, 0.128))
    assert headed.output_tokens - plain.output_tokens == pytest.approx(100 * 0.001)
    assert headed.prefill == plain.prefill


# -- straight lines ---------------------------------------------------------------------------------


def test_prices_by_hand():
    # A prompt step of 100 tokens: 1 + 2 = 3 s. A decode step of 10: 2 + 1 = 3 s, and 0.01 per context token.
    cost = LinearCost(DecodeTerms(2.0, 0.1, 0.01), PrefillTerms(1.0, 0.02), MixedTerms(9.0, 1.0, 1.0, 1.0))
    found = least_prices(cost, Need(5, 50, 500), StepRoom(10, 100, inf, 1, 1000))
    assert found == pytest.approx((0.3, 0.03, 0.01))
    # With memory for 400 context tokens a step holds fewer decodes of 80 tokens: five of them.
    tight = least_prices(cost, Need(5, 50, 400), StepRoom(10, 100, 400, 1, 80))
    assert np.dot(tight, (5, 50, 400)) > np.dot(found, (5, 50, 400))


@pytest.mark.parametrize("name", [name for name in list_cards() if load_card(name).tiles is None])
@given(
    decodes=st.integers(0, 256),
    prefill=st.integers(0, 8192),
    reads=st.integers(101, 3000),
    need=st.sampled_from([(1, 2000), (200, 200), (900, 100)]),
)
def test_no_step_of_a_card_undercuts_its_prices(name, decodes, prefill, reads, need):
    card = load_card(name)
    room = StepRoom(256, 8192, card.kv_tokens, 101, 3000)
    decodes = min(decodes, card.kv_tokens // reads)
    prices = prices_of(name, need, room)
    context, prefill = decodes * reads, min(prefill, 8192 - decodes)
    worth = np.dot(prices, (decodes, prefill, context))
    assert card.cost.seconds(Shape(decodes, context, prefill)) >= worth * (1 - 1e-6)


@cache
def prices_of(name, need, room):
    cost = load_card(name).cost
    lines = cost.below() if isinstance(cost, WorkCost) else cost
    return least_prices(lines, Need(*need, need[0] * 1000.0), room)


@pytest.mark.parametrize("share", [(1e-4, 0.0, 0.0), (1e-4, 5e-5, -1e-4), (2e-4, -1e-4, 1e-4)])
def test_prices_hold_for_bent_mixed_prices(share):
    cost = LinearCost(
        DecodeTerms(0.01, 2e-4, 1e-8, 16), PrefillTerms(0.02, 1.5e-4), MixedTerms(by_share=share)
    )
    room = StepRoom(64, 512, inf, 10, 500)
    prices = least_prices(cost, Need(100, 300, 20_000), room)
    for decodes in range(1, 65):
        for prefill in range(513 - decodes):
            for reads in (10, 500):
                shape = Shape(decodes, decodes * reads, prefill)
                assert cost.seconds(shape) >= np.dot(prices, (decodes, prefill, shape.context)) * (1 - 1e-8)


def test_a_linear_bound_adds_up(chat):
    card = load_card("linear-h200-qwen3-8b")
    lengths = Requests.of(chat[0], chat[1] - 1)
    bound = linear_bound(card.cost, lengths, 256, 8192, card.kv_tokens)
    assert bound.seconds == pytest.approx(bound.prefill + bound.decode)
    assert bound.prompt_attention == 0
    assert 8 < bound.rate < 10
    assert ideal_bound(card.cost, lengths, 256, 8192, card.kv_tokens) == bound
    assert linear_bound(card.cost, lengths, 1024, 16384).rate > bound.rate


def test_the_bound_by_kind_of_cost():
    lengths = Requests.of([100], [10])
    assert (
        engine_bound(TileCost(REF), lengths, 4, 512).seconds
        > ideal_bound(TileCost(REF), lengths, 4, 512).seconds
    )
    with pytest.raises(InputError, match=r"no throughput bound for a cost of kind Line; use a card's cost"):
        engine_bound(Line(), lengths, 4, 512)


@pytest.mark.parametrize(
    ("prompts", "decodes", "weights", "says"),
    [
        ([], [], None, "give as many of each"),
        ([1, 2], [1], None, "2 prompts, 1 outputs"),
        ([0], [1], None, "below 1 token"),
        ([1], [-1], None, "negative output"),
        ([1], [1], [0.0], "not all zero"),
    ],
)
def test_bad_lengths(prompts, decodes, weights, says):
    with pytest.raises(InputError, match=says):
        Requests.of(prompts, decodes, weights)
