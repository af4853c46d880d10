"""One `vllm serve` with the plug-in, in a session of its own; arms are changed through its settings file."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from studies.h200 import models
from studies.h200.promises.client import Target

SCHEDULER = "headgate.vllm.scheduler"
WATCHED = "studies.h200.promises.watch.scheduler"
MODEL = "shape"
SHAPES = {"qwen3-8b": models.QWEN3_8B, "qwen3-30b-a3b": models.QWEN3_30B_A3B, "tiny": models.TINY}
FLAGS = (
    "model", "graph", "budget", "slots", "model_len", "api_servers", "watch", "drafts", "accept", "no_plugin",
    "flags",
)  # fmt: skip
START = 900.0  # seconds at most
SWITCH = 60.0  # seconds at most until the plug-in has read its settings again
READ_AGAIN = "settings read again"
TOLD = (
    "GPU KV cache size",
    "Graph capturing finished",
    "headgate: policy",
    "Maximum concurrency",
    "model weights",
)
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled, and needs nvcc
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class Server:
    """A running server: where it is, its log, its settings."""

    def __init__(
        self, home: Path, pid: int, port: int, shape: models.Shape, plugin: bool, priorities: bool
    ) -> None:
        self.home, self.pid, self.port, self.plugin = home, pid, port, plugin
        warm = float(isinstance(shape, models.MoeShape))
        self.target = Target(port, MODEL, shape.vocabulary, warm, priorities)
        self.log, self.config, self.trace = home / "log", home / "headgate.json", home / "steps.jsonl"

    def switch(self, settings: dict[str, Any]) -> None:
        """Another arm, from now on; a trickle of requests, because the plug-in looks only while it works."""
        if not self.plugin:
            return
        if self.config.read_text() == json.dumps(settings):
            return
        before = self._said(READ_AGAIN)
        self.config.write_text(json.dumps(settings))
        end = time.monotonic() + SWITCH
        while self._said(READ_AGAIN) == before:
            if time.monotonic() > end:
                raise SystemExit(f"error: the plug-in did not read {settings}; see {self.log}")
            self.ask(8)
            time.sleep(0.3)

    def ask(self, tokens: int) -> None:
        """One small request, to its end."""
        words = {"model": MODEL, "prompt": [11] * 16, "max_tokens": tokens, "ignore_eos": True}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(
            url, json.dumps(words).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=START).read()

    def fallen(self) -> bool:
        """Has the plug-in given up? Then the arm measured plain vLLM."""
        return self._said("FALLEN BACK") > 0

    def told(self) -> list[str]:
        """What the log says of memory, graphs and policy."""
        rows = self.log.read_text(errors="replace").splitlines()
        return [row[-200:] for row in rows if any(text in row for text in TOLD)][:12]

    def stop(self) -> None:
        """The whole group of processes that was started for it, by its number."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return
            for _ in range(100):
                time.sleep(0.2)
                with suppress(ChildProcessError):  # another call may have started it
                    os.waitpid(self.pid, os.WNOHANG)
                try:
                    os.killpg(self.pid, 0)
                except ProcessLookupError:
                    return

    def _said(self, text: str) -> int:
        return self.log.read_text(errors="replace").count(text)


def start(asked: Namespace, first: dict[str, Any]) -> Server:
    """A new server, ready to serve."""
    home: Path = asked.home
    home.mkdir(parents=True, exist_ok=True)
    name = "tiny" if asked.tiny else asked.model
    shape = SHAPES[name]
    folder = shape.write(home / "model")
    tokenizer(folder, shape.vocabulary)
    if asked.drafts:
        replace(shape, layers=1).write(home / "drafter")
        tokenizer(home / "drafter", shape.vocabulary)
    settings = {**first, "trace": str(home / "steps.jsonl")} if asked.steps else first
    (home / "headgate.json").write_text(json.dumps(settings))
    for old in (home / "log", home / "steps.jsonl"):
        old.unlink(missing_ok=True)
    port = free_port()
    with (home / "log").open("wb") as log:
        child = subprocess.Popen(
            command(asked, folder, port),
            env=environment(home, asked.tiny),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(home, child.pid, port, shape, not asked.no_plugin, "priority" in asked.flags)
    flags = {key: getattr(asked, key) for key in FLAGS}
    known = {"pid": child.pid, "port": port, "shape": name, "plugin": server.plugin, "flags": flags}
    (home / "server.json").write_text(json.dumps(known))
    end = time.monotonic() + START
    while not _healthy(port):
        if child.poll() is not None or time.monotonic() > end:
            tail = (home / "log").read_text(errors="replace").splitlines()[-40:]
            raise SystemExit("error: the server did not start:\n" + "\n".join(tail))
        time.sleep(0.5)
    return server


def attach(asked: Namespace) -> Server:
    """The server that an earlier call left running; `asked` then says what that call said of it."""
    home: Path = asked.home
    try:
        known = json.loads((home / "server.json").read_text())
    except OSError:
        raise SystemExit(f"error: no server was left in {home}; leave --attach out to start one") from None
    vars(asked).update(known["flags"])
    priorities = "priority" in known["flags"]["flags"]
    server = Server(home, known["pid"], known["port"], SHAPES[known["shape"]], known["plugin"], priorities)
    if not _healthy(server.port):
        raise SystemExit(f"error: no server on port {server.port}; leave --attach out to start one")
    return server


def command(asked: Namespace, folder: Path, port: int) -> list[str]:
    """`vllm serve` with the defaults of vLLM, but for what is said here."""
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    words += [
        "--load-format",
        "dummy",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        MODEL,
    ]
    words += ["--no-enable-prefix-caching", "--generation-config", "vllm", "--uvicorn-log-level", "warning"]
    words += ["--api-server-count", str(asked.api_servers), "--max-model-len", str(asked.model_len)]
    if not asked.no_plugin:
        words += ["--scheduler-cls", WATCHED if asked.watch else SCHEDULER]
    if asked.budget:
        words += ["--max-num-batched-tokens", str(asked.budget)]
    if asked.slots:
        words += ["--max-num-seqs", str(asked.slots)]
    if asked.graph:
        words += ["--compilation-config", json.dumps({"max_cudagraph_capture_size": asked.graph})]
    if asked.drafts:
        words += ["--speculative-config", json.dumps(speculation(asked))]
    if asked.tiny:
        words += ["--enforce-eager", "--dtype", "float32", "--block-size", "32"]
    return [*words, *asked.flags]


def speculation(asked: Namespace) -> dict[str, Any]:
    """A drafter with made-up weights guesses nothing, so drafts are accepted by chance: each at the same rate
    after those before it.
    """
    return {
        "method": "draft_model",
        "model": str(asked.home / "drafter"),
        "num_speculative_tokens": asked.drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [asked.accept**place for place in range(1, asked.drafts + 1)],
    }


def environment(home: Path, tiny: bool) -> dict[str, str]:
    """For the server; on a CPU build a little memory and a name under which vLLM finds itself."""
    paths = ["src", "."]
    found = {**os.environ, **ENVIRONMENT, "HEADGATE_CONFIG": str(home / "headgate.json")}
    if tiny:
        found |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}
        paths += _named_vllm(home)
    found["PYTHONPATH"] = os.pathsep.join(
        [*map(os.path.abspath, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return found


def tokenizer(folder: Path, vocabulary: int) -> None:
    """A word for each token, so that answers can be written out."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel

    made = Tokenizer(WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "w0",
        "eos_token": "w1",
        "unk_token": "w0",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def free_port() -> int:
    """Any that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _healthy(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def _named_vllm(home: Path) -> list[str]:
    """The CPU build has another name, which vLLM's own command does not know."""
    try:
        version("vllm")
        return []
    except PackageNotFoundError:
        pass
    folder = home / "named" / "vllm-0+cpu.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n"
    (folder / "METADATA").write_text(about)
    return [str(folder.parent)]
