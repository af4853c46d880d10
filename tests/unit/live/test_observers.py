"""Who watches an engine, as the settings say."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from headgate import __version__
from headgate.core.errors import InputError
from headgate.core.ledger import Entry
from headgate.core.policy import Steps
from headgate.core.request import Slo
from headgate.core.view import Limits
from headgate.live.engine import plug_in as neutral
from headgate.live.engine.live import Live
from headgate.live.engine.metrics import Metrics
from headgate.live.engine.plug_in import EngineFacts, PlugIn
from headgate.live.engine.reload import Renewed
from headgate.live.engine.requests import RequestTerms
from headgate.live.engine.settings import Settings
from headgate.live.engine.trace import Trace
from headgate.live.vllm import VLLM
from headgate.live.vllm.seams import engine_number

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
FACTS = EngineFacts(VLLM, "0.32.0", "org/model", 1000, LIMITS, engine=1)


def build(settings):
    return None, {"refill": 4}


def test_metrics_always_and_the_trace_where_asked_for(tmp_path):
    path = tmp_path / "t.jsonl"
    settings = Settings(policy="eb", card="linear-h200-qwen3-8b", trace=str(path), metrics=False)
    plug_in = PlugIn(settings, FACTS, build)
    metrics, trace = plug_in.watchers
    assert isinstance(metrics, Metrics) and isinstance(trace, Trace)
    live = Live(None, Limits(64, 8), 1000, clock=lambda: 0.0)
    live.counts["empty"] = 2
    plug_in.begin(live)
    for watcher in plug_in.watchers:
        watcher.stepped(Steps(0.0, [0.5], 3, 30, 0, 0, 100))
    ready = Renewed(Settings(policy="v0"), None, {"slots": 8})
    plug_in._renewals = SimpleNamespace(take=lambda: ready, take_mark=lambda: "block 1", close=lambda: None)
    live.origin = -1.0
    assert plug_in.renew() is ready and plug_in.settings is ready.settings
    plug_in.close()
    plug_in.close()  # the engine's end and the end of the process may both call it
    assert metrics.policy == "v0" and metrics.all_steps() == {"decode": 1, "empty": 2}
    first, step, policy, mark = map(json.loads, path.read_text().splitlines())
    assert first["headgate"] == __version__ and first["driver"] == "vllm" and first["engine"] == LIMITS
    assert (first["policy"], first["parameters"], first["card"]) == (
        "eb",
        {"refill": 4},
        "linear-h200-qwen3-8b",
    )
    assert first["versions"]["vllm"] == "0.32.0" and first["replica"] == 1 and first["kv_tokens"] == 1000
    assert step["event"] == "steps" and step["ends"] == [0.5]
    assert policy == {"event": "policy", "at": 1.0, "policy": "v0", "parameters": {"slots": 8}}
    assert mark.pop("date") > 1e9 and mark == {"event": "mark", "at": 1.0, "mark": "block 1"}


def test_settings_that_are_read_again_may_name_another_trace(tmp_path):
    """Opened beside the engine; the old one ends, and a file that cannot be written changes nothing."""
    plug_in = PlugIn(Settings(policy="mixed", metrics=False), FACTS, build)
    live = Live(None, Limits(64, 8), 1000, [*plug_in.watchers], clock=lambda: 0.0)
    plug_in.begin(live)

    def take(**words):
        settings = Settings(policy="v0", metrics=False, **words)
        ready = Renewed(settings, *plug_in._prepare(settings))
        plug_in._renewals = SimpleNamespace(
            take=lambda: ready, take_mark=lambda: settings.mark, close=lambda: None
        )
        assert plug_in.renew() is ready
        live.arrive(Entry(live.ledger, len(live.ledger.waiting), 0.0, 5, 9, "", None, 0, Slo()))

    take()
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    take(trace=str(one), mark="block 1")
    take(trace=str(two), mark="block 2")
    take()
    plug_in.close()
    for path, mark, id in ((one, "block 1", 1), (two, "block 2", 2)):
        end = time.monotonic() + 10
        while len(path.read_text().splitlines()) < 3 and time.monotonic() < end:
            time.sleep(0.05)  # it is closed beside the engine
        header, *lines = map(json.loads, path.read_text().splitlines())
        assert header["policy"] == "v0"
        assert [line["event"] for line in lines] == ["policy", "mark", "arrived"]
        assert lines[1]["mark"] == mark and lines[2]["id"] == id
    with pytest.raises(InputError, match="name a file that can be written"):
        plug_in._prepare(Settings(policy="v0", trace=str(tmp_path / "none" / "t.jsonl")))


def test_weights_are_those_of_the_newest_settings():
    classes = [{"gold": {"ttft": "1s", "weight": weight}} for weight in (2, 10)]
    plug_in = PlugIn(Settings(policy="mixed", metrics=False, classes=classes[0]), FACTS, build)
    gold = {"headgate_class": "gold"}
    assert plug_in.promises(gold).slo.weight == 2
    ready = Renewed(Settings(policy="mixed", metrics=False, classes=classes[1]), None, {})
    plug_in._renewals = SimpleNamespace(take=lambda: ready, take_mark=lambda: None, close=lambda: None)
    plug_in.renew()
    assert plug_in.promises(gold).slo.weight == 10
    plug_in.close()


def test_only_metrics_by_default():
    plug_in = PlugIn(Settings(policy="mixed", metrics=False), FACTS, build)
    assert [type(watcher) for watcher in plug_in.watchers] == [Metrics]
    plug_in.close()


def test_a_trace_nobody_can_write_is_refused(tmp_path):
    settings = Settings(policy="mixed", trace=str(tmp_path / "none" / "t.jsonl"))
    with pytest.raises(InputError, match="name a file that can be written"):
        PlugIn(settings, FACTS, build)


def test_the_neutral_part_names_no_engine():
    """What an engine is called comes in by `EngineNames`."""
    files = sorted(Path(neutral.__file__).parent.glob("*.py"))
    texts = {file.name: file.read_text(encoding="utf-8").lower() for file in files}
    assert len(texts) > 5 and not [name for name, text in texts.items() if "vllm" in text or "sglang" in text]


def test_an_engine_that_was_never_begun_can_be_closed_and_watched_only():
    """Its own name as a policy: no policy is made."""
    watched = PlugIn(Settings(policy="vllm", metrics=False), FACTS, lambda settings: pytest.fail("made"))
    assert watched.policy is None and watched.renew() is None and watched.promises(None) == RequestTerms()
    watched.close()


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
