"""Prints SGLang's /metrics page after our scheduler served some requests: a process of its own, because
prometheus_client must be imported after SGLang has chosen its folder of several processes.
"""

import sys
import time

import kernels

FINISHED = 'headgate_finished_total{engine="0",how="limit"} 30.0'
PATIENCE = 60.0  # seconds; the plug-in writes its metrics in the background


def page() -> str:
    kernels.stand_in()
    from sglang.srt.utils.common import add_prometheus_middleware, set_prometheus_multiproc_dir

    set_prometheus_multiproc_dir()
    import virtual
    from bench import Bench
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from headgate.live.sglang.scheduler import HeadgateScheduler

    virtual.configured(policy="eb:refill=4", metrics=True)
    bench = Bench(HeadgateScheduler, virtual.Line(), enable_metrics=True)
    bench.serve(virtual.requests(bench, virtual.workload(30)))
    app = FastAPI()
    add_prometheus_middleware(app)
    client, deadline = TestClient(app), time.monotonic() + PATIENCE
    while True:
        text = client.get("/metrics").text
        if FINISHED in text or time.monotonic() > deadline:
            return text
        time.sleep(0.2)


if __name__ == "__main__":
    sys.stdout.write(page())
