"""The fit: known laws come back, each feature is chosen where it is and left out where it is not."""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import ABOUT, cells, exact, table, timed

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.cost.fit.fit import Fitted, fit
from headgate.cost.fit.solve import Law, Problem, host_can_show, offered, offered_floors, unseen
from headgate.cost.fit.steps import StepTable, concat
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.cost.model import Shape

PLAIN = WorkTerms(2e-3, 2.2e-5, 6e-6, 3.3e-8)
WITH = {
    "per_attention": replace(PLAIN, per_attention=4.5e-9),
    "mixed_constant": replace(PLAIN, mixed_constant=6e-3),
    "mixed_per_context": replace(PLAIN, mixed_per_context=1.5e-8),
    "prompt_constant": replace(PLAIN, prompt_constant=6e-3),
    "switch": replace(PLAIN, switch=6e-3),
    "least_tokens": replace(PLAIN, least_tokens=128),
    "tile": replace(PLAIN, tile=128),
    "host": replace(PLAIN, host_constant=7e-3, host_per_request=4e-5, host_prompts=0.02),
}


def fitted(terms: WorkTerms, seed: int = 1) -> Fitted:
    """With noise, outliers five times too long, and steps seen late."""
    return fit(timed(terms, noise=0.01, outliers=0.02, late=0.01, seed=seed), ABOUT)


@pytest.fixture(scope="module")
def plain() -> Fitted:
    return fitted(PLAIN)


def error(found: WorkTerms, true: WorkTerms) -> float:
    """The largest relative difference over the shapes of the grid."""
    one, other = WorkCost(found), WorkCost(true)
    shapes = {shape for cell in cells() for shape in cell}
    return max(abs(one.seconds(shape) / other.seconds(shape) - 1) for shape in shapes)


def test_the_plain_law_comes_back_and_nothing_else(plain: Fitted) -> None:
    assert plain.choice.law == Law(("per_context",))
    assert error(plain.terms, PLAIN) < 0.04
    for name in ("constant", "per_token", "per_context"):
        low, high = plain.intervals[name]
        assert 0.95 * low <= getattr(PLAIN, name) <= 1.05 * high
        assert low <= getattr(plain.terms, name) * 1.02
        assert high >= getattr(plain.terms, name) * 0.98


@pytest.mark.parametrize("name", WITH)
def test_what_is_there_is_chosen_and_found(name: str) -> None:
    true = WITH[name]
    found = fitted(true)
    law = found.choice.law
    if name == "host":
        assert law.host
        assert found.terms.host_per_request == pytest.approx(true.host_per_request, rel=0.1)
    elif name in ("least_tokens", "tile"):
        assert getattr(law, name) == getattr(true, name)
    else:
        assert name in law.extras
        assert getattr(found.terms, name) == pytest.approx(getattr(true, name), rel=0.25)
    assert (name == "host") == law.host
    assert ("switch" in law.extras) == (name == "switch")
    assert ("per_attention" in law.extras) == (name == "per_attention")
    assert error(found.terms, true) < (0.2 if name == "host" else 0.08)  # few steps are left to the GPU


def test_experts_are_found_where_the_model_has_them() -> None:
    true = replace(PLAIN, per_expert=1e-4, experts=128, experts_per_token=8)
    about = replace(ABOUT, model_shape={"experts": 128, "experts_per_token": 8})
    log = timed(true, noise=0.01, seed=4)
    found = fit(log, about)
    assert "per_expert" in found.choice.law.extras
    assert error(found.terms, true) < 0.05
    assert fit(log, ABOUT).quality.regions["decode"]["median"] > found.quality.regions["decode"]["median"]


def test_without_noise_it_is_exact() -> None:
    true = replace(PLAIN, per_attention=4.5e-9, mixed_constant=3e-3)
    found = fit(timed(true), ABOUT)
    assert error(found.terms, true) < 1e-4
    assert found.quality.good_enough(0.001)


def test_quality_is_that_of_parts_not_seen(plain: Fitted) -> None:
    regions = plain.quality.regions
    assert set(regions) == {"decode", "prefill", "mixed", "all"}
    assert regions["all"]["pieces"] == sum(regions[name]["pieces"] for name in ("decode", "prefill", "mixed"))
    assert 0.005 < regions["decode"]["median"] < 0.03
    assert not plain.quality.good_enough(0.001)
    blind = StepTable.from_columns(_one_odd_part(), list("abcdefghij"))
    assert abs(fit(blind, ABOUT).quality.parts["3"]) > 0.2


def _one_odd_part() -> dict[str, np.ndarray]:
    """Ten parts of decode steps; the steps of part 3 take half as long again."""
    decodes = np.tile(np.arange(1, 61), 10).astype(float)
    part = np.repeat(np.arange(10), 60)
    seconds = (0.005 + 3e-5 * decodes) * np.where(part == 3, 1.5, 1.0)
    zeros = np.zeros(600)
    return {"seconds": seconds, "decodes": decodes, "context": zeros, "prefill": zeros, "part": part}


def test_a_cell_that_was_visited_twice_is_unseen_as_a_whole() -> None:
    once, law = timed(WorkTerms(2e-3, 2.2e-5, 6e-6, 3.3e-8), noise=0.05), Law(("per_context",))
    alone, twice = (unseen(Problem(table), law) for table in (once, concat([once, once])))
    assert twice[: len(once)] == pytest.approx(alone, rel=1e-6)
    assert twice[len(once) :] == pytest.approx(alone, rel=1e-6)


def test_what_cannot_be_told_is_not_offered() -> None:
    shapes = [Shape(n % 50 + 200, 500 * n) for n in range(100)]
    rows = [(exact(WorkCost(PLAIN), shape, None), shape) for shape in shapes]
    decodes = table(rows, [n // 25 for n in range(100)], list("abcd"))
    assert offered(decodes) == ("per_context",)
    assert offered_floors(decodes) == ()  # nobody timed batches of fewer than 200
    assert not host_can_show(decodes)
    unknown = StepTable.from_columns({**_mixture(), "prompts": np.full(60, np.nan)})
    assert "per_attention" not in offered(unknown)
    assert "per_prompt" not in offered(unknown)
    assert "per_meeting" in offered(unknown)


def _mixture() -> dict[str, np.ndarray]:
    count = np.arange(60.0)
    return {
        "seconds": 0.01 + 1e-5 * count,
        "decodes": count + 1,
        "context": 9 * count,
        "prefill": 100 + count,
    }


def test_one_run_is_enough() -> None:
    draw = np.random.default_rng(5)
    decodes = draw.integers(1, 300, 400).astype(float)
    context = decodes * draw.integers(100, 2000, 400)
    seconds = (2e-3 + 2.8e-5 * decodes + 3.3e-8 * context) * (1 + 0.01 * draw.standard_normal(400))
    log = {"seconds": seconds, "decodes": decodes, "context": context, "prefill": np.zeros(400)}
    found = fit(StepTable.from_columns(log), ABOUT)
    assert found.choice.law.extras == ("per_context",)
    assert found.terms.per_context == pytest.approx(3.3e-8, rel=0.05)
    assert "Steps of prompts alone: none were timed." in found.card().provenance.extrapolated


def test_the_card(plain: Fitted, tmp_path: Path) -> None:
    card = plain.card()
    path = tmp_path / "made-up.json"
    card.save(path)
    again = load_card(path)
    assert again == card
    assert again.cost == WorkCost(plain.terms, plain.host)
    assert again.region.decodes == (1, 512)
    known = again.provenance
    assert known.versions == {"vllm": "0.26.0"}
    assert known.intervals is not None
    assert set(known.intervals) == set(plain.choice.law.names)
    assert known.grid is not None
    assert len(known.grid) == len(cells())
    assert sum(cell.steps for cell in known.grid) == len(plain.table)
    assert known.chosen is not None
    assert known.chosen[0].startswith("affine: ")
    assert any("long prompts come out too cheap" in line for line in known.assumptions)


def test_lines_fit_a_terminal(plain: Fitted) -> None:
    lines = plain.lines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("  per_context") for line in lines)


def test_too_little_is_refused() -> None:
    few = {name: values[:20] for name, values in _mixture().items()}
    with pytest.raises(InputError, match="20 timed steps"):
        fit(StepTable.from_columns(few), ABOUT)


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10**6))
def test_any_fit_keeps_the_laws_of_costs(seed: int) -> None:
    """Even of times that follow no law at all."""
    draw = np.random.default_rng(seed)
    count = 60
    decodes = draw.integers(0, 200, count).astype(float)
    prefill = np.where(decodes > 0, draw.integers(0, 2, count), 1) * draw.integers(1, 4000, count)
    columns = {
        "seconds": draw.lognormal(-4, 1, count),
        "decodes": decodes,
        "context": decodes * draw.integers(1, 3000, count),
        "prefill": prefill.astype(float),
        "part": np.arange(count) // 10,
    }
    cost = fit(StepTable.from_columns(columns, list("abcdef")), ABOUT).card().cost
    for _ in range(50):
        shape = Shape(*(int(x) for x in draw.integers(0, (300, 10**6, 5000, 10**4))))
        for name in Shape._fields[:4]:
            more = shape._replace(**{name: getattr(shape, name) + int(draw.integers(1, 500))})
            assert cost.seconds(more) >= cost.seconds(shape) * (1 - 1e-12)
        assert cost.seconds(shape) * (1 + 1e-12) >= cost.seconds(Shape(shape.decodes, shape.context))


def _tool() -> Any:
    path = Path(__file__).parents[3] / "tools" / "calibrated_cards.py"
    spec = spec_from_file_location("calibrated_cards", path)
    assert spec is not None
    assert spec.loader is not None
    tool = module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_the_card_with_drafts_is_what_the_tool_makes() -> None:
    made = _tool().drafted(load_card("cal-h200-qwen3-8b"), "qwen3-8b")
    shipped = load_card("cal-h200-qwen3-8b-k3")
    assert made.speculation is not None
    assert shipped.speculation is not None
    for name in ("draft", "draft_per_decode", "speculating"):
        assert getattr(made.speculation, name) == pytest.approx(getattr(shipped.speculation, name), rel=1e-3)
    assert made.model_copy(update={"speculation": shipped.speculation}) == shipped


def test_a_shipped_card_is_what_the_tool_makes() -> None:
    tool = _tool()
    made = tool.card_of(tool.fitted("qwen3-30b-a3b"), "qwen3-30b-a3b")
    shipped = load_card("cal-h200-qwen3-30b-a3b")
    assert shipped.work is not None
    assert asdict(made.work) == pytest.approx(asdict(shipped.work), rel=1e-3)
    assert made.provenance.assumptions == shipped.provenance.assumptions
