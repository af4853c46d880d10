"""`headgate serve`: what reaches vLLM, what is refused before, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time

import pytest

FAKE = """#!{python}
import json, os, sys
file = os.environ["HEADGATE_CONFIG"]
shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
said = {{"args": sys.argv[1:], "file": file, "settings": open(file).read(), "shared": shared}}
said["empty"] = shared and os.listdir(shared) == []
open("said.json", "w").write(json.dumps(said))
sys.exit({code})
"""
PYTHON = sys.executable
EB = ["--policy", "eb", "--set", "refill=48"]


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in ("HEADGATE_CONFIG", "PROMETHEUS_MULTIPROC_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("headgate.live.vllm.seams.installed", lambda: "0.32.0")


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A stand-in for vLLM's command, beside the Python that runs; what it was told."""

    def install(code: int = 0, text: str = FAKE):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "vllm").write_text(text.format(python=PYTHON, code=code))
        (folder / "vllm").chmod(stat.S_IRWXU)
        monkeypatch.setattr("sys.executable", str(folder / "python"))
        return lambda: json.loads((tmp_path / "said.json").read_text())

    return install


def nowhere(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")


def test_on_the_path(headgate, vllm, tmp_path, monkeypatch):
    said = vllm()
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert headgate("serve", "m", *EB).code == 0
    assert said()["args"][:2] == ["serve", "m"]


def test_everything_else_goes_to_vllm_in_its_order(headgate, vllm):
    said = vllm()
    rest = ["--max-num-seqs", "64", "-tp", "2", "--served-model-name", "a", "b", "--enforce-eager", "-O3"]
    done = headgate("serve", "org/model", *rest, *EB, "--trace", "t.jsonl", "--", "--config", "vllm.yaml")
    assert done.code == 0 and done.err.startswith("headgate: policy eb with refill=48")
    told = said()
    where = ["--config", "vllm.yaml", "--scheduler-cls", "headgate.vllm.scheduler"]
    assert told["args"] == ["serve", "org/model", *rest, *where]
    settings = json.loads(told["settings"])
    assert settings == {"policy": "eb", "set": {"refill": "48"}, "trace": "t.jsonl"}
    assert told["empty"] and told["file"] in done.out
    assert not os.path.exists(told["file"]) and not os.path.exists(told["shared"])


def test_a_file_of_ones_own(headgate, vllm, tmp_path):
    said = vllm()
    (tmp_path / "mine.toml").write_text('policy = "v0"\nmetrics = false\n')
    assert headgate("serve", "m", "--config", "mine.toml").code == 0
    told = said()
    assert told["file"] == str(tmp_path / "mine.toml") and told["shared"] is None
    assert (tmp_path / "mine.toml").exists()


def test_what_the_environment_says_stays(headgate, vllm, tmp_path, monkeypatch):
    said = vllm()
    (tmp_path / "mine.json").write_text('{"policy": "v0"}')
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("HEADGATE_CONFIG", str(tmp_path / "mine.json"))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "shared"))
    assert headgate("serve", "m").code == 0
    assert said()["shared"] == str(tmp_path / "shared") and (tmp_path / "shared").is_dir()


@pytest.mark.parametrize("code", [0, 1, 3])
def test_its_exit_code_is_ours(headgate, vllm, code):
    vllm(code)
    assert headgate("serve", "m", *EB).code == code


def test_a_dry_run_starts_and_writes_nothing(headgate, tmp_path, monkeypatch):
    nowhere(monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    done = headgate("serve", "m", *EB, "--max-num-seqs", "64", "--dry-run")
    assert done.code == 0 and sorted(tmp_path.rglob("*")) == before
    assert "vllm serve m --max-num-seqs 64 --scheduler-cls headgate.vllm.scheduler" in done.out
    assert '"refill": "48"' in done.out and "HEADGATE_CONFIG=" in done.out


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        ([], "Missing argument"),
        (["--max-num-seqs", "64", "m"], "the model comes first, not --max-num-seqs"),
        (["m", "--policy", "eb+"], "policy eb+ needs to know what steps cost; name a card, such as --card"),
        (["m", "--policy", "ebb"], "unknown policy 'ebb'; did you mean 'eb'?"),
        (["m", *EB, "--set", "refill"], "--set 'refill' is not NAME=VALUE"),
        (["m", *EB, "--max-num-seqs=32"], "refill=48 is outside 1..32"),
        (["m", *EB, "--set", "slots=64", "--max_num_seqs", "50"], "raise --max-num-seqs"),
        (["m", *EB, "--watchdog", "soon"], "watchdog: 'soon' is not a duration"),
        (["m", *EB, "--metrics-port", "0"], "metrics_port: 0 is not allowed; give at least 1"),
        (["m", *EB, "--card", "h100"], "unknown card 'h100'"),
        (["m", *EB, "--scheduler-cls", "x.Y"], "--scheduler-cls is what headgate serve sets"),
        (["m", *EB, "--additional-config", '{"headgate": {"polcy": 1}}'], "unknown field 'polcy'"),
        (["m", "--config", "none.toml"], "settings file none.toml: No such file"),
        (["m", "--config", "none.toml", *EB], "--policy beside the settings file none.toml; write it into"),
    ],
)
def test_refused_before_anything_starts(refused, vllm, args, fragment, tmp_path):
    vllm()
    refused(["serve", *args], fragment)


def test_no_vllm_and_the_wrong_vllm(refused, vllm, monkeypatch):
    nowhere(monkeypatch)
    refused(["serve", "m", *EB], "no vllm command here; install vLLM (0.26 to 0.33)")
    vllm()
    monkeypatch.setattr("headgate.live.vllm.seams.installed", lambda: "0.25.1")
    refused(["serve", "m", *EB], "vLLM 0.25.1 is older than those headgate knows (0.26 to 0.33); use vLLM")


def test_force_tries_it_and_a_newer_one_needs_none(headgate, vllm, monkeypatch):
    said = vllm()
    monkeypatch.setattr("headgate.live.vllm.seams.installed", lambda: "0.99.1")
    assert headgate("serve", "m", *EB).code == 0
    monkeypatch.setattr("headgate.live.vllm.seams.installed", lambda: "0.25.1")
    assert headgate("serve", "m", *EB, "--force").code == 0
    assert json.loads(said()["settings"])["force"] is True


def test_a_settings_file_and_an_environment_that_names_another(refused, vllm, monkeypatch):
    vllm()
    monkeypatch.setenv("HEADGATE_CONFIG", "other.toml")
    refused(["serve", "m", "--config", "a.toml"], "HEADGATE_CONFIG is set to other.toml; unset it")


def test_a_command_that_is_no_program(headgate, vllm):
    vllm(text="no program\n")
    done = headgate("serve", "m", *EB)
    assert done.code == 2 and "Exec format error; install vLLM again" in done.err


WAITS = """#!{python}
import os, signal, sys, time
def got(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit({code})
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, got)
print("group", os.getpgid(0) == os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


def test_signals_reach_vllm_once(vllm, tmp_path):
    vllm(7, WAITS)
    code = (
        "import sys\n"
        "from headgate.cli import main\n"
        f"sys.executable = {str(tmp_path / 'bin' / 'python')!r}\n"
        f"sys.argv = ['headgate', 'serve', 'm', *{EB!r}]\n"
        "main()\n"
    )
    child = subprocess.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert child.stdout is not None
        assert "scheduler-cls" in child.stdout.readline()
        assert child.stdout.readline() == "group True\n"
        os.killpg(child.pid, signal.SIGINT)  # Ctrl-C at a terminal reaches the whole group in front
        assert child.stdout.readline() == "got SIGINT\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "got SIGTERM\n"  # and no second SIGINT between
        assert child.wait(600) == 7
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_killed_by_a_signal_is_told_as_a_shell_does(headgate, vllm):
    vllm(text="#!{python}\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert headgate("serve", "m", *EB).code == 128 + signal.SIGKILL


@pytest.mark.parametrize("deaf", [False, True], ids=["listens to SIGTERM", "deaf to SIGTERM"])
def test_killed_outright_it_leaves_nothing_behind(vllm, tmp_path, deaf):
    """Row 10 of the attack: kill -9 of `headgate serve` ends vLLM and removes the temporary folder."""
    vllm(7, WAITS if not deaf else WAITS.replace("sys.exit({code})", "pass"))
    code = (
        "import sys\n"
        "from headgate.cli import main\n"
        "from headgate.cli import serve\n"
        "serve.Reaper.__init__.__defaults__ = (1,)\n"
        f"sys.executable = {str(tmp_path / 'bin' / 'python')!r}\n"
        f"sys.argv = ['headgate', 'serve', 'm', *{EB!r}]\n"
        "main()\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    child = subprocess.Popen(
        [PYTHON, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert child.stdout.readline() == "group True\n"
    assert len([*temporary.iterdir()]) == 1
    child.kill()
    child.wait()
    rest = child.stdout.read()  # ends when vLLM, the last to hold the pipe, has ended
    assert rest.splitlines() == ["got SIGTERM"]
    end = time.monotonic() + 600
    while [*temporary.iterdir()]:
        assert time.monotonic() < end, "the folder stays"
        time.sleep(0.05)
    child.stdout.close()


GRAPHS = ["--max-cudagraph-capture-size", "4096", "--gpu-memory-utilization", "0.90"]
WARMING = ["--middleware", "headgate.live.vllm.refusals.Warming"]


def test_promises_bring_the_graphs_and_the_warm_up_they_need(headgate, monkeypatch):
    nowhere(monkeypatch)
    done = headgate("serve", "m", "--ttft", "500ms", "--tbt", "100ms", "--port", "8123", "--dry-run")
    flags = [*GRAPHS, "--port", "8123", "--scheduler-cls", "headgate.vllm.scheduler", *WARMING]
    assert " ".join(flags) in done.out  # vLLM takes the last word: the user's
    assert "HEADGATE_WARM=" in done.out
    assert "/health answers 503 until http://127.0.0.1:8123 is warm" in done.out
    assert "--no-graphs leaves both out" in done.out


@pytest.mark.parametrize(
    ("rest", "graphs", "warm"),
    [
        ([], False, False),  # nothing is promised
        (["--ttft", "1s"], False, True),
        (["--tbt", "50ms", "--no-graphs"], False, True),
        (["--tbt", "50ms", "--no-warm-up"], True, False),
        (["--tbt", "50ms", "--enforce-eager"], False, True),
        (["--tbt", "50ms", "--max_cudagraph_capture_size=1024"], False, True),
        (["--tbt", "50ms", "--uds", "/tmp/s"], True, False),
        (["--tbt", "50ms", "--ssl-keyfile", "k"], True, False),
    ],
)
def test_only_what_is_needed_and_not_said_otherwise(headgate, monkeypatch, rest, graphs, warm):
    nowhere(monkeypatch)
    done = headgate("serve", "m", *rest, "--dry-run")
    assert done.code == 0
    assert (" ".join(GRAPHS) in done.out, " ".join(WARMING) in done.out) == (graphs, warm)


def test_memory_that_the_user_set_stays(headgate, monkeypatch):
    nowhere(monkeypatch)
    done = headgate("serve", "m", "--tbt", "50ms", "--gpu-memory-utilization", "0.8", "--dry-run")
    assert GRAPHS[0] in done.out and done.out.count("--gpu-memory-utilization") == 1


SERVER = """#!{python}
import http.server, os, sys
file = os.environ["HEADGATE_WARM"]
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        if self.path == "/health" and "x-headgate-warm-up" in self.headers:
            self.send_header("x-headgate-warm-up", file if "{code}" == "0" else "/another")
        self.end_headers()
        self.wfile.write(b"not json")
    def log_message(self, *words): open("asked", "a").write(self.path + "\\n")
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer)
server.timeout = 0.2
for _ in range(40):
    server.handle_request()
    if os.path.exists(file): sys.exit(0)
sys.exit(7)
"""


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 7)])
def test_only_ones_own_server_is_warmed_up_and_called_ready(headgate, vllm, tmp_path, code, ends):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    vllm(code, SERVER)
    done = headgate("serve", "m", "--ttft", "1s", "--port", port)
    assert done.code == ends
    asked = (tmp_path / "asked").read_text().split()
    assert ("/v1/models" in asked) == (code == 0)  # another server on this port gets no load
    if code == 0:
        assert (
            "warm-up: not warmed up:" in done.err
        )  # it is no list of models, and the server is ready anyway


def test_keys_are_not_printed(headgate, monkeypatch):
    nowhere(monkeypatch)
    keys = ["--api-key", "secret-a", "secret-b", "--port", "8001", "--api_key=secret-c"]
    done = headgate("serve", "m", *keys, "--dry-run")
    assert done.code == 0 and "secret" not in done.out + done.err
    assert "--api-key ... ... --port 8001 --api_key=..." in done.out


@pytest.mark.parametrize(
    "own",
    [
        ["-cc", "{}"],
        ["-cc.max_cudagraph_capture_size=512"],
        ["--compilation-config.mode", "3"],
        ["--", "--config", "vllm.yaml"],
    ],
)
def test_graphs_that_vllm_is_told_otherwise_are_left_alone(headgate, monkeypatch, own):
    nowhere(monkeypatch)
    done = headgate("serve", "m", "--tbt", "50ms", "--dry-run", *own)
    assert done.code == 0 and GRAPHS[0] not in done.out and "0.90" not in done.out


def test_what_each_class_is_promised_is_said(headgate, tmp_path, monkeypatch):
    nowhere(monkeypatch)
    (tmp_path / "own.toml").write_text(
        '[classes.gold]\nttft = "300ms"\ntbt = "60ms"\nweight = 5\n[classes.batch]\nbackground = true\n'
    )
    done = headgate("serve", "m", "--config", "own.toml", "--dry-run")
    gold, batch = "gold: ttft 300 ms, tbt 60 ms, weight 5", "batch: background"
    assert f"classes: {gold}; {batch}; without a class: nothing promised" in done.out


def test_the_class_of_warm_ups_is_ours(headgate, tmp_path, monkeypatch):
    nowhere(monkeypatch)
    (tmp_path / "own.toml").write_text('[classes.headgate-warm-up]\nttft = "1s"\n')
    done = headgate("serve", "m", "--config", "own.toml", "--dry-run")
    assert done.code == 2 and "take another name" in done.err


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("mine.yaml", "policy: eb", "settings file mine.yaml: settings are TOML or JSON"),
        ("mine.toml", 'policy = "ebb"', "settings file mine.toml: unknown policy 'ebb'; did you mean 'eb'?"),
        ("mine.toml", 'card = "llama-9"', "settings file mine.toml: unknown card 'llama-9'"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_mistake_in_a_settings_file_names_the_file(refused, tmp_path, name, text, wanted, engine):
    (tmp_path / name).write_text(text)
    refused(["serve", "m", "--engine", engine, "--config", name, "--dry-run"], wanted)
