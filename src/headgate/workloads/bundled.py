"""The traces that ship with the package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headgate.core.errors import unknown
from headgate.workloads.traces import read_trace
from headgate.workloads.workload import Workload

BUNDLED: dict[str, str] = {
    "azure-conv": (
        "ten minutes of Azure's 2023 conversations: 3,118 requests, 5.2 per second, mean 1,153 in and 246 out"
    ),
    "azure-code": (
        "ten minutes of Azure's 2023 code completion: 2,146 requests, 3.6 per second in bursts, "
        "mean 1,972 in and 28 out"
    ),
}

_FOLDER = Path(__file__).parent.parent / "data"
_FILES = {"azure-conv": "azure_conv_10min.csv.gz", "azure-code": "azure_code_10min.csv.gz"}


def bundled(name: str) -> Workload:
    """The bundled trace of this name; see BUNDLED."""
    if name not in _FILES:
        raise unknown("bundled trace", name, BUNDLED)
    workload, _ = read_trace(_FOLDER / _FILES[name], format="azure")
    return replace(workload, name=name)
