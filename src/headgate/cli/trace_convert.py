"""`headgate trace convert IN OUT`: any trace that headgate reads, as Mooncake's JSON lines."""

from __future__ import annotations

import sys
from pathlib import Path

from headgate.core.errors import InputError
from headgate.experiment.build import make_workload
from headgate.experiment.settings import Experiment
from headgate.workloads.traces import write_mooncake


def convert(names: list[str], settings: Experiment, overwrite: bool) -> None:
    """Read, write, and say what was written."""
    if len(names) != 2:
        raise InputError("trace convert takes two files; write headgate trace convert IN OUT.jsonl")
    source, target = names
    if Path(target).exists() and not overwrite:
        raise InputError(f"{target} exists; choose another name or pass --overwrite")
    workload, bad = make_workload(settings.model_copy(update={"trace": source}))
    write_mooncake(workload, target)
    if "times" in workload.origin:
        print(f"note: {workload.origin['times']}", file=sys.stderr)
    left = f", {bad.count} bad rows left out" if bad.count else ""
    print(f"{target}: {len(workload):,} requests in Mooncake's format{left}")
