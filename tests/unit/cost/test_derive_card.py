"""Derived cards: by name, their limits, where their numbers come from, and what is refused."""

from __future__ import annotations

import pytest

from headgate.core.errors import InputError
from headgate.cost.card import load_card, parse_card
from headgate.cost.derive.derived_card import (
    SUM_CONSTANT,
    SUM_PER_REQUEST,
    WantedCard,
    card_named,
    derive_card,
    most_running,
    parse,
)
from headgate.cost.derive.transformer import MODELS
from headgate.cost.likeness import Likeness, doubts, error_bar, refusals, throughput_error
from headgate.cost.model import Shape

LLAMA = "derived:llama-3.1-70b@h100-sxm:tp4"
MEASURED_KV = {"qwen3-8b": 812_144, "qwen3-4b": 870_688, "qwen3-30b-a3b": 762_464}


def test_a_card_by_name_is_a_card_like_any_other():
    card = load_card(LLAMA)
    assert card.name == LLAMA and card.gpu == "4 x NVIDIA H100 80GB HBM3"
    assert parse_card(card.text(), "text") == card
    assert load_card(LLAMA) is card  # derived once
    assert card_named(card.name) == card


@pytest.mark.parametrize(
    "name",
    [
        "derived:qwen3-8b@h200",
        "derived:mixtral-8x7b@h100-sxm:tp4:ep4:fp8:kv-fp8:util0.9",
        "derived:qwen3-8b@h100-sxm:pp2:graph1024:approximate",
    ],
)
def test_names_are_read_back(name):
    assert parse(name).name == name
    assert load_card(name).name == name


def test_other_names_of_gpu_and_model_are_the_same_card():
    assert load_card("derived:meta-llama/Llama-3.1-70B-Instruct@H100:tp4").name == LLAMA


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_table_fits_somewhere(name):
    card = derive_card(WantedCard(name, "b200", 8))
    assert card.work is not None and card.cost.seconds(Shape(1, 256)) > 0
    assert card.provenance.residuals["law of work against laws of operators"]["mean"] < 0.06


@pytest.mark.parametrize("model", MEASURED_KV)
def test_kv_memory_is_that_of_the_calibrated_engines(model):
    assert load_card(f"derived:{model}@h200").kv_tokens == pytest.approx(MEASURED_KV[model], rel=0.005)


def test_limits_follow_from_memory():
    tight, roomy = load_card("derived:llama-3.1-70b@h100-sxm:tp2"), load_card(LLAMA)
    assert tight.kv_tokens < 0.1 * roomy.kv_tokens
    assert tight.max_running == most_running(tight.kv_tokens) == roomy.max_running == 1024
    assert tight.max_model_len == tight.kv_tokens < roomy.max_model_len == 131_072
    half = load_card(f"{LLAMA}:kv-fp8")
    assert half.kv_tokens == pytest.approx(2 * roomy.kv_tokens, abs=32)


def test_every_number_has_an_origin():
    card = load_card("derived:qwen3-30b-a3b@h100-sxm:tp2")
    numbers = card.provenance.numbers
    assert numbers is not None
    document = card.model_dump()
    for place in ("kv_tokens", "block", "max_model_len", "max_running", "max_batch_tokens"):
        assert numbers[place].value == document[place]
    for part in ("work", "host"):
        for name, value in document[part].items():
            if value:
                assert numbers[f"{part}.{name}"].value == pytest.approx(value, rel=1e-5)
    assert {number.origin for number in numbers.values()} == {"measured", "published", "assumed"}
    assert numbers["gpu.peak"].origin == "published" and numbers["host.constant"].origin == "assumed"
    assert numbers["gpu.gemm.eb"].origin == "measured"


def test_data_sheets_make_prices_assumptions_and_bars_wider():
    near, far = load_card("derived:qwen3-8b@h100-sxm"), load_card("derived:qwen3-8b@h100-pcie")
    assert near.provenance.numbers["work.per_token"].origin == "measured"
    assert far.provenance.numbers["work.per_token"].origin == "assumed"
    bars = [
        load_card(name).expected_error.throughput
        for name in (
            "derived:qwen3-8b@h200",
            "derived:qwen3-8b@h100-sxm",
            "derived:qwen3-8b@h100-pcie",
            "derived:qwen3-8b@h100-sxm:pp2:approximate",
        )
    ]
    assert bars == sorted(set(bars))


def test_a_gpu_by_three_numbers_of_its_data_sheet():
    mine, table = load_card("derived:qwen3-8b@312tf-2.04tb-80gb"), load_card("derived:qwen3-8b@a100-sxm")
    assert mine.expected_error.throughput == 0.40 and mine.gpu == "312tf-2.04tb-80gb"
    step = Shape(64, 64 * 1024)
    assert mine.cost.unhosted().seconds(step) == pytest.approx(table.cost.unhosted().seconds(step), rel=0.2)
    with pytest.raises(InputError, match="no GPU has these numbers"):
        load_card("derived:qwen3-8b@0tf-2tb-80gb")


def test_fp8_has_the_error_of_its_products():
    assert load_card(f"{LLAMA}:fp8").expected_error.decode == 0.20


def test_error_bars_are_said_of_derived_cards_only():
    (line,) = error_bar(load_card(LLAMA))
    assert "derived, not measured" in line and "±15 %" in line and "calibrate --from-bench" in line
    assert error_bar(load_card("cal-h200-qwen3-8b")) == []
    assert throughput_error(load_card("cal-h200-qwen3-8b")) == 0.0


def test_engines_of_another_degree_or_model_are_refused():
    card = load_card(LLAMA)
    assert refusals(card, Likeness(settings={"tensor parallel": "8"}))
    assert refusals(card, Likeness(model_shape={"layers": 32}))
    assert not refusals(card, Likeness(settings={"tensor parallel": "4"}, model_shape={"layers": 80}))
    assert "derived, not measured" in doubts(card, Likeness())[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("derived:", "is not complete"),
        ("derived:qwen3-8b", "is not complete"),
        ("derived:@h200", "is not complete"),
        ("derived:gpt-5@h200", "unknown model"),
        ("derived:qwen3-8b@tpu", "unknown GPU"),
        ("derived:qwen3-8b@h200:fast", "'fast' is not known"),
        ("derived:qwen3-8b@h200:tp3", "all-reduce is known for 2, 4 and 8"),
        ("derived:qwen3-8b@h200:tp99999", "all-reduce is known"),
        ("derived:gemma-3-4b@h200:tp8:ep2", "no experts"),
        ("derived:qwen3-14b@h200:tp4:ep4", "has no experts"),
        ("derived:mixtral-8x7b@h100:tp4:ep2", "choose 1 or 4"),
        ("derived:llama-3.1-70b@h100", "leave no room for KV"),
        ("derived:qwen3-8b@h200:pp2", "--approximate"),
        ("derived:qwen3-8b@a100:fp8", "--approximate"),
        ("derived:qwen3-8b@h200:util.01", "0.1 to 1"),
        ("derived:missing/config.json@h200", "No such file"),
        ("derived:" + "x" * 600 + "@h200", "is not complete"),
    ],
)
def test_refusals_are_one_line(name, message):
    with pytest.raises(InputError, match=message) as caught:
        load_card(name)
    assert "\n" not in str(caught.value)


def test_corrections_of_a_calibrated_card():
    wanted = WantedCard("qwen3-8b", "h200")
    same = derive_card(wanted, [load_card("cal-h200-qwen3-8b")], "mine")
    assert same.name == "mine" and same.provenance.numbers["engine.compute"].origin == "measured"
    assert same.provenance.numbers["engine.compute"].value == pytest.approx(1.18, abs=0.02)
    with pytest.raises(InputError, match="hold for one GPU"):
        derive_card(WantedCard("qwen3-8b", "h100"), [load_card("cal-h200-qwen3-8b")])
    for other in ("derived:qwen3-8b@h200", "linear-h200-qwen3-8b"):
        with pytest.raises(InputError, match="not a calibrated card"):
            derive_card(wanted, [load_card(other)])


def test_a_synchronous_engine_pays_for_its_host():
    plain, summed = load_card(LLAMA), load_card(f"{LLAMA}:sync")
    assert plain.host is not None and summed.host is None
    step = Shape(64, 64 * 1024)
    paid = summed.cost.seconds(step) - plain.cost.unhosted().seconds(step)
    assert paid == pytest.approx(SUM_CONSTANT + 64 * SUM_PER_REQUEST)
    assert (
        summed.name == f"{LLAMA}:sync"
        and summed.provenance.numbers["host.added_to_a_step"].origin == "published"
    )
    assert "add :sync" in error_bar(plain)[0] and "add :sync" not in error_bar(summed)[0]
    engine = Likeness(settings={"asynchronous scheduling": "False"})
    assert any("asynchronous scheduling True" in line for line in doubts(plain, engine))
    assert not any("asynchronous" in line for line in doubts(summed, engine))


def test_kv_memory_has_a_bar_by_the_room_that_is_left():
    tight, roomy = load_card("derived:llama-3.1-8b@rtx-4090"), load_card("derived:llama-3.1-8b@h200")
    assert roomy.expected_error.kv < 0.02 < 0.2 < tight.expected_error.kv
    assert "KV memory within ±1.2 %" in error_bar(roomy)[0]
