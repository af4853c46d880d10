"""`headgate emulate` as a process: it announces itself, drains on SIGTERM, and says what is wrong."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from calls_of_emulator import PATIENCE

from headgate.live.emulate import answer

MAIN = "from headgate.cli import main; main()"
SRC = Path(__file__).resolve().parents[3] / "src"


@contextmanager
def started(*flags):
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, "emulate", "--port", "0", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()


def ask(url, body):
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=PATIENCE)


def test_it_serves_and_drains():
    with started("--speed", "20", "--engines", "2", "--policy", "eb+", "--slots", "64") as child:
        urls = [child.stdout.readline().split()[2] for _ in range(2)]
        with ask(urls[1], {"prompt": "hi", "max_tokens": 5}) as told:
            assert json.load(told)["choices"][0]["text"] == answer("hi", 5)
        with ask(urls[0], {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True}) as told:
            assert told.readline().startswith(b"data: {")
            child.send_signal(signal.SIGTERM)
            rest = told.read()
        assert rest.endswith(b"data: [DONE]\n\n") and rest.count(b"data: {") <= 399
        assert child.wait(PATIENCE) == 0
        assert "drains" in child.stdout.read()


def test_a_derived_card_says_how_far_off_it_may_be():
    with started("--card", "derived:qwen3-8b@h200") as child:
        assert child.stdout.readline().split()[2].startswith("http")
        assert "derived, not measured" in child.stdout.readline()


def test_a_crash_is_the_end_of_the_process():
    with started("--speed", "20", "--crash-after", "20") as child:
        url = child.stdout.readline().split()[2]
        with pytest.raises(OSError):
            ask(url, {"prompt": "hi", "max_tokens": 400, "ignore_eos": True}).read()
        assert child.wait(PATIENCE) == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--card", "no-such-card"], "no-such-card"),
        (["--policy", "mixd"], "did you mean 'mixed'?"),
        (["--slots", "0"], "slots: 0 is not allowed"),
        (["--speed", "0"], "speed"),
        (["--fault", "nothing"], "unknown fault"),
        (["--engines", "0"], "engines: 0 is not allowed"),
        (["--hold", "3"], "--virtual"),
        (["--kv-load-failure", "x"], "recompute"),
        (["--processes", "2"], "--port"),
        (["--tokenizer", "nowhere.json"], "tokenizer"),
        (["--output-law", "normal"], "unknown length law"),
        (["--host", "192.0.2.1"], "cannot listen"),
    ],
)
def test_mistakes_are_one_line(flags, told):
    with started(*flags) as child:
        _, err = child.communicate(timeout=PATIENCE)
        assert child.returncode == 2, err
        assert told in err and len(err.strip().splitlines()) == 1, err
