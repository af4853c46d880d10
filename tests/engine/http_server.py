"""A server for tests: `headgate serve` on a free port, what it says, and what it counts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import SystemRandom

import psutil
import pytest
from asynchronous_cpu import installed_in

SRC = Path(__file__).resolve().parents[2] / "src"
START = 1200.0  # seconds: vLLM imports itself two or three times, on a machine that may be busy
SHOWN = 0.6  # seconds: metrics are shown four times a second
PATIENCE = 600.0  # seconds for what takes a moment: only what hangs takes so long
MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
# Settings of this process, or what an engine in it left behind.
LEFT_BEHIND = (
    "HEADGATE_CONFIG",
    "HEADGATE_METRICS",
    "PROMETHEUS_MULTIPROC_DIR",
    "VLLM_DIST_IDENT",
    MULTIPROCESSING,
)
# The model runs in the engine's process, as with one GPU: a third of a start less. On a CPU it has its own.
ONE_PROCESS = {MULTIPROCESSING: "0", "OMP_NUM_THREADS": "1"}
MAIN = "from headgate.cli import main; main()"
SAMPLE = re.compile(r"^(headgate_\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)


class Server:
    """A running server and its log."""

    def __init__(self, child: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.child, self.port, self.log = child, port, log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self, text: str) -> list[str]:
        """Lines of the log with this text."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]

    def metrics(self) -> dict[tuple[str, str], float]:
        """Our metrics by name and labels, engine 0; all that has happened by now is in them."""
        time.sleep(SHOWN)
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as answer:
            text = answer.read().decode()
        return {(name, labels.replace('engine="0"', "").strip(",").replace(",,", ",")): float(value)
                for name, labels, value in SAMPLE.findall(text)}  # fmt: skip

    def uses(self, policy: str) -> bool:
        """Whether this policy is in force."""
        shown = self.metrics().items()
        return any(f'policy="{policy}"' in labels and value == 1
                   for (name, labels), value in shown if name == "headgate_info")  # fmt: skip

    def until(self, name: str, labels: str, value: float) -> None:
        """Waits until a metric has a value."""
        self.await_metric(name, labels, f"{value:g}", lambda found: found == value)

    def beyond(self, name: str, labels: str, value: float) -> None:
        """Waits until a metric is above a value."""
        self.await_metric(name, labels, f"above {value:g}", lambda found: found is not None and found > value)

    def await_metric(
        self, name: str, labels: str, wanted: str, there: Callable[[float | None], bool]
    ) -> None:
        end = time.monotonic() + PATIENCE
        while not there(found := self.metrics().get((name, labels))):
            assert time.monotonic() < end, f"{name}{{{labels}}} is {found}, not {wanted}"


def eventually(there: Callable[[], bool], what: str) -> None:
    """Waits until it is so."""
    end = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.2)


def environment(scratch: Path) -> dict[str, str]:
    """For a small engine on a CPU, with our sources."""
    found = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1"}
    found |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    paths = [str(SRC)]
    try:
        version("vllm")
    except PackageNotFoundError:  # the CPU build has another name, which its own command does not know
        paths.append(str(_named_vllm(scratch)))
    found["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    for name in LEFT_BEHIND:
        found.pop(name, None)
    return found


def _named_vllm(scratch: Path) -> Path:
    folder = scratch / "named"
    (folder / "vllm-0+cpu.dist-info").mkdir(parents=True, exist_ok=True)
    about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n"
    (folder / "vllm-0+cpu.dist-info" / "METADATA").write_text(about)
    return folder


def free_port() -> int:
    """Below those the system gives to whoever asks for any: it must be free a minute later, too.

    An engine in this process seeds Python's generator: two workers of pytest would draw the same ports, and
    vLLM shares a port that is taken.
    """
    while True:
        port = SystemRandom().randrange(20_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def start(command: list[str], scratch: Path, *flags: str, **environ: str) -> Server:
    """Starts it, with these environment variables; does not wait until it serves."""
    port = free_port()
    small = ["--enforce-eager", "--max-num-batched-tokens", "256", "--block-size", "32", "--port", str(port)]
    small += ["--dtype", "float32", "--served-model-name", "tiny", "--max-model-len", "1024"]
    log = scratch / f"log-{port}"
    with open(log, "wb") as out:
        child = subprocess.Popen(
            [*command, *flags, *small],
            env=environment(scratch) | environ,
            cwd=scratch,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    return Server(child, port, log)


def wait(server: Server) -> None:
    """Until it serves."""
    end = time.monotonic() + START
    while server.child.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError("the server did not start:\n" + "\n".join(server.said("")[-40:]))


def stop(server: Server) -> int:
    """As an operator would; whatever is left is ended by its number. Its exit code."""
    try:
        family = psutil.Process(server.child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if server.child.poll() is None:
        server.child.send_signal(signal.SIGTERM)
    try:
        code = server.child.wait(PATIENCE)
    finally:
        left = [process for process in family if process.is_running()]
        _, left = psutil.wait_procs(left, timeout=PATIENCE)
        for process in left:
            process.kill()
        server.child.kill()
        server.child.wait()
    assert not left, f"left behind: {left}"
    return code


def kill(server: Server) -> None:
    """As a machine that dies: the server and every process it started, at once."""
    family = psutil.Process(server.child.pid).children(recursive=True)
    for process in (server.child, *family):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=PATIENCE)
    server.child.wait()


@contextmanager
def ready(servers: list[Server]) -> Iterator[list[Server]]:
    """Servers that were started together, because that takes a minute or more, for the time of a block."""
    try:
        for server in servers:
            wait(server)
        yield servers
    finally:
        for server in servers:
            if server.child.poll() is None:
                stop(server)


@contextmanager
def plugged_in(model: Path, scratch: Path, config: Path, slots: int) -> Iterator[Server]:
    """vLLM's own server with the plug-in, which reads these settings: nothing of `headgate serve`."""
    paths = [*installed_in(scratch / "plug-in"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        vllm = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
        flags = "--scheduler-cls", "headgate.vllm.scheduler", "--max-num-seqs", str(slots)
        with ready([start(vllm, scratch, *flags, HEADGATE_CONFIG=str(config))]) as servers:
            yield servers[0]


@contextmanager
def served(model: Path, scratch: Path, *flags: str, **environ: str) -> Iterator[Server]:
    """A server for the time of a block."""
    server = start(
        [sys.executable, "-c", MAIN, "serve", str(model), "--no-warm-up"], scratch, *flags, **environ
    )
    with ready([server]):
        yield server
