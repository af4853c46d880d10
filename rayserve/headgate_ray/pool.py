"""Simulations as tasks of a Ray cluster: a local one that ends with us, or one that is there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from headgate.core.errors import InputError, RunError
from headgate.experiment import workers
from headgate.experiment.workers import AHEAD, Answer, Task, WorkerPool

RETRIES = 5  # of a task whose worker or node died; runs are pure, so it is the same run again
CONNECT = 10.0  # seconds
STORE = 256 << 20  # bytes for answers under way, of a cluster started here


class RayPool(WorkerPool[Task, Answer]):
    """One Ray task for every task, with one CPU. Tasks of lost workers run again, on another node."""

    def __init__(self, work: Callable[[Task], Answer], jobs: int, address: str) -> None:
        self._own = not ray.is_initialized()
        if self._own:
            self._start(jobs, address)
        self._run = ray.remote(num_cpus=1, max_retries=RETRIES)(_run)
        self._work = ray.put(work)
        self._pending: dict[Any, Future[Answer]] = {}

    @staticmethod
    def check(address: str) -> None:
        """Ray waits for minutes for a cluster that is not there, and then ends the process."""
        host, _, port = address.rpartition("/")[2].rpartition(":")
        try:
            if port.isdigit():
                socket.create_connection((host.strip("[]"), int(port)), CONNECT).close()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"--on ray:{address}: {reason}; check that the cluster is up") from None

    def _start(self, jobs: int, address: str) -> None:
        where: dict[str, Any] = {"address": "local", "num_cpus": jobs}  # whatever else runs here
        where |= {"include_dashboard": False, "object_store_memory": STORE}
        if address:
            packages = [str(Path(workers.__file__).parents[1]), str(Path(__file__).parent)]
            where = {"address": address, "runtime_env": {"py_modules": packages}}  # nodes run this very code
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", **where)
        except Exception as error:  # Ray has no class for a start that takes too long
            reason = str(error).strip().partition("\n")[0].partition(". ")[0]
            if address:
                raise InputError(f"--on ray:{address}: {reason}; check that the cluster is up") from None
            raise RunError(f"--on ray: Ray does not start here: {reason}; use --jobs instead") from None

    @property
    def ahead(self) -> int:
        """By the CPUs of the cluster as it is now; it may grow."""
        return AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))

    def submit(self, task: Task) -> Future[Answer]:
        ref = self._run.remote(self._work, task)
        self._pending[ref] = future = Future[Answer]()
        ref.future().add_done_callback(lambda done: self._ended(ref, done))
        return future

    def _ended(self, ref: Any, done: Future[Answer]) -> None:
        future, error = self._pending.pop(ref), done.exception()
        if error is None:
            future.set_result(done.result())
        elif isinstance(error, ray.exceptions.RayTaskError):  # the work itself failed
            future.set_exception(error.cause)
        else:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            future.set_exception(RunError(f"Ray lost a run {RETRIES + 1} times: {reason}"))

    def close(self) -> None:
        for ref in [*self._pending]:
            ray.cancel(ref, force=True)
        if self._own:
            ray.shutdown()


def _run(work: Callable[[Any], Any], task: Any) -> Any:
    return work(task)
