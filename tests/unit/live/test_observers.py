"""Who watches an engine, as the settings say."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from headgate import __version__
from headgate.core.errors import InputError
from headgate.core.policy import Steps
from headgate.live.engine.metrics import Metrics
from headgate.live.engine.observers import Facts, close, connect, engine_number, observers, renewed
from headgate.live.engine.trace import Trace
from headgate.live.vllm.fields import Settings

FACTS = Facts("org/model", "0.32.0", 1000, {"max_num_seqs": 8}, engine=1)


def test_metrics_always_and_the_trace_where_asked_for(tmp_path):
    path = tmp_path / "t.jsonl"
    settings = Settings(policy="eb", card="linear-h200-qwen3-8b", trace=str(path), metrics=False)
    found = observers(settings, {"refill": 4}, FACTS)
    metrics, trace = found
    assert isinstance(metrics, Metrics) and isinstance(trace, Trace)
    connect(found, {"empty": 2})
    for watcher in found:
        watcher.stepped(Steps(0.0, [0.5], 3, 30, 0, 0, 100))
    renewed(found, "v0", {"slots": 8}, 1.0)
    close(found)
    close(found)  # vLLM's end and the end of the process may both call it
    assert metrics.policy == "v0" and metrics.all_steps() == {"decode": 1, "empty": 2}
    first, step, policy = map(json.loads, path.read_text().splitlines())
    assert first["headgate"] == __version__ and first["engine"] == {"max_num_seqs": 8}
    assert (first["policy"], first["parameters"], first["card"]) == (
        "eb",
        {"refill": 4},
        "linear-h200-qwen3-8b",
    )
    assert first["versions"]["vllm"] == "0.32.0" and first["replica"] == 1 and first["kv_tokens"] == 1000
    assert step["event"] == "steps" and step["ends"] == [0.5]
    assert policy == {"event": "policy", "at": 1.0, "policy": "v0", "parameters": {"slots": 8}}


def test_only_metrics_by_default():
    found = observers(Settings(policy="mixed", metrics=False), {}, FACTS)
    assert [type(watcher) for watcher in found] == [Metrics]
    close(found)


def test_a_trace_nobody_can_write_is_refused(tmp_path):
    settings = Settings(policy="mixed", trace=str(tmp_path / "none" / "t.jsonl"))
    with pytest.raises(InputError, match="name a file that can be written"):
        observers(settings, {}, FACTS)


@pytest.mark.parametrize(
    ("parallel", "number"),
    [
        ({"data_parallel_rank": 0, "data_parallel_index": 3}, 3),  # vLLM resets the rank, not the index
        ({"data_parallel_rank": 0, "data_parallel_index": 0}, 0),
        ({"data_parallel_rank": 2}, 2),  # a release without the index
    ],
)
def test_which_of_several_engines_this_is(parallel, number):
    """Row 4 of the attack: two ranks that both call themselves 0 share the alert on headgate_fallen."""
    assert engine_number(SimpleNamespace(**parallel)) == number
