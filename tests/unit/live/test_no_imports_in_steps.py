"""A policy imports nothing while the engine runs: an import takes as long as dozens of steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
SERVES = """
import sys
from headgate.live.engine.settings import Settings
from headgate.live.engine.policy import build_policy
from headgate.live.vllm import VLLM
from stub_engine import StubEngine
limits = {"kv_tokens": 8000 * 16, "block": 16, "max_model_len": 8192, "batch_tokens": 2048, "running": 16}
policy = build_policy(Settings(policy=sys.argv[1], card="linear-h200-qwen3-8b"), VLLM, **limits)[0]
engine = StubEngine(policy, slots=16, budget=2048, block=16, blocks=8001)
engine.add("first", 100, 20)
engine.drain()
before = set(sys.modules)
for number in range(400):
    engine.add(f"r{number}", 50, 5 + number % 40)
engine.drain()
assert engine.live.fallen is None
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("policy", ["eb+", "eb-online", "slai"])
def test_nothing_is_imported_while_requests_are_served(policy):
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", SERVES, policy],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stdout.split() == []
