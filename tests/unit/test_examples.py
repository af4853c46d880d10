"""Every example runs and prints what stands beside it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.live.emulate import emulated
from same import assert_alike

EXAMPLES = Path(__file__).parents[2] / "examples"
HEADGATE = [sys.executable, "-c", "from headgate.cli import main; main()"]
GPUS = (
    "--trace trace.csv --scale-rate 20 --requests 1000 --slo ttft=500ms@p95,tbt=100ms@p99 --seeds 2 --jobs 1"
)
COMMANDS = {
    "first_simulation": [sys.executable, "first_simulation.py"],
    "fleet_study": [sys.executable, "fleet_study.py"],
    "write_a_policy": [sys.executable, "write_a_policy.py"],
    "emulated_fleet": [sys.executable, "emulated_fleet.py"],
    "check_a_policy": [*HEADGATE, "check", "write_a_policy.py:HalfFull"],
    "how_many_gpus": [
        *[*HEADGATE, "plan", "capacity", "--find", "engines", *GPUS.split()],
        *["--policy", "mixed", "--policy", "eb+"],
    ],
    "serve_dry_run": [*HEADGATE, "serve", "MODEL", "--config", "headgate.toml", "--dry-run"],
    "eb_or_mixed": [*HEADGATE, "compare", "eb_or_mixed.toml", "--out", "runs/eb_or_mixed"],
    "mix": [*HEADGATE, "simulate", "--rate", "12", "--mix", "mix.toml", "--out", "runs/mix"],
}
ELSEWHERE = ["serve_with_vllm"]  # needs vLLM: tests/engine/test_example.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the examples to run them in."""
    made = shutil.ignore_patterns("__pycache__", "runs")  # others may be writing there just now
    return Path(shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("copy") / "examples", ignore=made))


@pytest.mark.parametrize("name", list(COMMANDS))
def test_example_prints_what_stands_beside_it(name, folder, request):
    plain = {**os.environ, "PATH": "/usr/bin:/bin", "TMPDIR": "/tmp", "COLUMNS": "80"}
    plain["XDG_CACHE_HOME"] = os.devnull  # searches begin from nothing
    done = subprocess.run(COMMANDS[name], capture_output=True, text=True, cwd=folder, check=True, env=plain)
    printed = done.stdout.replace(str(folder), "/home/you/examples")
    beside = EXAMPLES / f"{name}.out"
    if request.config.getoption("--update-golden"):
        beside.write_text(printed)
    assert_alike(printed, beside.read_text())


def test_every_example_is_run_and_told_of():
    shown = (EXAMPLES / "README.md").read_text()
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.toml"), *EXAMPLES.glob("*.csv")]:
        assert path.name in shown
    assert {path.stem for path in EXAMPLES.glob("*.out")} == {*COMMANDS, *ELSEWHERE}


def test_alike_sees_other_words_and_other_numbers():
    assert_alike("mixed 25.11* [1,000", "mixed 25.12* [1,001")
    with pytest.raises(AssertionError):
        assert_alike("25.1 s", "27.1 s")
    with pytest.raises(ValueError, match="could not convert"):
        assert_alike("mixed", "eb")


def test_load_for_two_keys_at_once():
    async def told() -> list[str]:
        async with emulated(engines=1, card="cal-h200-qwen3-8b", policy="mixed", speed=20) as urls:
            words = [sys.executable, "two_keys.py", urls[0], "0.5", "one=2", "other=3"]
            pipe = asyncio.subprocess.PIPE
            done = await asyncio.create_subprocess_exec(*words, cwd=EXAMPLES, stdout=pipe)
            return (await done.communicate())[0].decode().splitlines()

    lines = asyncio.run(told())
    assert [line.split(":")[0] for line in lines] == ["2 clients", "3 clients"]
    assert all(" 0 refused; first token after " in line and line.endswith(" s") for line in lines)
