from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.live.route.deliver.relay import EventScanner

STREAMS = {
    "vllm": b'data: {"id":"a","choices":[{"text":"\xc3\xa9"}]}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n',
    "crlf": b'data: {"a":1}\r\n\r\n: ping\r\n\r\ndata: {"b":2}\r\ndata: x\r\n\r\ndata: [DONE]\r\n\r\n',
    "cr": b'data: {"a":1}\r\rdata: {"error":{"code":500}}\r\rdata: [DONE]\r\r',
    "named": b'event: message_start\ndata: {"type":"x"}\n\n: comment\n\n\n\ndata:tight\nid: 4\n\n',
    "cut": b'data: {"a":1}\n\ndata: {"b"',
    "usage-null": b'data: {"usage":null,"a":1}\n\ndata: {"usage": {"completion_tokens": 3}}\n\n',
}


def naive(stream: bytes) -> dict[str, object]:
    """Splits the whole stream into lines at once, as the standard says."""
    lines = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    events, data = [], []
    for line in lines[:-1]:
        if not line:
            if data:
                events.append(b"\n".join(data))
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
    usage = [each for each in events if b'"usage"' in each and b'"usage":null' not in each]
    errors = [each for each in events if b'"error"' in each[:40]]
    return {
        "events": len(events),
        "first": events[0] if events else None,
        "done": b"[DONE]" in events,
        "usage": usage[-1] if usage else None,
        "error": errors[-1] if errors else None,
    }


def seen(scanner: EventScanner) -> dict[str, object]:
    return {name: getattr(scanner, name) for name in ("events", "first", "done", "usage", "error")}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_every_split_position_reads_the_same(stream: bytes) -> None:
    want = naive(stream)
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            scanner = EventScanner()
            parts = (stream[:first], stream[first:second], stream[second:])
            passed = b"".join(scanner.feed(part) for part in parts if part)
            assert passed + scanner.rest() == stream
            assert seen(scanner) == want, (first, second)


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_byte_by_byte(stream: bytes) -> None:
    scanner = EventScanner()
    passed = b"".join(scanner.feed(stream[at : at + 1]) for at in range(len(stream)))
    assert passed + scanner.rest() == stream
    assert seen(scanner) == naive(stream)


NAMED = (
    b'event: message_start\ndata: {"type":"message_start"}\n\ndata: {"type":"x","text":"message_stop"}\n\n'
)


@pytest.mark.parametrize(
    ("path", "last", "done", "failed"),
    [
        ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True, False),
        ("/v1/messages", b'data: {"type": "message_stop"}\n\n', True, False),
        ("/v1/messages", b'event: error\r\ndata: {"type":"error"}\r\n\r\n', True, True),
        ("/v1/messages", b'event: message_delta\ndata: {"type":"message_stop"}\n\n', False, False),
        ("/v1/responses", b'event: response.failed\ndata: {"usage":{}}\n\n', True, True),
        ("/v1/responses", b'event: response.completed\ndata: {"usage":{}}\n', True, False),
        ("/v1/completions", b'event: message_stop\ndata: {"type":"message_stop"}\n\n', False, False),
    ],
)
def test_the_last_event_of_a_path_at_every_split_position(
    path: str, last: bytes, done: bool, failed: bool
) -> None:
    stream = NAMED + last
    for first in range(len(stream) + 1):
        scanner = EventScanner(path=path)
        passed = b"".join(scanner.feed(part) for part in (stream[:first], stream[first:]) if part)
        assert passed + scanner.rest() == stream
        assert (scanner.done, scanner.error is not None) == (done, failed), first


PIECES = st.sampled_from(
    [
        b"data: x",
        b"data:",
        b"\n",
        b"\n\n",
        b"\r\n",
        b"\r",
        b": c",
        b"event: e\n",
        b'data: {"error":1}\n\n',
        b"\xff",
    ]
)


@given(st.lists(PIECES, max_size=20), st.lists(st.integers(0, 120), max_size=8))
def test_random_streams_and_splits(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    marks = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    scanner = EventScanner()
    passed = b"".join(scanner.feed(stream[a:b]) for a, b in pairwise(marks) if b > a)
    assert passed + scanner.rest() == stream
    want = naive(stream)
    assert scanner.events == want["events"]
    assert scanner.first == want["first"]


def test_only_whole_events_are_passed_on() -> None:
    scanner = EventScanner()
    assert scanner.feed(b'data: {"a') == b""
    assert scanner.feed(b'":1}\n\ndata: {"b') == b'data: {"a":1}\n\n'
    assert scanner.rest() == b'data: {"b'
    assert not scanner.torn


def test_an_event_beyond_the_cap_is_passed_on_and_the_next_is_read() -> None:
    scanner = EventScanner(cap=100)
    stream = b"data: " + b"x" * 1000 + b"\n\n" + b"data: [DONE]\n\n"
    passed = b"".join(scanner.feed(stream[at : at + 7]) for at in range(0, len(stream), 7))
    assert passed + scanner.rest() == stream
    assert scanner.events == 2
    assert scanner.done
    assert scanner.first == b""
    torn = EventScanner(cap=10)
    torn.feed(b"data: " + b"y" * 50)
    assert torn.torn


def test_a_mebibyte_event_in_small_pieces() -> None:
    event = b"data: " + b"z" * (1 << 20) + b"\n\n"
    scanner = EventScanner(cap=2 << 20)
    passed = b"".join(scanner.feed(event[at : at + 1024]) for at in range(0, len(event), 1024))
    assert passed == event
    assert scanner.events == 1


@pytest.mark.parametrize("size", [1, 7, 150, 2000])
@pytest.mark.parametrize(
    ("name", "done", "failed"),
    [
        (b"response.completed", True, False),
        (b"response.failed", True, True),
        (b"response.output_text.done", False, False),
    ],
)
def test_a_last_event_beyond_the_cap_ends_its_stream(
    name: bytes, done: bool, failed: bool, size: int
) -> None:
    """It repeats the client's metadata: a client must not make streams look as if they had been cut off."""
    stream = b"event: response.created\ndata: {}\n\n"
    stream += b'event: %b\ndata: {"metadata":"%b"}\n\n' % (name, b"x" * 1000)
    scanner = EventScanner(cap=100, path="/v1/responses")
    passed = b"".join(scanner.feed(stream[at : at + size]) for at in range(0, len(stream), size))
    assert passed + scanner.rest() == stream and not scanner.torn
    assert (scanner.done, scanner.error is not None) == (done, failed)
