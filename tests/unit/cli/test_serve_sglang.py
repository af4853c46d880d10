"""`headgate serve --engine sglang`: what reaches SGLang, and what is refused before."""

from __future__ import annotations

import json
import socket
import stat
import sys

import pytest

FAKE = """#!{python}
import json, os, sys
file = os.environ["HEADGATE_CONFIG"]
said = {{"args": sys.argv[1:], "settings": json.load(open(file)), "loaded": os.environ["HEADGATE_LOADED"]}}
json.dump(said, open("said.json", "w"))
{more}
"""
PYTHON = sys.executable


@pytest.fixture
def engine(tmp_path, monkeypatch):
    for name in ("HEADGATE_CONFIG", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def install(more: str = ""):
        command = tmp_path / "bin" / "sglang"
        command.parent.mkdir()
        command.write_text(FAKE.format(python=PYTHON, more=more))
        command.chmod(stat.S_IRWXU)
        monkeypatch.setattr("sys.executable", str(command.with_name("python")))
        return lambda: json.loads((tmp_path / "said.json").read_text())

    return install


def test_flags_that_a_policy_needs(headgate, engine):
    said = engine()
    done = headgate("serve", "m", "--engine", "sglang", "--policy", "keep", "--ttft", "1s", "--tp", "2")
    assert done.code == 0
    assert said()["args"] == ["serve", "m", "--enable-mixed-chunk", "--enable-metrics", "--tp", "2"]
    assert said()["settings"] == {"policy": "keep", "ttft": "1s"}


def test_an_exclusive_policy_needs_no_mixing(headgate, engine):
    done = headgate("serve", "m", "--engine", "sglang", "--policy", "eb", "--set", "refill=8", "--dry-run")
    assert "sglang serve m --enable-metrics\n" in done.out
    assert "HEADGATE_LOADED=" in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "wait"], "policy wait names the decodes"),
        (["--policy", "v0", "--use-ray"], "--use-ray is not supported; drop it"),
        (["--policy", "v0", "--pp-size", "2"], "--pp-size 2 is not supported; drop it"),
        (["--engine", "trt"], "write vllm or sglang"),
        (["--policy", "sglang:order=lpm"], "own flags instead of sglang:PARAMETER=VALUE"),
        (["--policy", "sglang", "--engine", "vllm"], "SGLang's own scheduling"),
    ],
)
def test_refused_before_sglang_starts(headgate, engine, words, said):
    done = headgate("serve", "m", "--engine", "sglang", *words)
    assert done.code == 2 and said in done.err


def test_a_filter_of_plug_ins_must_name_us(headgate, engine, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    done = headgate("serve", "m", "--engine", "sglang", "--policy", "eb", "--dry-run")
    assert done.code == 2 and "SGLANG_PLUGINS" in done.err


SERVER = """
import http.server
class Up(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *args): ...
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Up)
server.serve_forever()
"""


def test_a_server_without_headgate_is_stopped(headgate, engine):
    engine(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = headgate("serve", "m", "--engine", "sglang", "--policy", "v0", "--port", str(port))
    assert done.code == 2
    assert "SGLang had started without headgate, and was stopped" in done.err
