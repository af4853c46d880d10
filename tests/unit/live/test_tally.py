"""The tally counts what the run's tables say, and its metrics say what it counted."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, multiprocess

from headgate.core.ledger import Entry
from headgate.core.plan import ALL, NONE, Plan
from headgate.core.policy import BatchPolicy, End
from headgate.core.request import Slo
from headgate.core.view import Limits
from headgate.live.engine import process
from headgate.live.engine.live import Live
from headgate.live.engine.metrics import Metrics
from headgate.live.engine.settings import Settings
from headgate.live.engine.tally import ClassTally, Tally
from headgate.methods.eb.exclusive import Exclusive
from headgate.methods.keep.policy import Keep
from headgate.methods.mixed.mixed import Mixed
from headgate.record.recorder import HOW, Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.stats.measured import Measured
from headgate.workloads import Kind, Workload
from worlds import POLICIES, TESTING, Line, engines, workloads

MAKERS = {**POLICIES, **TESTING}
ABOUT = {"policy": "eb", "card": "none", "model": "m"}


@given(st.data(), st.sampled_from(sorted(MAKERS)), engines(), workloads(impatient=True))
def test_it_agrees_with_the_tables(data, name, engine, workload):
    policy = MAKERS[name](data.draw, engine)
    recorder, tally = Recorder([kind.name for kind in workload.kinds]), Tally()
    Simulator(engine, policy, workload, (recorder, tally)).run()
    tables = recorder.tables()
    requests, steps = tables["requests"], tables["steps"]
    prompts, decodes, count = steps["prefill"] > 0, steps["decodes"] > 0, steps["count"]
    assert tally.steps["mixed"] == count[prompts & decodes].sum()
    assert tally.steps["decode"] == count[~prompts & decodes].sum()
    assert tally.steps["prefill"] == count[prompts & ~decodes].sum()
    assert tally.tokens["decode"] == (steps["decodes"] * count).sum()
    assert tally.tokens["prefill"] == (steps["prefill"] * count).sum()
    assert tally.evictions == requests["evictions"].sum()
    assert tally.lost["eviction"] == requests["wasted"].sum()
    assert {how.value: (requests["how"] == code).sum() for how, code in HOW.items()} == {
        how.value: tally.left[how.value] for how in HOW
    }
    assert tally.plans == len(tables["plans"]["time"])
    assert tally.states == [0, 0, 0] and tally.phase == "idle"
    in_steps = sum(times.seconds * times.steps for times in tally.step_times)
    assert np.isclose(in_steps, steps["seconds"].sum())
    in_phases = sum(times.seconds for times in tally.phase_times) + tally._phase
    assert np.isclose(in_phases, in_steps)


@given(st.data(), st.sampled_from(sorted(MAKERS)), engines(), workloads(impatient=True, promised=True))
def test_promises_by_class_agree_with_the_tables(data, name, engine, workload):
    """Every gap of every request, which the tables have one by one and the tally never looks at."""
    policy = MAKERS[name](data.draw, engine)
    recorder, tally = Recorder([kind.name for kind in workload.kinds]), Tally()
    Simulator(engine, policy, workload, (recorder, tally)).run()
    run = Run(
        {"kinds": [{"name": kind.name, **kind.slo.said()} for kind in workload.kinds]}, **recorder.tables()
    )
    requests, longest = run.requests, Measured(run).longest
    expected = Counter()
    for row, kind in enumerate(workload.kinds[number] for number in requests["kind"]):
        first, between = kind.slo.first_token, kind.slo.between_tokens
        came = not np.isnan(requests["first_token"][row])
        took = requests["first_token" if came else "finished"][row] - requests["arrival"][row]
        refused = requests["how"][row] == HOW[End.REFUSED]
        if first is not None and (came or refused or took > first):
            expected[kind.name or "default", "ttft", "true" if came and took <= first else "false"] += 1
        if between is not None and came:
            assume(not abs(longest[row] - between) < 1e-9)  # a matter of rounding
            expected[kind.name or "default", "tbt", "false" if longest[row] > between else "true"] += 1
    shown = tally.by_class.shown()
    assert shown["headgate_promises"] == expected
    assert sum(shown["headgate_evictions"].values()) == requests["evictions"].sum()
    assert not any(shown["headgate_queue"].values()) and not tally.by_class._here


class Alternates(BatchPolicy):
    """The first prompt, three decode steps, the second prompt in two pieces, then decodes."""

    def __init__(self):
        self.asked = 0

    def plan(self, view):
        self.asked += 1
        prompts = (*view.prefilling, *view.waiting)[:1]
        return Plan(ALL) if 2 <= self.asked <= 4 or not prompts else Plan(NONE, prompts, budget=50)


def test_a_stall_is_the_gap_of_a_decode_that_was_held():
    engine = Engine(Line(1.0, 0.0, 0.0, 0.0, 0.0), 10_000, 1000, 50, 8)
    tally = Tally()
    Simulator(engine, Alternates(), Workload.of([50, 100], [20, 5]), (tally,)).run()
    assert list(tally.stalls) == [3.0] and tally.longest_stall == 3.0  # two steps of prompts and its own
    assert [(times.kind, times.seconds) for times in tally.phase_times] == [
        ("prefill", 1.0),
        ("decode", 3.0),
        ("prefill", 2.0),
    ]


def test_a_refill_of_an_empty_engine_stalls_only_those_who_have_begun():
    engine = Engine(Line(1.0, 0.0, 0.0, 0.0, 0.0), 10_000, 1000, 50, 8)
    tally = Tally()
    Simulator(engine, Exclusive(8, 2), Workload.of([50, 50], [5, 5]), (tally,)).run()
    assert list(tally.stalls) == [2.0]  # its first token came at 1 s, its second at 3 s


def test_modes():
    tally = Tally("eb+")
    assert tally.mode == "eb+"
    tally.planned(Plan(), 0.0, {"exclusive": False})
    assert tally.mode == "mixed"
    tally.planned(Plan(), 0.0, {"exclusive": True})
    assert tally.mode == "exclusive"
    tally.fell_back("it broke", 1.0)
    assert tally.mode == "fallback"
    tally.renewed("v0", {}, 2.0)
    assert tally.mode == "v0" and tally.fallen is None


@pytest.mark.parametrize("name", ["keep", "auto", "keep:tbt=50ms"])
def test_the_mode_of_keep_is_its_own(name):
    """Its eb+ decides only while no request has a promise; what that would do is a gauge."""
    tally, keep = Tally(name), Keep(8, 64, Line(), tbt=4.0)
    Simulator(Engine(Line(), 2_000, 1000, 64, 8), keep, Workload.of([40] * 12, [30] * 12), (tally,)).run()
    assert "exclusive" in tally.gauges
    assert tally.mode == "keep"


def test_fallbacks_are_counted_under_a_few_labels():
    """Whatever failed, and whichever requests the reason names."""
    registry = CollectorRegistry()
    metrics = Metrics(Settings(), ABOUT, 2_000, registry=registry, background=False)
    for number in range(300):
        clock = Clock()
        live = Live(Starves(), Limits(64, 8), 2_000, (metrics,), clock, watchdog=1.0)
        live.arrive(Entry(live.ledger, number, 0.0, 10, 5))
        for _ in range(200):
            clock.now += 0.1
            live.begin(2_000)
            live.ran((), 0, None)
        assert f"request {number} (waiting)" in live.fallen
    for policy in (Alternates(), None):
        live = Live(policy, Limits(64, 8), 2_000, (metrics,))
        live.fall("it broke " + "x" * 1000, *(() if policy else ("made up",)))
    metrics.show()
    found = {
        sample.labels["reason"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "headgate_fallbacks_total"
    }
    assert found == {"starved": 300, "raised": 2}


class Starves(BatchPolicy):
    def plan(self, view):
        return Plan(ALL)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


# -- metrics --------------------------------------------------------------------------------------------


def served(metrics: Metrics) -> None:
    engine = Engine(Line(), 2_000, 1000, 64, 8)
    Simulator(engine, Exclusive(8, 3), Workload.of([40] * 12, [30] * 12), (metrics,)).run()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"engine": "0", **labels})


def test_metrics_show_the_tally_once():
    registry = CollectorRegistry()
    metrics = Metrics(Settings(), ABOUT, 2_000, registry=registry, background=False)
    served(metrics)
    metrics.wasted(7, 1.0)
    metrics.counts = {"empty": 5, "decode": 1000}
    metrics.fell_back("it broke " + "x" * 1000, 1.0)
    for _ in range(3):
        metrics.show()
    steps = metrics.steps
    for kind in ("mixed", "decode", "prefill"):
        assert value(registry, "headgate_steps_total", kind=kind) == steps[kind]
    assert steps["mixed"] == 0 and steps["prefill"] > 0
    assert value(registry, "headgate_steps_total", kind="empty") == 5
    assert value(registry, "headgate_step_seconds_count", kind="decode") == steps["decode"]
    assert value(registry, "headgate_stall_seconds_count") >= 1
    assert value(registry, "headgate_queue", **{"class": "default"}) == 0
    assert value(registry, "headgate_wasted_tokens_total", cause="gone") == 7
    assert value(registry, "headgate_threshold") == 3 and value(registry, "headgate_slots") == 8
    assert value(registry, "headgate_policy", gauge="refill") == 3
    assert value(registry, "headgate_mode", mode="fallback") == 1
    assert value(registry, "headgate_phase", phase="idle") == 1
    assert value(registry, "headgate_requests", state="decoding") == 0
    assert value(registry, "headgate_fallen") == 1
    assert value(registry, "headgate_fallbacks_total", reason="raised") == 1
    labels = {"version": metrics._board._about["version"], **ABOUT}
    assert value(registry, "headgate_info", **labels) == 1
    metrics.renewed("v0", {}, 2.0)
    metrics.show()
    assert value(registry, "headgate_info", **labels) == 0
    assert value(registry, "headgate_mode", mode="fallback") == 0
    assert value(registry, "headgate_fallen") == 0


def test_metrics_by_class_and_tenant():
    """Three classes, one slot: which promises were kept can be counted by hand."""
    registry = CollectorRegistry()
    metrics = Metrics(Settings(), ABOUT, 2_000, registry=registry, background=False)
    kinds = (
        Kind("gold", Slo(1.5, 1.5, weight=10)),
        Kind("free", Slo(1.5, 0.5)),
        Kind("", Slo(background=True)),
    )
    workload = Workload.of(
        [10, 20, 30],
        [3, 3, 3],
        kind=[0, 1, 2],
        kinds=kinds,
        tenant=[1, 2, 0],
        tenants=("", "acme", "\u6771\u4eac"),
    )
    engine = Engine(Line(1.0, 0.0, 0.0, 0.0, 0.0), 2_000, 1000, 64, 1)  # one slot, steps of one second
    Simulator(engine, Mixed(1, 64), workload, (metrics,)).run()
    for _ in range(2):
        metrics.show()

    def promises(kind, promise):
        labels = {"class": kind, "promise": promise}
        name = "headgate_promises_total"
        return [value(registry, name, kept=kept, **labels) for kept in ("true", "false")]

    assert promises("gold", "ttft") == [1, None] and promises("free", "ttft") == [None, 1]
    assert promises("gold", "tbt") == [1, None] and promises("free", "tbt") == [None, 1]
    assert promises("default", "ttft") == promises("default", "tbt") == [None, None]
    assert [value(registry, "headgate_queue", **{"class": kind}) for kind in ("gold", "default")] == [0, 0]
    tokens = {"acme": (10, 3), "\u6771\u4eac": (20, 3), "": (None, None)}
    for tenant, counts in tokens.items():
        for kind, count in zip(("prompt", "output"), counts, strict=True):
            assert value(registry, "headgate_tenant_tokens_total", tenant=tenant, kind=kind) == count


def test_queues_and_evictions_by_class():
    tally, live = ClassTally(), Live(None, Limits(64, 8), 2_000)
    chat, batch = (Entry(live.ledger, n, 0.0, 10, 5, kind) for n, kind in enumerate(("chat", "batch")))
    for entry in (chat, batch):
        tally.arrived(entry, 0.0)
    assert tally.shown()["headgate_queue"] == {("chat",): 1, ("batch",): 1}
    tally.admitted(batch, 0.0)
    tally.evicted(batch, 1.0)
    tally.finished(chat, 2.0, End.ABORTED)
    assert tally.shown()["headgate_queue"] == {("chat",): 0, ("batch",): 1}
    assert tally.shown()["headgate_evictions"] == {("batch",): 1}


def test_a_client_that_hangs_up_in_time_breaks_no_promise():
    tally, live = ClassTally(), Live(None, Limits(64, 8), 2_000)
    for number, (end, how) in enumerate(((0.4, End.ABORTED), (0.6, End.ABORTED), (0.1, End.REFUSED))):
        entry = Entry(live.ledger, number, 0.0, 10, 5, slo=Slo(0.5))
        tally.arrived(entry, 0.0)
        tally.finished(entry, end, how)
    assert tally.shown()["headgate_promises"] == {("default", "ttft", "false"): 2}


def test_two_engines_share_the_metrics():
    registry = CollectorRegistry()
    for engine in (0, 1):
        metrics = Metrics(Settings(), ABOUT, 0, engine, registry, background=False)
        served(metrics)
        metrics.show()
    first, second = (
        registry.get_sample_value("headgate_steps_total", {"engine": str(engine), "kind": "decode"})
        for engine in (0, 1)
    )
    assert first == second > 0


def test_without_prometheus_there_is_one_line_and_the_log(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    times = iter([0.0, 30.0, 61.0, 122.0])
    with caplog.at_level(logging.INFO, "vllm.headgate"):
        metrics = Metrics(Settings(), ABOUT, 2_000, background=False, clock=lambda: next(times))
        assert "no metrics, prometheus_client is not installed" in caplog.text
        caplog.clear()
        served(metrics)
        metrics.show()  # not due yet
        metrics.show()
        metrics.show()  # nothing happened since
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("headgate: eb, mode eb (refill 3, slots 8, refilling ")
    assert f"steps in 61 s: 0 mixed, {metrics.steps['decode']} decode" in line and "longest stall" in line


def test_metrics_that_cannot_be_made_are_told(monkeypatch, caplog):
    class Broken:
        def register(self, collector):
            raise OSError("no such folder")

    with caplog.at_level(logging.WARNING, "vllm.headgate"):
        metrics = Metrics(Settings(), ABOUT, registry=Broken(), background=False)
    assert "no metrics: OSError: no such folder" in caplog.text
    metrics.show()


def test_a_port_of_their_own_or_a_line_that_says_it_is_taken(caplog):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING, "vllm.headgate"):
            Metrics(Settings(metrics_port=port), ABOUT, registry=CollectorRegistry(), background=False)
        assert f"no metrics on port {port}: Address already in use" in caplog.text
    metrics = Metrics(Settings(metrics_port=port), ABOUT, registry=CollectorRegistry())
    served(metrics)
    metrics.show()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert 'headgate_steps_total{engine="0",kind="prefill"}' in answer.read().decode()
    metrics.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()


def test_values_of_the_engines_process_reach_the_servers_metrics(tmp_path):
    core = (
        "from headgate.live.engine.metrics import Metrics\n"
        "from headgate.live.engine.settings import Settings\n"
        "from headgate.core.policy import Steps\n"
        "metrics = Metrics(Settings(), {'policy': 'eb', 'card': 'none', 'model': 'm'}, 100)\n"
        "metrics.stepped(Steps(0.0, [0.02], 4, 40, 0, 0, 50))\n"
    )  # it ends at once: the rest is shown when the process ends
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", core], env=environment, check=True, timeout=600)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    assert value(registry, "headgate_steps_total", kind="decode") == 1
    assert value(registry, "headgate_mode", mode="eb") == 1
    assert value(registry, "headgate_step_seconds_sum", kind="decode") == pytest.approx(0.02)


def test_values_of_the_engines_process_reach_a_front_end_that_was_not_set_up():
    """As vLLM does it: plug-ins in the front end, engines as its children, then /metrics; nothing stays."""
    engine = (
        "import sys\n"
        "from headgate.live.engine.metrics import Metrics\n"
        "from headgate.live.engine.settings import Settings\n"
        "from headgate.core.policy import Steps\n"
        "from headgate.live.vllm.front import install; install()\n"
        "number = int(sys.argv[1])\n"
        "metrics = Metrics(Settings(), {'policy': 'eb', 'card': 'none', 'model': 'm'}, 100, number)\n"
        "metrics.stepped(Steps(0.0, [0.02], 4, 40, 0, 0, 50))\n"
    )
    end = (
        "import os, subprocess, sys\n"
        "from headgate.live.engine.process import FOLDER\n"
        "from headgate.live.vllm.front import install\n"
        "install(); install()\n"
        "for number in '01':\n"
        f"    subprocess.run([sys.executable, '-c', {engine!r}, number], check=True)\n"
        "from prometheus_client import generate_latest\n"
        "print(os.environ[FOLDER]); print(generate_latest().decode())\n"
    )
    environment = {
        n: v for n, v in os.environ.items() if n not in ("PROMETHEUS_MULTIPROC_DIR", process.FOLDER)
    }
    words = {"env": environment, "check": True, "timeout": 600, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", end], **words)
    folder, *lines = done.stdout.splitlines()
    for number in "01":
        assert f'headgate_steps_total{{engine="{number}",kind="decode"}} 1.0' in lines
        assert f'headgate_step_seconds_count{{engine="{number}",kind="decode"}} 1.0' in lines
    assert sum(line.startswith("# TYPE headgate_steps_total ") for line in lines) == 1
    assert not os.path.exists(folder)


def test_an_engine_in_the_front_ends_process_is_shown_once(monkeypatch, tmp_path):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setenv(process.FOLDER, str(tmp_path))
    assert process.leaves_metrics()
    monkeypatch.setattr(process, "_shows", [os.getpid()])
    assert not process.leaves_metrics()


class Odd:
    def __float__(self):
        raise RuntimeError("no number")


ODD_GAUGES = [{"mode": "fast", "refill": 3}, {"x": Odd(), "refill": 3}, None, [1], {3: {}}]


@pytest.mark.parametrize("gauges", ODD_GAUGES)
def test_one_gauge_that_is_no_number_hides_no_other_metric(gauges):
    """Row 7 of the attack: the alert on headgate_fallen must work whatever a policy shows."""
    registry = CollectorRegistry()
    metrics = Metrics(Settings(), ABOUT, 100, registry=registry, background=False)
    metrics.planned(Plan(), 0.0, gauges)
    metrics.show()
    assert value(registry, "headgate_fallen") == 0
    metrics.fell_back("it broke", 1.0)
    metrics.show()
    assert value(registry, "headgate_fallen") == 1
    assert value(registry, "headgate_mode", mode="fallback") == 1
    if isinstance(gauges, dict) and "refill" in gauges:
        assert value(registry, "headgate_threshold") == 3
    assert "mode" in metrics.line(1.0, metrics.all_steps())


def test_the_thread_that_shows_metrics_outlives_a_failure(caplog):
    registry = CollectorRegistry()
    metrics = Metrics(Settings(), ABOUT, 100, registry=registry, background=False)
    shown = threading.Semaphore(0)
    board = metrics._board
    show, fails = board.show, [True, True]

    def sometimes():
        if fails:
            fails.pop()
            raise RuntimeError("dictionary changed size during iteration")
        show()
        shown.release()

    board.show = sometimes
    thread = process.Background(metrics.show, 0.001, "metrics")
    metrics.fell_back("it broke", 1.0)
    assert shown.acquire(timeout=600)
    thread.close()
    assert value(registry, "headgate_fallen") == 1
    assert caplog.text.count("metrics failed and is tried again") == 1


def test_a_metrics_folder_that_cannot_be_written(tmp_path):
    """The engine goes on without metrics and says so in one line."""
    core = (
        "import logging; logging.basicConfig(format='%(message)s')\n"
        "from headgate.live.engine.metrics import Metrics\n"
        "from headgate.live.engine.settings import Settings\n"
        "from headgate.core.policy import Steps\n"
        "metrics = Metrics(Settings(), {'policy': 'eb', 'card': 'none', 'model': 'm'}, 100)\n"
        "metrics.stepped(Steps(0.0, [0.02], 4, 40, 0, 0, 50))\n"
        "metrics.close()\n"
        "print('served')\n"
    )
    (tmp_path / "file").write_text("no folder")
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "file")}
    done = subprocess.run(
        [sys.executable, "-c", core], env=environment, check=True, timeout=600, capture_output=True, text=True
    )
    assert done.stdout == "served\n" and done.stderr.count("headgate: no metrics") == 1
