"""How well the emulator keeps time, and what a token costs: `python -m benchmarks.emulator [STREAMS...]`.

Starts `headgate emulate` in a process of its own, opens so many streams from another process, and prints one
row for each number of streams: tokens per second by the card, lateness of steps (from `/metrics`), how far
the tokens of a step arrive behind its end, and CPU time of the emulator per token. Seconds on a shared
machine are the neighbours' too: compare rows of one run.
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
SECONDS = 8.0
PROMPT, OUTPUT = 64, 4000  # tokens
CARD = "cal-h200-qwen3-8b"
BUCKET = re.compile(r'^headgate_emulator_late_seconds_bucket\{.*le="([^"]+)".*\} (\S+)$', re.MULTILINE)
MAIN = "from headgate.cli import main; main()"


class Row(NamedTuple):
    """What one number of streams gave."""

    streams: int
    tokens_per_second: float
    late_p50: float
    late_p99: float
    behind_p50: float
    behind_p99: float
    cpu_per_token: float


def start(slots: int, speed: float) -> tuple[subprocess.Popen[str], str]:
    """An emulator in its own process, and its url."""
    command = [sys.executable, "-c", MAIN, "emulate", "--card", CARD, "--slots", str(slots), "--port", "0"]
    command += ["--speed", str(speed), "--model", "emulated"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    line = child.stdout.readline()
    return child, line.split()[2]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def lateness(url: str) -> dict[str, float]:
    """The cumulative counts of the lateness histogram, by upper bound."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return {bound: float(count) for bound, count in BUCKET.findall(answer.read().decode())}


def quantile(before: dict[str, float], after: dict[str, float], share: float) -> float:
    """The upper bound below which this share of the steps between two looks was late."""
    total = after["+Inf"] - before["+Inf"]
    return next(float(bound) for bound in after if after[bound] - before[bound] >= share * total)


async def listen(url: str, streams: int, until: float) -> list[list[float]]:
    """Open the streams, and note when every event of each came, until that time."""
    host, port = url.removeprefix("http://").split(":")
    prompts = [[number + 1, *range(1, PROMPT)] for number in range(streams)]
    times: list[list[float]] = [[] for _ in range(streams)]

    async def one(number: int) -> None:
        body = {"prompt": prompts[number], "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        while time.perf_counter() < until:
            got = await reader.read(65536)
            now = time.perf_counter()
            times[number] += [now] * got.count(b"data: {")
            if not got:
                break
        writer.close()

    await asyncio.gather(*map(one, range(streams)))
    return times


def behind(times: list[list[float]]) -> list[float]:
    """For each token of each step, how long after the first token of that step it came.

    All streams are in every step once all prompts are done, so counting from the end lines steps up.
    """
    shortest = min(map(len, times)) // 2
    rows = [each[-shortest:] for each in times if len(each) >= shortest]
    last = [row[: shortest - 2] for row in rows]
    return sorted(value - min(step) for step in zip(*last, strict=True) for value in step)


def measure(streams: int, speed: float = 1.0) -> Row:
    """One row."""
    child, url = start(max(streams, 1), speed)
    try:
        began = time.perf_counter()
        watcher = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.emulator", "listen", url, str(streams), str(SECONDS)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        time.sleep(SECONDS / 3)
        before, cpu, tokens = lateness(url), cpu_seconds(child.pid), made(url)
        at = time.perf_counter()
        time.sleep(SECONDS / 3)
        after, spent, more = lateness(url), cpu_seconds(child.pid) - cpu, made(url) - tokens
        seconds = time.perf_counter() - at
        found = json.loads(watcher.communicate()[0])
        assert time.perf_counter() - began < SECONDS * 20
    finally:
        child.terminate()
        child.wait()
    return Row(
        streams, more / seconds, quantile(before, after, 0.5), quantile(before, after, 0.99),
        found["p50"], found["p99"], spent / more,
    )  # fmt: skip


def made(url: str) -> float:
    """Output tokens so far."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        found = re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def main() -> None:
    """Print the table, or (as the second process) what the streams saw."""
    if sys.argv[1:2] == ["listen"]:
        url, streams, seconds = sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
        late = behind(asyncio.run(listen(url, streams, time.perf_counter() + seconds)))
        json.dump({"p50": late[len(late) // 2], "p99": late[int(len(late) * 0.99)]}, sys.stdout)
        return
    print("streams  tokens/s  steps late p50, p99 (ms, at most)  in a step p50, p99 (ms)  CPU per token (us)")
    for streams in map(int, sys.argv[1:] or STREAMS):
        row = measure(streams)
        print(
            f"{row.streams:7}  {row.tokens_per_second:8.0f}  {row.late_p50 * 1e3:16.1f}, "
            f"{row.late_p99 * 1e3:<14.1f}  {row.behind_p50 * 1e3:14.2f}, {row.behind_p99 * 1e3:<7.2f}  "
            f"{row.cpu_per_token * 1e6:10.1f}"
        )


if __name__ == "__main__":
    main()
