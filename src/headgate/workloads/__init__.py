"""Requests: when they arrive, and how long they are."""

from __future__ import annotations

from headgate.workloads.arrivals import Poisson, arrival_process
from headgate.workloads.lengths import Geometric, Pairs, Uniform, length_law
from headgate.workloads.synthetic import Share, WorkloadStage, generate
from headgate.workloads.traces import read_trace
from headgate.workloads.workload import Kind, Workload

__all__ = [
    "Geometric", "Kind", "Pairs", "Poisson", "Share", "Uniform", "Workload", "WorkloadStage",
    "arrival_process", "generate", "length_law", "read_trace",
]  # fmt: skip
