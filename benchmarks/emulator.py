"""How well the emulator keeps time, and what a token costs: `python -m benchmarks.emulator [STREAMS...]`.

Starts `headgate emulate` in a process of its own, opens so many streams from another process, and prints one
row for each number of streams: tokens per second by the card; how late steps ended, and when their last token
had been written (`headgate_emulator_late_seconds` and `_written_seconds`, upper bounds of buckets); CPU time
of the emulator per token. Seconds on a shared machine are the neighbours' too: compare rows of one run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

STREAMS = (64, 128, 200, 256)
SECONDS = 12.0
PROMPT, OUTPUT = 64, 4000  # tokens
TOKENS = "vllm:generation_tokens_total"
CARD = "cal-h200-qwen3-8b"
BUCKET = r'^headgate_emulator_{}_seconds_bucket{{.*le="([^"]+)".*}} (\S+)$'
MAIN = "from headgate.cli import main; main()"


class Row(NamedTuple):
    """What one number of streams gave."""

    streams: int
    tokens_per_second: float
    late_p50: float
    late_p99: float
    written_p50: float
    written_p99: float
    cpu_per_token: float


def start(slots: int, speed: float) -> tuple[subprocess.Popen[str], str]:
    """An emulator in its own process, and its url; EMULATOR_BEFORE="chrt -f 10" puts words before it."""
    command = [
        *os.environ.get("EMULATOR_BEFORE", "").split(),
        sys.executable,
        "-c",
        MAIN,
        "emulate",
        "--card",
        CARD,
        "--slots",
        str(slots),
        "--port",
        "0",
    ]
    command += ["--speed", str(speed), "--model", "emulated"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    line = child.stdout.readline()
    return child, line.split()[2]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def lateness(url: str) -> dict[str, dict[str, float]]:
    """The cumulative counts of the two histograms of lateness, by upper bound."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    return {
        name: {bound: float(count) for bound, count in re.findall(BUCKET.format(name), text, re.MULTILINE)}
        for name in ("late", "written")
    }


def quantile(before: dict[str, float], after: dict[str, float], share: float) -> float:
    """The upper bound below which this share of the steps between two looks was late."""
    total = after["+Inf"] - before["+Inf"]
    return next(float(bound) for bound in after if after[bound] - before[bound] >= share * total)


async def listen(url: str, streams: int, until: float) -> None:
    """Open the streams and read them until that time."""
    host, port = url.removeprefix("http://").split(":")

    async def one(number: int) -> None:
        prompt = [number + 1, *range(1, PROMPT)]
        body = {"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        while time.perf_counter() < until and await reader.read(65536):
            pass
        writer.close()

    await asyncio.gather(*map(one, range(streams)))


def measure(streams: int, speed: float = 1.0) -> Row:
    """One row."""
    child, url = start(max(streams, 1), speed)
    try:
        watcher = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.emulator", "listen", url, str(streams), str(SECONDS)],
        )  # fmt: skip
        while value(url, "vllm:num_requests_running") < streams or value(url, TOKENS) < 20 * streams:
            assert watcher.poll() is None, "the clients have ended before the engine was full"
            time.sleep(0.1)
        before, cpu, tokens = lateness(url), cpu_seconds(child.pid), value(url, TOKENS)
        at = time.perf_counter()
        time.sleep(SECONDS / 3)
        after, spent, more = lateness(url), cpu_seconds(child.pid) - cpu, value(url, TOKENS) - tokens
        seconds = time.perf_counter() - at
        assert watcher.wait() == 0
    finally:
        child.terminate()
        child.wait()
    late, late_99, written, written_99 = (
        quantile(before[name], after[name], share) for name in ("late", "written") for share in (0.5, 0.99)
    )
    return Row(streams, more / seconds, late, late_99, written, written_99, spent / more)


def value(url: str, name: str) -> float:
    """One of the emulator's metrics."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        found = re.search(rf"^{name}\{{.*\}} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def main() -> None:
    """Print the table, or (as the second process) what the streams saw."""
    if sys.argv[1:2] == ["listen"]:
        url, streams, seconds = sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
        asyncio.run(listen(url, streams, time.perf_counter() + seconds))
        return
    print("streams  tokens/s  steps late p50, p99 (ms, at most)  written p50, p99 (ms)  CPU per token (us)")
    for streams in map(int, sys.argv[1:] or STREAMS):
        row = measure(streams)
        print(
            f"{row.streams:7}  {row.tokens_per_second:8.0f}  {row.late_p50 * 1e3:16.1f}, "
            f"{row.late_p99 * 1e3:<14.1f}  {row.written_p50 * 1e3:14.1f}, {row.written_p99 * 1e3:<7.1f}  "
            f"{row.cpu_per_token * 1e6:10.1f}"
        )


if __name__ == "__main__":
    main()
