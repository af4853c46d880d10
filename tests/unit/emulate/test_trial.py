"""`headgate trial` on a real `headgate emulate`: arms take over, differences are found, files put back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headgate.core.errors import InputError
from headgate.live.emulate import emulated
from headgate.live.trial.load import FollowedTrace
from headgate.record.live_trace import read_live_trace

MAIN = "from headgate.cli import main; main()"
SRC = Path(__file__).resolve().parents[3] / "src"
PROMISE = "1s"  # a tenth of ours, or more
ORIGINAL = f'# the operator\'s own\npolicy = "mixed"\nttft = "{PROMISE}"\n'.encode()
SPEEDS = ("10", "4", "1")  # the first that the machine keeps up with
LOAD = ("--rate", "3", "--prompt", "100", "--output", "100")  # one at a time, waits are 2 s after 4 s
LITTLE = ("--rate", "1", "--prompt", "100", "--output", "10")
TIMING = ("--block", "10s", "--minutes", "2")
SLOW = "slow=mixed:slots=1"  # one request at a time: a queue


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_bytes(ORIGINAL)
    return path


@contextmanager
def process(*flags, cwd):
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, *map(str, flags)], cwd=cwd, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(SRC)},
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@contextmanager
def server(config, *flags, speed=SPEEDS[0]):
    with process("emulate", "--port", 0, "--speed", speed, *flags, cwd=config.parent) as child:
        yield child.stdout.readline().split()[2]


def trial(config, *flags, arms=("--arm", SLOW), reads=None, other=None):
    """A server, and a trial on it that ended by itself; what both left."""
    for speed in SPEEDS:
        with server(config, "--config", reads or config, speed=speed) as url, ExitStack() as stack:
            if other:
                second = stack.enter_context(server(config, *other, speed=speed))
                urls = ("--arm", f"a={url}", "--arm", f"b={second}")
            else:
                urls = ("--config", config, "--url", url, *arms)
            command = ("trial", *urls, *LOAD, *TIMING, "--speed", speed, *flags)
            child = stack.enter_context(process(*command, cwd=config.parent))
            out, err = child.communicate(timeout=500)
            if "of the newest requests were sent" not in err:
                break
    assert config.read_bytes() == ORIGINAL
    return child.returncode, out, err


def metrics(url):
    lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def policy_of(url):
    return (
        next(name for name in metrics(url) if name.startswith("headgate_info"))
        .split('policy="')[1]
        .split('"')[0]
    )


def until(what, seconds=120.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def test_the_emulator_reads_its_settings_again(config):
    with server(config, "--config", config) as url:
        assert policy_of(url) == "mixed" and metrics(url)['headgate_renewals_total{engine="0"}'] == 0
        config.write_text('policy = "vllm"\n')
        until(lambda: policy_of(url) == "vllm")
        config.write_text('policy = "nonsense"\n')
        time.sleep(0.5)
        config.write_text('{"policy": "eb:refill=3"}')
        until(lambda: policy_of(url) == "eb:refill=3")
        assert metrics(url)['headgate_renewals_total{engine="0"}'] == 2


def test_a_policy_takes_over_requests_that_run(config, tmp_path):
    """None is lost; the trace says which policy, and repeats the mark."""
    trace = tmp_path / "served" / "engine-0.jsonl"

    async def serve():
        import aiohttp

        body = {"prompt": [5] * 200, "max_tokens": 9000, "ignore_eos": True}
        options = {"config": str(config), "speed": 10.0, "out": str(tmp_path / "served"), "slots": 2}
        async with emulated(**options) as servers, aiohttp.ClientSession() as session:

            async def one():
                async with session.post(f"{servers[0]}/v1/completions", json=body) as answer:
                    return (await answer.json())["usage"]["completion_tokens"]

            calls = [asyncio.create_task(one()) for _ in range(4)]
            engine = servers.engines[0]
            while engine.running < 2:
                await asyncio.sleep(0.01)
            for mark in ("block 1", "block 2"):  # the second when the first was read, while requests run
                config.write_text(json.dumps({"policy": "eb:refill=1", "mark": mark}))
                while mark not in trace.read_text():
                    await asyncio.sleep(0.01)
            assert engine.running == 2
            return await asyncio.gather(*calls)

    assert asyncio.run(serve()) == [9000] * 4
    run = read_live_trace(trace)
    assert [line["policy"] for line in run.meta["policies"]] == ["eb:refill=1"]
    marks = [json.loads(line) for line in trace.read_text().splitlines() if '"mark"' in line]
    assert [mark["mark"] for mark in marks] == ["block 1", "block 2"]
    assert marks[1]["at"] - marks[0]["at"] > 1.0 and 1e9 < marks[0]["date"] < marks[1]["date"]


def test_a_difference_is_found_and_the_file_put_back(config, tmp_path):
    code, out, err = trial(config, "--out", "found", "--overwrite", "--api-key", "s3cret")
    assert code == 0, err
    assert not list(tmp_path.glob("settings.toml.*"))
    assert "slow is worse than as is: promises kept" in " ".join(out.split()), out
    found = json.loads((tmp_path / "found" / "trial.json").read_text())
    kept = found["found"]["slow"]["all"]["kept"]
    assert kept["word"] == "less" and kept["arm"] < kept["baseline"] - 0.1
    assert found["settings"]["slow"] == {"policy": "mixed:slots=1", "ttft": PROMISE}
    bench = [json.loads(path.read_text()) for path in sorted((tmp_path / "found").glob("*.bench.json"))]
    assert [result["label"] for result in bench] == ["as is", "slow"]
    assert bench[0]["mean_ttft_ms"] < bench[1]["mean_ttft_ms"] and bench[0]["failed"] == 0
    page = (tmp_path / "found" / "report.html").read_text()
    assert "slow is worse than as is" in page and "<svg" in page
    assert "--api-key KEY" in page and "s3cret" not in page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_trial_that_is_ended_in_the_middle_leaves_the_file_as_it_was(config, tmp_path, number):
    with server(config, "--config", config) as url:
        flags = ("--config", config, "--url", url, "--arm", SLOW, *LITTLE, *TIMING, "--speed", SPEEDS[0])
        with process("trial", *flags, "--whole", "--json", "-", cwd=tmp_path) as child:
            until(lambda: policy_of(url) == "mixed:slots=1")
            assert config.read_bytes() != ORIGINAL
            child.send_signal(number)
            out, err = child.communicate(timeout=120)
            until(lambda: config.read_bytes() == ORIGINAL)
            until(lambda: policy_of(url) == "mixed")
    if number != signal.SIGKILL:
        assert child.returncode == 130 and "interrupted; the server is back at its settings" in err
        assert json.loads(out)["stopped"].startswith("interrupted")


def test_a_floor_returns_to_the_baseline(config):
    code, out, err = trial(config, "--stop-if", "kept<90%")
    assert code == 1 and "slow kept at most" in err and "in two blocks running" in err
    assert "Cannot tell" in out


CLIENT = """
import asyncio, sys, headgate
from headgate.experiment.build import make_workload
from headgate.experiment.settings import experiment
from headgate.live.trial.load import TraceLoad, served_model

async def send(url, speed):
    load = experiment({"rate": 2.4, "prompt": 100.0, "output": 90.0, "requests": 5000})
    source = TraceLoad(make_workload(load)[0], url, {}, 1, speed)
    source.model = (await served_model(url))[0]
    await source.start()
    while not source.trouble():
        await asyncio.sleep(0.1)

asyncio.run(send(sys.argv[1], float(sys.argv[2])))
"""


def test_your_own_traffic_is_seen_in_the_trace(config, tmp_path):
    """Another client sends; the trial only follows the trace."""
    arms = ("--arm", "a=vllm", "--arm", SLOW)
    for speed in SPEEDS:
        trace = tmp_path / f"served-{speed}" / "engine-0.jsonl"
        with server(config, "--config", config, "--out", trace.parent.name, speed=speed) as url:
            known = os.environ | {"PYTHONPATH": str(SRC)}
            client = subprocess.Popen([sys.executable, "-c", CLIENT, url, speed], env=known)
            try:
                until(lambda: trace.stat().st_size > 20_000)  # noqa: B023
                flags = ("--config", config, "--follow", trace, *arms, *TIMING, "--speed", speed)
                with process("trial", *flags, "--json", "-", cwd=tmp_path) as child:
                    out, err = child.communicate(timeout=500)
                if client.poll() is None and child.returncode == 0:  # it kept up
                    break
            finally:
                client.kill()
                client.wait()
    assert child.returncode == 0, err
    assert config.read_bytes() == ORIGINAL
    found = json.loads(out)
    assert found["found"]["slow"]["all"]["kept"]["word"] == "less" and found["rounds"] >= 6


def test_two_servers_are_compared(config):
    code, out, err = trial(config, "--ttft", PROMISE, "--json", "-", other=("--slots", 1))
    assert code == 0, err
    assert json.loads(out)["found"]["b"]["all"]["kept"]["word"] == "less"


def test_a_server_that_reads_another_file_is_noticed(config, tmp_path):
    """The plug-in is there, but the settings never reach it."""
    unread = tmp_path / "other.toml"
    unread.write_text('policy = "mixed"\n')
    code, _, err = trial(config, reads=unread)
    assert code == 1 and "did not take the settings over" in err
    assert "or the machine is too slow: start server and trial with less than --speed" in err


def test_a_trace_that_is_damaged_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"trace": 1}\n')

    async def follow(text):
        source = FollowedTrace(str(path))
        await source.start()
        try:
            with path.open("a") as file:
                file.write(text)
            source.poll()
        finally:
            await source.stop(0.0)

    asyncio.run(follow('{"event": "mark", "at": 1.0, "date": 2.0, "mark": "x"}\n{"event": "ma'))
    for wrong in ('{"event": 3}\n{"event": 3}\n', "no JSON\nno JSON\n", '{"event": "steps"}\n' * 2):
        with pytest.raises(InputError, match="give the trace of one running server"):
            asyncio.run(follow(wrong))
