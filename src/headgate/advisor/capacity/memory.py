"""Answers of earlier searches, kept by content: the code, the card, the requests and the run itself."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from importlib.resources import files
from math import inf
from pathlib import Path

from headgate.advisor.capacity.trials import Answer, Case, Task
from headgate.core.version import VERSION
from headgate.workloads.workload import Workload

COUNTS = ("advisor", "core", "cost", "estimators", "kv", "methods", "record", "sim", "stats", "workloads")
ARRAYS = ("arrival", "prompt", "output", "limit", "kind", "patience", "abort", "priority")


class Kept:
    """A file of answers for one case; one that cannot be read or written is as good as empty."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.file = folder / f"{_of_case(case)}.jsonl"
        self.hits = 0
        self._known: dict[str, Answer] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            for line in self.file.read_text(encoding="utf-8").splitlines():
                key, ratio, worst, values, stay = json.loads(line)
                self._known[key] = Answer(_number(ratio), worst, tuple(map(_number, values)), stay)

    def get(self, task: Task) -> Answer | None:
        found = self._known.get(_of_task(task))
        self.hits += found is not None
        return found

    def put(self, task: Task, answer: Answer) -> None:
        key = _of_task(task)
        self._known[key] = answer
        values = [_plain(value) for value in answer.values]
        line = json.dumps([key, _plain(answer.ratio), answer.worst, values, answer.stay])
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")


def remembered(folder: Path | None, case: Case) -> Kept | None:
    """What the folder knows of the case; None without a folder."""
    return Kept(folder, case) if folder else None


def chosen_folder(cache: str | None) -> Path | None:
    """The folder that --cache names, None for none; not named: where caches of programs belong."""
    if cache == "none":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) if cache else Path(base) / "headgate" / "searches"


def _of_task(task: Task) -> str:
    """A policy of the user's own is known by its text, not by its name."""
    file = task.policy.rpartition(":")[0]
    text = Path(file).read_bytes() if file.endswith(".py") else b""
    parts = (task.policy, sorted(task.settings.items()), task.limits, task.seed, task.rate)
    return hashlib.sha256(repr(parts).encode() + text).hexdigest()[:32]


def _of_case(case: Case) -> str:
    found = hashlib.sha256(f"{VERSION} {_of_code()}".encode())
    engine = (repr(case.engine.cost), repr(case.engine.cost.host), case.engine.limits)
    rest = (case.traffic.requests, case.traffic.levels, case.traffic.classes, case.traffic.recorded)
    found.update(repr((engine, rest, case.watchdog, case.asynchronous)).encode())
    found.update(repr((case.traffic.words.arrivals, case.traffic.words.burstiness)).encode())
    drawn = case.traffic.at(1.0, case.traffic.words.seed)
    for workload in (drawn, case.traffic.trace or drawn):
        _add(found, workload)
    return found.hexdigest()[:32]


def _add(found: hashlib._Hash, workload: Workload) -> None:
    for name in ARRAYS:
        found.update(getattr(workload, name).tobytes())
    found.update(repr(workload.kinds).encode())


@cache
def _of_code() -> str:
    """Everything that may change an answer."""
    found = hashlib.sha256()
    package = Path(str(files("headgate")))
    for folder in COUNTS:
        for path in sorted((package / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _plain(value: float) -> float | None:
    return None if value == inf else value


def _number(value: float | None) -> float:
    return inf if value is None else float(value)
