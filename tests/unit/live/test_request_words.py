"""Per-request parameters: whatever comes over HTTP, the request is served, and reading it costs little."""

from __future__ import annotations

import logging
from math import inf, nan

import pytest

from headgate.core.errors import InputError
from headgate.core.request import Slo
from headgate.live.engine import requests
from headgate.live.engine.requests import promises
from headgate.live.engine.settings import CLIENTS_MAY, Settings, merge

CLASSES = {"chat": {"ttft": "300ms", "tbt": 0.05}, "batch": {}}
OPEN = Settings(clients_may=CLIENTS_MAY, delivery=0)
TWO = Settings(classes=CLASSES, clients_may=CLIENTS_MAY, delivery=0)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(requests, "IGNORED", requests.IGNORED.__class__())
    monkeypatch.setattr(requests, "MADE_UP", set())
    monkeypatch.setattr(requests, "TENANTS", set())


def test_nothing_said():
    assert promises(None, TWO) == promises({}, TWO) == promises({"top": 1}, TWO) == ("", Slo(), None, "")


def test_classes_promises_and_guess():
    assert promises({"headgate_class": "chat"}, TWO) == ("chat", Slo(0.3, 0.05), None, "")
    own = {"headgate_class": "chat", "headgate_ttft": "1s", "headgate_guess": 80}
    assert promises(own, TWO) == ("chat", Slo(1.0, 0.05), 80, "")
    assert promises({"headgate_tbt": 0.07, "headgate_guess": "12"}, OPEN) == ("", Slo(None, 0.07), 12, "")
    assert promises({"headgate_class": "anything"}, OPEN).kind == "anything"
    assert not requests.IGNORED


def test_promises_of_all_requests_hold_where_there_is_no_closer_one():
    own = {"chat": {"ttft": "300ms"}}
    settings = Settings(ttft="500ms", tbt=0.1, classes=own, clients_may=CLIENTS_MAY, delivery=0)
    assert promises(None, settings) == promises({"top": 1}, settings) == ("", Slo(0.5, 0.1), None, "")
    assert promises({"headgate_class": "chat"}, settings) == ("chat", Slo(0.3, 0.1), None, "")
    assert promises({"headgate_tbt": "200ms"}, settings) == ("", Slo(0.5, 0.2), None, "")


def test_a_part_of_each_gap_is_left_to_delivery():
    """20 ms, but never more than a fifth of a promise; first tokens keep theirs."""
    settings = Settings(ttft="500ms", tbt="100ms", clients_may=CLIENTS_MAY, floor={"tbt": "20ms"})
    assert promises(None, settings).slo == Slo(0.5, pytest.approx(0.08))
    assert promises({"headgate_tbt": "30ms"}, settings).slo == Slo(0.5, pytest.approx(0.024))
    assert promises(None, Settings(ttft="500ms")).slo == Slo(0.5, None)


def test_classes_have_promises_of_every_kind():
    classes = {
        "chat": {"tpot": "40ms"},
        "read": {"ttft": "1s", "envelope": "50ms"},
        "code": {"ttft": "200ms"},
    }
    settings = Settings(ttft="500ms", gap="100ms", classes=classes, clients_may=CLIENTS_MAY)
    found = {name: promises({"headgate_class": name}, settings).slo for name in classes}
    assert found["chat"] == Slo(0.5, 0.04, "mean")  # delivery delays all tokens alike: nothing is taken off
    assert found["read"] == Slo(1.0, 0.05, "envelope")
    assert found["code"] == Slo(0.2, pytest.approx(0.08))
    claimed = promises({"headgate_class": "read", "headgate_tbt": "200ms"}, settings).slo
    assert claimed == Slo(1.0, pytest.approx(0.18))
    assert settings.tightest() == 0.04 and settings.shortest_claim == 0.04
    assert Settings(ttft="1s", envelope="50ms").gaps_promised() == "envelope"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            {"classes": {"chat": {"envelope": "50ms"}}},
            "classes.chat: envelope begins where the first token is",
        ),
        ({"tbt": "50ms", "tpot": "40ms"}, "tbt promises every gap, tpot the mean of a request; drop one of"),
        ({"classes": {"b": {"background": True, "envelope": "1s"}}}, "background and envelope=1s"),
    ],
)
def test_promises_that_make_no_sense_are_one_line(words, says):
    with pytest.raises(InputError, match=says):
        merge({}, words, "--additional-config")


def test_a_file_may_promise_the_first_token_of_an_envelope():
    settings = merge({"ttft": "1s"}, {"envelope": "50ms"}, "--additional-config")
    assert promises(None, settings).slo == Slo(1.0, 0.05, "envelope")


def test_by_default_only_the_class_is_the_clients_word():
    """Row 5 of the attack: promises come from the classes that the operator declares."""
    settings = Settings(classes=CLASSES, delivery=0)
    greedy = {"headgate_class": "chat", "headgate_tbt": 1e-9, "headgate_ttft": 1e-9, "headgate_guess": 1}
    assert promises(greedy, settings) == ("chat", Slo(0.3, 0.05), None, "")
    assert dict(requests.IGNORED) == {"headgate_tbt": 1, "headgate_ttft": 1, "headgate_guess": 1}


def test_nothing_at_all_is_the_clients_word_where_the_operator_says_so():
    assert promises({"headgate_class": "chat"}, Settings(classes=CLASSES, clients_may=[])) == (
        "",
        Slo(),
        None,
        "",
    )


def test_times_have_a_floor_and_a_ceiling_and_a_guess_is_bounded():
    said = promises({"headgate_ttft": 1e-9, "headgate_tbt": "0.001ms", "headgate_guess": 1e300}, OPEN)
    assert said == ("", Slo(0.1, 0.05), requests.MOST_TOKENS, "")
    own = Settings(clients_may=CLIENTS_MAY, delivery=0, floor={"tbt": "30ms"})
    assert promises({"headgate_ttft": 1e-9, "headgate_tbt": 1e-9}, own).slo == Slo(0.1, 0.03)
    assert promises({"headgate_ttft": 1e300, "headgate_tbt": 10**400}, OPEN).slo == Slo(86_400.0, 86_400.0)
    assert promises({"headgate_guess": 10**5000}, OPEN).guess == requests.MOST_TOKENS


def test_no_claim_is_tighter_than_what_the_operator_promises():
    """Under slai and keep the tightest gap limits the prompts of all; the operator may set a floor."""
    words = {"clients_may": CLIENTS_MAY, "delivery": 0, "tbt": "200ms"}
    greedy = {"headgate_tbt": 1e-9}
    assert promises(greedy, Settings(**words)).slo.between_tokens == 0.2
    classes = {"chat": {"tbt": "80ms"}, "batch": {}}
    assert promises(greedy, Settings(**words, classes=classes)).slo.between_tokens == 0.08
    lower = Settings(**words, classes=classes, floor={"tbt": "20ms"})
    assert promises(greedy, lower).slo.between_tokens == 0.02


def test_a_wrong_allow_list_is_one_line():
    from headgate.live.vllm.settings import read_settings

    with pytest.raises(InputError, match="clients_may"):
        read_settings({"headgate": {"clients_may": ["tpot"]}})
    with pytest.raises(InputError, match=r"unknown field 'floor.tpt'; did you mean 'tbt'"):
        read_settings({"headgate": {"floor": {"tpt": 1}}})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[("headgate_ttft", value) for value in ("soon", "", -1, 0, "0", nan, inf, True, [1], None, "1e999")],
        *[
            ("headgate_tbt", value)
            for value in ("5 parsecs", {}, "1" * 15_000 + "!", "1" + " " * 15_000 + "!")
        ],
        *[("headgate_guess", value) for value in ("many", 0, -3, 1.5, inf, nan, True, [3], None, "1e999")],
        ("headgate_guess", "1" * 65),
        *[("headgate_class", value) for value in ("", 7, "x" * 65, ["chat"], None, "chta")],
        ("headgate_tttf", 1),
        ("headgate_" + "x" * 10_000, 1),
    ],
)
def test_a_wrong_value_is_ignored_counted_and_told_once(caplog, word, value):
    with caplog.at_level(logging.WARNING, "vllm.headgate"):
        for _ in range(3):
            assert promises({word: value}, TWO) == ("", Slo(), None, "")
    assert sum(requests.IGNORED.values()) == 3
    assert len(caplog.records) == 1
    assert len(caplog.records[0].getMessage()) < 300  # row 2: not logged whole


def test_names_that_clients_make_up_do_not_fill_the_counter():
    for number in range(100):
        promises({f"headgate_{number}": 1}, OPEN)
    assert dict(requests.IGNORED) == {"others": 100}


def test_classes_that_clients_make_up_do_not_fill_memory():
    kinds = {promises({"headgate_class": f"class {number}"}, OPEN).kind for number in range(1000)}
    assert len(kinds) == requests.MOST_CLASSES + 1 and "" in kinds
    assert promises({"headgate_class": "class 0"}, OPEN).kind == "class 0"


# -- weights, background work, tenants

WORTH = {
    "gold": {"ttft": "1s", "weight": 10},
    "batch": {"background": True},
    "spare": {"background": True, "weight": 0.5},
}


def test_classes_have_weights_and_background_work_no_promise():
    """Not even what all others are promised, and not what it claims."""
    settings = Settings(ttft="500ms", tbt="100ms", classes=WORTH, clients_may=CLIENTS_MAY, delivery=0)
    assert promises({"headgate_class": "gold"}, settings).slo == Slo(1.0, 0.1, weight=10)
    assert promises({"headgate_class": "batch"}, settings).slo == Slo(background=True)
    greedy = {"headgate_class": "spare", "headgate_ttft": "200ms", "headgate_tbt": "60ms"}
    assert promises(greedy, settings).slo == Slo(weight=0.5, background=True)
    assert requests.IGNORED == {"headgate_ttft": 1, "headgate_tbt": 1}
    assert promises(None, settings).slo == Slo(0.5, 0.1)


@pytest.mark.parametrize("word", ["headgate_weight", "headgate_background", "headgate_priority", "weight"])
def test_no_client_gives_itself_a_weight(word):
    settings = Settings(classes=WORTH, clients_may=CLIENTS_MAY)
    assert promises({word: 1e6, "headgate_class": "gold"}, settings).slo.weight == 10
    assert promises({word: 1e6}, settings).slo == Slo()


def test_a_tenant_is_the_clients_word_only_where_the_operator_says_so():
    assert promises({"headgate_tenant": "acme"}, TWO).tenant == "acme"
    assert promises({"headgate_class": "chat", "headgate_tenant": "acme"}, Settings()).tenant == ""
    assert requests.IGNORED == {"headgate_tenant": 1}


@pytest.mark.parametrize(
    "wrong",
    ["", "x" * 65, "x" * 10_000_000, "\ud800", "a\nb", "a\0", "\u202e", 7, None, ["a"], {"a": 1}, b"a"],
    ids=lambda value: repr(value)[:20],
)
def test_hostile_tenants_and_classes_are_ignored(wrong):
    """Half a surrogate pair would end /metrics, a line break a log."""
    assert promises({"headgate_tenant": wrong, "headgate_class": wrong}, OPEN) == ("", Slo(), None, "")
    assert requests.IGNORED == {"headgate_tenant": 1, "headgate_class": 1}


def test_tenants_are_named_in_any_script():
    for name in ("Müller", "東京", "\U0001f600", "a b", "x" * 64):
        assert promises({"headgate_tenant": name}, OPEN).tenant == name


def test_a_hundred_thousand_tenants_share_1024_accounts_and_one_more():
    named = [promises({"headgate_tenant": f"t{number}"}, OPEN).tenant for number in range(100_000)]
    assert len(set(named)) == requests.MOST_TENANTS + 1 and len(requests.TENANTS) == requests.MOST_TENANTS
    assert named[:1024] == [f"t{number}" for number in range(1024)]
    assert set(named[1024:]) == {requests.OTHER_TENANTS}
    assert promises({"headgate_tenant": "t7"}, OPEN).tenant == "t7"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"background": True, "ttft": "5s"}, "background and ttft=5s; background promises nothing: drop one"),
        (
            {"background": True, "itl": "100ms"},
            "background and tbt=0.1s; background promises nothing: drop one",
        ),
        ({"weight": 0}, "weight=0; give a number above 0"),
        ({"weight": -2.5}, "weight=-2.5; give a number above 0"),
    ],
)
def test_classes_that_contradict_themselves(words, said):
    with pytest.raises(InputError) as refused:
        merge({}, {"classes": {"batch": words}}, "--flag")
    assert str(refused.value).endswith(f"classes.batch: {said}")


@pytest.mark.parametrize("words", [{"weight": "10"}, {"weight": inf}, {"weight": nan}, {"background": 1}])
def test_a_weight_is_a_finite_number_and_background_a_switch(words):
    with pytest.raises(InputError, match=r"classes\.batch"):
        merge({}, {"classes": {"batch": words}}, "--flag")
