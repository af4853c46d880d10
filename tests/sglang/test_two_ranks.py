"""Tensor parallelism: rank 0's turn is every rank's, whatever their clocks say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cases():
    script = Path(__file__).with_name("two_ranks.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("name", ["shared", "shared, overlap", "a policy that fails"])
def test_both_ranks_make_the_same_batches(cases, name):
    assert cases[name]["same"]
    assert cases[name]["finished"] == [40, 40]


def test_rejected_requests_leave_both(cases):
    case = cases["a policy that rejects"]
    assert case["same"]
    assert case["aborted"][0] == case["aborted"][1] > 0
    assert case["finished"][0] + case["aborted"][0] == 40


def test_without_sharing_they_would_differ(cases):
    assert not cases["each for itself"]["same"]
