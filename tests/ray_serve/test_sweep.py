"""Simulations as Ray tasks: the same tables as from the process pool, bit for bit."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress

import numpy as np
import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray installs it")

import ray
from typer.testing import CliRunner

from conftest import PATIENCE, remove, until
from headgate.cli import app
from headgate.core.errors import RunError
from headgate.experiment.workers import Workers, as_they_end
from headgate.record.tables import Run

HEADGATE = [sys.executable, "-c", "from headgate.cli import main; main()"]
SWEEP = (
    "sweep --policy mixed --policy eb+ --over rate=2,4,6,8,10 --seeds 20 --requests 20 --prompt 300 "
    "--output 20 --jobs 2 --out {}"
)
SMALL = "sweep --policy mixed --over rate=2,4 --requests 20 --prompt 300 --output 20"


def on_ray(*words):
    """In this process, which is connected to the cluster."""
    done = CliRunner().invoke(app, [*words, "--on", "ray"])
    assert done.exit_code == 0, done.output
    return done.stdout


def apart(*words):
    """In a process of its own: pools fork, and Ray's threads are here."""
    done = subprocess.run([*HEADGATE, *words], capture_output=True, text=True, check=True)
    return done.stdout


def tables(folder):
    """Every table of every run, and all that is said of it but its date and command."""
    found = {}
    for file in sorted(folder.rglob("*.npz")):
        with np.load(file, allow_pickle=True) as stored:
            found[str(file.relative_to(folder))] = {name: stored[name].tobytes() for name in stored.files}
    for file in sorted(folder.rglob("run.json")):
        meta = json.loads(file.read_text())
        found[str(file.relative_to(folder))] = {k: v for k, v in meta.items() if k not in ("date", "command")}
    return found


def test_200_runs_equal_those_of_the_pool(cluster, tmp_path):
    pool, ray_runs = tmp_path / "pool", tmp_path / "ray"
    apart(*SWEEP.format(pool).split())
    on_ray(*SWEEP.format(ray_runs).split())
    found = tables(ray_runs)
    assert found == tables(pool)
    assert sum(name.endswith("run.json") for name in found) == 200
    assert "200 of 200 runs are there already" in on_ray(*SWEEP.format(ray_runs).split())


def test_a_cluster_by_its_address_runs_this_very_package(cluster, tmp_path):
    address = ray.get_runtime_context().gcs_address
    apart(*SMALL.split(), "--out", str(tmp_path / "pool"))
    apart(*SMALL.split(), "--out", str(tmp_path / "ray"), "--on", f"ray:{address}")
    assert tables(tmp_path / "ray") == tables(tmp_path / "pool")


LOAD = "--prompt 500 --output 40 --seeds 2 --jobs 2 --json -"
CAPACITY = (
    f"plan capacity --slo ttft=500ms@p50,tbt=100ms@p99 --policy mixed --requests 300 --cache none {LOAD}"
)
ENGINES = f"plan capacity --find engines --rate 60 --slo ttft=500ms@p95 --requests 300 {LOAD}"
ADVISE = f"advise --rate 10 --slo ttft=1s@p95 --policy keep --slots 64 --requests 100 --cache none {LOAD}"


@pytest.mark.parametrize("words", [CAPACITY, ENGINES, ADVISE], ids=["rate", "engines", "advise"])
def test_searches_find_the_same(cluster, words):
    assert json.loads(on_ray(*words.split())) == json.loads(apart(*words.split()))


class Terminal:
    """What a process says on a standard error that is a terminal."""

    def __init__(self):
        self._ours, self.end = pty.openpty()
        self._said = []
        self._reader = threading.Thread(target=self._read)

    def _read(self):
        with suppress(OSError):  # nobody has the other end any more
            while said := os.read(self._ours, 65536):
                self._said.append(said)

    def begin(self):
        os.close(self.end)  # only the process has it now
        self._reader.start()

    def text(self):
        """Everything, once the process has ended."""
        self._reader.join()
        return b"".join(self._said).decode()


@pytest.fixture
def sweeping(tmp_path):
    """A sweep in a process with a Ray of its own, three of its 200 runs written; and its terminal."""
    folder, terminal = tempfile.mkdtemp(prefix="hg-"), Terminal()
    words = "sweep --policy mixed --over rate=2,4,6,8,10 --seeds 40 --requests 300 --prompt 300 --output 60"
    process = subprocess.Popen(
        [*HEADGATE, *words.split(), "--jobs", "1", "--on", "ray", "--out", tmp_path / "s"],
        env={**os.environ, "RAY_TMPDIR": folder},
        stderr=terminal.end,
        start_new_session=True,
    )
    terminal.begin()
    try:
        until(lambda: process.poll() is not None or len([*tmp_path.rglob("run.json")]) >= 3, "three runs")
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        remove(folder)


def test_ctrl_c_keeps_what_is_done(sweeping, tmp_path):
    """A real SIGINT, to the whole group as from a terminal. Runs are written as they come, with progress."""
    process, terminal = sweeping
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    kept, said = [*tmp_path.rglob("run.json")], terminal.text()
    assert 3 <= len(kept) < 200
    finished = sum(Run.load(each.parent).meta["outcome"] == "finished" for each in kept)
    assert f"interrupted: {finished} of 200 runs stand in {tmp_path / 's'}; the same command" in said
    assert said.count("headgate: ") == 1 and "Traceback" not in said
    assert re.search("sweep .*[1-9]%", said)  # the bar


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:99999", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_one_line(tmp_path, address):
    words = [*SMALL.split(), "--out", str(tmp_path / "s"), "--on", f"ray:{address}"]
    done = subprocess.run([*HEADGATE, *words], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "check that the cluster is up" in done.stderr
    assert not (tmp_path / "s").exists()


def double(number):
    return 2 * number


def die_once(folder):
    """Kills its worker when it runs for the first time."""
    mark = folder / "died"
    if not mark.exists():
        mark.touch()
        os._exit(1)
    return "survived"


def refuse(number):
    raise RunError(f"run {number} cannot go on")


def test_a_task_whose_worker_died_runs_again(cluster, tmp_path):
    with Workers(2, "ray").start(die_once, 1) as pool:
        assert [*as_they_end(pool, [tmp_path])] == [(tmp_path, "survived")]


def test_few_are_submitted_ahead_and_what_is_left_is_dropped(cluster):
    taken = []
    with Workers(2, "ray").start(double, 10_000) as pool:
        for task, answer in as_they_end(pool, (taken.append(n) or n for n in range(10_000))):
            assert answer == 2 * task
            break
    assert len(taken) <= 2 * ray.cluster_resources()["CPU"]


def test_what_a_run_raises_comes_back_as_itself(cluster):
    with pytest.raises(RunError, match="run 3 cannot go on"), Workers(2, "ray").start(refuse, 1) as pool:
        list(as_they_end(pool, [3]))
