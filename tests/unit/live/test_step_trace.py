"""A trace tells the recorder the same as the engine did: same tables, whatever happened."""

from __future__ import annotations

import errno
import json
import logging
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.policy import Observer
from headgate.core.request import Slo
from headgate.experiment.library import card_engine
from headgate.live.engine import process
from headgate.live.engine.trace import Trace
from headgate.record.live_trace import read_live_trace
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads import Workload
from headgate.workloads.workload import Kind
from worlds import POLICIES, TESTING, engines, workloads

HEADER = {"headgate": "0", "policy": "eb", "parameters": {"refill": 3}, "card": None, "kv_tokens": 100}
MAKERS = {**POLICIES, **TESTING}


def traced(engine: Engine, policy, workload, path, watchers: tuple[Observer, ...] = ()) -> dict:
    """Serve the workload with a recorder and a trace; the recorder's tables."""
    recorder = Recorder([kind.name for kind in workload.kinds])
    trace = Trace(path, HEADER, background=False)
    Simulator(engine, policy, workload, (recorder, trace, *watchers)).run()
    trace.close()
    return recorder.tables()


def assert_same(tables: dict, run: Run) -> None:
    for name, columns in tables.items():
        found = getattr(run, name)
        assert set(columns) == set(found)
        for column, values in columns.items():
            np.testing.assert_array_equal(values, found[column], err_msg=f"{name}.{column}")


@given(st.data(), st.sampled_from(sorted(MAKERS)), engines(), workloads(impatient=True))
def test_round_trip(tmp_path_factory, data, name, engine, workload):
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    policy = MAKERS[name](data.draw, engine)
    tables = traced(engine, policy, workload, path)
    run = read_live_trace(path)
    assert_same(tables, run)
    assert run.meta["outcome"] == "finished" and run.meta["policy"] == "eb"


def small(tmp_path, **columns):
    engine = card_engine("linear-h200-qwen3-8b", slots=8, budget=512)
    from headgate.methods.eb.exclusive import Exclusive

    workload = Workload.of([300] * 20, [10, 40] * 10, **columns)
    return traced(engine, Exclusive(8, 3), workload, tmp_path / "t.jsonl")


def test_kinds_and_their_promises(tmp_path):
    kinds = (Kind("chat", Slo(0.3, 0.05)), Kind("batch"))
    tables = small(tmp_path, kind=[0, 1] * 10, kinds=kinds)
    run = read_live_trace(tmp_path / "t.jsonl")
    assert_same(tables, run)
    assert run.meta["kinds"] == [
        {"name": "chat", "first_token": 0.3, "between_tokens": 0.05, "between_kind": "gap"},
        {"name": "batch", "first_token": None, "between_tokens": None, "between_kind": "gap"},
    ]


def test_a_trace_cut_off_anywhere_is_read_as_far_as_it_goes(tmp_path):
    small(tmp_path)
    whole = (tmp_path / "t.jsonl").read_bytes()
    cut = tmp_path / "cut.jsonl"
    seen = []
    for size in range(len(whole) // 7, len(whole), len(whole) // 7):
        cut.write_bytes(whole[:size])
        run = read_live_trace(cut)
        seen.append(len(run.steps["start"]))
        running = run.requests["how"] == -1
        assert running.any() == run.meta["outcome"].startswith("cut off with")
        decoded = run.stays["ticks"].sum() + np.isfinite(run.requests["first_token"]).sum()
        assert run.requests["output"].sum() == decoded  # those still here have their tokens, too
    assert seen == sorted(seen) and seen[0] < seen[-1]


def test_run_load_reads_a_trace(tmp_path):
    assert_same(small(tmp_path), Run.load(tmp_path / "t.jsonl"))


def test_who_came_before_the_trace_began_is_left_out(tmp_path):
    small(tmp_path)
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    arrived = next(place for place, line in enumerate(lines) if '"arrived"' in line)
    (tmp_path / "late.jsonl").write_text("\n".join(lines[:arrived] + lines[arrived + 1 :]) + "\n")
    run = read_live_trace(tmp_path / "late.jsonl")
    assert run.requests["id"].tolist() == list(range(1, 20))


def test_what_only_live_engines_do_is_in_the_record(tmp_path):
    small(tmp_path)
    with open(tmp_path / "t.jsonl", "a") as file:
        for line in (
            {"event": "policy", "at": 1.0, "policy": "v0", "parameters": {}},
            {"event": "fell_back", "at": 2.0, "reason": "it broke"},
            {"event": "rescued", "at": 2.0},
            {"event": "wasted", "at": 2.0, "tokens": 5},
            {"event": "of a later version"},
        ):
            file.write(json.dumps(line) + "\n")
    meta = read_live_trace(tmp_path / "t.jsonl").meta
    assert meta["fallbacks"][0]["reason"] == "it broke" and meta["policies"][0]["policy"] == "v0"
    assert (meta["rescues"], meta["wasted_tokens"]) == (1, 5)


STEP = '{"event":"steps","start":0,"ends":[1],"decodes":1,"context":1,"prefill":0,"behind":0,"kv":0}\n'
PLANNED = '{"event":"plan","at":0,"decode":-1,"prompts":1,"evict":0,"gauges":{}}\n'
FIRST = '{"trace": 1, "policy": "eb"}\n'
CAME = '{"event":"arrived","id":0,"at":0,"kind":"","prompt":3,"limit":9,"priority":0,"first_token":null,"between_tokens":null,"guess":null}\n'  # noqa: E501


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "is no trace of a live engine; give a file that headgate serve --trace wrote"),
        ("1,2\n3,4\n", "is no trace of a live engine"),
        ('{"a": 1}\n', "is no trace of a live engine"),
        ('{"trace": 2}\n', "has format 2, this version reads 1; upgrade"),
        ('{"trace": 1, "kv_tokens": "x"}\n' + CAME, ":1: 'kv_tokens' of the first line is not a finite"),
        ('{"trace": 1, "policy": [1]}\n' + CAME, ":1: 'policy' of the first line is not a text"),
        (FIRST, "no request in it"),
        (FIRST + CAME[:-9], "no request in it"),
        (FIRST + "[1]\n" + CAME, ":2: not a JSON object; the file was changed"),
        (FIRST + '{"x": 1}\n', ":2: has no event"),
        (FIRST + CAME + '{"event": "held", "id": 0}\n', ":3: 'held' lacks 'at'"),
        (FIRST + CAME.replace('"id":0', '"id":"0"'), ":2: 'id' of 'arrived' is not a whole number"),
        (FIRST + CAME.replace('"prompt":3', '"prompt":"3"'), ":2: 'prompt' of 'arrived' is not a whole"),
        (FIRST + CAME + STEP.replace("[1]", "[]"), ":3: 'ends' of 'steps' is not a list of moments"),
        (FIRST + CAME + STEP.replace('"kv":0', '"kv":null'), ":3: 'kv' of 'steps' is empty"),
        (
            FIRST + CAME + STEP.replace('"decodes":1', '"decodes":{}'),
            ":3: 'decodes' of 'steps' is not a whole",
        ),
        (FIRST + CAME + STEP.replace("[1]", "[NaN]"), ":3: 'ends' of 'steps' is not a list of moments"),
        (FIRST + CAME.replace('"at":0', '"at":Infinity'), ":2: 'at' of 'arrived' is not a finite number"),
        (FIRST + CAME + PLANNED.replace("{}", '""'), ":3: 'gauges' of 'plan' is not a JSON object"),
        (FIRST + CAME + PLANNED.replace("-1", str(10**30)), ":3: 'decode' of 'plan' is not a whole number"),
        (FIRST + CAME + CAME, ":3: 'arrived' makes no sense here (ValueError: the same request comes twice)"),
        (
            FIRST + CAME + '{"event":"wasted","at":1,"tokens":"x"}\n',
            ":3: 'tokens' of 'wasted' is not a whole",
        ),
        (
            FIRST + CAME + '{"event":"admitted","id":0,"at":3}\n{"event":"prefilled","id":0,"at":2}\n',
            ":4: 'prefilled' of request 0 at 2 s, before its slot or first token at 3 s: the clock goes back",
        ),
        (
            FIRST + CAME + STEP + STEP,
            ":4: 'steps' at 0 s, before the end of the step above at 1 s: the clock",
        ),
        (FIRST + CAME + STEP.replace("[1]", "[-1]"), ":3: 'steps' at -1 s, before the moment above at 0 s"),
        (
            FIRST + CAME.replace('"at":0', '"at":5') + '{"event":"admitted","id":0,"at":3}\n',
            ":3: 'admitted' of request 0 at 3 s, before its arrival at 5 s: the clock goes back; give each",
        ),
    ],
)
def test_damage_is_one_line_with_the_place(tmp_path, text, fragment):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_live_trace(path)
    assert fragment in str(error.value) and str(path) in str(error.value)


# -- writing --------------------------------------------------------------------------------------------


def test_an_old_trace_is_kept(tmp_path):
    for name in ("t.jsonl", "t-2.jsonl", "t-3.jsonl"):
        trace = Trace(tmp_path / "t.jsonl", HEADER, background=False)
        trace.close()
        assert trace.path == tmp_path / name
        assert json.loads(trace.path.read_text())["policy"] == "eb"


def test_a_place_nobody_can_write_to_is_refused_at_once(tmp_path):
    with pytest.raises(InputError, match="No such file or directory; name a file that can be written"):
        Trace(tmp_path / "none" / "t.jsonl", HEADER)


class Full:
    """A disk without room."""

    closed = False

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        self.closed = True
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_trace_with_one_line_and_nothing_else(tmp_path, caplog):
    trace = Trace(tmp_path / "t.jsonl", HEADER, background=False)
    trace._file.close()
    trace._file = full = Full()
    with caplog.at_level(logging.WARNING, "vllm.headgate"):
        for _ in range(3):
            trace.rescued(1.0)
            trace.flush()
        trace.close()
    assert full.closed and len(caplog.records) == 1 and "No space left on device" in caplog.text
    assert not trace._events


def test_a_disk_that_is_too_slow_ends_the_trace(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("headgate.live.engine.trace.MOST_UNWRITTEN", 10)
    trace = Trace(tmp_path / "t.jsonl", HEADER, background=False)
    with caplog.at_level(logging.WARNING, "vllm.headgate"):
        for _ in range(11):
            trace.rescued(1.0)
    assert "too slow" in caplog.text and not trace._events
    trace.close()


def test_numbers_that_are_none_become_null(tmp_path):
    trace = Trace(tmp_path / "t.jsonl", HEADER, background=False)
    from headgate.core.plan import Plan

    trace.planned(Plan(), 1.0, {"gain": float("nan"), "share": np.float64(0.5), "on": np.int64(3)})
    trace.close()
    last = json.loads(trace.path.read_text().splitlines()[-1])
    assert last["gauges"] == {"gain": None, "share": 0.5, "on": 3}


def test_a_thread_writes_and_the_end_of_the_process_writes_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr("headgate.live.engine.trace.FLUSH_EVERY", 1000.0)
    monkeypatch.setattr(process, "PATIENCE", 600.0)
    trace = Trace(tmp_path / "t.jsonl", HEADER)
    trace.rescued(1.0)
    assert trace._thread._thread.daemon
    trace._thread._exit()  # what multiprocessing calls when the process ends
    trace.close()
    assert trace.path.read_text().count("\n") == 2


def test_work_that_fails_is_logged_once_and_tried_again(caplog):
    tries = threading.Semaphore(0)

    def work():
        tries.release()
        raise KeyError("x")

    with caplog.at_level(logging.WARNING, "vllm.headgate"):
        thread = process.Background(work, 0.001, "the thing")
        assert all(tries.acquire(timeout=600) for _ in range(3))
        thread.close()
    assert caplog.text.count("the thing failed and is tried again: KeyError") == 1
    assert not thread.busy


class Hangs:
    """A disk that never answers, until it is let go."""

    def __init__(self):
        self.reached, self.free = threading.Event(), threading.Event()

    def write(self, text):
        self.reached.set()
        assert self.free.wait(600)
        return len(text)

    def close(self):
        assert self.free.is_set(), "closed while a write hangs: that would hang too"


def test_a_disk_that_hangs_keeps_a_bounded_number_of_events(tmp_path, caplog, monkeypatch):
    """Row 8 of the attack: the writer never comes back, so only the engine's own side can notice."""
    monkeypatch.setattr("headgate.live.engine.trace.MOST_UNWRITTEN", 50)
    monkeypatch.setattr("headgate.live.engine.trace.FLUSH_EVERY", 0.001)
    monkeypatch.setattr(process, "PATIENCE", 0.05)
    trace = Trace(tmp_path / "t.jsonl", HEADER)
    trace._file.close()
    trace._file = disk = Hangs()
    with caplog.at_level(logging.WARNING, "vllm.headgate"):
        trace.rescued(0.0)
        assert disk.reached.wait(600)
        most = 0
        for _ in range(1000):
            trace.rescued(1.0)
            most = max(most, len(trace._events))
        trace.close()  # comes back although the disk does not
    assert most <= 51 and not trace._events
    assert caplog.text.count("ends here, serving goes on: the disk is too slow") == 1
    disk.free.set()


def test_gauges_that_are_no_numbers_do_not_end_the_trace(tmp_path):
    from headgate.core.plan import Plan

    trace = Trace(tmp_path / "t.jsonl", HEADER, background=False)
    trace.planned(Plan(), 1.0, {"mode": "fast", "share": 0.5, 3: None})
    trace.planned(Plan(), 2.0, None)
    trace.close()
    lines = [json.loads(line) for line in trace.path.read_text().splitlines()[1:]]
    assert [line["gauges"] for line in lines] == [{"share": 0.5}, {}]
