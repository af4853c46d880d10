"""What seeded commands answer as JSON, to ten digits. `pytest --update-golden` rewrites it; read the diff.

A change of layout, of names or of speed must not move a digit; the last ones differ between processors.
Long answers are kept as their digest.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli import app

FOLDER = Path(__file__).parent
RUNNER = CliRunner()
LONG = 20_000  # bytes
CHANGES = re.compile(r'^\s*"(date|headgate)": "[^"]*",?\n', re.MULTILINE)  # with each run, each version
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")
COMMANDS = {
    "simulate": "simulate --prompt 256 --output 64 --requests 300 --clients 96 --slots 64 "
    "--policy eb+ --seed 3",
    "simulate-asynchronous": "simulate --card cal-h200-qwen3-8b --asynchronous --trace azure-conv "
    "--requests 300 --rate 15 --policy slai --seed 1",
    "simulate-short-of-kv": "simulate --prompt 300 --output 300 --requests 200 --slots 128 "
    "--arrivals all-at-once --kv-tokens 20000 --policy mixed --detailed",
    "simulate-fleet": "simulate --trace azure-code --requests 300 --rate 30 --engines 3 "
    "--router gate-and-route+ --policy mixed",
    "compare": "compare --trace azure-conv --requests 400 --clients 96 --policy mixed --policy eb:refill=16 "
    "--policy eb-online",
    "compare-routers": "compare --requests 300 --rate 40 --engines 3 --router least-loaded --router split "
    "--policy mixed",
    "sweep": "sweep --requests 100 --over slots=16,32 --policy mixed --policy v0 --seeds 2",
    "plan-threshold": "plan threshold --trace azure-conv --slots 256",
    "plan-flags": "plan flags --trace azure-conv --tpot 50ms --ttft 500ms --requests 500",
    "plan-capacity": "plan capacity --trace azure-conv --requests 300 --slo ttft=500ms@p50,tbt=100ms@p99 "
    "--policy mixed --policy v0 --seeds 1",
    "plan-engines": "plan capacity --find engines --trace azure-code --requests 300 --rate 60 "
    "--slo ttft=500ms@p95 --policy mixed --seeds 1",
    "plan-fluid": "plan fluid --engines 10 --trace azure-conv --rate 100",
    "plan-wait": "plan wait --rate 5 --prompt 200 --output 100",
    "reproduce": "reproduce eb-table10 --quick",
    "check": "check eb+ --worlds 3",
}


PLAIN = {"NO_COLOR": "1", "COLUMNS": "80", "XDG_CACHE_HOME": os.devnull}  # searches begin from nothing


def answer(command: str) -> str:
    result = RUNNER.invoke(app, [*command.split(), "--json", "-"], env=PLAIN)
    assert result.exit_code == 0, result.output
    plain = NUMBER.sub(lambda found: f"{float(found[0]):.10g}", CHANGES.sub("", result.stdout))
    if len(plain) > LONG:
        return f"{len(plain)} bytes, sha256 {hashlib.sha256(plain.encode()).hexdigest()}\n"
    return plain


@pytest.mark.parametrize("name", COMMANDS)
def test_the_answer_is_the_golden_one(name, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = FOLDER / f"{name}.json"
    found = answer(COMMANDS[name])
    if request.config.getoption("--update-golden"):
        file.write_text(found, encoding="utf-8")
    assert file.exists(), "no such golden file; run pytest --update-golden and read it"
    assert found == file.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over():
    assert {file.stem for file in FOLDER.glob("*.json")} == set(COMMANDS)
