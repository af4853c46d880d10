"""Settings inside vLLM: where they come from, what is refused, what is read again."""

from __future__ import annotations

import logging
import os

import pytest

from headgate.core.errors import InputError
from headgate.live.engine.policy import build_policy, check_policy
from headgate.live.engine.settings import Settings
from headgate.live.vllm import VLLM
from headgate.live.vllm.settings import read_settings
from headgate.methods.eb.exclusive import Exclusive
from headgate.methods.eb.hybrid import ExclusivePlus
from headgate.methods.keep.policy import Keep

CARD = "linear-h200-qwen3-8b"
ENGINE = {
    "kv_tokens": 100_000,
    "block": 16,
    "max_model_len": 8192,
    "batch_tokens": 4096,
    "running": 64,
    "names": VLLM,
}


@pytest.fixture(autouse=True)
def no_file(monkeypatch):
    monkeypatch.delenv("HEADGATE_CONFIG", raising=False)


def written(tmp_path, monkeypatch, text, name="headgate.toml"):
    path = tmp_path / name
    path.write_text(text)
    monkeypatch.setenv("HEADGATE_CONFIG", str(path))
    return path


def test_defaults():
    settings = read_settings()
    assert (settings.policy, settings.watchdog, settings.log_every) == ("auto", 300.0, 60.0)
    assert settings.metrics and not settings.force and settings.trace is None


TOML = 'policy = "eb"\nlog-every = "500ms"\n[set]\nrefill = 8\n[classes.chat]\nttft = "300ms"\n'
JSON = '{"policy": "eb", "log_every": "0.5s", "set": {"refill": 8}, "classes": {"chat": {"ttft": "300ms"}}}'


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", TOML), ("a.json", JSON), ("a.conf", JSON), ("b", TOML)]
)
def test_a_file_of_either_kind(tmp_path, monkeypatch, name, text):
    written(tmp_path, monkeypatch, text, name)
    settings = read_settings()
    assert settings.named() == ("eb", {"refill": 8})
    assert settings.log_every == 0.5 and settings.classes["chat"].ttft == 0.3


def test_additional_config_wins_word_by_word(tmp_path, monkeypatch):
    written(tmp_path, monkeypatch, 'policy = "eb"\nwatchdog = "7s"\nset = {refill = 8}')
    assert read_settings({"headgate": {"watchdog": "9s"}}).named() == ("eb", {"refill": 8})
    over = read_settings({"headgate": {"policy": "mixed"}, "other": 1})
    assert over.named() == ("mixed", {})  # another policy's parameters mean nothing to it
    assert over.watchdog == 7
    assert read_settings(object()).watchdog == 7  # vLLM takes objects, too


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ('polcy = "eb"', "unknown field 'polcy'; did you mean 'policy'?"),
        ("watchdog = -1", "watchdog: -1 is not allowed; give a number above 0"),
        ('watchdog = "soon"', "watchdog: 'soon' is not a duration; write 500ms"),
        ("metrics_port = 70000", "metrics_port: 70000 is not allowed; give at most 65535"),
        ('metrics = "yes"', "metrics: yes is not allowed; give true or false"),
        ("[classes.chat]\ntpt = 1", "unknown field 'classes.chat.tpt'; did you mean 'tpot'?"),
        ("ttft = 500", "ttft: '500' has no unit; write 500ms or 500s"),
        ("[classes.chat]\nitl = 0.05", "classes.chat.tbt: '0.05' has no unit; write 0.05ms or 0.05s"),
        ('tbt = "50ms"\nitl = "60ms"', "'itl' and 'tbt' are one setting; drop one of the two"),
        ("set = {refill = [1]}", "set.refill: [1] is not a setting; give a number"),
        ("policy = ", "not valid TOML"),
    ],
)
def test_a_wrong_word_in_a_file_is_one_line_that_names_it(tmp_path, monkeypatch, text, fragment):
    path = written(tmp_path, monkeypatch, text)
    with pytest.raises(InputError) as error:
        read_settings()
    assert str(error.value).startswith(f"settings file {path}: ") and fragment in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("{", "line 1, column 2: not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("{" * 9, "not valid JSON"),
    ],
)
def test_broken_json(tmp_path, monkeypatch, text, fragment):
    written(tmp_path, monkeypatch, text, "x.json")
    with pytest.raises(InputError, match=fragment):
        read_settings()


def test_no_such_file_and_no_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADGATE_CONFIG", str(tmp_path / "none.json"))
    with pytest.raises(InputError, match=r"No such file.*give a readable JSON or TOML file"):
        read_settings()
    (tmp_path / "none.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8 text"):
        read_settings()


@pytest.mark.parametrize(
    ("own", "fragment"),
    [([1], "must be a table"), ({"cart": "x"}, "--additional-config, headgate: unknown field 'cart'")],
)
def test_wrong_additional_config(own, fragment):
    with pytest.raises(InputError, match=fragment):
        read_settings({"headgate": own})


# -- the policy -----------------------------------------------------------------------------------------


def test_a_policy_gets_the_engines_limits_and_the_cards_prices():
    policy, parameters = build_policy(Settings(policy="eb+", card=CARD), **ENGINE)
    assert isinstance(policy, ExclusivePlus)
    assert parameters == {"slots": 64, "budget": 4096}
    policy, parameters = build_policy(Settings(policy="eb:refill=8", set={"slots": "32"}), **ENGINE)
    assert isinstance(policy, Exclusive) and parameters == {"slots": 32, "refill": 8}


def test_steps_are_priced_with_the_engines_largest_graph():
    settings = Settings(policy="keep", card="cal-h200-qwen3-8b", any_card=True)
    for graph, expected in ((None, 1024), (512, 512)):
        policy, _ = build_policy(settings, **ENGINE, graph=graph)
        assert policy._prices.graph == expected


@pytest.mark.parametrize(
    ("graph", "words", "said"),
    [
        (512, {"tbt": 0.1}, True),
        (512, {"classes": {"chat": {"tbt": 0.1}}}, True),
        (512, {"tbt": 0.5}, False),  # launches fit
        (512, {}, False),
        (None, {"tbt": 0.1}, False),  # the card's graphs need not be the engine's
        (4096, {"tbt": 0.1}, False),  # a step of that many tokens takes most of the gap
        (512, {"tbt": 0.1, "policy": "slai"}, False),
    ],
)
def test_small_graphs_that_confine_keep_are_named(graph, words, said, caplog):
    settings = Settings(card="cal-h200-qwen3-30b-a3b", any_card=True, **words)
    with caplog.at_level(logging.WARNING, "vllm.headgate"):
        build_policy(settings, **ENGINE, graph=graph)
    found = [record.getMessage() for record in caplog.records]
    assert (
        any("steps of at most 512 tokens" in text and "gaps must stay below 80 ms" in text for text in found)
        == said
    )


def test_auto_is_keep_which_is_eb_plus_until_a_promise_comes():
    policy, parameters = build_policy(Settings(card=CARD), **ENGINE)
    assert isinstance(policy, Keep)
    assert policy.learned is None
    assert parameters == {"slots": 64, "budget": 4096}


def test_auto_without_a_card_learns_what_steps_cost():
    policy, _ = build_policy(Settings(), **ENGINE)
    assert isinstance(policy, Keep)
    assert policy.learned is not None


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (
            {"policy": "eb+"},
            "policy eb+ needs to know what steps cost; name a card, such as --card cal-h200-qwen3-8b",
        ),
        ({"policy": "ebb"}, "unknown policy 'ebb'; did you mean 'eb'?"),
        ({"policy": "eb"}, "policy eb needs refill; pass --set refill=VALUE"),
        ({"policy": "eb:refil=3"}, "unknown parameter of policy eb 'refil'; did you mean 'refill'?"),
        ({"policy": "eb:refill=many"}, "refill='many' is not a whole number"),
        ({"policy": "eb:refill=65"}, "refill=65 is outside 1..64"),
        ({"policy": "mixed:slots=65"}, "slots=65 exceeds the engine's 64; lower it or raise --max-num-seqs"),
        ({"policy": "mixed:budget=4097"}, "lower it or raise --max-num-batched-tokens"),
        ({"policy": "eb:refill=4,max_gap=1"}, "max_gap needs a cost"),
        ({"card": "h100"}, "unknown card 'h100'"),
        ({"policy": "none.py:Mine"}, "no file none.py"),
    ],
)
def test_policies_that_cannot_be_made(words, fragment):
    with pytest.raises(InputError) as error:
        build_policy(Settings(**words), **ENGINE)
    assert fragment in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(InputError):
        check_policy(Settings(**words), VLLM, batch_tokens=4096, running=64)


def test_before_the_engine_is_there_only_its_limits_are_unknown():
    check_policy(Settings(policy="eb:refill=2000,slots=3000"), VLLM)
    check_policy(Settings(policy="vllm"), VLLM)
    check_policy(Settings(card=CARD), VLLM, running=1 << 21)
    with pytest.raises(InputError, match="max-num-seqs"):
        check_policy(Settings(policy="eb:refill=2000,slots=3000"), VLLM, running=256)


def test_a_policy_of_the_users_own_that_breaks_when_it_is_made(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from headgate import BatchPolicy, Plan\n"
        "class Mine(BatchPolicy):\n"
        "    def __init__(self): raise KeyError('a\\nb')\n"
        "    def plan(self, view): return Plan()\n"
    )
    with pytest.raises(InputError, match=r"mine.py:Mine cannot be made: KeyError: .*; fix it"):
        build_policy(Settings(policy=f"{tmp_path}/mine.py:Mine"), **ENGINE)


def test_an_engine_that_goes_further_than_its_card_is_told_not_refused(caplog):
    bigger = ENGINE | {"running": 5000, "batch_tokens": 100_000}
    with caplog.at_level(logging.WARNING, "vllm.headgate"):
        build_policy(Settings(card=CARD), **bigger)
    said = [record.getMessage() for record in caplog.records]
    assert (
        len(said) == 2
        and "max_num_batched_tokens is 100000, card linear-h200-qwen3-8b was made for" in said[0]
    )


def test_a_derived_card_says_how_far_off_it_may_be(caplog):
    with caplog.at_level(logging.WARNING, "vllm.headgate"):
        policy, _ = build_policy(Settings(card="derived:qwen3-8b@h200", policy="keep"), **ENGINE)
    assert policy is not None
    assert "derived, not measured" in caplog.records[0].getMessage()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_only_regular_files_are_settings(tmp_path, make):
    """Row 9 of the attack: opening a FIFO would hang the engine."""
    path = tmp_path / "headgate.json"
    make(path)
    with pytest.raises(InputError, match=r"(not a regular file|Is a directory); give a readable"):
        read_settings(None, str(path))
    with pytest.raises(InputError, match=r"not a regular file|Is a directory"):
        build_policy(Settings(card=str(path)), **ENGINE)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "headgate.toml"
    with open(path, "wb") as file:
        file.truncate(2 << 30)  # 2 GB of nothing, none of it on the disk
    with pytest.raises(InputError, match="2,147,483,648 bytes, more than 1,048,576"):
        read_settings(None, str(path))
    with pytest.raises(InputError, match="2,147,483,648 bytes, more than"):
        build_policy(Settings(card=str(path)), **ENGINE)


def test_a_card_that_prices_decodes_has_no_price_for_drafts():
    with pytest.raises(InputError, match="linear-h200-qwen3-8b prices decodes, not tokens"):
        build_policy(Settings(card=CARD), **ENGINE, width=4)
    policy, _ = build_policy(Settings(card="cal-h200-qwen3-8b", policy="eb+"), **ENGINE, width=4)
    assert policy is not None
