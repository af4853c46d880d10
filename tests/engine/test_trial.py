"""`headgate trial` on vLLM itself: settings are taken over, a trace is begun and ended, marks are in it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from http_server import START, Server, environment, eventually, plugged_in

from headgate.live.trial.load import TraceLoad, served_model
from headgate.record.live_trace import read_live_trace
from headgate.workloads.workload import Workload

ORIGINAL = '# the operator\'s own\npolicy = "vllm"\nttft = "10s"\n'
SPEED = 3.0  # blocks of 20 s are as short as these seven seconds
MAIN = "from headgate.cli import main; main()"


@pytest.fixture(scope="module")
def server(model: Path, scratch: Path):
    (scratch / "trial.toml").write_text(ORIGINAL)
    with plugged_in(model, scratch, scratch / "trial.toml", slots=8) as found:
        yield found


def traffic(url: str, over: threading.Event) -> TraceLoad:
    """A request a second, until it is over; none is given up."""
    count = 400
    requests = Workload.of([20] * count, [12] * count, arrival=[1.0 * number for number in range(count)])

    async def send() -> TraceLoad:
        load = TraceLoad(requests, url, {}, 1)
        load.model = (await served_model(url))[0]
        await load.start()
        while not over.is_set():
            await asyncio.sleep(0.1)
        await load.stop(START)
        return load

    return asyncio.run(send())


def trial(scratch: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    timing = ("--speed", str(SPEED), "--block", "20s", "--minutes", "4", "--whole", "--json", "-")
    command = [sys.executable, "-c", MAIN, "trial", "--config", str(scratch / "trial.toml"), *flags, *timing]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=START, cwd=scratch, env=environment(scratch)
    )


def ended(server: Server, folder: Path) -> bool:
    """Whether no process of the server holds a file there open any more."""
    main = psutil.Process(server.child.pid)
    held = [file.path for process in (main, *main.children(recursive=True)) for file in process.open_files()]
    return not any(Path(path).is_relative_to(folder.resolve()) for path in held)


def test_a_trial_of_live_traffic_and_one_of_its_own(server, scratch):
    over = threading.Event()
    clients: list[TraceLoad] = []
    thread = threading.Thread(target=lambda: clients.append(traffic(server.url, over)))
    thread.start()
    try:
        done = trial(scratch, "--arm", "eb:refill=2", "--out", "followed")
        eventually(lambda: ended(server, scratch / "followed"), "the end of the trace")
    finally:
        over.set()
        thread.join()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rounds"] == 6 and found["state"] == "light" and not clients[0].failed
    assert found["found"]["eb:refill=2"]["all"]["kept"]["arm"] > 0.5
    assert (scratch / "trial.toml").read_text() == ORIGINAL
    (trace,) = (scratch / "followed").glob("trace-*.jsonl")
    marks = [json.loads(line) for line in trace.read_text().splitlines() if '"event":"mark"' in line]
    assert len(marks) == 14  # the first minute, twelve blocks, the end
    assert marks[1]["mark"].split(" ", 2)[2].startswith("round 1 block 1 arm ")
    assert [mark["at"] for mark in marks] == sorted(mark["at"] for mark in marks)
    assert all(abs(mark["date"] - time.time()) < 3600 for mark in marks)
    run = read_live_trace(trace)
    assert {line["policy"] for line in run.meta["policies"]} == {"vllm", "eb:refill=2"}
    arrived = trace.read_text().count('"event":"arrived"')
    load = ("--clients", "1", "--prompt", "20", "--output", "8")  # which no busy machine sends too late
    own = trial(scratch, "--arm", "eb:refill=2", "--url", server.url, *load)
    assert own.returncode == 0, own.stderr
    assert json.loads(own.stdout)["rounds"] == 6
    assert trace.read_text().count('"event":"arrived"') == arrived
    assert (scratch / "trial.toml").read_text() == ORIGINAL and not server.said("FALLEN BACK")
