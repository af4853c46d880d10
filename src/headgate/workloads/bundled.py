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
    "sharegpt-8k": (
        "lengths of ShareGPT conversations below 8k tokens, without arrivals (give --rate): 30,731 requests, "
        "mean 2,340 in and 439 out"
    ),
}

_FOLDER = Path(__file__).parent.parent / "data"
_FILES = {  # and the format of each
    "azure-conv": ("azure_conv_10min.csv.gz", "azure"),
    "azure-code": ("azure_code_10min.csv.gz", "azure"),
    "sharegpt-8k": ("sharegpt_8k_lengths.csv.gz", "vidur"),
}


def bundled(name: str) -> Workload:
    """The bundled trace of this name; see BUNDLED."""
    if name not in _FILES:
        raise unknown("bundled trace", name, BUNDLED)
    file, format = _FILES[name]
    workload, _ = read_trace(_FOLDER / file, format=format)
    return replace(workload, name=name)


def bundled_format(name: str) -> str:
    """The format in which a bundled trace is kept."""
    return _FILES[name][1]
