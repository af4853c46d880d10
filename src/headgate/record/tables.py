"""A run on disk: four tables of plain numpy columns and one JSON file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import InputError, unknown
from headgate.core.policy import End

Columns = dict[str, NDArray[Any]]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

RECORD = "run.json"  # its presence tells a run folder from any other
FORMAT = 1  # of the folder; a reader refuses a newer one instead of misreading it
ENDS = tuple(End)  # the column `how` counts into this
LIBRARIES = ("polars", "pandas", "numpy")  # for data frames; the first that is installed is taken
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "requests": (
        "id", "kind", "arrival", "admitted", "first_token", "finished", "prompt", "output",
        "cached", "evictions", "wasted", "replica", "how",
    ),
    "steps": (
        "start", "count", "first", "seconds", "decodes", "context", "prefill", "behind", "kv", "replica",
    ),
    "stays": ("request", "opened", "gap", "first_tick", "ticks"),
    "plans": ("time", "step", "decode", "prompts", "evict"),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What happened in one run, the same for every driver. Times in seconds, lengths and KV in tokens.

    `meta` is `run.json`. Read here: `kinds` (name and promises of each kind), `kv_tokens` (KV of one
    replica), `load` ("open", "closed" or "all-at-once"), `clients`, `rate`, `burstiness`, `model`,
    `label`, `policy`, `date`. Everything else in it is kept untouched.

    `requests` has one row per request in the order they were sent, by growing id. `steps` has one row per run
    of equal steps, whose durations lie on a straight line from `first` and sum to `seconds`. `stays` has one
    row per uninterrupted stay among the running decodes. `plans` has one row per plan with its gauges.

    A tick is a step in which decodes ran; each replica counts its own from 0, in the order of its rows.
    A stay counts on the replica in its own column `replica` where there is one, else on its request's.

    Examples:
        >>> import headgate
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=8)
        >>> run = headgate.simulate(engine, "mixed", headgate.Workload.of([512, 512], [64, 32]))
        >>> run.requests["output"].tolist()
        [64, 32]
        >>> requests = run.to_dataframe()  # of polars or pandas, where one is installed
        >>> list(requests["how"])
        ['stopped', 'stopped']
    """

    meta: dict[str, Any]
    requests: Columns
    steps: Columns
    stays: Columns
    plans: Columns

    def __post_init__(self) -> None:
        for table, names in COLUMNS.items():
            columns: Columns = getattr(self, table)
            missing = [name for name in names if name not in columns]
            if missing:
                raise InputError(
                    f"table {table!r} lacks the column {missing[0]!r}; the run is broken, run it again"
                )
            wanted = (np.size(columns[names[0]]),)
            for name, column in columns.items():
                if (shape := np.shape(column)) != wanted:
                    raise InputError(
                        f"column {name!r} of table {table!r} has shape {shape}, the others {wanted}"
                    )
        if np.any(np.diff(self.requests["id"]) <= 0):
            raise InputError("table 'requests' must list each request once, by growing id")

    @property
    def kinds(self) -> list[dict[str, Any]]:
        """Name and promises of each kind; one nameless kind when the run does not say."""
        return self.meta.get("kinds") or [{"name": "", "first_token": None, "between_tokens": None}]

    @property
    def tenants(self) -> list[str]:
        """Their names; `requests` has a column `tenant` where there are several."""
        return list(self.meta.get("tenants") or [""])

    @property
    def sending(self) -> str:
        """How requests were sent: "open", "closed" or "all-at-once"; guessed when the run does not say."""
        if "load" in self.meta:
            return str(self.meta["load"])
        if self.meta.get("clients"):
            return "closed"
        arrival = self.requests["arrival"]
        return "all-at-once" if len(arrival) and np.ptp(arrival) == 0 else "open"

    def completed(self) -> Flags:
        """Which requests were served to their end: their own stop or their limit."""
        how = self.requests["how"]
        return np.asarray((how == ENDS.index(End.STOPPED)) | (how == ENDS.index(End.LIMIT)))

    def span(self) -> tuple[float, float]:
        """From the first arrival to the last thing that happened."""
        arrival, finished, steps = self.requests["arrival"], self.requests["finished"], self.steps
        moments = (arrival, finished[~np.isnan(finished)], steps["start"] + steps["seconds"])
        starts = [float(times.min()) for times in (arrival, steps["start"]) if len(times)]
        ends = [float(times.max()) for times in moments if len(times)]
        return min(starts, default=0.0), max(ends, default=0.0)

    def rows_of(self, ids: NDArray[Any]) -> Integers:
        known = self.requests["id"]
        rows = np.minimum(np.searchsorted(known, ids), len(known) - 1).astype(np.int64)
        if len(ids) and (not len(known) or np.any(known[rows] != ids)):
            raise InputError("table 'stays' names a request that table 'requests' lacks; run it again")
        return rows

    def to_dataframe(self, table: str = "requests", library: str | None = None) -> Any:
        """One table as a data frame, one row per request (or step, stay, plan); kinds and ends by name.

        Args:
            table: "requests", "steps", "stays" or "plans".
            library: "polars", "pandas" or "numpy" (a dictionary of columns); the first one installed when
                left out.
        """
        if table not in COLUMNS:
            raise unknown("table of a run", table, COLUMNS)
        columns: Columns = dict(getattr(self, table))
        if table == "requests":
            kinds = np.array([str(kind.get("name", "")) for kind in self.kinds])
            ends = np.array([*(end.value for end in ENDS), ""])  # -1: it had not left
            columns |= {"kind": kinds[self.requests["kind"]], "how": ends[self.requests["how"]]}
            if "tenant" in columns:
                columns["tenant"] = np.array(self.tenants)[self.requests["tenant"]]
        name = library or next(name for name in LIBRARIES if find_spec(name))
        if name not in LIBRARIES:
            raise unknown("library for data frames", name, LIBRARIES)
        if name == "numpy":
            return columns
        if find_spec(name) is None:
            raise InputError(f"{name} is not installed; pip install {name}, or take another library")
        return import_module(name).DataFrame(columns)

    def save(
        self, folder: str | Path, overwrite: bool = False, more: Mapping[str, str] | None = None
    ) -> None:
        """Write the run, and `more` files by name; the folder appears whole or not at all.

        Everything goes into a temporary folder beside it first, which is then renamed.
        """
        target = Path(folder)
        refuse_full(target, overwrite)
        meta = {"format": FORMAT, **self.meta}
        try:  # of numpy's numbers and arrays, the values
            text = json.dumps(meta, indent=2, allow_nan=False, default=lambda value: value.tolist()) + "\n"
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError(f"run.json cannot hold what the run says of itself: {error}") from error
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
                fresh = Path(scratch, "new")
                fresh.mkdir()
                for name, content in {RECORD: text, **(more or {})}.items():
                    (fresh / name).write_text(content, encoding="utf-8")
                for name in COLUMNS:
                    np.savez(fresh / f"{name}.npz", **getattr(self, name))
                if target.exists():
                    os.replace(target, Path(scratch, "old"))
                os.replace(fresh, target)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"cannot write the run to {target}: {reason}; choose another folder") from error

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Read a run that `save` wrote, or the trace of a live engine (a file that ends in .jsonl)."""
        source = Path(folder)
        if source.suffix == ".jsonl":
            from headgate.record.live_trace import read_live_trace

            return read_live_trace(source)
        if not source.is_dir():
            raise InputError(f"no run folder {source}; give the folder a run was written to")
        inside = sorted(source.glob(f"*/{RECORD}"))
        if inside and not (source / RECORD).exists():
            raise InputError(
                f"{source} holds {len(inside)} runs, of a comparison or sweep; load one, such as "
                f"{inside[0].parent}"
            )
        meta = _read(source / RECORD, "JSON", json.load)
        if not isinstance(meta, dict):
            raise InputError(f"{source / RECORD} holds a {type(meta).__name__}, not an object; run it again")
        stored = meta.pop("format", FORMAT)
        if not isinstance(stored, int) or stored > FORMAT:
            raise InputError(f"run folder {source} has format {stored}, this version reads {FORMAT}; upgrade")
        places = {name: source / f"{name}.npz" for name in COLUMNS}
        return cls(
            meta, **{name: _read(file, "a table of numbers", _columns) for name, file in places.items()}
        )


def _read(path: Path, what: str, parse: Callable[[IO[bytes]], Any]) -> Any:
    try:
        with path.open("rb") as file:
            return parse(file)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; run it again") from error
    except (ValueError, EOFError, TypeError, RecursionError, BadZipFile) as error:
        raise InputError(f"{path} is not {what}: {error}; run it again") from error


def _columns(file: IO[bytes]) -> Columns:
    with np.load(file, allow_pickle=False) as archive:  # so a foreign file cannot run code
        return {name: archive[name] for name in archive.files}


def refuse_full(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder for the run")
    full = folder.is_dir() and any(folder.iterdir())
    if full and not overwrite:
        raise InputError(f"folder {folder} is not empty; choose another or allow overwriting")
    if full and not (folder / RECORD).is_file():
        raise InputError(f"folder {folder} holds no run ({RECORD}), so it is not overwritten; choose another")


def write_whole(target: str | Path, text: str) -> None:
    """Replace a file, or leave what was there as it was: a full disk must not cost what was kept."""
    path = Path(target)
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    with tempfile.TemporaryDirectory(prefix=f".{path.name[:100]}-", dir=path.parent) as scratch:
        whole = Path(scratch, "whole")
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, path)
