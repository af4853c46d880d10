"""One Ray of two nodes on this machine for all tests here, so that Serve has two HTTP proxies.

Each file skips in one line where Ray is not installed. Nothing of Ray outlives the session: a process that
still has a file open in Ray's folder at the end is an error.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATIENCE = 240.0  # seconds: how long a failure may take on a slow machine; nothing else waits for it
PATIENT = {  # on a busy machine Ray would kill its own proxies before they have begun
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "240",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_worker_niceness": "0",  # else whatever else runs goes before them
    "RAY_health_check_timeout_ms": "60000",
}
QUIET = {"enable_access_log": False, "log_level": "ERROR"}
PR_SET_PDEATHSIG = 1


def until(condition, what):
    """Waits for what is bound to come; `what` may be a function that tells how things stand."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.05)


def users(folder):
    """Processes that have a file open in a folder: all of Ray's write a log there."""
    found = {}
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and any(
                os.readlink(each).startswith(str(folder)) for each in (process / "fd").iterdir()
            ):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ")[:80]
        except OSError:  # it has ended
            continue
    return found


def nobody_left(folder, seconds=60.0):
    """Waits until no process uses Ray's folder; ends those that go on, names them, and removes the folder."""
    end = time.monotonic() + seconds
    while (left := users(folder)) and time.monotonic() < end:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    return left


def ends_with_us():
    """A child that dies when this process dies, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start_ray(folder):
    import ray

    ray.init(
        num_cpus=2,  # engines and callers take none
        include_dashboard=False,
        object_store_memory=100_000_000,
        logging_level="ERROR",
        log_to_driver=False,
        _temp_dir=folder,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
    )


@pytest.fixture(scope="session")
def cluster():
    os.environ.update(PATIENT)  # before Ray reads it
    import ray
    from ray import serve

    sys.path.insert(0, str(HERE))
    folder = tempfile.mkdtemp(prefix="hg-")  # short: Ray has its sockets there
    second = None
    try:
        for left in (2, 1, 0):
            try:
                start_ray(folder)
                break
            except Exception:  # Ray's own limit of 30 seconds for a start
                ray.shutdown()
                if not left:
                    raise
        address = ray.get_runtime_context().gcs_address
        start = "start --block --num-cpus=0 --object-store-memory=80000000 --disable-usage-stats --address"
        second = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *start.split(), address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=ends_with_us,
        )
        until(lambda: sum(each["Alive"] for each in ray.nodes()) == 2, "two nodes")
        yield
    finally:
        serve.shutdown()
        if second is not None:
            second.terminate()
            second.wait(PATIENCE)
        ray.shutdown()
        left = nobody_left(folder)
        assert not left, f"processes of Ray that did not end: {left}"


@pytest.fixture(scope="session")
def served(cluster):
    """Serve with an HTTP proxy on every node that has replicas, all on one port; the port."""
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"port": port, "host": "127.0.0.1", "location": "EveryNode"}
    serve.start(http_options=options, logging_config=QUIET)
    return port
