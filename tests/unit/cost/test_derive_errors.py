"""How far derived cards are off, on everything they can be held against; studies/cards/derived.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headgate.cost.card import load_card
from headgate.cost.derive.derived_card import DATA_SHEET, HELD_OUT, OTHER_GPU, OVER_PCIE
from headgate.cost.fit.fit import measure
from headgate.cost.fit.solve import seconds
from headgate.sim.engine.engine import engine_of_card
from studies.cards.derived import (
    CALIBRATED,
    DEGREES,
    GRAPH,
    KINDS,
    UNSEEN,
    by_sheet,
    leave_one_out,
    left_out_gpus,
    nine_in_ten,
    public_engines,
    public_runs,
    published,
    real_kv,
    real_steps,
    run_errors,
    scaling,
    served,
    tabled,
    throughput,
)
from studies.cards.step_logs import read_steps

FIDELITY = Path(__file__).parents[3] / "studies" / "fidelity" / "results"
MEDIAN = {"qwen3-8b": 0.017, "qwen3-4b": 0.049, "qwen3-30b-a3b": 0.040}
TIMED = {"qwen3-8b": (1, 0.032), "qwen3-4b": (1, 0.081), "qwen3-30b-a3b": (2, 0.040)}


def bar(bars, kind):
    return bars[0][("decode", "prefill", "mixed", "throughput").index(kind)]


@pytest.mark.parametrize("held", CALIBRATED)
def test_step_times_of_a_held_out_card(held):
    errors = leave_one_out(held)
    assert np.median(np.abs(errors.every)) == pytest.approx(MEDIAN[held], abs=0.005)
    for kind, own in zip(KINDS, errors, strict=True):
        assert np.quantile(np.abs(own), 0.9) <= bar(HELD_OUT, kind)


@pytest.mark.parametrize("held", CALIBRATED)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_saturated_throughput_of_a_held_out_card(held, asynchronous):
    off = np.abs(throughput(held, asynchronous, requests=100))
    assert np.median(off) <= 0.03
    assert off.max() <= 0.10


@pytest.mark.parametrize("held", TIMED)
def test_timed_steps_that_no_fit_has_seen(held):
    number, median = TIMED[held]
    regions = real_steps(held, f"derived:{held}@h200:graph{GRAPH}", number)
    assert regions["all"]["median"] == pytest.approx(median, abs=0.005)


@pytest.mark.parametrize(
    ("name", "median", "total", "kv_tokens"),
    [("llama-3.1-8b", 0.045, 0.008, 914_592), ("qwen3-8b-fp8", 0.072, -0.097, 859_216)],
)
def test_engines_that_no_law_has_seen(name, median, total, kv_tokens):
    """Measured on the H200 after the laws were fixed: steps within the bars, memory within half a percent."""
    found = real_steps(name, UNSEEN[name])["all"]
    assert (found["median"], found["total"]) == pytest.approx((median, total), abs=0.005)
    assert load_card(UNSEEN[name]).kv_tokens == pytest.approx(kv_tokens, rel=0.005)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_published_steps_of_another_gpu_model_and_degree(degree):
    errors = published(degree)
    assert np.median(np.abs(errors.every)) <= 0.09
    for kind, own in zip(KINDS, errors, strict=True):
        assert np.median(np.abs(own)) <= bar(OTHER_GPU, kind)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_speed_up_by_tensor_parallelism_is_the_published_one(degree):
    mine, theirs = scaling(degree)
    assert mine == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b"])
def test_a_gpu_by_its_data_sheet(model):
    for _, errors in left_out_gpus(model):
        for kind, own in zip(KINDS, errors, strict=True):
            assert np.quantile(np.abs(own), 0.9) <= bar(DATA_SHEET, kind)


def test_bars_hold_for_nine_in_ten_public_steps_of_engines_not_seen():
    over_pcie = [public_engines()["rtx-pro-6000 tp 2"]]
    for bars, engines in ((OTHER_GPU, tabled()), (OVER_PCIE, over_pcie), (DATA_SHEET, by_sheet())):
        for place, kind in enumerate(KINDS):
            groups = [own for errors in engines if len(own := errors[place])]
            assert not groups or nine_in_ten(groups) <= bar(bars, kind)


def test_every_engine_weighs_alike_in_nine_in_ten():
    small, large = np.full(90, 0.01), np.array([-0.5])
    assert nine_in_ten([small, large]) == 0.5
    assert nine_in_ten([small] * 9 + [large]) == 0.01


def test_bars_of_kv_memory_hold():
    found = real_kv()
    assert len(found) == 8
    assert all(abs(error) <= bar for error, bar in found.values())
    assert found["derived:llama-3.1-8b@rtx-4090:util0.9"][0] == pytest.approx(0.175, abs=0.005)
    assert found["derived:qwen3-8b@h200"][1] < 0.02


def test_bars_of_throughput_hold_for_three_public_runs():
    for name, error in served().items():
        assert abs(error) <= load_card(name).expected_error.throughput
    assert abs(served()["derived:llama-3.1-8b@rtx-4090:util0.9"]) <= 0.12  # it was 27 %


@pytest.mark.parametrize("degree", DEGREES)
def test_public_runs_of_a_synchronous_engine(degree):
    """90 runs on 2, 4 and 8 H100; two numbers of the host were fitted to all, and held out come out alike."""
    card = load_card(f"derived:qwen3-32b@h100-sxm:tp{degree}:util0.9:sync")
    errors = run_errors(card.work, card.kv_tokens, public_runs(degree))
    assert np.mean(np.abs(errors) <= card.expected_error.throughput) >= 0.9
    assert np.mean(np.abs(errors)) <= 0.05 and abs(errors.mean()) <= 0.02


def test_a_4090_takes_the_slots_and_the_prompts_of_its_public_run():
    card = load_card("derived:llama-3.1-8b@rtx-4090:util0.9")
    assert engine_of_card(card, slots=256).running == 256
    errors = public_engines()["rtx-4090 tp 1"]
    assert np.abs(errors.mixed).max() <= 0.2  # it was priced twice as long as it took


def test_the_calibrated_card_is_nearer_than_the_derived_one_on_runs_neither_has_seen():
    table = read_steps(sorted(FIDELITY.glob("*.steps.npz")))
    off = {}
    for name in ("cal-h200-qwen3-8b", f"derived:qwen3-8b@h200:graph{GRAPH}"):
        totals = measure(table, seconds(load_card(name).work, table)).parts.values()
        off[name] = np.median(np.abs(list(totals)))
    assert len(table.labels) == 14
    assert off["cal-h200-qwen3-8b"] < 0.01 < off[f"derived:qwen3-8b@h200:graph{GRAPH}"]
