"""Where a trial's figures come from: requests of its own, measured at the client, or the server's trace."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from time import perf_counter, time_ns
from typing import Any, BinaryIO

import aiohttp
import numpy as np

from headgate.core.errors import InputError, RunError
from headgate.core.files import parse_line
from headgate.core.request import Slo
from headgate.live.route.view.counters import Counts, parsed
from headgate.live.tasks import SHOWN, end_all, fetched, why
from headgate.live.trial.book import Block, Book, Listener, SeenRequest
from headgate.record.live_trace import WRONG, ClockError, Replay, is_live_trace
from headgate.record.trace_fields import fault
from headgate.workloads.workload import Workload

FIRST_TOKEN_ID, TOKEN_IDS = 100, 1000  # prompts are drawn from these ids: every vocabulary has them
PATIENCE = 10.0  # seconds for an answer that is no completion
IN_A_ROW = 20  # requests that fail one after the other: the server is gone
MOST_IN_FLIGHT = 20_000
TOO_LATE = 0.01  # seconds: more than a client should add
LATE_STEP = "0.005"  # seconds, as a bucket of the emulator's is called
HOPELESS, NEWEST = 0.5, 50  # seconds of the server's: later than that, half of so many requests end the trial
LONGEST_ANSWER = 16 << 20  # bytes of /metrics or of the list of models
SHORTEST_MODEL = 2048  # tokens, where a server does not say
ERRORS = (aiohttp.ClientError, OSError)  # a time that is over among them
CLOSED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)  # reset: ours lay unread


class TraceLoad:
    """Over and over, with other tokens but for what prompts share. `speed`: times are an emulator's."""

    def __init__(
        self,
        workload: Workload,
        url: str,
        judged: Mapping[str | None, Slo],
        seed: int,
        speed: float = 1.0,
        key: str = "",
    ) -> None:
        self.url, self._key = url, key
        self.book = Book(dict(judged))
        self.model = ""
        self.failed = 0
        self._late: list[float] = []  # how late each request was sent, in real seconds
        self._workload, self._speed = workload, speed
        self._seeds = seed, time_ns()  # else the next trial would find its prompts in the prefix cache
        self._pieces = workload.pieces() if workload.contents is not None else None
        self._origin = perf_counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sender: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._in_a_row, self._why = 0, ""
        self._returned = asyncio.Event()

    def now(self) -> float:
        return (perf_counter() - self._origin) * self._speed

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE),
            read_bufsize=1 << 20,
        )
        self._sender = asyncio.create_task(self._send_all())

    async def stop(self, drain: float) -> None:
        if self._sender is not None:
            self._sender.cancel()
        if self._tasks and drain > 0:
            await asyncio.wait(self._tasks, timeout=drain / self._speed)
        await end_all(self._tasks)
        if self._session is not None:
            await self._session.close()

    def trouble(self) -> str | None:
        if self._sender is not None and self._sender.done() and not self._sender.cancelled():
            error = self._sender.exception()
            return f"the load ended: {error}" if error else None
        if self._in_a_row >= IN_A_ROW:
            return f"{self._in_a_row} requests in a row failed: {self._why}"
        newest = self._late[-NEWEST:] if len(self._late) >= NEWEST else []
        return self._slow(newest, HOPELESS / self._speed) or None

    def notes(self) -> list[str]:
        failures = f"{self.failed:,} requests failed, the last one: {self._why}"
        late = self.too_slow() or self._lateness(0.99, TOO_LATE, self._late)
        return [*([failures] if self.failed and self._why else []), *([late] if late else [])]

    def too_slow(self) -> str:
        """Figures of requests that come when they like mean nothing."""
        return self._slow(self._late, TOO_LATE)

    def _slow(self, late: Sequence[float], most: float) -> str:
        said = self._lateness(0.5, most, late)
        return f"this machine is too slow: {said}" if said else ""

    def _lateness(self, share: float, most: float, late: Sequence[float]) -> str:
        found = float(np.quantile(late, share)) if late else 0.0
        if found <= most:
            return ""
        faster = self._speed > 1
        remedy = f"start both with less than --speed {self._speed:g}" if faster else "lower the load"
        which = f"{100 * (1 - share):.0f} % of the requests were sent more than {1000 * found:.0f} ms late"
        return f"{which}; free a core or {remedy}"

    async def _send_all(self) -> None:
        workload, turn = self._workload, 0
        span = float(workload.arrival[-1]) if not workload.closed else 0.0
        span += span / max(len(workload) - 1, 1)  # so that the first of a turn is not sent with the last
        begin = self.now()
        while True:
            for row in range(len(workload)):
                await self._until_due(row, begin + turn * span)
                if len(self._tasks) >= MOST_IN_FLIGHT:
                    raise RunError(f"{MOST_IN_FLIGHT:,} requests are under way; lower the load")
                task = asyncio.create_task(self._send(row, turn))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(lambda task: self._returned.set())
            turn += 1

    async def _until_due(self, row: int, begin: float) -> None:
        if self._workload.closed:
            while len(self._tasks) >= self._workload.clients[row]:
                self._returned.clear()
                await self._returned.wait()
        else:
            due = begin + float(self._workload.arrival[row])
            await asyncio.sleep(max(0.0, due - self.now()) / self._speed)
            self._late.append((self.now() - due) / self._speed)

    async def _send(self, row: int, turn: int) -> None:
        workload = self._workload
        kind = workload.kinds[int(workload.kind[row])]
        body = self._body(row, turn, kind.name)
        output = int(workload.output[row])
        seen = self.book.arrived(self.now(), kind.name, kind.slo, int(workload.prompt[row]))
        tokens, complete = 0, False
        try:
            try:
                tokens, complete = await self._stream(body, seen)
            except CLOSED:  # an idle connection, which the server closed meanwhile
                if seen.first is not None:
                    raise
                tokens, complete = await self._stream(body, seen)
        except (*ERRORS, ValueError) as error:  # a line without an end is a ValueError
            self._why = why(error)
        finally:
            self.book.left(seen, self.now(), complete, min(tokens, output) if complete else tokens)
            self.failed += not complete
            self._in_a_row = 0 if complete else self._in_a_row + 1

    def _body(self, row: int, turn: int, kind: str) -> bytes:
        workload, output = self._workload, int(self._workload.output[row])
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": self._prompt(row, turn),
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        if kind and len(workload.kinds) > 1:
            body["vllm_xargs"] = {"headgate_class": kind}
        return json.dumps(body, separators=(",", ":")).encode()

    def _prompt(self, row: int, turn: int) -> list[int]:
        parts = ((-1, int(self._workload.prompt[row])),) if self._pieces is None else self._pieces[row]
        ids: list[int] = []
        for mark, tokens in parts:
            seed = [*self._seeds, 1, int(mark)] if mark >= 0 else [*self._seeds, 0, row, turn]
            draw = np.random.default_rng(seed)
            ids += draw.integers(FIRST_TOKEN_ID, TOKEN_IDS, int(tokens)).tolist()
        return ids

    async def _stream(self, body: bytes, seen: SeenRequest) -> tuple[int, bool]:
        """Each event with a choice is a token, as `vllm bench serve` counts them."""
        assert self._session is not None
        book, now, tokens, done = self.book, self.now, 0, False
        headers = {"Content-Type": "application/json", **key_header(self._key)}
        async with self._session.post(f"{self.url}/v1/completions", data=body, headers=headers) as answer:
            if answer.status != 200:
                self._why = f"status {answer.status}: {(await answer.text())[:SHOWN]}"
                return 0, False
            async for line in answer.content:
                if not line.startswith(b"data:"):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif b'"error"' in line[:40]:
                    self._why = line[5 : SHOWN + 5].decode(errors="replace").strip()
                    return tokens, False
                elif b'"choices":[]' not in line:
                    tokens += 1
                    if tokens == 1:
                        book.first_token(seen, now())
                    else:
                        book.next_token(seen, now())
        return tokens, done and tokens > 0


async def served_model(url: str, key: str = "") -> tuple[str, int]:
    """Its name, and the tokens of its longest request."""
    try:
        about = json.loads(await _get(f"{url}/v1/models", key))["data"][0]
        return str(about["id"]), int(about.get("max_model_len") or SHORTEST_MODEL)
    except ERRORS as error:
        if isinstance(error, aiohttp.ClientResponseError) and error.status == HTTPStatus.UNAUTHORIZED:
            raise InputError(f"{url} wants a key; give --api-key") from None
        raise InputError(f"no server answers at {url}: {why(error)}; start it or correct its URL") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise InputError(f"{url}/v1/models is no list of models; give the URL of a vLLM server") from None


class PlugInMetrics:
    def __init__(self, url: str, key: str = "") -> None:
        self.url, self._key = url, key
        self.renewals: float | None = None  # None: there is no plug-in
        self.fallen = 0.0
        self._before: Counter[str] = Counter()  # steps of an emulator by how late they ended; at first
        self._steps = self._before  # and now

    async def read(self) -> bool:
        shown: Counts = {}
        with suppress(*ERRORS):
            text = await _get(f"{self.url}/metrics", self._key)
            shown = parsed(text, ("headgate_",))
        if "headgate_info" in shown:
            self.renewals = sum(shown.get("headgate_renewals_total", {}).values())
            self.fallen = sum(shown.get("headgate_fallen", {}).values())
            ends = Counter[str]()
            for labels, steps in shown.get("headgate_emulator_late_seconds_bucket", {}).items():
                ends[dict(labels).get("le", "")] += int(steps)
            self._before, self._steps = self._before or ends, ends
        return "headgate_info" in shown

    def notes(self) -> list[str]:
        """An emulator that cannot keep up says so in its own log, which is not read beside a verdict."""
        steps, in_time = (self._steps[end] - self._before[end] for end in ("+Inf", LATE_STEP))
        if steps - in_time <= 0.01 * steps:
            return []
        said = f"{100 * (1 - in_time / steps):.0f} % of the emulator's steps ended more than 5 ms late"
        return [f"do not trust these times: {said}; free a core, or start both with a lower --speed"]

    async def require(self) -> None:
        await self.read()
        if self.renewals is None:
            raise InputError(
                f"the server at {self.url} shows no headgate metrics, so no plug-in reads settings there; "
                "start it with HEADGATE_CONFIG=FILE headgate serve MODEL, or compare two servers, "
                "--arm NAME=URL"
            )


def key_header(key: str) -> dict[str, str]:
    """Of servers that want one; no other service's key is ever sent."""
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _get(url: str, key: str) -> str:
    about: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=PATIENCE), "headers": key_header(key)}
    try:
        async with aiohttp.ClientSession(**about) as session:
            return (await fetched(session, url, LONGEST_ANSWER)).decode(errors="replace")
    except (aiohttp.InvalidURL, ValueError) as error:
        raise InputError(f"{url} is no URL ({error}); write it as http://HOST:PORT") from None


# -- the user's own traffic: the step trace that the plug-in writes, read as it grows

AT_A_TIME = 1 << 22  # bytes read at once
LONGEST_LINE = 1 << 20


class FollowedTrace:
    def __init__(self, path: str, own: bool = False) -> None:
        self.book = Book()
        self.model = ""
        self.path, self.own = Path(path) if own else newest(path), own
        self.begun: dict[str, Block] = {}  # by the mark that began it
        self._expected: dict[str, Callable[[float], Block]] = {}
        self.renewals = 0  # policies that took over
        self.fell_back = ""
        self._replay = Replay(Listener(self.book))
        self._rest = b""
        self._file: BinaryIO | None = None
        self._first = True  # no line was read yet

    def now(self) -> float:
        return self.book.newest

    async def start(self) -> None:
        if not self.own:
            self._file = open(self.path, "rb")  # noqa: SIM115
            self._file.seek(0, os.SEEK_END)

    async def stop(self, drain: float) -> None:
        with suppress(InputError):  # it was told by `trouble`, or comes too late to matter
            self.poll()
        self.own = False  # none is waited for any more
        if self._file is not None:
            self._file.close()
            self._file = None

    def trouble(self) -> str | None:
        self.poll()
        return f"the policy fell back: {self.fell_back}" if self.fell_back else None

    def expect(self, mark: str, begin: Callable[[float], Block]) -> None:
        self._expected = {mark: begin}

    def too_slow(self) -> str:
        return ""

    def notes(self) -> list[str]:
        return []

    def poll(self) -> None:
        if self._file is None and self.own and self.path.exists():
            self._file = open(self.path, "rb")  # noqa: SIM115
        while self._file is not None and (piece := self._file.read(AT_A_TIME)):
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > LONGEST_LINE:
                raise self._damaged("a line has no end")
            for line in lines:
                first, self._first = self._first, False
                read = parse_line(line.decode(errors="replace"))
                # the first line may lack its beginning; that of a whole trace is about the server
                if not (first and (read is None or "trace" in read)):
                    self._tell(read)

    def _tell(self, line: dict[str, Any] | None) -> None:
        wrong = "not a JSON object" if line is None else fault(line)
        if line is None or wrong:
            raise self._damaged(wrong or "")
        try:
            self._replay.tell(line)
        except ClockError as error:
            raise self._damaged(f"the clock goes back ({error})") from None
        except WRONG as error:
            raise self._damaged(f"{line.get('event')!r} makes no sense here ({error})") from None
        while self._replay.asides:
            aside = self._replay.asides.pop()
            if aside["event"] == "mark":
                if (begin := self._expected.pop(aside["mark"], None)) is not None:
                    self.begun[aside["mark"]] = begin(aside["at"])
            elif aside["event"] == "policy":
                self.renewals += 1
            elif aside["event"] == "fell_back":
                self.fell_back = aside["reason"]

    def _damaged(self, why: str) -> InputError:
        return InputError(f"trace {self.path}: {why}; give the trace of one running server")


def newest(path: str) -> Path:
    """A server that is started again writes NAME-2, NAME-3: the one that was written to last."""
    named = Path(path)
    found = [named, *named.parent.glob(f"{named.stem}-*{named.suffix}")]
    found = [each for each in found if is_live_trace(each)]
    if not found:
        raise InputError(
            f"trace {path}: no trace of a live engine; start the server with `trace` in its settings, or let "
            "the trial send its own load, such as --rate 10"
        )
    return max(found, key=lambda each: each.stat().st_mtime)
