"""Words of a request: whatever comes over HTTP, the request is served."""

from __future__ import annotations

import logging
from math import inf, nan

import pytest

from headgate.core.request import Slo
from headgate.live.vllm import requests
from headgate.live.vllm.requests import promises
from headgate.live.vllm.fields import Settings

OPEN = Settings()
TWO = Settings(classes={"chat": {"ttft": "300ms", "tbt": 0.05}, "batch": {}})


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(requests, "BAD", requests.BAD.__class__())


def test_nothing_said():
    assert promises(None, TWO) == promises({}, TWO) == promises({"top": 1}, TWO) == ("", Slo(), None)


def test_classes_promises_and_guess():
    assert promises({"headgate_class": "chat"}, TWO) == ("chat", Slo(0.3, 0.05), None)
    own = {"headgate_class": "chat", "headgate_ttft": "1s", "headgate_guess": 80}
    assert promises(own, TWO) == ("chat", Slo(1.0, 0.05), 80)
    assert promises({"headgate_tbt": 0.02, "headgate_guess": "12"}, OPEN) == ("", Slo(None, 0.02), 12)
    assert promises({"headgate_class": "anything"}, OPEN).kind == "anything"
    assert not requests.BAD


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[("headgate_ttft", value) for value in ("soon", "", -1, 0, "0", nan, inf, True, [1], None, "1e999")],
        *[("headgate_tbt", value) for value in ("5 parsecs", {})],
        *[("headgate_guess", value) for value in ("many", 0, -3, 1.5, inf, nan, True, [3], None, "1e999")],
        *[("headgate_class", value) for value in ("", 7, "x" * 65, ["chat"], None, "chta")],
        ("headgate_tttf", 1),
        ("headgate_" + "x" * 10_000, 1),
    ],
)
def test_a_wrong_value_is_ignored_counted_and_told_once(caplog, word, value):
    with caplog.at_level(logging.WARNING, "vllm.headgate"):
        for _ in range(3):
            assert promises({word: value}, TWO) == ("", Slo(), None)
    assert sum(requests.BAD.values()) == 3
    assert len(caplog.records) == 1


def test_names_that_clients_make_up_do_not_fill_the_counter():
    for number in range(100):
        promises({f"headgate_{number}": 1}, OPEN)
    assert dict(requests.BAD) == {"others": 100}
