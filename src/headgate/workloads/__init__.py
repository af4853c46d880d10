"""Requests: when they arrive, and how long they are."""

from __future__ import annotations

from headgate.workloads.arrivals import Poisson, arrival_process
from headgate.workloads.lengths import Geometric, Uniform, length_law
from headgate.workloads.synthetic import Share, generate
from headgate.workloads.traces import read_trace
from headgate.workloads.workload import Kind, Workload

__all__ = [
    "Geometric", "Kind", "Poisson", "Share", "Uniform", "Workload",
    "arrival_process", "generate", "length_law", "read_trace",
]  # fmt: skip
