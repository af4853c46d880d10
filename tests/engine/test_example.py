"""The example that serves with vLLM runs on a tiny model and prints what stands beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tiny
from http_server import ONE_PROCESS, START, environment

from same import assert_alike

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_serve_with_vllm(tmp_path):
    model = tiny.model(tmp_path / "model")
    command = [sys.executable, str(EXAMPLES / "serve_with_vllm.py"), str(model), "float32"]
    environ = environment(tmp_path) | ONE_PROCESS
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=START)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = [line for line in done.stdout.splitlines() if "pid=" not in line]  # vLLM's own log
    assert_alike("\n".join(printed[-3:]), (EXAMPLES / "serve_with_vllm.out").read_text())
