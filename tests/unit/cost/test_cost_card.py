"""Cards on disk: what ships, round trips, and what every kind of bad card says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headgate.core.errors import InputError
from headgate.cost.card import Region, list_cards, load_card, parse_card
from headgate.cost.model import Shape

NAMES = [
    "cal-h200-qwen3-30b-a3b",
    "cal-h200-qwen3-4b",
    "cal-h200-qwen3-8b",
    "cal-h200-qwen3-8b-k3",
    "derived-h200-qwen3-8b",
    "linear-h200-qwen3-8b",
    "pub-a100-llama-7b",
    "pub-a100-llama-7b-compute",
    "pub-h200-qwen3-30b-a3b",
    "pub-h200-qwen3-8b",
    "pub-rtx-ada-6000-mistral-7b",
    "pub-rtx-pro-6000-qwen3-30b-a3b",
    "pub-rtx-pro-6000-qwen3-8b",
]


def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(load_card("pub-h200-qwen3-8b").text())
    return loaded


def complaint(card: Any) -> str:
    with pytest.raises(InputError) as caught:
        parse_card(card if isinstance(card, str) else json.dumps(card), "my.json")
    message = str(caught.value)
    assert message.startswith("card my.json")
    assert "\n" not in message
    return message


def test_the_list() -> None:
    assert list_cards() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_shipped_cards_are_complete(name: str) -> None:
    card = load_card(name)
    assert card.name == name
    assert card.kv_tokens % card.block == 0
    assert card.block == 16
    assert card.provenance.extrapolated
    assert card.cost is card.cost


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    card = load_card(name)
    card.save(tmp_path / "copy.json")
    again = load_card(tmp_path / "copy.json")
    assert again == card
    assert again.text() == card.text()
    assert load_card(str(tmp_path / "copy.json")).cost == card.cost


def test_published_capacity_is_memory_less_weights() -> None:
    per_token = {"8b": 147_456, "a3b": 98_304}
    weights = {"8b": 16.4e9, "a3b": 61e9}
    for name in (name for name in NAMES if name.startswith("pub-") and "qwen3" in name):
        memory = 141e9 if "h200" in name else 96e9
        size = name.rsplit("-", 1)[1]
        fits = (0.9 * memory - weights[size]) / per_token[size]
        assert 0 <= fits - load_card(name).kv_tokens < 16


def test_unknown_name() -> None:
    with pytest.raises(InputError, match=r"unknown card 'h200-qwen3-8b'; did you mean 'pub-h200-qwen3-8b'\?"):
        load_card("h200-qwen3-8b")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json: No such file or directory; give a readable file"):
        load_card(tmp_path / "none.json")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load_card(tmp_path / "bad.json")


def test_malformed_json_names_the_line() -> None:
    assert "my.json, line 3, column 1: not valid JSON" in complaint('{\n"name": "x",\n}')


def test_not_an_object() -> None:
    assert "must be a JSON object" in complaint([1, 2])


def test_misspelled_field_gets_the_nearest() -> None:
    card = document()
    card["kv_token"] = card.pop("kv_tokens")
    assert complaint(card) == "card my.json: unknown field 'kv_token'; did you mean 'kv_tokens'?"


def test_misspelled_coefficient_gets_the_nearest() -> None:
    card = document()
    terms = card["coefficients"]["decode"]
    terms["perdecode"] = terms.pop("per_decode")
    message = complaint(card)
    assert (
        message == "card my.json: unknown field 'coefficients.decode.perdecode'; did you mean 'per_decode'?"
    )


def test_misspelled_optional_coefficient_gets_the_nearest() -> None:
    card = document()
    terms = card["coefficients"]["mixed"]
    terms["by_shares"] = terms.pop("by_share")
    assert "'coefficients.mixed.by_shares'; did you mean 'by_share'?" in complaint(card)


def test_unknown_field_without_a_neighbour_lists_those_known() -> None:
    card = document()
    card["region"]["zzzz"] = 1
    said = "unknown field 'region.zzzz'; known here: behind, context, decodes, prefill"
    assert complaint(card).endswith(said)


def test_straight_lines_or_tiles_but_one_of_them() -> None:
    card = document()
    lines = card.pop("coefficients")
    wanted = "a card has one of coefficients (straight lines), tiles and work; give one"
    assert complaint(card) == f"card my.json: {wanted}"
    card["tiles"] = json.loads(load_card("derived-h200-qwen3-8b").text())["tiles"]
    assert parse_card(json.dumps(card), "my.json").cost == load_card("derived-h200-qwen3-8b").cost
    assert complaint({**card, "coefficients": lines}).endswith(wanted)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("per_colum", 0.01, "unknown field 'tiles.per_colum'; did you mean 'per_column'?"),
        ("per_token", -1.0, "per_token must be a finite number, zero or more"),
        ("tile", [128, 0, 32], "sides of both tiles must be at least 1"),
        ("tile", [128, 128], "tiles.tile"),
        ("layers", "36", "tiles.layers: Input should be a valid integer"),
    ],
)
def test_bad_tiles(field: str, value: Any, says: str) -> None:
    card = json.loads(load_card("derived-h200-qwen3-8b").text())
    card["tiles"][field] = value
    assert says in complaint(card)


def test_missing_fields() -> None:
    card = document()
    del card["coefficients"]["prefill"]["per_token"]
    assert complaint(card) == "card my.json: field 'coefficients.prefill.per_token' is missing; add it"
    del card["provenance"]
    assert complaint(card).endswith("per_token' is missing; add it | field 'provenance' is missing; add it")


def test_a_card_without_provenance_is_refused() -> None:
    card = document()
    del card["provenance"]
    assert complaint(card) == "card my.json: field 'provenance' is missing; add it"


@pytest.mark.parametrize("bad", [-1e-5, math.nan, math.inf])
def test_bad_coefficient(bad: float) -> None:
    card = document()
    card["coefficients"]["decode"]["per_decode"] = bad
    message = complaint(card)
    assert "coefficients.decode" in message
    assert "per_decode" in message
    assert "finite number" in message


def test_a_number_in_quotes_is_refused() -> None:
    card = document()
    card["coefficients"]["prefill"]["constant"] = "0.001"
    assert "coefficients.prefill.constant: Input should be a valid number" in complaint(card)


def test_bad_share() -> None:
    card = document()
    card["coefficients"]["mixed"]["by_share"] = [1e-5, 0.0, 5e-5]
    assert "would make a step shorter when a token is added" in complaint(card)


def test_bad_limit() -> None:
    card = document()
    card["max_running"] = 0
    assert "max_running: Input should be greater than or equal to 1" in complaint(card)


def test_region_in_order() -> None:
    card = document()
    card["region"]["decodes"] = [512, 1]
    assert "region: decodes must be two numbers in order" in complaint(card)


def test_region_says_what_is_extrapolated() -> None:
    region = Region(decodes=(1, 512), context=(100, 1000), prefill=(256, 4096))
    assert region.misses(Shape(512, 1000, 256)) == ()
    assert region.misses(Shape(prefill=1024)) == ()
    assert region.misses(Shape(513, 1001, 255)) == ("decodes", "context", "prefill")


def test_the_model_does_not_import_pydantic() -> None:
    code = "import sys, headgate.cost.model; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_code_in_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "cards.md").read_text(encoding="utf-8")
    for block in text.split("```python\n")[1:]:
        code = block.split("```")[0]
        exec(code, {})
        assert capsys.readouterr().out.strip() in code
    for name in NAMES:
        assert f"`{name}`" in text
