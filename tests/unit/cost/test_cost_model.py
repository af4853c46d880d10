"""The linear family: laws on every shipped card, floors, known answers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.cost.card import list_cards, load_card
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.cost.laws.work import WorkCost
from headgate.cost.model import Shape, StepCost
from headgate.experiment.library import simulate
from headgate.methods.eb.exclusive import Exclusive
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload

CARDS = {name: load_card(name) for name in list_cards()}
cards = st.sampled_from(sorted(CARDS))
shapes = st.builds(
    Shape,
    decodes=st.integers(0, 2048),
    context=st.integers(0, 2_000_000),
    prefill=st.integers(0, 16_384),
    behind=st.integers(0, 100_000),
    chunks=st.just(()),
)
PLAIN = LinearCost(DecodeTerms(0.01, 1e-4, 1e-8), PrefillTerms(0.002, 2e-5, 3e-8), MixedTerms())


@given(cards, st.integers(0, 2048), st.integers(0, 10_000_000), st.integers(0, 60))
def test_span_is_seconds_bit_for_bit(card: str, decodes: int, context: int, steps: int) -> None:
    cost = CARDS[card].cost
    walked = [cost.seconds(Shape(decodes, context + i * decodes)) for i in range(steps)]
    span = cost.span(decodes, context, steps)
    assert span.dtype == np.float64
    assert span.tolist() == walked


@given(cards, st.integers(1, 2048), st.integers(0, 10_000_000))
def test_decode_line_is_seconds_bit_for_bit(card: str, decodes: int, context: int) -> None:
    cost = CARDS[card].cost
    fixed, per_context = cost.decode_line(decodes)
    least = cost.decode_floor(decodes) if isinstance(cost, WorkCost) else 0.0
    assert max(fixed + per_context * context, least) == cost.seconds(Shape(decodes, context))


@given(cards, shapes)
def test_finite_and_not_negative(card: str, shape: Shape) -> None:
    seconds = CARDS[card].cost.seconds(shape)
    assert type(seconds) is float
    assert math.isfinite(seconds)
    assert seconds >= 0


@given(cards, shapes, st.sampled_from(Shape._fields[:4]), st.integers(1, 5_000))
def test_more_never_takes_less(card: str, shape: Shape, feature: str, more: int) -> None:
    cost = CARDS[card].cost
    larger = shape._replace(**{feature: getattr(shape, feature) + more})
    # Rounding only: by_share divides and multiplies by the number of tokens.
    assert cost.seconds(larger) >= cost.seconds(shape) * (1 - 1e-12)


@given(cards, shapes)
def test_mixed_is_never_cheaper_than_either_half(card: str, shape: Shape) -> None:
    cost = CARDS[card].cost
    decodes = Shape(shape.decodes, shape.context if shape.decodes else 0)
    prompts = Shape(prefill=shape.prefill, behind=shape.behind)
    assert cost.seconds(shape) >= max(
        cost.seconds(decodes), cost.seconds(prompts if shape.prefill else Shape())
    )


@pytest.mark.parametrize("name", CARDS)
def test_nothing_takes_no_time(name: str) -> None:
    cost = CARDS[name].cost
    assert cost.seconds(Shape()) == 0.0
    assert cost.span(0, 0, 3).tolist() == [0.0, 0.0, 0.0]


def test_the_floor_catches_a_tiny_mixed_step() -> None:
    # Without the floor the published polynomial would price 11 tokens at half a millisecond.
    cost = CARDS["pub-h200-qwen3-8b"].cost
    assert cost.seconds(Shape(1, 512, 10)) == cost.seconds(Shape(1, 512))


def test_by_hand() -> None:
    cost = LinearCost(
        DecodeTerms(1.0, 0.5, 0.25, free_decodes=4),
        PrefillTerms(2.0, 0.125, 0.5),
        MixedTerms(3.0, 0.25, 1.0, 0.5, 0.5, 4, by_share=(1.0, 2.0, -1.0)),
    )
    assert cost.seconds(Shape(3, 8)) == 1.0 + 0.25 * 8
    assert cost.seconds(Shape(6, 8)) == 1.0 + 0.5 * 2 + 0.25 * 8
    assert cost.seconds(Shape(0, 0, 16, 2)) == 2.0 + 0.125 * 16 + 0.5 * 2
    share = 6 / 8
    by_share = (1.0 + 2.0 * share - share**2) * 8
    assert cost.seconds(Shape(6, 8, 2, 2)) == 3.0 + 0.25 * 2 + 1.0 * 2 + 0.5 * 8 + 0.5 * 2 + by_share


def test_decode_line_is_remembered() -> None:
    assert PLAIN.decode_line(7) is PLAIN.decode_line(7)


def test_equal_by_value() -> None:
    again = LinearCost(PLAIN.decode, PLAIN.prefill, PLAIN.mixed)
    assert again == PLAIN
    assert hash(again) == hash(PLAIN)
    assert again != LinearCost(PLAIN.decode, PLAIN.prefill, MixedTerms(constant=1.0))
    assert PLAIN != "a cost"
    assert "per_token=2e-05" in repr(PLAIN)


def _per_token(name: str, share: float) -> tuple[float, float]:
    """beta_MB and beta_EB at a decode share."""
    terms = CARDS[name].coefficients
    a, b, c = terms.mixed.by_share
    mixed = a + b * share + c * share**2
    return mixed, terms.prefill.per_token * (1 - share) + terms.decode.per_decode * share


@pytest.mark.parametrize(
    ("name", "mixed", "exclusive"),
    [
        # The published polynomial has four digits, hence the tolerance; the answers were computed with more.
        ("pub-h200-qwen3-8b", 4.388825e-5, 3.185659e-5),
        ("pub-rtx-pro-6000-qwen3-8b", 1.296650e-4, 6.801327e-5),
    ],
)
def test_known_prices_per_token(name: str, mixed: float, exclusive: float) -> None:
    found = _per_token(name, 1 / 3)  # prompts of 512 tokens, outputs of 256
    assert found[0] == pytest.approx(mixed, rel=1e-4)
    assert found[1] == pytest.approx(exclusive, rel=1e-6)


@pytest.mark.parametrize(("share", "rate"), [(0.11, 32_374), (0.50, 18_317), (0.89, 12_081)])
def test_mixed_steps_reproduce_the_published_throughput(share: float, rate: float) -> None:
    tokens = 4_000
    decodes = round(tokens * share)
    seconds = CARDS["pub-h200-qwen3-8b"].cost.seconds(Shape(decodes, 512 * decodes, tokens - decodes))
    assert tokens / seconds == pytest.approx(rate, rel=3e-3)


@pytest.mark.parametrize(
    ("name", "most"), [("pub-h200-qwen3-30b-a3b", 1.114), ("pub-rtx-pro-6000-qwen3-30b-a3b", 1.160)]
)
def test_assumed_excess_is_as_the_card_says(name: str, most: float) -> None:
    ratios = [mixed / exclusive for mixed, exclusive in (_per_token(name, i / 1000) for i in range(1001))]
    assert max(ratios) == pytest.approx(most, abs=1e-3)
    assert [ratios[0], ratios[-1]] == pytest.approx([1.0, 1.0])


def test_the_published_card_jumps_when_a_prompt_joins() -> None:
    cost = CARDS["pub-h200-qwen3-8b"].cost
    jump = cost.seconds(Shape(512, 0, 1)) - cost.seconds(Shape(512))
    assert 0.014 < jump < 0.015


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_coefficients_must_be_sane(bad: float) -> None:
    with pytest.raises(ValueError, match="per_decode must be a finite number"):
        DecodeTerms(0.01, bad)
    with pytest.raises(ValueError, match="by_share"):
        MixedTerms(by_share=(bad, 0.0, 0.0))


@pytest.mark.parametrize("bad", [(1.0, 0.0, 1.5), (1.0, -1.5, 0.0), (1.0, 0.5, -2.0)])
def test_by_share_may_not_make_tokens_cheaper_than_free(bad: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="shorter when a token is added"):
        MixedTerms(by_share=bad)


@given(st.tuples(*[st.floats(-2, 2)] * 3), st.integers(1, 300), st.integers(1, 300))
def test_allowed_shares_are_monotone(
    by_share: tuple[float, float, float], decodes: int, prefill: int
) -> None:
    try:
        mixed = MixedTerms(by_share=by_share)
    except ValueError:
        return
    cost = LinearCost(DecodeTerms(0.0, 0.0), PrefillTerms(0.0, 0.0), mixed)
    here = cost.seconds(Shape(decodes, 0, prefill))
    assert here >= 0
    assert cost.seconds(Shape(decodes + 1, 0, prefill)) >= here - 1e-9
    assert cost.seconds(Shape(decodes, 0, prefill + 1)) >= here - 1e-9


class Bare(StepCost):
    """The least a law must say."""

    def seconds(self, shape: Shape) -> float:
        fixed, slope = self.decode_line(shape.decodes)
        return fixed + slope * shape.context + 1e-5 * shape.prefill

    def decode_line(self, decodes: int) -> tuple[float, float]:
        return (0.01 + 1e-5 * decodes, 1e-8) if decodes else (0.01, 0.0)


def test_a_law_that_says_the_least_has_an_answer_to_everything() -> None:
    cost = Bare()
    assert (cost.by_chunk, cost.switch, cost.host, cost.decode_floor(8)) == (False, 0.0, None, 0.0)
    assert cost.unhosted() is cost
    span = cost.span(8, 800, 5)
    assert span.tolist() == [cost.seconds(Shape(8, 800 + 8 * step)) for step in range(5)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_such_a_law_drives_every_engine(asynchronous) -> None:
    engine = Engine(Bare(), 10_000, 4096, 512, 8)
    requests = Workload.of([100] * 20, [30] * 20)
    run = simulate(engine, Exclusive(8, 4), requests, asynchronous=asynchronous)
    assert run.completed().all()


def test_a_law_that_says_less_cannot_be_made() -> None:
    class Less(StepCost):
        def seconds(self, shape: Shape) -> float:
            return 1.0

    with pytest.raises(TypeError, match="decode_line"):
        Less()


def test_no_code_asks_whether_a_cost_has_something() -> None:
    """`StepCost` declares it all; whoever looks for an attribute by name goes around it."""
    asked = re.compile(r"(?:get|has)attr\((?:self\.)?_?(?:\w+\.)?cost\b")
    source = Path(__file__).parents[3] / "src"
    assert [path.name for path in source.rglob("*.py") if asked.search(path.read_text())] == []
