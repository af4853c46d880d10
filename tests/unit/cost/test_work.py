"""The sum of work: laws for any coefficients, known answers, and the driver that runs it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.policy import BatchPolicy
from headgate.cost.laws.terms import HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.cost.model import Chunk, Shape
from headgate.methods.eb.exclusive import Exclusive
from headgate.methods.mixed.mixed import Mixed
from headgate.record.recorder import Recorder
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.sim.engine.steps import LONG, StepClock, step_ends
from headgate.workloads.arrivals import Poisson
from headgate.workloads.lengths import Uniform
from headgate.workloads.synthetic import generate

small = st.floats(0, 1e-3)
tiny = st.floats(0, 1e-6)
terms = st.builds(
    WorkTerms,
    constant=small,
    per_token=tiny,
    per_decode=tiny,
    per_context=tiny,
    per_attention=tiny,
    per_prompt=small,
    prompt_constant=small,
    mixed_constant=small,
    mixed_per_context=tiny,
    mixed_per_decode=tiny,
    per_meeting=tiny,
    host_constant=small,
    host_prompts=small,
    host_per_request=tiny,
    host_ungraphed=small,
    graph=st.sampled_from((0, 64, 512)),
    switch=small,
    per_expert=tiny,
    least_tokens=st.integers(0, 300),
    tile=st.sampled_from((1, 8, 64)),
    experts=st.just(128),
    experts_per_token=st.integers(1, 128),
)
shapes = st.builds(
    Shape,
    decodes=st.integers(0, 600),
    context=st.integers(0, 400_000),
    prefill=st.integers(0, 9_000),
    behind=st.integers(0, 20_000),
    chunks=st.just(()),
)
FULL = WorkTerms(
    constant=0.5,
    per_token=1 / 4,
    per_decode=1 / 8,
    per_context=1 / 16,
    per_attention=1 / 32,
    per_prompt=2.0,
    prompt_constant=3.0,
    mixed_constant=5.0,
    mixed_per_context=1 / 64,
    mixed_per_decode=1 / 128,
    per_meeting=1 / 2,
    host_constant=20.0,
    host_prompts=30.0,
    host_per_request=1 / 2,
    switch=7.0,
    least_tokens=8,
    tile=4,
)
HOSTED = WorkTerms(2e-3, 2e-5, 5e-6, 3e-8, host_constant=6e-3, host_per_request=5e-5, switch=4e-3)


@given(terms, st.integers(0, 600), st.integers(0, 10**6), st.integers(0, 90))
def test_span_and_line_are_seconds_bit_for_bit(
    terms: WorkTerms, decodes: int, context: int, steps: int
) -> None:
    cost = WorkCost(terms)
    walked = [cost.seconds(Shape(decodes, context + i * decodes)) for i in range(steps)]
    assert cost.span(decodes, context, steps).tolist() == walked
    fixed, slope = cost.decode_line(decodes)
    if decodes:
        assert cost.seconds(Shape(decodes, context)) == max(
            fixed + slope * context, cost.decode_floor(decodes)
        )


@given(terms, shapes, st.sampled_from(Shape._fields[:4]), st.integers(1, 5_000))
def test_more_never_takes_less(terms: WorkTerms, shape: Shape, feature: str, more: int) -> None:
    cost = WorkCost(terms)
    larger = shape._replace(**{feature: getattr(shape, feature) + more})
    here = cost.seconds(shape)
    assert math.isfinite(here)
    assert here >= 0
    assert cost.seconds(larger) >= here * (1 - 1e-12)


@given(terms, shapes)
def test_mixed_is_never_cheaper_than_either_half_nor_than_the_lines_below(
    terms: WorkTerms, shape: Shape
) -> None:
    cost = WorkCost(terms)
    context = shape.context if shape.decodes else 0
    behind = shape.behind if shape.prefill else 0
    whole = cost.seconds(shape) * (1 + 1e-12)
    assert whole >= cost.seconds(Shape(shape.decodes, context))
    assert whole >= cost.seconds(Shape(prefill=shape.prefill, behind=behind))
    assert whole >= cost.below().seconds(Shape(shape.decodes, context, shape.prefill, behind)) * (1 - 1e-12)


def test_by_hand() -> None:
    cost = WorkCost(FULL)
    assert cost.seconds(Shape()) == 0.0
    assert cost.seconds(Shape(9, 800)) == 0.5 + 12 / 4 + 9 / 8 + 800 / 16  # three tiles of four
    assert cost.seconds(Shape(2, 16)) == 20.0 + 2 / 2  # the host; the GPU takes 0.5 + 8 / 4 + 2 / 8 + 1
    chunks = (Chunk(10, 6), Chunk(0, 4))
    pairs = 6 * 13 + 4 * 2
    alone = 0.5 + 3.0 + 12 / 4 + 10 / 16 + pairs / 32 + 2 * 2.0
    assert cost.seconds(Shape(0, 0, 10, 10, chunks)) == max(alone, 20 + 30 + 2 / 2)
    mixed = alone + (16 - 12) / 4 + 5.0 + (1 / 8 + 1 / 128) * 6 + (1 / 16 + 1 / 64) * 6000 + 6 / 16 * 10 / 2
    assert cost.seconds(Shape(6, 6000, 10, 10, chunks)) == pytest.approx(mixed, rel=1e-15)


def test_beyond_the_largest_graph_kernels_are_launched_one_by_one() -> None:
    cost = WorkCost(WorkTerms(1.0, 0.0, host_ungraphed=9.0, graph=64))
    assert cost.seconds(Shape(64, 640)) == 1.0
    assert cost.seconds(Shape(65, 650)) == 9.0
    assert cost.seconds(Shape(60, 600, 4)) == 1.0
    assert cost.seconds(Shape(60, 600, 5)) == 9.0
    assert cost.decode_floor(65) == 9.0


def test_few_tokens_meet_few_experts() -> None:
    cost = WorkCost(WorkTerms(0.0, 0.0, per_expert=1.0, experts=4, experts_per_token=2))
    assert cost.seconds(Shape(1, 10)) == 2.0
    assert cost.seconds(Shape(2, 20)) == 3.0
    assert cost.seconds(Shape(1, 10, 1)) == 3.0
    assert cost.seconds(Shape(0, 0, 500)) == 4.0


def test_prompts_without_chunks_are_one_prompt() -> None:
    cost = WorkCost(FULL)
    assert cost.seconds(Shape(0, 0, 500, 7)) == cost.seconds(Shape(0, 0, 500, 7, (Chunk(7, 500),)))


def test_the_host_counts_every_prompt_whatever_else_the_law_has() -> None:
    cost = WorkCost(WorkTerms(0.0, 0.0, host_per_request=1.0))
    assert cost.by_chunk  # or drivers would not tell of them
    assert cost.seconds(Shape(2, 20, 10, 0, (Chunk(0, 6), Chunk(0, 4)))) == 4.0


def test_equal_by_value() -> None:
    assert WorkCost(FULL) == WorkCost(FULL)
    assert hash(WorkCost(FULL)) == hash(WorkCost(FULL))
    assert WorkCost(FULL) != WorkCost(HOSTED)
    assert WorkCost(FULL) != "a cost"
    assert "per_token=2e-05" in repr(WorkCost(HOSTED))


@pytest.mark.parametrize("bad", [{"tile": 0}, {"per_token": -1.0}, {"switch": math.inf}])
def test_nonsense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        WorkTerms(**{"constant": 1.0, "per_token": 1.0, **bad})  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [5, LONG + 40])
def test_a_span_begins_with_the_change_of_phase_and_rests_on_the_host(steps: int) -> None:
    cost, decodes, context = WorkCost(HOSTED), 100, 216_000
    times = [cost.seconds(Shape(decodes, context + i * decodes)) for i in range(steps)]
    floor = cost.decode_floor(decodes)
    assert times[0] == floor
    if steps > LONG:
        assert times[-1] > floor
    line = cost.decode_line(decodes)
    ends = step_ends(cost, line, decodes, context, steps, 1.0, math.inf, more=0.25, least=floor)
    expected, now = [], 1.0
    for place, seconds in enumerate(times):
        now += seconds + (0.25 if place == 0 else 0.0)
        expected.append(now)
    assert ends == expected


def test_the_pace_knows_when_a_phase_has_changed() -> None:
    pace, cost = StepClock(WorkCost(HOSTED)), WorkCost(HOSTED)
    plain = cost.seconds(Shape(8, 800))

    def first() -> float:
        return pace.decode_ends(8, 800, 1, 0.0, math.inf)[0]

    assert first() == plain
    pace.prompts_end(0.0, Shape(8, 800, 100))
    assert first() == plain  # a mixed step is no change
    pace.prompts_end(0.0, Shape(0, 0, 100))
    assert first() == plain + HOSTED.switch
    assert first() == plain  # once


@pytest.mark.parametrize("policy", [lambda: Exclusive(16, 4), lambda: Mixed(16, 512)])
def test_jumping_and_stepping_agree_to_the_last_bit(policy: type[BatchPolicy]) -> None:
    engine = Engine(WorkCost(HOSTED), 20_000, 2_000, 512, 16)
    requests = generate(60, seed=3, prompt=Uniform(100), output=Uniform(80), arrivals=Poisson(40.0))

    def ends(leases: bool) -> list[float]:
        recorder = Recorder()
        Simulator(engine, policy(), requests, (recorder,), leases=leases).run()
        found: list[float] = recorder.tables()["requests"]["finished"].tolist()
        return found

    assert ends(True) == ends(False)


def test_the_largest_graph_is_the_engines() -> None:
    cost = WorkCost(HOSTED, HostTerms(0.003, prompts=0.009, ungraphed=0.029, graph=1024))
    step = Shape(100, 5_000, 600)
    assert cost.host.seconds(step) == pytest.approx(0.012)
    fewer = cost.graphed(512)
    assert fewer.host.seconds(step) == pytest.approx(0.032)
    assert fewer.seconds(step) == cost.seconds(step)
    assert WorkCost(HOSTED).graphed(512) == WorkCost(HOSTED)
