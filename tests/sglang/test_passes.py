"""SGLang's messages of forward passes, made, sent and encoded by its own classes, become a cost card."""

from __future__ import annotations

import threading
import time

import pytest
import virtual
from bench import Bench
from sglang.srt.observability.forward_pass_metrics import ForwardPassMetrics, _FpmPublisherThread

from headgate.cost.fit.fit import fit
from headgate.cost.fit.steps import About
from headgate.cost.model import Shape
from headgate.live.calibrate.steps import steps_of_passes
from headgate.live.sglang.record_passes import record


def published(bench):
    """What SGLang's reporter says of each batch, with the virtual GPU's time."""
    scheduler, messages = bench.scheduler, []
    reporter, process = scheduler.metrics_reporter, scheduler.process_batch_result
    scheduler._fpm_worker_id, scheduler._fpm_dp_rank = "w", 0
    own = bench._launched
    spent = []

    def launched(batch):
        before = len(bench.ends)
        start = max(bench.now, bench.ends[-1] if bench.ends else 0.0)
        own(batch)
        spent.extend(end - start for end in bench.ends[before:])

    def ended(batch, result):
        said = reporter._build_scheduled_request_metrics(batch)
        messages.append(ForwardPassMetrics(wall_time=spent[len(messages)], scheduled_requests=said))
        process(batch, result)

    scheduler.tp_worker.launched, scheduler.process_batch_result = launched, ended
    return messages


@pytest.mark.parametrize("mixed", [False, True], ids=["exclusive", "mixed"])
def test_from_the_publisher_to_a_card(tmp_path, mixed):
    cost = virtual.Line()
    bench = Bench(None, cost, enable_mixed_chunk=mixed)
    messages = published(bench)
    bench.serve(virtual.requests(bench, virtual.workload(120, rate=60.0)))
    assert len(messages) == len(bench.steps)
    said = [message.scheduled_requests for message in messages]
    assert [(one.sum_prefill_tokens, one.num_decode_requests) for one in said] == virtual.totals(bench.steps)
    table = steps_of_passes(recorded(messages, tmp_path))
    assert len(table) == len(messages)  # heartbeats are left out
    law = fit(table, About("sg", "none", "tiny", 65536, 16384, 16, 512)).card().cost
    for shape in (Shape(8, 8 * 400), Shape(0, 0, 400), *([Shape(8, 8 * 400, 400)] * mixed)):
        assert law.seconds(shape) == pytest.approx(cost.seconds(shape), rel=0.1)


def recorded(messages, folder):
    """The file that our recorder writes while SGLang's publisher sends them, heartbeats before and after."""
    address, file = f"ipc://{folder}/passes", folder / "passes.jsonl"
    publisher = _FpmPublisherThread(address, "w", 0)
    if hasattr(publisher, "set_idle"):  # SGLang 0.5.22 sends heartbeats unasked
        publisher.set_idle(True)
    reader = threading.Thread(target=record, args=(address, str(file), len(messages) + 4), daemon=True)
    reader.start()
    deadline = time.monotonic() + 60
    while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    for message in messages:
        publisher.publish(message)
    reader.join(60)
    publisher.shutdown()
    assert not reader.is_alive()
    return file
