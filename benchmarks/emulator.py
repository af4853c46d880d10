"""How well the emulator keeps time, and what a token costs: `python -m benchmarks.emulator [STREAMS...]`.

Starts `headgate emulate` in processes of its own, opens so many streams to each from another process, and
prints one row for each number of streams:

- tokens per second, by the card;
- how late steps ended, and when their last token had been written: `headgate_emulator_late_seconds` and
  `_written_seconds`, upper bounds of buckets, as the emulator itself saw it;
- how late tokens were at the client: when the kernel put them into its socket, against the schedule in the
  emulator's trace. When the client gets round to reading is its own affair and not in it;
- CPU time of the emulator per token.

`--processes 5` takes five emulators, each with so many streams. EMULATOR_BEFORE="chrt -f 10" puts words
before emulators and client: on a machine that does other work the tails are that work's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STREAMS = (64, 128, 200, 256)
SECONDS = 6.0  # of measurement
PROMPT, OUTPUT = 64, 8000  # tokens; the prompt of stream n is n tokens longer, by which the trace knows it
TOKENS = "vllm:generation_tokens_total"
CARD = "cal-h200-qwen3-8b"
BUCKET = r'^headgate_emulator_{}_seconds_bucket{{.*le="([^"]+)".*}} (\S+)$'
MAIN = "from headgate.cli import main; main()"
BEFORE = os.environ.get("EMULATOR_BEFORE", "").split()
STAMP, NANOSECONDS = getattr(socket, "SO_TIMESTAMPNS", 35), struct.Struct("qq")  # Linux: when data came
LOOK = 0.002  # seconds between two looks of the client at its sockets
STAMPED = 256  # streams, at most, whose tokens are timed; the others are read only
EVENT = b"data: "
HEAD = "| streams | tokens/s | steps late | steps written | tokens at the client (how many) | CPU per token |"


class Row(NamedTuple):
    """What one number of streams gave; times in seconds."""

    streams: int
    tokens_per_second: float
    late: tuple[float, float]  # p50, p99
    written: tuple[float, float]
    arrived: tuple[float, float]
    compared: int
    cpu_per_token: float


@contextmanager
def emulators(slots: int, speed: float, processes: int, out: Path) -> Iterator[tuple[list[str], list[int]]]:
    """Urls and process numbers of so many emulators."""
    command = [*BEFORE, sys.executable, "-c", MAIN, "emulate", "--card", CARD, "--slots", str(slots)]
    command += ["--engines", str(processes), "--processes", str(processes), "--port", str(free(processes))]
    command += ["--speed", str(speed), "--model", "emulated", "--out", str(out)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        lines = (line for line in child.stdout if "http" in line)
        urls = sorted(next(lines).split()[2] for _ in range(processes))
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        yield urls, [int(pid) for pid in children] or [child.pid]
    finally:
        child.terminate()
        child.communicate()


def free(ports: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    for first in range(18100, 60000, 100):
        try:
            for port in range(first, first + ports):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise SystemExit("error: no free ports")


# -- the client ----------------------------------------------------------------------------------------


def listen(urls: list[str], streams: int) -> None:
    """Open the streams, read them until told to stop, and print what came when."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *told: stop.append(1))
    step, waiting = -(-streams * len(urls) // STAMPED), select.epoll()
    connections = [connect(url, number) for url in urls for number in range(streams)]
    places = {connection.fileno(): place for place, connection in enumerate(connections)}
    for connection in connections:
        waiting.register(connection, select.EPOLLIN)
    counts, seen = [0] * len(connections), []
    while not stop:
        time.sleep(LOOK)
        for file, _ in waiting.poll(0, len(connections)):
            place = places[file]
            if place % step:
                connections[place].recv(1 << 16)
                continue
            data, notes, _, _ = connections[place].recvmsg(1 << 16, 64)
            events = data.count(EVENT)
            counts[place] += events
            if events and notes:  # the stamp is the newest one's; the kernel begins to stamp a little later
                seconds, more = NANOSECONDS.unpack(notes[0][2])
                seen.append((*divmod(place, streams), counts[place] - 1, seconds + more * 1e-9))
    json.dump(seen, sys.stdout)


def connect(url: str, number: int) -> socket.socket:
    """A stream, asked for."""
    host, port = url.removeprefix("http://").split(":")
    body = {"prompt": [1] * (PROMPT + number), "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.SOL_SOCKET, STAMP, 1)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    return connection


def errors(seen: list[tuple[int, int, int, float]], traces: list[Path], speed: float) -> list[float]:
    """By how many seconds each token came after its time, once all streams of its engine were there."""
    found = []
    for engine, path in enumerate(traces):
        zero, first, ends = schedule(path)
        full = max(first.values())
        for place, number, count, came in seen:
            if place == engine:
                due = first[number] if not count else ends[np.searchsorted(ends, first[number]) + count]
                if due > full:
                    found.append(came - zero - due / speed)
    return found


def schedule(path: Path) -> tuple[float, dict[int, float], np.ndarray[Any, Any]]:
    """The date of time 0, when each stream got its first token, and when decodes got theirs."""
    head, *lines = map(json.loads, path.read_text().splitlines())
    numbers, first, ends = {}, {}, []
    for line in lines:
        if line["event"] == "arrived":
            numbers[line["id"]] = line["prompt"] - PROMPT
        elif line["event"] == "prefilled":
            first[numbers[line["id"]]] = line["at"]
        elif line["event"] == "steps" and line["decodes"]:
            ends += line["ends"]
    return head["zero"], first, np.array(ends)


# -- what the emulators say ----------------------------------------------------------------------------


class Look(NamedTuple):
    """At one moment: counts by upper bound of the two histograms, output tokens, CPU seconds."""

    at: float
    late: dict[str, float]
    written: dict[str, float]
    tokens: float
    cpu: float


def look(urls: list[str], pids: list[int]) -> Look:
    """All emulators together."""
    cpu, texts = sum(map(cpu_seconds, pids)), [metrics(url) for url in urls]
    late, written = (
        {
            bound: sum(float(dict(found)[bound]) for found in every)
            for bound, _ in every[0]
        }
        for every in ([re.findall(BUCKET.format(name), text, re.MULTILINE) for text in texts]
                      for name in ("late", "written"))
    )  # fmt: skip
    return Look(time.perf_counter(), late, written, sum(value(text, TOKENS) for text in texts), cpu)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return str(answer.read().decode())


def value(text: str, name: str) -> float:
    """One metric of an engine."""
    found = re.search(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def quantiles(before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    """The upper bounds below which 50 and 99 % of the steps between two looks were late."""
    total = after["+Inf"] - before["+Inf"]
    found = [next(float(bound) for bound in after if after[bound] - before[bound] >= share * total)
             for share in (0.5, 0.99)]  # fmt: skip
    return found[0], found[1]


def measure(streams: int, speed: float, processes: int) -> Row:
    """One row."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "served")
        with emulators(streams, speed, processes, out) as (urls, pids):
            words = ["-m", "benchmarks.emulator", "listen", str(streams), *urls]
            client = subprocess.Popen([*BEFORE, sys.executable, *words], stdout=subprocess.PIPE, text=True)
            while any(value(text, TOKENS) < 20 * streams for text in map(metrics, urls)):
                assert client.poll() is None, "the client has ended before the engines were full"
                time.sleep(0.5)
            before = look(urls, pids)
            time.sleep(SECONDS)
            after = look(urls, pids)
            client.terminate()
            seen = json.loads(client.communicate()[0])
        traces = sorted(out.glob("**/engine-0.jsonl"))
        late = errors(seen, traces, speed)
    tokens = after.tokens - before.tokens
    return Row(
        streams * processes,
        tokens / (after.at - before.at),
        quantiles(before.late, after.late),
        quantiles(before.written, after.written),
        (float(np.percentile(late, 50)), float(np.percentile(late, 99))),
        len(late),
        (after.cpu - before.cpu) / tokens,
    )


def main(argv: list[str]) -> None:
    """Print the table; as the second process, what the streams saw."""
    if argv[:1] == ["listen"]:
        return listen(argv[2:], int(argv[1]))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulator", description=__doc__)
    parser.add_argument("streams", nargs="*", type=int, default=STREAMS, help="of each process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--speed", type=float, default=1.0)
    asked = parser.parse_args(argv)
    print(f"p50 and p99\n\n{HEAD}\n|{'---|' * HEAD.count(' | ')}---|")
    for streams in asked.streams:
        row = measure(streams, asked.speed, asked.processes)
        late, written, arrived = (
            f"{1e3 * p50:.2g}, {1e3 * p99:.2g} ms" for p50, p99 in (row.late, row.written, row.arrived)
        )
        print(f"| {row.streams:,} | {row.tokens_per_second:,.0f} | {late} | {written} | "
              f"{arrived} ({row.compared:,}) | {1e6 * row.cpu_per_token:.1f} us |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
