"""Server-sent events seen while their bytes pass through."""

from __future__ import annotations

from headgate.live.route.verdict import decoded

EVENT_CAP = 1 << 20  # bytes of one event that are kept; a longer one is passed on unread
DONE = b"[DONE]"
HEAD = 256  # bytes of an event passed on unread in which its name is looked for
ERROR_HEAD = 48  # an error event names its one key within so many bytes
LAST_EVENTS: dict[str, frozenset[bytes]] = {  # how streams of a path end, besides with [DONE]
    "/v1/completions": frozenset(),
    "/v1/chat/completions": frozenset(),
    "/v1/messages": frozenset((b"message_stop", b"error")),
    "/v1/responses": frozenset((b"response.completed", b"response.failed", b"response.incomplete", b"error")),
}
FAILURES = frozenset((b"error", b"response.failed"))


class EventScanner:
    """Finds the ends of events in a stream of bytes, wherever it is cut.

    `feed` returns the bytes that may be passed on: whole events only, so that a stream whose engine dies can
    still be ended with a well-formed error event. A tail longer than `cap` is passed on as it is. Streams
    with carriage returns are passed on at once: the end of an event is not known before the next byte.
    """

    __slots__ = (
        "_cap", "_ends", "_first", "_head", "_last", "_raw", "_skipping", "_tail",
        "done", "error", "events", "usage",
    )  # fmt: skip

    def __init__(self, cap: int = EVENT_CAP, path: str = "") -> None:
        self._ends = LAST_EVENTS.get(path, frozenset())
        self.events = 0  # events with data
        self.done = False  # `[DONE]` came, or what else ends a stream of this path
        self.error: bytes | None = None  # the data of the newest event that looks like an error
        self.usage: bytes | None = None  # the data of the newest event with a usage object
        self._first: bytes | None = None
        self._cap = cap
        self._tail = bytearray()  # of an event not yet ended, line ends as LF
        self._raw = False  # a carriage return was seen: nothing is held back
        self._last = 0  # the newest byte, where CR and LF may belong together
        self._skipping = False  # inside an event longer than the cap
        self._head = b""  # the first lines of that one, where its name is

    @property
    def first(self) -> bytes | None:
        """The data of the first event, None before it is complete."""
        return self._first

    @property
    def torn(self) -> bool:
        """Whether the client has the beginning of an event whose end never came."""
        return self._skipping or (self._raw and bool(self._tail))

    def feed(self, chunk: bytes) -> bytes:
        """Look at the next bytes; what is returned may be sent to the client now."""
        if (
            not self._ends
            and chunk.startswith(b"data: {")
            and chunk.endswith(b"\n\n")
            and chunk.count(b"\n") == 2
            and self._first is not None
            and not (self._tail or self._skipping or self._raw)
            and not (b"\r" in chunk or b'"usage"' in chunk or b'"error"' in chunk)
        ):
            self.events += 1  # one event with a token, as most reads of a socket bring
            return chunk
        if self._raw or b"\r" in chunk:
            return self._feed_raw(chunk)
        if not self._tail and not self._skipping and chunk.endswith(b"\n\n"):
            self._read(chunk)
            return chunk
        return self._feed_parts(chunk)

    def rest(self) -> bytes:
        """Bytes held back at the end of the stream: the beginning of an event that never ended.

        The last event counts also where the empty line behind it is missing.
        """
        piece = bytes(self._tail).rstrip(b"\n")
        if piece and not self._skipping and self._is_last(piece, payload(_data_lines(piece))):
            self.done = True
        return b"" if self._raw or self._skipping else bytes(self._tail)

    def _feed_parts(self, chunk: bytes) -> bytes:
        """The general way, for streams with LF alone."""
        if self._skipping:
            return self._skip(chunk)
        tail = self._tail
        start = max(len(tail) - 1, 0)
        tail += chunk
        end = tail.rfind(b"\n\n", start)
        if end < 0:
            return self._give_up() if len(tail) > self._cap else b""
        whole = bytes(tail[: end + 2])
        del tail[: end + 2]
        self._read(whole)
        return whole + self._give_up() if len(tail) > self._cap else whole

    def _give_up(self) -> bytes:
        """Pass on an event that is too long to be kept."""
        passed = bytes(self._tail)
        self._head = passed[:HEAD].rpartition(b"\n")[0]
        self._tail.clear()
        self._tail += passed[-1:]
        self._skipping = True
        self._note_first(b"")
        return passed

    def _skip(self, chunk: bytes) -> bytes:
        """Look for the end of an event that is not kept."""
        joined = bytes(self._tail) + chunk
        end = joined.find(b"\n\n")
        self._tail.clear()
        if end < 0:
            self._tail += joined[-1:]
            return chunk
        self._skipping = False
        self.events += 1
        if self._is_last(self._head, b""):
            self.done = True
        cut = end + 2 - (len(joined) - len(chunk))
        return chunk[:cut] + (self.feed(chunk[cut:]) if cut < len(chunk) else b"")

    def _feed_raw(self, chunk: bytes) -> bytes:
        """Pass on at once; look at a copy whose line ends are LF."""
        held = b"" if self._raw or self._skipping else bytes(self._tail)
        self._raw = True
        plain = chunk[1:] if self._last == 13 and chunk[:1] == b"\n" else chunk
        self._last = chunk[-1] if chunk else self._last
        self._feed_parts(plain.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
        return held + chunk

    def _read(self, whole: bytes) -> None:
        for piece in whole.split(b"\n\n"):
            if piece:
                self._event(piece)

    def _event(self, piece: bytes) -> None:
        data = piece
        if b"\n" in piece or not piece.startswith(b"data:"):
            data = _data_lines(piece)
            if not data:
                return
        self.events += 1
        if self._first is None:
            self._note_first(payload(data))
        if b'"usage"' in data and b'"usage":null' not in data:
            self.usage = payload(data)
        elif b'"error"' in data[:ERROR_HEAD]:
            self.error = payload(data)
        if self._is_last(piece, payload(data)):
            self.done = True

    def _is_last(self, piece: bytes, data: bytes) -> bool:
        """Whether nothing may follow this event. One without a name is known by its type."""
        if data.strip() == DONE:
            return True
        if not self._ends:
            return False
        name = _name(piece)
        if not name and any(each in data for each in self._ends):
            name = str(decoded(data).get("type")).encode()
        if name in FAILURES:
            self.error = data
        return name in self._ends

    def _note_first(self, data: bytes) -> None:
        if self._first is None:
            self._first = data


def _data_lines(piece: bytes) -> bytes:
    """The data of an event as one line; comments, names and ids are left out."""
    lines = [payload(line) for line in piece.split(b"\n") if line.startswith(b"data:")]
    return b"data: " + b"\n".join(lines) if lines else b""


def _name(piece: bytes) -> bytes:
    """The name of an event, empty where it has none."""
    names = [line[6:].strip() for line in piece.split(b"\n") if line.startswith(b"event:")]
    return names[-1] if names else b""


def payload(line: bytes) -> bytes:
    """What follows `data:` and at most one space."""
    return line[6:] if line[5:6] == b" " else line[5:]
