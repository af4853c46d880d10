"""Where results go: a run folder, a JSON file, standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from headgate.core.errors import InputError
from headgate.results.tables import Run

RUNS = Path("runs")


def run_folder(out: str | None, name: str, overwrite: bool) -> Path:
    """The folder to write to: the one asked for, which must be free, or the next number under runs/."""
    if out is not None:
        folder = Path(out)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--out {folder} is a file; name a folder")
        if folder.is_dir() and any(folder.iterdir()) and not overwrite:
            raise InputError(f"--out {folder} exists and is not empty; choose another or pass --overwrite")
        return folder
    taken = [int(path.name[:4]) for path in RUNS.glob("[0-9][0-9][0-9][0-9]-*")]
    return RUNS / f"{max(taken, default=0) + 1:04d}-{name}"


def check_json(target: str | None) -> None:
    """Refuse a JSON target that cannot be written, before the work is done."""
    if target not in (None, "-") and not Path(str(target)).resolve().parent.is_dir():
        raise InputError(f"--json {target}: its folder does not exist; create it or name another")


def write_json(target: str | None, document: dict[str, Any]) -> None:
    """To a file, or to standard output for `-`."""
    if target is None:
        return
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {target}: {error.strerror}; name a file that can be written") from None


def save(run: Run, folder: Path, overwrite: bool) -> None:
    """The run's tables, and its figures in the schema of `vllm bench serve`."""
    from headgate.results.bench import bench_result

    run.save(folder, overwrite)
    (folder / "bench.json").write_text(json.dumps(bench_result(run), indent=2) + "\n", encoding="utf-8")
