"""Defects that a review found: engines that must come back, missing keys, odd metrics, slow bodies."""

from __future__ import annotations

import json

import pytest

from headgate.core.errors import InputError
from headgate.live.route.config import EngineAt
from headgate.live.route.engines import Upstream, engine_key, read_load
from headgate.live.route.gate.queue import EngineState, live_room
from headgate.live.route.request import RefusedError, read_body


@pytest.mark.parametrize("deep", [True, False])
def test_an_engine_that_is_tried_again_has_room_for_one_under_every_router(deep: bool) -> None:
    """A breaker that is half open allows one request; before, gates had no room for it and never tried."""
    state = EngineState(256, prompts=4)
    state.most = 1
    assert state.room("any", deep).total == 1
    assert live_room("any", 256, 4, deep=False).total == 256  # and nothing else is lost


def test_a_missing_key_is_an_error_before_the_engine_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EngineAt(url="http://a:8000", slots=4, key_env="HEADGATE_TEST_KEY")
    monkeypatch.delenv("HEADGATE_TEST_KEY", raising=False)
    with pytest.raises(InputError, match="HEADGATE_TEST_KEY is not set"):
        engine_key(spec)
    monkeypatch.setenv("HEADGATE_TEST_KEY", "k")
    assert engine_key(spec) == "Bearer k"


def test_a_full_engine_is_up() -> None:
    upstream = Upstream(0, EngineAt(url="http://a:8000", slots=4))
    upstream.healthy = True
    upstream.foreign = 9  # others have taken every slot
    assert upstream.slots(0.0) == 0
    assert upstream.up(0.0)
    upstream.healthy = False
    assert not upstream.up(0.0)


def test_metrics_are_read_at_the_start_of_a_line_only() -> None:
    text = b'vllm:num_requests_running{engine="0"} 3\n# vllm:num_requests_running 9\n'
    text += b"x vllm:num_requests_running 7\n"
    text += b'vllm:num_requests_running{engine="1"} 4.0 1700000000\nvllm:num_requests_waiting 2'
    load = read_load(text, 1.0)
    assert (load.running, load.waiting) == (7, 2)


def test_names_inside_values_are_no_duplicates_and_escapes_in_names_are_refused() -> None:
    inside = {"model": "m", "prompt": 'say "model" and "prompt"', "metadata": {"model": 1, "prompt": [1]}}
    assert read_body(json.dumps(inside).encode(), "/v1/completions") is not None
    for bad in (b'{"model":"a","prompt":"x","model":"b"}', b'{"mod\\u0065l":"a","prompt":"x"}'):
        with pytest.raises(RefusedError) as caught:
            read_body(bad, "/v1/completions")
        assert caught.value.status == 400


@pytest.mark.parametrize("text", ['"\\\\"', '"[[[["', '"a\\"[["', '""', '"]"'])
def test_brackets_in_texts_do_not_count(text: str) -> None:
    many = "[" + ",".join([f"{{{text}:[]}}"] * 100) + "]"
    assert read_body(f'{{"prompt":"x","other":{many}}}'.encode(), "/v1/completions") is not None
    deep = "[" * 70 + text + "]" * 70
    with pytest.raises(RefusedError):
        read_body(f'{{"prompt":"x","other":{deep}}}'.encode(), "/v1/completions")
