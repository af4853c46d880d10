"""Answers of earlier searches, kept by content: the code, the card, the requests and the run itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

from headgate.advisor.capacity.traffic import SearchTraffic
from headgate.core.version import VERSION
from headgate.sim.engine.engine import Engine

COUNTS = "advisor core cost estimators experiment kv methods record sim stats workloads"
ARRAYS = ("arrival", "prompt", "output", "limit", "kind", "patience", "abort", "priority", "cached", "tenant")
Task = TypeVar("Task")
Answer = TypeVar("Answer", bound=tuple[Any, ...])


class AnswerFile(Generic[Task, Answer]):
    """A file of answers, each a named tuple of numbers; one that cannot be read or written counts as empty.

    `known_as` names the parts of a task that decide its answer: policies and routers, and all the rest.
    """

    def __init__(
        self, file: Path, made: Callable[..., Answer], known_as: Callable[[Task], tuple[list[str], object]]
    ) -> None:
        self.file = file
        self._known_as = known_as
        self._known: dict[str, Answer] = {}
        with suppress(OSError, ValueError, TypeError):
            for line in self.file.read_text(encoding="utf-8").splitlines():
                key, *parts = json.loads(line)
                self._known[key] = made(*(tuple(part) if isinstance(part, list) else part for part in parts))

    def get(self, task: Task) -> Answer | None:
        return self._known.get(self._key(task))

    def put(self, task: Task, answer: Answer) -> None:
        key = self._key(task)
        self._known[key] = answer
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps([key, *answer]) + "\n")

    def _key(self, task: Task) -> str:
        """A policy of the user's own is known by its text, not by its name."""
        names, rest = self._known_as(task)
        digest = hashlib.sha256(repr((names, rest)).encode())
        for name in names:
            file = name.rpartition(":")[0]
            digest.update(Path(file).read_bytes() if file.endswith(".py") else b"")
        return digest.hexdigest()[:32]


def chosen_folder(cache: str | None) -> Path | None:
    """The folder that --cache names, None for none; not named: where caches of programs belong."""
    if cache == "none":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) if cache else Path(base) / "headgate" / "searches"


def file_of(folder: Path, engine: Engine, traffic: SearchTraffic, rest: object) -> Path:
    """Where the answers for such engines and requests are; `rest` is what else all runs share."""
    digest = hashlib.sha256(f"{VERSION} {_of_code()}".encode())
    cost = repr(engine.cost), repr(engine.cost.host)
    limits = (*cost, engine.limits, engine.prefix_cache, engine.speculation, engine.retraction)
    shared = (traffic.requests, traffic.levels, traffic.classes, traffic.recorded)
    digest.update(repr((limits, shared, rest)).encode())
    digest.update(repr((traffic.words.arrivals, traffic.words.burstiness)).encode())
    digest.update(repr([share for share in traffic.words.classes if share.clients]).encode())
    drawn = traffic.at_rate.at(1.0, traffic.words.seed)
    for workload in (drawn, traffic.trace or drawn):
        contents = workload.contents
        for column in (contents.offsets, contents.keys, contents.tokens) if contents else ():
            digest.update(column.tobytes())
        for name in ARRAYS:
            digest.update(getattr(workload, name).tobytes())
        digest.update(repr(workload.kinds).encode())
    return folder / f"{digest.hexdigest()[:32]}.jsonl"


@cache
def _of_code() -> str:
    digest = hashlib.sha256()
    package = Path(str(files("headgate")))
    for folder in COUNTS.split():
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
