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
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATIENCE = 600.0  # seconds: how long a failure may take on a slow machine; nothing else waits for it
PATIENT = {  # on a busy machine Ray would kill its own proxies before they have begun
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "240",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_worker_niceness": "0",  # else whatever else runs goes before them
    "RAY_health_check_timeout_ms": "60000",
    "RAY_worker_register_timeout_seconds": "240",
}
QUIET = {"enable_access_log": False, "log_level": "ERROR"}
PR_SET_PDEATHSIG = 1


def until(condition, what):
    """Waits for what is bound to come; `what` may be a function that tells how things stand."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.05)


def users(folder, part=""):
    """Other processes with a file open in a folder, with that in its path: all of Ray's have a log there."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name == str(os.getpid()):
            continue
        try:
            links = process.name.isdigit() and [os.readlink(each) for each in (process / "fd").iterdir()]
            if links and any(each.startswith(str(folder)) and part in each for each in links):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ")[:80]
        except OSError:  # it has ended
            continue
    return found


def nobody_left(folder, part=""):
    """Waits until no process uses Ray's folder; ends those that go on, and names them."""
    end = time.monotonic() + PATIENCE
    while (left := users(folder, part)) and time.monotonic() < end:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def remove(folder):
    """Ray's folder, once nobody uses it."""
    left = nobody_left(folder)
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes of Ray that did not end: {left}"


def ends_with_us():
    """A child that dies when this process dies, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start_ray(folder, tries=6):
    """Ray gives a start 30 seconds, which a busy machine may exceed."""
    import ray

    try:
        ray.init(
            num_cpus=2,  # engines and callers take none
            include_dashboard=False,
            object_store_memory=100_000_000,
            logging_level="ERROR",
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
        )
    except Exception:
        ray.shutdown()
        for pid in users(folder):  # which knows nothing of what a start that took too long has begun
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if tries == 1:
            raise
        start_ray(folder, tries - 1)


@pytest.fixture(scope="session")
def cluster():
    os.environ.update(PATIENT)  # before Ray reads it
    import ray
    from ray import serve

    sys.path.insert(0, str(HERE))
    folder = tempfile.mkdtemp(prefix="hg-")  # short: Ray has its sockets there
    with ExitStack() as end:
        end.callback(remove, folder)
        end.callback(ray.shutdown)
        start_ray(folder)
        second = second_node(ray.get_runtime_context().gcs_address)
        end.callback(stop, second, folder)
        end.callback(serve.shutdown)
        until(lambda: sum(each["Alive"] for each in ray.nodes()) == 2, "two nodes")
        yield


def second_node(address):
    words = "start --block --num-cpus=0 --object-store-memory=80000000 --disable-usage-stats --address"
    return subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *words.split(), address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=ends_with_us,
    )


def stop(second, folder):
    """While the first node lives: without it Ray's agents of the second take a minute to end."""
    second.terminate()
    second.wait(PATIENCE)
    nobody_left(folder, "raylet.1.")


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
