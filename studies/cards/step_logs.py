"""Timed steps from files: tables that `headgate calibrate` wrote, and the step logs of studies.h200."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.fit.steps import StepTable, concat

LENGTHS = re.compile(r"^\d+_(?:(\d+)-\d+|mix)_")  # of a log's name: slots, workload, arm, round
SPREAD = 13 / 12  # E[L^2] / E[L]^2 of prompts uniform on half to one and a half times their mean
MIX = (512, 1024, 128)  # means of the geometric prompts of `mix`, equally likely
ENDS = 1  # rows at either end of a log that are left out: their neighbours are not there


def read_steps(paths: Iterable[Path]) -> StepTable:
    """All of them as one table, a part for each run or grid cell."""
    return concat(_read(path) for path in paths)


def _read(path: Path) -> StepTable:
    try:
        with np.load(path, allow_pickle=False) as stored:
            names = set(stored.files)
            log = dict(zip(stored["columns"], stored["log"].T, strict=True)) if "log" in names else None
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: no step log ({error}); give .npz files of calibrate or h200") from None
    if log is not None:
        return _from_log(log, path.stem)
    table = StepTable.load(path)
    return table if len(table.labels) > 1 else replace(table, labels=(path.stem,))  # one run: by its file


def _from_log(log: dict[str, np.ndarray], name: str) -> StepTable:
    """A step takes from the end of the one before, or from its own schedule() if later, to its end."""
    composed, end = log["began"] + log["scheduling"], log["ended"]
    before = np.concatenate(([-np.inf], end[:-1]))
    mean, pairs = prompts_of(name)
    columns = {
        "seconds": end - np.maximum(before, composed),
        "decodes": log["decodes"],
        "context": log["context"] + log["decodes"],  # the token being written is read, too
        "prefill": log["prefill"],
        "behind": log["behind"],
        "prompts": np.maximum(log["prefill"] / mean, log["prefill"] > 0),
        "attention": log["prefill"] * pairs,
        "busy": np.concatenate((composed[1:] < end[:-1], [True])),
    }
    table = StepTable.from_columns(columns, (name,))
    return table.take(np.arange(ENDS, len(table) - ENDS))


def prompts_of(name: str) -> tuple[float, float]:
    """Mean prompt tokens, and pairs of prompt tokens for each, by the log's name; the logs do not have them.

    NaN where the name is another. What lay behind the few prompts that were cut is left out.
    """
    found = LENGTHS.match(name)
    if not found:
        return np.nan, np.nan
    if found[1] is None:
        mean = sum(MIX) / len(MIX)
        return mean, sum(each**2 for each in MIX) / sum(MIX)  # E[L^2] = 2 m^2 of a geometric law
    return float(found[1]), float(found[1]) * SPREAD / 2
