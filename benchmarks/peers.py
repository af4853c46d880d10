"""The same requests through headgate and NVIDIA's DynoSim: `python -m benchmarks.peers NAME REQUESTS`.

NAME is `headgate` or `dynosim`; the latter needs `pip install --no-deps ai-dynamo-runtime==1.3.1`
(later releases leave the offline replay to a package that is not on the index). Both get 1,024 prompt and 256
output tokens per request at 6.45/s, one engine, 512 slots, 16,384 tokens a step, no prefix cache. Each prices
steps by a law of its own, so only the time they take is compared.
"""

from __future__ import annotations

import sys
import time

PROMPT, OUTPUT, RATE = 1024, 256, 6.45
SLOTS, BUDGET, BLOCK = 512, 16384, 16


def headgate(requests: int) -> None:
    """With workload and tables."""
    import numpy as np

    from benchmarks import worlds
    from headgate.methods.mixed.mixed import Mixed
    from headgate.record.recorder import Recorder
    from headgate.sim.engine.simulator import Simulator
    from headgate.workloads.workload import Workload

    times = np.arange(requests) / RATE
    workload = Workload.of([PROMPT] * requests, [OUTPUT] * requests, arrival=times)
    recorder = Recorder()
    Simulator(worlds.engine(), Mixed(SLOTS, BUDGET), workload, (recorder,)).run()
    recorder.tables()


def dynosim(requests: int) -> None:
    """Its offline replay of synthetic requests."""
    from dynamo import _core  # type: ignore[import-not-found]

    engine = _core.MockEngineArgs(
        num_gpu_blocks=65_536,
        block_size=BLOCK,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=BUDGET,
        enable_prefix_caching=False,
    )
    found = _core.run_mocker_synthetic_trace_replay(
        PROMPT,
        OUTPUT,
        requests,
        extra_engine_args=engine,
        num_workers=1,
        replay_mode="offline",
        router_mode="round_robin",
        arrival_interval_ms=1000 / RATE,
    )
    assert found["completed_requests"] == requests


if __name__ == "__main__":
    name, many = sys.argv[1], int(sys.argv[2])
    run = {"headgate": headgate, "dynosim": dynosim}[name]
    run(10)  # imports
    began = time.process_time()
    run(many)
    print(f"{name}: {many} requests in {time.process_time() - began:.3f} CPU seconds")
