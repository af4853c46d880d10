"""Every example runs and prints what stands beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from same import assert_alike

EXAMPLES = Path(__file__).parents[2] / "examples"
HEADGATE = [sys.executable, "-c", "from headgate.cli import main; main()"]
GPUS = ["--trace", "trace.csv", "--scale-rate", "20", "--requests", "1000", "--seeds", "2", "--jobs", "1"]
GPUS += ["--slo", "ttft=500ms@p95,tbt=100ms@p99", "--policy", "mixed", "--policy", "eb+"]
COMMANDS = {
    "first_simulation": [sys.executable, str(EXAMPLES / "first_simulation.py")],
    "write_a_policy": [sys.executable, str(EXAMPLES / "write_a_policy.py")],
    "eb_or_mixed": [*HEADGATE, "compare", str(EXAMPLES / "eb_or_mixed.toml"), "--out", "runs/eb_or_mixed"],
    "how_many_gpus": [*HEADGATE, "plan", "capacity", "--find", "engines", *GPUS],
    "serve_dry_run": [*HEADGATE, "serve", "MODEL", "--config", str(EXAMPLES / "headgate.toml"), "--dry-run"],
    "check_a_policy": [*HEADGATE, "check", "write_a_policy.py:HalfFull"],
    "mix": [*HEADGATE, "simulate", "--rate", "12", "--mix", str(EXAMPLES / "mix.toml"), "--out", "runs/mix"],
}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_example_prints_what_stands_beside_it(name, tmp_path, request):
    done = subprocess.run(COMMANDS[name], capture_output=True, text=True, cwd=tmp_path, check=True)
    beside = EXAMPLES / f"{name}.out"
    if request.config.getoption("--update-golden"):
        beside.write_text(done.stdout)
    assert_alike(done.stdout, beside.read_text())


def test_alike_sees_other_words_and_other_numbers():
    assert_alike("mixed 25.11* [1,000", "mixed 25.12* [1,001")
    with pytest.raises(AssertionError):
        assert_alike("25.1 s", "27.1 s")
    with pytest.raises(ValueError, match="could not convert"):
        assert_alike("mixed", "eb")
