"""The requests of a live engine's trace as a workload: when they came, their lengths, what its cache had."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headgate.core.errors import InputError
from headgate.core.request import Slo
from headgate.record.tables import Run
from headgate.workloads.workload import Kind, Workload


def as_workload(run: Run, path: Path) -> Workload:
    """Requests that broke off have the mean output of their class, as they would have gone on.

    Prompts are not in a trace, so what requests share is not known. Their hits are, and are replayed.
    """
    rows = run.requests
    done, kind = run.completed(), rows["kind"].astype(np.int64)
    if not done.any():
        raise InputError(f"trace {path}: no request was served to its end; let the engine serve some first")
    output = np.maximum(rows["output"], 1)
    for place in np.unique(kind[~done]).tolist():
        mine = kind == place
        mean = output[done & mine if (done & mine).any() else done].mean()
        output = np.where(mine & ~done, np.maximum(output, round(mean)), output)
    order = np.argsort(rows["arrival"], kind="stable")
    kinds = [
        Kind(
            str(each["name"]),
            Slo(**{**Slo()._asdict(), **{name: each[name] for name in Slo._fields if name in each}}),
        )
        for each in run.kinds
    ]
    columns = {
        "arrival": rows["arrival"] - rows["arrival"].min(),
        "kind": kind,
        "priority": rows["priority"],
        "cached": np.clip(rows["cached"], 0, rows["prompt"] - 1),
    }
    return Workload.of(
        rows["prompt"][order],
        output[order],
        kinds=kinds,
        name=path.name.split(".")[0],
        origin={"trace": path.name, "format": "headgate-serve"},
        **{name: values[order] for name, values in columns.items()},
    )
