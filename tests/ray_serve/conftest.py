"""One Ray on this machine for all tests here. Each file skips in one line where Ray is not installed."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# On a busy machine Ray would kill its own proxies before they have begun.
PATIENT = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
QUIET = {"enable_access_log": False, "log_level": "ERROR"}


@pytest.fixture(scope="session")
def cluster():
    os.environ.update(PATIENT)  # before Ray reads it
    import ray
    from ray import serve

    sys.path.insert(0, str(HERE))
    ray.init(
        num_cpus=16,  # logical: engines here do nothing but wait
        include_dashboard=False,
        object_store_memory=100_000_000,
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
    )
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def served(cluster):
    """Serve with one HTTP proxy; its port."""
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"port": port, "host": "127.0.0.1"}, logging_config=QUIET)
    return port
