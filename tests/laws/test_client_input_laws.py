"""Laws of client input: it costs the engine's thread bounded work, and no policy fails from it."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.live.engine import requests
from headgate.live.engine.requests import LONGEST_TEXT, WORDS, promises
from headgate.live.engine.settings import CLIENTS_MAY, Settings
from headgate.sim.engine.engine import Engine
from stub_engine import StubEngine
from worlds import POLICIES, PRICES

MOST_CALLS = 250  # of any function, Python's or C's, for one request: far below a millisecond
MOST_BYTES = 1 << 16  # allocated at once
LARGE = 1 << 25  # 32 MB
ALL = Settings(clients_may=CLIENTS_MAY)
CLASSES = {f"class {number}": {"ttft": "1s", "tbt": "50ms"} for number in range(1000)}
SETTINGS = st.sampled_from([Settings(), ALL, Settings(classes=CLASSES, clients_may=CLIENTS_MAY)])

SIZES = st.sampled_from([0, 1, 20, 63, 64, 65, 1000, 15_000, 1 << 20, LARGE])
TEXTS = st.builds(
    lambda head, middle, size, tail: head + middle * size + tail,
    st.sampled_from(["", "1", "1.", ".", " ", "0", "1e", "-"]),
    st.sampled_from(["1", " ", "0", "a", "s", "e", ".", "\u0661", "\0", "\U0001f600"]),
    SIZES,
    st.sampled_from(["", "!", "s", "ms", " h", "1"]),
)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([1e300, 1e-300, 10**400, -(10**400), 2**63, 10**5000, 1e-9, True, False]),
)
VALUES = st.one_of(
    st.none(),
    TEXTS,
    NUMBERS,
    st.builds(lambda value, size: [value] * min(size, 1 << 22), NUMBERS, SIZES),
    st.just({"a": {"b": []}}),
    st.binary(max_size=100),
)
MANY = st.builds(
    lambda prefix, count: {f"{prefix}{number}": number for number in range(count)},
    st.sampled_from(["headgate_", "headgate_tbt", "other_"]),
    st.sampled_from([0, 1, 100, 20_000]),
)
ARGUMENTS = st.builds(
    lambda own, many, name: {**many, **own, **({name: 1} if name else {})},
    st.dictionaries(st.sampled_from(WORDS), VALUES),
    MANY,
    TEXTS.map(lambda text: "headgate_" + text) | st.just(""),
)


def counted(work: Callable[[], object]) -> tuple[int, int]:
    """How many functions it called, and the most bytes it had allocated at once."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return calls, peak


@given(ARGUMENTS, SETTINGS)
@example({"headgate_ttft": "1" * 15_000 + "!"}, ALL)
@example({"headgate_tbt": "1" + " " * 15_000 + "!"}, ALL)
@example({f"headgate_{number}": 1 for number in range(20_000)}, Settings())
@example({"headgate_" + "x" * 5_000_000: 1}, Settings())
@example({"headgate_class": "x" * 64}, Settings(classes=CLASSES))
@example({"headgate_guess": [1.5] * (1 << 22)}, ALL)
def test_reading_a_request_is_bounded_work(arguments, settings):
    """Rows 1 and 2: counts and sizes, not seconds; benchmarks/client_input.py has those."""
    parsed = []
    duration = requests.duration

    def spied(text: str) -> float:
        parsed.append(len(text))
        return duration(text)

    requests.duration = spied
    try:
        promises(arguments, settings)  # what is wrong is logged once
        calls, peak = counted(lambda: promises(arguments, settings))
    finally:
        requests.duration = duration
    assert calls <= MOST_CALLS and peak <= MOST_BYTES
    assert all(size <= LONGEST_TEXT for size in parsed)


@given(ARGUMENTS, SETTINGS)
def test_whatever_a_client_says_is_within_its_range(arguments, settings):
    kind, slo, guess, tenant = promises(arguments, settings)
    assert len(kind) <= LONGEST_TEXT
    assert not settings.classes or kind in {"", *settings.classes}
    between = settings.within(settings.shortest_claim)
    for time, least in ((slo.first_token, settings.floor.ttft), (slo.between_tokens, between)):
        assert time is None or least <= time <= requests.LONGEST_TIME
    assert guess is None or 1 <= guess <= requests.MOST_TOKENS
    assert len(tenant) <= LONGEST_TEXT and len(requests.TENANTS) <= requests.MOST_TENANTS
    assert slo.weight is None and not slo.background
    if settings.clients_may == ("class",):
        assert guess is None and not tenant


SMALL = st.one_of(
    st.none(),
    NUMBERS,
    st.text(max_size=70),
    st.sampled_from(["1ms", "1e-9", "1e300", "10h", "500ms", "batch", "chat", "-1", "0"]),
)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", sorted(POLICIES))
@given(
    data=st.data(),
    said=st.lists(st.dictionaries(st.sampled_from(WORDS), SMALL), min_size=1, max_size=12),
    priorities=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=12, max_size=12),
    stamps=st.lists(st.floats(), min_size=12, max_size=12),
)
def test_no_client_value_makes_a_policy_fail(name, asynchronous, data, said, priorities, stamps):
    """Row 3: everything a client can say, through the whole plug-in, to every policy."""
    engine = Engine(PRICES, 400 * 8, 10_000, 64, 6, 8)
    policy = POLICIES[name](data.draw, engine)
    words = {"slots": 6, "budget": 64, "block": 8, "blocks": 401, "by_priority": True}

    def read(request: Any) -> Any:
        return promises(request.sampling_params.extra_args, ALL)

    stub = StubEngine(policy, promises=read, **words, asynchronous=asynchronous)
    for number, arguments in enumerate(said):
        more = {"priority": priorities[number], "arrival_time": stamps[number], "extra_args": arguments}
        stub.add(f"r{number}", 1 + 7 * number, 5 + number, **more)
        stub.step()
    stub.drain()
    assert stub.live.fallen is None
    assert not any(stub.sizes().values())
