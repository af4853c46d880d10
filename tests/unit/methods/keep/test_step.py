"""The step that is chosen: known answers, what it never exceeds, CUDA graph boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.policy import Steps
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.cost.laws.terms import DraftTerms, HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.cost.model import Shape
from headgate.methods.keep.learned import LearnedCost
from headgate.methods.keep.step import (
    LEAST,
    SECOND,
    Chooser,
    DecodeLoad,
    Now,
    Prompts,
    StepKind,
    StepPrices,
    lag,
    largest,
    stalled,
)

BUDGET = 16_384
# A step takes 2 ms, 20 µs per prompt token, 30 µs per decode, 8 ns per context token where both meet.
CARD = LinearCost(
    DecodeTerms(0.002, 30e-6), PrefillTerms(0.002, 20e-6), MixedTerms(0.002, 20e-6, 30e-6, per_context=8e-9)
)


HOSTED = WorkCost(
    WorkTerms(constant=0.002, per_token=20e-6, per_decode=10e-6, mixed_per_context=8e-9),
    HostTerms(0.003, prompts=0.009, ungraphed=0.029, graph=512),
)


def at(load, gap, **more):
    """Without a margin."""
    return Now(load, gap, gap, **more)


def chosen(now, tokens, card=CARD):
    beside = BUDGET - now.load.decodes
    return Chooser(StepPrices(card)).choose(now, Prompts([(0, each) for each in tokens]), BUDGET, beside)


def test_long_contexts_make_prompts_run_apart():
    """Apart (50 - 5 - 2) / 0.02 = 2,150 tokens fit, together 2,010; for those 47.2 ms against 50.0."""
    step = chosen(at(DecodeLoad(100, 600_000), 0.050), [5000])
    assert step.kind is StepKind.APART
    assert 2134 <= step.tokens <= 2150
    assert step.seconds == pytest.approx(0.002 + 20e-6 * step.tokens)


def test_short_contexts_make_prompts_run_together():
    """Together 2,170 tokens fit, apart 2,150; for those 49.6 ms against 50.0."""
    step = chosen(at(DecodeLoad(100, 200_000), 0.050), [5000])
    assert step.kind is StepKind.TOGETHER
    assert 2154 <= step.tokens <= 2170


@pytest.mark.parametrize("before", [True, False])
def test_the_choice_of_before_stays_within_two_percent_of_the_crossing(before):
    """The two ways cost the same at 250,000 tokens of context; 2 percent are about 125,000 more or less."""
    load = [DecodeLoad(100, context) for context in (100_000, 250_000, 400_000)]
    apart = [chosen(at(each, 0.050, apart=before), [5000]).kind is StepKind.APART for each in load]
    assert apart == [False, before, True]


def test_a_promise_that_cannot_be_kept_leaves_the_smallest_chunks():
    """Decodes take 5 of 4.9 ms; 64 tokens and they take 8.28 ms apart, 8.68 together."""
    step = chosen(at(DecodeLoad(100, 300_000), 0.0049), [5000])
    assert (step.kind, step.tokens, step.kept) == (StepKind.APART, LEAST, False)
    assert step.seconds + 0.005 == pytest.approx(0.00828)


def test_prompts_wait_where_any_of_them_breaks_a_gap_that_decodes_alone_keep():
    """Decodes take 5 of 6 ms, with 64 tokens 8.28; in the end prompts get a step of their own."""
    now = at(DecodeLoad(100, 300_000), 0.006)
    step = chosen(now, [5000])
    assert (step.kind, step.tokens, step.kept) == (StepKind.DECODES, 0, False)
    assert chosen(now._replace(gap=0.0049, promised=0.006), [5000]).kind is StepKind.DECODES  # a lower margin
    step = chosen(now._replace(starved=True), [5000])
    assert (step.kind, step.tokens, step.kept) == (StepKind.APART, 5000, False)


@pytest.mark.parametrize("trust", [0.4, 0.6])
def test_a_low_margin_shuts_no_prompts_out_whose_step_keeps_the_promise(trust):
    """Decodes take 25 of 50 ms, with 64 tokens 32; an excuse would keep the margin low."""
    card = LinearCost(DecodeTerms(0.025, 0.0), PrefillTerms(0.010, 100e-6), MixedTerms(0.0256, 100e-6, 0.0))
    step = chosen(Now(DecodeLoad(100, 300_000), trust * 0.050, 0.050), [5000], card)
    assert (step.kind, step.tokens, step.kept) == (StepKind.TOGETHER, LEAST, True)


def test_the_first_margin_counts_for_prompts_that_wait():
    """With 64 tokens decodes take 8.28 of 8.5 ms."""
    prompts, now = Prompts([(0, 5000)]), Now(DecodeLoad(100, 300_000), 0.0068, 0.0085)
    steps = [
        Chooser(StepPrices(CARD), trust).choose(now, prompts, BUDGET, BUDGET - 100) for trust in (0.9, 1.0)
    ]
    assert [(step.kind, step.kept) for step in steps] == [(StepKind.DECODES, False), (StepKind.APART, True)]


def test_prompts_do_not_wait_because_the_host_may_be_slow():
    """A launch with prompts usually takes 12 of 14 ms, a slow one 18."""
    step = chosen(at(DecodeLoad(10, 1000), 0.014, last=0.05), [500], hosted(0.0, prompts=0.009))
    assert (step.kind, step.tokens, step.kept) == (StepKind.TOGETHER, LEAST, False)
    step = chosen(at(DecodeLoad(10, 1000), 0.011, last=0.05), [500], hosted(0.0, prompts=0.009))
    assert (step.kind, step.kept) == (StepKind.DECODES, False)


def test_after_such_a_chunk_decodes_run():
    step = chosen(at(DecodeLoad(100, 300_000), 0.006, since=0.00328), [5000])
    assert step.kind is StepKind.DECODES


def test_lag_of_an_asynchronous_engine():
    """Decodes take 25 ms, the launch after them 36: 11 ms late, unless the tokens before were as late."""
    assert lag(0.036, 0.036, 0.025, 0.090) == pytest.approx(0.011)
    assert lag(0.036, 0.036, 0.025, 0.025) == 0


def test_lag_when_the_next_launch_is_slower_than_usual():
    assert lag(0.050, 0.034, 0.025, 0.090) == pytest.approx(0.025)
    assert lag(0.050, 0.034, 0.025, 0.020) == pytest.approx(0.025 - 0.014)  # the last one was late too
    assert lag(0.034, 0.034, 0.025, 0.025) == 0


def test_prompts_do_not_run_apart_by_choice_where_a_launch_is_a_good_part_of_the_gap():
    load, prompts, prices = DecodeLoad(100, 1_500_000), Prompts([(0, 1500)] * 9), StepPrices(HOSTED)
    prices.slow.overlaps = True  # the engine composes ahead

    def kind(gap):
        return Chooser(prices).choose(at(load, gap), prompts, BUDGET, BUDGET - 100).kind

    assert (kind(0.1), kind(0.15), kind(0.4)) == (StepKind.TOGETHER, StepKind.TOGETHER, StepKind.APART)
    prices.slow.factor = 1.0  # launches were seen to take what the card says
    assert kind(0.15) is StepKind.APART
    assert chosen(at(load, 0.1), [1500] * 9).kind is StepKind.APART  # a card that knows no host


def test_prompts_run_apart_where_a_slow_launch_hides_behind_the_decodes():
    """A launch takes 38 ms, slow 57; decodes take 32 or 62."""
    prices, prompts = StepPrices(HOSTED), Prompts([(0, 1500)] * 9)
    prices.slow.overlaps = True
    loads = [DecodeLoad(decodes, 3_000_000) for decodes in (1000, 2000)]
    kinds = [Chooser(prices).choose(at(load, 0.15), prompts, BUDGET, BUDGET - 2000).kind for load in loads]
    assert kinds == [StepKind.TOGETHER, StepKind.APART]


def test_a_short_piece_lasts_as_long_as_the_host_launches_the_next():
    now = at(DecodeLoad(100, 600_000), 0.2, since=0.010, newest=0.010)
    assert stalled(now, 0.036) == pytest.approx(0.026)
    assert stalled(now, 0.005) == 0
    assert stalled(now._replace(since=0.0), 0.036) == 0


def test_without_decodes_a_step_is_as_large_as_the_budget():
    step = chosen(at(DecodeLoad(0, 0), 0.050), [9000, 9000])
    assert (step.kind, step.tokens) == (StepKind.APART, BUDGET)


def test_no_second_piece_once_much_of_the_gap_is_spent():
    load = DecodeLoad(100, 600_000)
    assert chosen(at(load, 0.050, since=SECOND * 0.050), [500]).kind is StepKind.APART
    assert chosen(at(load, 0.050, since=SECOND * 0.050 + 1e-6, apart=True), [500]).kind is StepKind.DECODES


@given(
    decodes=st.integers(1, 600),
    context=st.integers(600, 800_000),
    gap=st.floats(0.001, 0.3),
    used=st.floats(0.0, 1.0),
    tokens=st.lists(st.integers(1, 8000), min_size=1, max_size=12),
    apart=st.booleans(),
)
def test_no_step_exceeds_the_gap_unless_it_says_so(decodes, context, gap, used, tokens, apart):
    prices, prompts = StepPrices(CARD), Prompts([(0, each) for each in tokens])
    load, since = DecodeLoad(decodes, context), used * gap
    step = Chooser(prices).choose(at(load, gap, since=since, apart=apart), prompts, BUDGET, BUDGET - decodes)
    cut = prompts.first(step.tokens)
    if step.kind is StepKind.DECODES:
        assert step.tokens == 0
        return
    assert step.tokens >= min(LEAST, prompts.total)
    if not step.kept:
        assert since == 0
        return
    after = DecodeLoad(decodes + cut.done, context + cut.length)
    apart = prices.alone(cut) + prices.decodes(after)
    spent = apart if step.kind is StepKind.APART else prices.together(load, cut)
    assert since + spent <= gap * (1 + 1e-12)


def test_the_search_finds_the_largest_to_sixteen_tokens():
    assert largest(lambda x: x <= 5000, 64, 16_384) in range(4985, 5001)
    assert largest(lambda x: x <= 16_384, 64, 16_384) == 16_384
    assert largest(lambda x: x <= 63, 64, 16_384) == 0
    assert largest(lambda x: True, 64, 10) == 0


# -- the host ---------------------------------------------------------------------------------------------

GPU = WorkTerms(constant=0.002, per_token=10e-6)


def hosted(ungraphed: float, prompts: float = 0.004) -> WorkCost:
    return WorkCost(GPU, HostTerms(0.003, prompts=prompts, ungraphed=ungraphed, graph=1024))


def test_a_step_stays_within_the_largest_graph_while_the_host_binds():
    """1,524 tokens take the GPU 17 ms and the host 53; 1,024 take 12 and 7: 85 tokens a ms against 29."""
    step = chosen(at(DecodeLoad(24, 2400), 0.2), [1500], hosted(0.050))
    assert (step.kind, step.tokens) == (StepKind.TOGETHER, 1000)


def test_it_does_not_where_the_gpu_takes_longer():
    step = chosen(at(DecodeLoad(24, 2400), 0.2), [8000], hosted(0.050))
    assert (step.kind, step.tokens) == (StepKind.TOGETHER, 8000)


def test_a_gap_shorter_than_the_host_needs_beyond_the_graph_is_kept_within_it():
    step = chosen(at(DecodeLoad(24, 2400), 0.030), [8000], hosted(0.050))
    assert step.kept
    assert step.tokens <= 1000


def test_drafts_are_priced():
    """100 decodes of four tokens: 14 ms alone, so that 1,800 tokens of prompts fit into 50 ms, not 2,150."""
    wide = WorkCost(WorkTerms(0.002, 20e-6, 40e-6, mixed_per_context=8e-9)).speculating(DraftTerms(3))
    load = DecodeLoad(100, 600_000)
    assert (
        StepPrices(wide).decodes(load) == pytest.approx(0.002 + 400 * 30e-6) and StepPrices(wide).width == 4
    )
    step = chosen(at(load, 0.050), [5000], wide)
    assert step.kind is StepKind.APART and 1684 <= step.tokens <= 1700


def test_a_graph_holds_drafts_too():
    """Beside 60 decodes a graph of 512 tokens has room for 452 of prompts, or for 272 where each has four."""
    for cost, room in ((HOSTED, 452), (HOSTED.speculating(DraftTerms(3)), 272)):
        step = chosen(at(DecodeLoad(60, 6_000), 0.060), [500], cost)
        assert step.kind is StepKind.TOGETHER and step.tokens == room


def test_learned_prices_tell_drafts_from_decodes():
    """Two engines with the same decodes; one verifies four tokens of each, and its steps take longer."""
    costs = {}
    for width in (1, 4):
        cost = costs[width] = LearnedCost()
        cost.width = width
        end = 0.0
        for number in range(600):
            decodes, start = 10 + 7 * number % 90, end
            end = start + 0.005 + 20e-6 * width * decodes
            cost.learn(Steps(start, [end], decodes, 0, 0, 0, 0, width * decodes if width > 1 else 0))
    for width, cost in costs.items():
        assert cost.terms[2] == pytest.approx(20e-6, rel=0.05)  # by token, not by decode
        assert cost.seconds(Shape(50)) == pytest.approx(0.005 + 20e-6 * 50 * width, rel=0.02)
        assert cost.decode_line(50)[0] == pytest.approx(cost.seconds(Shape(50)))
