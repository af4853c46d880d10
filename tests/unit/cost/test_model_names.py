"""Names of models: never another family, generation or size."""

import pytest

from headgate.core.errors import InputError
from headgate.cost.card import differ, hub_name, load_card
from headgate.cost.derive.transformer import MODELS


@pytest.mark.parametrize(
    ("one", "other", "wrong"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B", False),
        ("qwen3-8b-instruct", "Qwen3-8B", False),
        ("meta-llama/Llama-3-8B", "Qwen3-8B", True),
        ("Qwen/Qwen3-4B", "Qwen3-8B", True),
        ("Qwen/Qwen2.5-8B", "Qwen3-8B", True),
        ("/models/mine", "Qwen3-8B", False),
        ("Qwen3-30B-A3B", "Qwen3-30B-A3B", False),
    ],
)
def test_what_names_tell(one, other, wrong):
    assert differ(one, other) is wrong


def test_a_card_of_another_family_is_never_suggested():
    with pytest.raises(InputError, match="unknown card 'h200-llama-8b'; choose from: "):
        load_card("h200-llama-8b")
    with pytest.raises(InputError, match="did you mean 'cal-h200-qwen3-8b'"):
        load_card("cal-h20-qwen3-8b")


def test_every_model_of_the_table_has_a_name_that_vllm_loads():
    for name in MODELS:
        found = hub_name(name)
        assert found and "/" in found and not differ(found, name)
        assert hub_name(found) == hub_name(found.rpartition("/")[2]) == found


def test_names_that_are_not_known_are_not_made_up():
    assert hub_name("Llama-7B") is None and hub_name("Qwen3-8B-mine") is None
    assert hub_name("my/own") == "my/own" and hub_name("Qwen3-8B") == "Qwen/Qwen3-8B"
