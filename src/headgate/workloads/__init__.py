"""Requests: when they arrive, and how long they are."""

from __future__ import annotations

from headgate.core.durations import duration, slice_text
from headgate.workloads.arrivals import (
    AllAtOnce,
    ArrivalProcess,
    Constant,
    GammaArrivals,
    Poisson,
    arrival_process,
)
from headgate.workloads.columns import Lengths, Summary
from headgate.workloads.formats import FORMATS
from headgate.workloads.lengths import (
    Empirical,
    Fixed,
    Gamma,
    Geometric,
    LengthLaw,
    LogNormal,
    Pairs,
    Uniform,
    length_law,
)
from headgate.workloads.streams import stream
from headgate.workloads.synthetic import Share, Stage, generate
from headgate.workloads.traces import BUNDLED, BadRows, bundled, read_trace, write_mooncake
from headgate.workloads.workload import Kind, Workload

__all__ = [
    "BUNDLED",
    "FORMATS",
    "AllAtOnce",
    "ArrivalProcess",
    "BadRows",
    "Constant",
    "Empirical",
    "Fixed",
    "Gamma",
    "GammaArrivals",
    "Geometric",
    "Kind",
    "LengthLaw",
    "Lengths",
    "LogNormal",
    "Pairs",
    "Poisson",
    "Share",
    "Stage",
    "Summary",
    "Uniform",
    "Workload",
    "arrival_process",
    "bundled",
    "duration",
    "generate",
    "length_law",
    "read_trace",
    "slice_text",
    "stream",
    "write_mooncake",
]
