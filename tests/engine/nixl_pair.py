"""Two real vLLM servers on the CPU that hand KV over by NIXL, for the router's tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from http_server import ONE_PROCESS, Server, environment, free_port, ready

LEASE = 8  # seconds


def start(model: Path, scratch: Path, number: int) -> Server:
    """One engine that both exports and imports KV; a load that fails is computed again."""
    port, side = free_port(), free_port()
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE},
    }
    command = [
        sys.executable, "-c", "from vllm.entrypoints.cli.main import main; main()", "serve", str(model),
        "--port", str(port), "--enforce-eager", "--max-num-batched-tokens", "256", "--max-num-seqs", "16",
        "--block-size", "32", "--dtype", "float32", "--served-model-name", "tiny", "--max-model-len", "1024",
        "--enable-force-include-usage", "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    more = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side), "UCX_TLS": "tcp,self,sm", **ONE_PROCESS}
    log = scratch / f"engine-{number}-{port}.log"
    with open(log, "wb") as out:
        child = subprocess.Popen(
            command,
            env={
                **environment(scratch),
                **more,
                "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("BIND", "nobind"),
            },
            cwd=scratch,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    return Server(child, port, log)


def pair(model: Path, scratch: Path) -> AbstractContextManager[list[Server]]:
    return ready([start(model, scratch, number) for number in range(2)])
