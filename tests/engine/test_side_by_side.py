"""Two data-parallel engines of one server, on one settings file."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_server import ONE_PROCESS, PATIENCE, SAMPLE, Server, eventually, served

from headgate.record.live_trace import trace_lines
from headgate.record.tables import Run

BASE = {"trace": "steps.jsonl", "log_every": "1h"}
TOKENS, REQUESTS = 12, 24


@pytest.fixture(scope="module")
def server(model, scratch):
    (scratch / "headgate.json").write_text(json.dumps({**BASE, "policy": "eb", "set": {"refill": 2}}))
    flags = ("--config", "headgate.json", "--max-num-seqs", "4", "--data-parallel-size", "2")
    with served(model, scratch, *flags, **ONE_PROCESS) as found:
        yield found


def ask_all(server: Server) -> None:
    def ask(number: int) -> int:
        body = {"model": "tiny", "prompt": f"request {number}", "max_tokens": TOKENS, "ignore_eos": True}
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(REQUESTS) as pool:
        assert list(pool.map(ask, range(REQUESTS))) == [TOKENS] * REQUESTS


def metric(server: Server, name: str, engine: int, labels: str = "") -> float | None:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode()
    for found, all_labels, value in SAMPLE.findall(text):
        if found == name and f'engine="{engine}"' in all_labels and labels in all_labels:
            return float(value)
    return None


def test_each_engine_counts_for_itself(server):
    ask_all(server)
    eventually(
        lambda: sum(metric(server, "headgate_finished_total", e) or 0 for e in (0, 1)) == REQUESTS,
        "every request is counted by one engine",
    )
    for engine in (0, 1):
        assert (metric(server, "headgate_finished_total", engine) or 0) > 0
        assert metric(server, "headgate_fallen", engine) == 0
        assert metric(server, "headgate_steps_total", engine, 'kind="mixed"') == 0


def test_both_read_the_file_again(server, scratch):
    (scratch / "new.json").write_text(json.dumps({**BASE, "policy": "mixed"}))
    (scratch / "new.json").replace(scratch / "headgate.json")

    def renewed() -> bool:
        ask_all(server)  # settings are read between two plans
        return all(metric(server, "headgate_renewals_total", engine) == 1 for engine in (0, 1))

    eventually(renewed, "both engines have the new policy")
    for engine in (0, 1):
        assert metric(server, "headgate_info", engine, 'policy="mixed"') == 1


def test_each_has_a_trace_of_its_own(server, scratch):
    time.sleep(2.0)  # they are written once a second
    runs = {}
    for path in sorted(scratch.glob("steps*.jsonl")):
        _, header = next(trace_lines(path))
        runs[header["replica"]] = Run.load(path)
    assert sorted(runs) == [0, 1]
    assert all(set(run.requests["output"].tolist()) == {TOKENS} for run in runs.values())
