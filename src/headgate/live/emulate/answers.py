"""From tokens to bytes: a streamed answer is written as its tokens come, another one when it is complete."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from os import write
from typing import Any, NamedTuple

from headgate.live.emulate import shapes
from headgate.live.emulate.faults import Fault
from headgate.live.emulate.job import Job
from headgate.live.emulate.problems import ProblemError
from headgate.live.emulate.shapes import Head, encode
from headgate.live.emulate.tokens import Ids

FULL = 1 << 18  # bytes a slow reader may leave in the socket's buffer before events are merged
DONE = b"data: [DONE]\n\n"
NULLS = ("logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")
TAIL = b'"' + b"".join(b',"%b":null' % name.encode() for name in NULLS) + b"}]}\n\n"
CHAT_TAIL = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'


class Wanted(NamedTuple):
    """What the client wants to see beside the text."""

    usage: bool = False
    running_usage: bool = False
    ids: bool = False
    logprobs: int | None = None
    echo: tuple[str, ...] = ()  # texts of the prompts, to stand before the answer
    stamps: bool = False  # emulated times
    cached: bool = False  # prompt tokens that were found in the prefix cache

    @property
    def plain(self) -> bool:
        """Nothing but text: events can be put together from parts made beforehand."""
        return not (self.running_usage or self.ids or self.logprobs is not None or self.echo or self.stamps)


class Answer:
    """Collects the jobs of one request; `done` is set when all of them have ended."""

    streams = False

    def __init__(self, head: Head, wanted: Wanted, prompts: list[Ids], each: int) -> None:
        self.head, self.wanted = head, wanted
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.jobs: list[Job] = []
        self.error: str | None = None
        self._prompts, self._each, self._open = prompts, each, 0
        self.prompt_tokens = sum(map(len, prompts))
        self.now: Callable[[], float] = lambda: 0.0

    def add(self, job: Job) -> None:
        self.jobs.append(job)
        self._open += 1

    def tokens(self, job: Job) -> None:
        """Not of interest before the end."""

    def end(self, job: Job) -> None:
        """One of its jobs has ended."""
        self._open -= 1
        self.error = self.error or job.error
        if not self._open and not self.done.done():
            self.done.set_result(None)

    def whole(self, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self._choice(job, 0, job.made, shapes.choice) for job in self.jobs]
        made = sum(job.made for job in self.jobs)
        more: dict[str, Any] = {"emulated": self._times(self.jobs[0])} if self.wanted.stamps else {}
        ids = self._prompts[0].tolist() if self.wanted.ids else None
        found = shapes.whole(
            self.head, choices, self.prompt_tokens, made,
            kv_transfer_params=params, prompt_token_ids=ids, **more,
        )  # fmt: skip
        found["usage"] |= self._cached()
        return found

    def _cached(self) -> dict[str, Any]:
        """Prompt tokens of the last prompt that were not computed, where vLLM would say so."""
        if not self.wanted.cached:
            return {}
        return {"prompt_tokens_details": {"cached_tokens": self.jobs[-1].cached + self.jobs[-1].loaded}}

    def _choice(self, job: Job, begin: int, end: int, shape: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Positions from `begin` to `end` of one of its jobs, with all that is wanted of them."""
        wanted, chat = self.wanted, self.head.chat
        text, logprobs = job.text.text(begin, end), None
        prompt = self._prompts[job.choice // self._each].tolist() if wanted.ids and not begin else None
        if wanted.logprobs is not None:
            pieces = job.text.pieces(begin, end)
            if chat:
                logprobs = shapes.chat_logprobs(pieces, wanted.logprobs)
            else:
                before = len(job.text.text(0, begin))
                logprobs = shapes.completion_logprobs(pieces, [], before, wanted.logprobs)
        if wanted.echo and not begin:
            text = wanted.echo[job.choice // self._each] + text
        ids = job.text.ids(begin, end) if wanted.ids else None
        return shape(job, text, chat, logprobs, ids, prompt)

    def _times(self, job: Job) -> dict[str, float]:
        names = ("arrival", "admitted", "first", "finished")
        return {name: value for name in names if (value := getattr(job, name)) >= 0}


class Front(dict[int, bytes]):
    """What stands before the text of an event, by the length of the text: chunks begin with their size."""

    def __init__(self, start: bytes, tail: bytes, chunked: bool) -> None:
        self._start, self._rest, self._chunked = start, len(start) + len(tail), chunked

    def __missing__(self, length: int) -> bytes:
        size = b"%x\r\n" % (self._rest + length) if self._chunked else b""
        made = self[length] = size + self._start
        return made


class Stream(Answer):
    """Writes events to the socket as the engine makes tokens. Nothing is awaited: a reader who is slow gets
    fewer events with more text in each, as from vLLM, and costs no memory, for text need not be stored.

    Events of tokens are made some at a time, and go to the socket itself: a transport costs more, and that
    of uvloop writes only when the whole step has been handed out. All else goes through the transport, and
    so do tokens while it holds something.
    """

    streams = True

    def __init__(
        self, head: Head, wanted: Wanted, prompts: list[Ids], each: int,
        transport: asyncio.WriteTransport, chunked: bool, fault: Fault | None = None,
    ) -> None:  # fmt: skip
        super().__init__(head, wanted, prompts, each)
        self._transport, self._chunked, self._fault = transport, chunked, fault
        self._closing, self._soon = transport.is_closing, asyncio.get_running_loop().call_soon
        self._silent = False  # a fault: nothing more is written
        self._file = _file_of(transport) if wanted.plain and fault is None else -1
        self._behind = True  # the transport may hold bytes that come first
        tail = CHAT_TAIL if head.chat else TAIL
        self._tail, self._end = tail, tail + b"\r\n" if chunked else tail
        self._fronts: list[Front] = []

    def add(self, job: Job) -> None:
        """One of its jobs; the part of its events that never changes is made now."""
        super().add(job)
        middle = b',"delta":{"content":"' if self.head.chat else b',"text":"'
        start = b"data: " + self.head.prefix + b'{"index":%d' % job.choice + middle
        self._fronts.append(Front(start, self._tail, self._chunked))

    def tokens(self, job: Job) -> None:
        """Write what there is, unless the reader is slow."""
        if self._behind:
            self._behind = self._transport.get_write_buffer_size() > 0
        events = job.events
        if self._behind or job.sent + 1 < job.made or not (events or self._prepare(job)):
            self._by_transport(job)
        elif not self._closing():
            event = events.pop()
            try:
                written = write(self._file, event)
            except OSError:  # full, or gone: the next token goes through the transport, with this one
                return
            job.sent += 1
            if not events:
                self._soon(self._prepare, job)
            if written < len(event):
                self._behind = True
                self._transport.write(event[written:])

    def _prepare(self, job: Job) -> bool:
        """Make the events of its next tokens; False where each has to be made for itself."""
        if self._file < 0 or job.events or (self.head.chat and not job.sent):
            return bool(job.events)
        front, end = self._fronts[job.choice], self._end
        job.events += [front[len(text)] + text + end for text in reversed(job.text.some(job.sent))]
        return bool(job.events)

    def _by_transport(self, job: Job) -> None:
        transport = self._transport
        job.events.clear()
        if self._fault is not None and self._strike(job):
            return
        if transport.is_closing() or transport.get_write_buffer_size() > FULL:
            return
        if not job.sent and self.head.chat:
            self.write(self._role(job))
        self.write(self._event(job, job.sent, job.made))
        job.sent = job.made

    def end(self, job: Job) -> None:
        """Its last token comes with the reason of its end."""
        strikes = self._fault is not None and self._strike(job)
        if not strikes and not self._transport.is_closing():
            if job.error is not None:
                self.write(b"data: " + ProblemError(job.error, 500).body() + b"\n\n")
            else:
                if not job.sent and self.head.chat:
                    self.write(self._role(job))
                self.write(self._event(job, job.sent, job.made))
            job.sent = job.made
        super().end(job)

    def closing(self) -> bytes:
        """What follows the last token."""
        if self._silent:
            return b""
        if not self.wanted.usage or self.error is not None:
            return DONE
        made = sum(job.made for job in self.jobs)
        event = self.head.fields(True) | {
            "choices": [],
            "usage": shapes.usage(self.prompt_tokens, made, details=False) | self._cached(),
            "system_fingerprint": self.head.fingerprint,
        }
        return b"data: " + encode(event) + b"\n\n" + DONE

    def write(self, data: bytes) -> None:
        """Some bytes of the body, at once."""
        if self._silent or self._transport.is_closing():
            return
        self._behind = True
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    @property
    def silent(self) -> bool:
        """A fault has ended the stream without an end."""
        return self._silent

    def _role(self, job: Job) -> bytes:
        first = {"index": job.choice, "delta": {"role": "assistant", "content": ""}}
        event = self.head.fields(True) | {"choices": [first | {"logprobs": None, "finish_reason": None}]}
        if self.wanted.running_usage:
            event["usage"] = self._usage(job, 0)
        event |= {
            "prompt_token_ids": self._prompts[0].tolist() if self.wanted.ids else None,
            "prompt_text": None,
        }
        return b"data: " + encode(event) + b"\n\n"

    def _event(self, job: Job, begin: int, end: int) -> bytes:
        event = self.head.fields(True)
        event["choices"] = [self._choice(job, begin, end, shapes.stream_choice)]
        if job.how is not None and not self.wanted.usage:
            event["system_fingerprint"] = self.head.fingerprint
        if self.wanted.running_usage:
            event["usage"] = self._usage(job, end)
        if self.wanted.stamps:
            event["emulated"] = {"time": self.now()} if job.how is None else self._times(job)
        return b"data: " + encode(event) + b"\n\n"

    def _usage(self, job: Job, made: int) -> dict[str, Any]:
        counts = shapes.usage(len(self._prompts[job.choice // self._each]), made, details=False)
        return counts | ({"completion_tokens_details": None} if self.head.chat else {})

    def _strike(self, job: Job) -> bool:
        """Does the fault strike now, or has it?"""
        assert self._fault is not None
        if self._silent:
            return True
        kind, at = self._fault
        if job.made < at:
            return False
        if kind == "error-event":
            self.write(b"data: " + ProblemError("emulated fault", 500).body() + b"\n\n" + DONE)
        elif kind == "reset-mid-event":
            self.write(self._event(job, job.sent, job.made)[:-20])
        self._silent = True
        if kind == "drop":
            self._transport.abort()
        elif kind == "reset-mid-event":
            self._transport.close()  # what was written goes out before the end
        if kind != "stall" and not self.done.done():
            self.done.set_result(None)
        return True


def _file_of(transport: asyncio.WriteTransport) -> int:
    """The descriptor that bytes may be written to; -1 where sockets are no files."""
    found = transport.get_extra_info("socket")
    return -1 if found is None or sys.platform == "win32" else int(found.fileno())
