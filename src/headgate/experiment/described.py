"""What a run's record says of its requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headgate.sim.engine.residents import Residents
from headgate.workloads.workload import Workload


def cache_record(engines: Sequence[Residents]) -> dict[str, object]:
    """Blocks that each one's prefix cache evicted, where they had any."""
    evicted = [engine.cache.evicted for engine in engines if engine.cache is not None]
    return {"prefix_evicted": evicted} if evicted else {}


def described(workload: Workload) -> dict[str, object]:
    """Name, size, load and classes of the requests, for run.json."""
    load = "closed" if workload.closed else "open" if np.ptp(workload.arrival) else "all-at-once"
    return {
        "workload": {"name": workload.name, "requests": len(workload), **workload.origin},
        "load": load,
        "clients": int(workload.clients.max()) or None,
        "kinds": [{"name": kind.name, **kind.slo._asdict()} for kind in workload.kinds],
    }
