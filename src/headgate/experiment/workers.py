"""Where simulations run: here, in processes of their own, or as tasks of a Ray cluster. One interface."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from headgate.core.errors import InputError, elsewhere

Task = TypeVar("Task")
Answer = TypeVar("Answer")
RAY = "ray"
ON = "ray, or ray:ADDRESS of a cluster, instead of processes here (needs headgate-ray)"
AHEAD = 2  # tasks for every process


class WorkerPool(Generic[Task, Answer]):
    """Carries out tasks, this one in our process. What one gives does not depend on where it ran."""

    def __init__(self, work: Callable[[Task], Answer]) -> None:
        self._work = work

    @property
    def ahead(self) -> int:
        """Tasks that should be submitted and not done, for no process to wait."""
        return 1

    def submit(self, task: Task) -> Future[Answer]:
        done: Future[Answer] = Future()
        done.set_result(self._work(task))
        return done

    def close(self) -> None:
        """What has not begun is dropped; what runs is ended or waited for."""


class Workers(NamedTuple):
    """How many processes, and where. With `ray`, `jobs` counts those of a cluster started here."""

    jobs: int = 1
    on: str = ""  # nothing: this machine; ray or ray:ADDRESS

    def checked(self) -> Workers:
        if self.on and self.on.partition(":")[0] != RAY:
            raise InputError(f"--on {self.on!r} is not known; write ray, or ray:ADDRESS for a cluster")
        if self.on:
            _ray_pool().check(self.on.partition(":")[2])
        return self

    @contextmanager
    def start(self, work: Callable[[Task], Answer], most: int) -> Iterator[WorkerPool[Task, Answer]]:
        """A pool for `work`, which is sent to each process once, for at most so many tasks at a time."""
        pool: WorkerPool[Task, Answer]
        if self.on:
            pool = _ray_pool()(work, self.jobs, self.on.partition(":")[2])
        else:
            jobs = min(self.jobs, max(most, 1))
            pool = WorkerPool(work) if jobs == 1 else Processes(work, jobs)
        try:
            yield pool
        finally:
            pool.close()


def _ray_pool() -> Any:
    """Of package headgate-ray: a `WorkerPool` for work, processes and address; `check` tries the address."""
    from importlib import metadata  # slow to import

    for point in metadata.entry_points(group="headgate.workers", name=RAY):
        with suppress(ImportError):  # Ray itself is not there
            return point.load()
    raise elsewhere("--on ray", "ray", "rayserve")


def as_they_end(pool: WorkerPool[Task, Answer], tasks: Iterable[Task]) -> Iterator[tuple[Task, Answer]]:
    """Every task with its answer, in whatever order they end. Few are submitted ahead of time."""
    left, pending = iter(tasks), dict[Future[Answer], Task]()
    while True:
        for task in islice(left, max(0, pool.ahead - len(pending))):
            pending[pool.submit(task)] = task
        if not pending:
            return
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            yield pending.pop(future), future.result()


class Processes(WorkerPool[Task, Answer]):
    def __init__(self, work: Callable[[Task], Answer], jobs: int) -> None:
        self._jobs = jobs
        self._pool = ProcessPoolExecutor(jobs, initializer=_share, initargs=(work,))

    @property
    def ahead(self) -> int:
        return AHEAD * self._jobs

    def submit(self, task: Task) -> Future[Answer]:
        return self._pool.submit(_run_shared, task)

    def close(self) -> None:
        for process in [*(self._pool._processes or {}).values()]:
            process.terminate()  # a run may have minutes to go that no one waits for
        self._pool.shutdown(wait=True, cancel_futures=True)


_shared: list[Callable[[Any], Any]] = []  # the work of this process


def _share(work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and decides
    _shared[:] = [work]


def _run_shared(task: Any) -> Any:
    return _shared[0](task)
