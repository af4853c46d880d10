"""Two tensor-parallel ranks, two processes, clocks that disagree: which batches does each make?

A script, because SGLang's groups are made once in a process: `python two_ranks.py` prints a line of JSON for
each case.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import uuid
from pathlib import Path
from unittest.mock import MagicMock

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0|1")

import kernels  # noqa: E402

kernels.stand_in()

import bench as benches  # noqa: E402
import sglang.srt.distributed.device_communicators.pynccl as pynccl  # noqa: E402
import sglang.srt.models.registry  # noqa: E402, F401  once, not in each child
import virtual  # noqa: E402
from sglang.srt.server_args import PortArgs  # noqa: E402
from sglang.srt.utils.network import get_free_port  # noqa: E402

import headgate  # noqa: E402
from headgate.live.sglang.scheduler import HeadgateScheduler  # noqa: E402

pynccl.PyNcclCommunicator = lambda *args, **words: MagicMock(disabled=True)  # it asks for a GPU
KEEP = "keep:ttft=0.5,tbt=0.03"
CASES = {
    "shared": (KEEP, True, False),
    "shared, overlap": (KEEP, True, True),
    "a policy that fails": ("failing", True, True),
    "a policy that rejects": ("rejecting", True, False),
    "each for itself": (KEEP, False, False),
}
CHANNELS = ("tokenizer", "scheduler_input", "detokenizer", "rpc", "metrics")


class Failing(headgate.Mixed):
    plans = 0

    def plan(self, view):
        self.plans += 1
        if self.plans > 20:
            raise RuntimeError("boom")
        return super().plan(view)


class Rejecting(headgate.Mixed):
    def plan(self, view):
        plan = super().plan(view)
        return plan._replace(
            reject=tuple(id for id in view.waiting if id % 7 == 3 and id not in plan.prefill)
        )


def policy_of(name):
    if name == "failing":
        return Failing(16, 512)
    return Rejecting(16, 512) if name == "rejecting" else headgate.make_policy(name, virtual.engine())


def ports() -> PortArgs:
    channels = {f"{name}_ipc_name": f"ipc://{tempfile.mktemp()}" for name in CHANNELS}
    return PortArgs(
        nccl_port=get_free_port(), tokenizer_worker_ipc_name=None, decoupled_spec_ipc_config=None,
        instance_id=uuid.uuid4().hex[:12], **channels,
    )  # fmt: skip


def rank(number, name, share, overlap, where, answer) -> None:
    virtual.configured()
    if not share:  # each rank has a policy and books of its own
        begin = HeadgateScheduler._headgate_begin

        def alone(self, settings):
            size, self.tp_size = self.tp_size, 1
            begin(self, settings)
            self.tp_size = size

        HeadgateScheduler._headgate_begin = alone
    bench = benches.Bench(
        HeadgateScheduler,
        virtual.Line(),
        overlap=overlap,
        enable_mixed_chunk=True,
        rank=number,
        ports=where,
        tp_size=2,
    )
    scheduler = bench.scheduler
    live = scheduler._headgate
    if live is not None:
        live.clock, live.origin = (lambda: bench.now * (1 + 0.3 * number)), 0.0
        live.take_over(policy_of(name))
    own = scheduler.process_batch_result

    def processed(batch, result):  # only rank 0 streams answers
        own(batch, result)
        bench.finished.update({request.rid: 0 for request in batch.reqs if request.finished()})

    scheduler.process_batch_result = processed
    drop = scheduler._headgate_drop
    scheduler._headgate_drop = lambda request: (drop(request), bench.aborted.setdefault(request.rid, None))
    load = virtual.workload(40)
    requests = [request for _, request in virtual.requests(bench, load)]
    bench.sent.update(dict.fromkeys((request.rid for request in requests), 0.0))
    turns = 0

    def ingest(stop_at_pause=False):
        nonlocal turns
        turns += 1
        new = [requests.pop(0)] if requests and turns % 2 else []
        scheduler.process_input_requests(new)
        scheduler.gracefully_exit = len(bench.finished.keys() | bench.aborted.keys()) >= 40 or turns > 3000
        return new

    bench.loop(ingest)
    answer.send(([*bench.steps], len(bench.finished), len(bench.aborted)))


def main() -> None:
    fork = multiprocessing.get_context("fork")
    for title, (name, share, overlap) in CASES.items():
        where = ports()
        pipes = [fork.Pipe(False) for _ in range(2)]
        children = [
            fork.Process(target=rank, args=(number, name, share, overlap, where, pipe[1]))
            for number, pipe in enumerate(pipes)
        ]
        for child in children:
            child.start()
        heard = [pipe[0].recv() if pipe[0].poll(60) else ([], 0, 0) for pipe in pipes]
        for child in children:
            child.join(5)
            if child.is_alive():
                child.kill()
        same = heard[0][0] == heard[1][0] != []
        counts = {
            "steps": len(heard[0][0]),
            "finished": [h[1] for h in heard],
            "aborted": [h[2] for h in heard],
        }
        print(json.dumps({"case": title, "same": same, **counts}), flush=True)


if __name__ == "__main__":
    main()
