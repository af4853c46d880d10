"""A policy that misbehaves stops the run with a RunError that names it; what there is is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from headgate import Mixed, card_engine, generate, simulate
from headgate.core.errors import InputError, RunError
from headgate.core.plan import ALL, NONE, Plan, Until
from headgate.core.policy import BatchPolicy, Observer
from headgate.methods.names import BATCH
from headgate.record.tables import Run
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.arrivals import Poisson
from headgate.workloads.lengths import Uniform

ENGINE = card_engine("linear-h200-qwen3-8b", slots=8, budget=512)
LOADS = {"closed": {"clients": 16}, "open": {"arrivals": Poisson(50.0)}, "at once": {}}


def requests(load="closed"):
    return generate(40, seed=0, prompt=Uniform(50), output=Uniform(20), **LOADS[load])


def boom(*args):
    raise ValueError("boom\nin two lines")


def policy(**methods):
    return type("Mine", (Mixed,), methods)(8, 512)


def changed(**fields):
    return policy(plan=lambda self, view: Mixed.plan(self, view)._replace(**fields))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "where", ["plan", "arrived", "admitted", "prefilled", "finished", "stepped", "planned", "gauges"]
)
def test_exceptions_of_a_policy(where, load):
    with pytest.raises(RunError, match=r"policy Mine broke at .* s: ValueError: boom in two lines") as error:
        simulate(ENGINE, policy(**{where: boom}), requests(load))
    assert isinstance(error.value.__cause__, ValueError) and "\n" not in str(error.value)
    assert "test_policy_faults.py" in str(error.value)


@pytest.mark.parametrize("answer", [None, "hello", 3, (), Plan])
def test_answers_that_are_no_plan(answer):
    with pytest.raises(RunError, match="policy Mine"):
        simulate(ENGINE, policy(plan=lambda self, view: answer), requests())


@pytest.mark.parametrize(
    "fields",
    [
        {"budget": float("nan")},
        {"budget": -1},
        {"budget": "x"},
        {"chunk": 0},
        {"chunk": 0.5},
        {"prefill": (999,)},
        {"prefill": ("x",)},
        {"prefill": (0, 0)},
        {"prefill": None},
        {"decode": None},
        {"decode": frozenset({999})},
        {"evict": (999,)},
        {"until": None},
        {"until": Until(steps=0)},
        {"until": Until(time=-1.0)},
    ],
    ids=str,
)
def test_plans_of_nonsense(fields):
    with pytest.raises(RunError, match="policy Mine"):
        simulate(ENGINE, changed(**fields), requests())


def test_numbers_of_any_type_name_requests():
    class Numpy(Mixed):
        def plan(self, view):
            plan = super().plan(view)
            everybody = frozenset(np.int64(id) for id in view.decoding)
            return plan._replace(prefill=tuple(np.int64(id) for id in plan.prefill), decode=everybody)

    class Floats(Mixed):
        def plan(self, view):
            plan = super().plan(view)
            return plan._replace(prefill=tuple(float(id) for id in plan.prefill))

    for kind in (Numpy, Floats):
        assert simulate(ENGINE, kind(8, 512), requests()).completed().all()


@pytest.mark.parametrize("load", LOADS)
def test_a_policy_that_runs_nothing(load):
    for plan in (Plan(NONE), Plan(NONE, until=Until(steps=5)), Plan(ALL)):
        with pytest.raises(RunError, match="policy Mine runs nothing"):
            simulate(ENGINE, policy(plan=lambda self, view, plan=plan: plan), requests(load))


def test_a_policy_that_never_stops_waiting():
    class Later(BatchPolicy):
        def plan(self, view):
            return Plan(NONE, until=Until(time=view.now + 1e-9))

    with pytest.raises(RunError, match="policy Later runs nothing"):
        simulate(ENGINE, Later(), requests())


def test_a_policy_that_lets_time_pass():
    class Later(BatchPolicy):
        def plan(self, view):
            return Plan(NONE, until=Until(time=view.now + 1))

    with pytest.raises(RunError, match=r"policy Later starves .* request 0 \(waiting\)"):
        simulate(ENGINE, Later(), requests())


def test_a_policy_that_passes_somebody_over():
    class Unfair(Mixed):
        def plan(self, view):
            others = [id for id in view.waiting if id][: 8 - len(view.decoding) - len(view.prefilling)]
            return Plan(ALL, (*view.prefilling, *others))

    many = generate(4000, seed=0, prompt=Uniform(50), output=Uniform(20), clients=16)
    with pytest.raises(RunError, match=r"policy Unfair starves .* request 0 \(waiting\)"):
        simulate(ENGINE, Unfair(8, 512), many, watchdog=5.0)


def test_a_policy_that_changes_the_view():
    class Steals(Mixed):
        def plan(self, view):
            if len(view.waiting) > 3:
                view.waiting.popitem()
            return super().plan(view)

    class Clears(Mixed):
        def plan(self, view):
            view.decoding.clear()
            return super().plan(view)

    for kind in (Steals, Clears):
        with pytest.raises(RunError, match=f"policy {kind.__name__}"):
            simulate(ENGINE, kind(8, 512), requests())


def test_an_observer_that_breaks_is_told_with_its_place():
    class Bad(Observer):
        def finished(self, request, now, how):
            boom()

    with pytest.raises(RunError, match=r"boom .*test_policy_faults.py"):
        simulate(ENGINE, Mixed(8, 512), requests(), observers=(Bad(),))


@pytest.mark.parametrize("watchdog", [0.0, -1.0, float("nan")])
def test_watchdogs_without_a_time(watchdog):
    with pytest.raises(InputError, match="give a time above 0"):
        simulate(ENGINE, Mixed(8, 512), requests(), watchdog=watchdog)


@pytest.mark.parametrize("slots", [0, -1, 10**6, 1.5, "x"])
def test_engines_that_cannot_be(slots):
    with pytest.raises(InputError, match="slots"):
        card_engine("linear-h200-qwen3-8b", slots=slots)


def test_patience_and_hanging_up_at_the_same_moment(headgate):
    both = ["--patience", "1s", "--abort", "1s"]
    assert headgate("simulate", "--requests", 60, "--clients", 60, "--slots", 2, *both).code == 0


def test_a_failed_run_is_kept(headgate, tmp_path, monkeypatch):
    def plan(self, view):
        return boom() if view.now > 2 else Mixed.plan(self, view)

    monkeypatch.setitem(BATCH, "mine", type("Mine", (Mixed,), {"plan": plan}))
    for command in (["simulate"], ["compare", "--policy", "mixed"]):
        said = headgate(*command, "--policy", "mine", "--requests", 300, "--out", command[0])
        assert said.code == 1 and "policy Mine broke" in said.err and said.err.count("\n") == 1
    for folder in ("simulate", "compare/mine"):
        run = Run.load(tmp_path / folder)
        assert run.meta["outcome"].startswith("failed: policy Mine broke") and not run.completed().all()


def test_an_interrupted_run_is_kept(headgate, tmp_path, monkeypatch):
    serve = Simulator._serve

    def interrupted(self):
        self._progress = lambda done: done >= 512 and signal.raise_signal(signal.SIGINT)
        serve(self)

    monkeypatch.setattr(Simulator, "_serve", interrupted)
    said = headgate("simulate", "--requests", 2000, "--out", "r", "--prompt", 50, "--output", 20)
    assert said.code in (1, 130) and "(interrupted); its results so far are in r" in said.err
    run = Run.load(tmp_path / "r")
    assert run.meta["outcome"] == "interrupted" and 0 < run.completed().sum() < 2000


LONG = 600  # seconds: only what hangs takes so long, on whatever machine


def start(*args, **options):
    command = [sys.executable, "-c", "from headgate.cli import main; main()", *map(str, args)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


UNDER_WAY = """
from pathlib import Path
from headgate import Mixed

class Mine(Mixed):
    asked = 0

    def plan(self, view):
        self.asked += 1
        if self.asked == 50:
            Path("under way").touch()
        return super().plan(view)
"""


def test_ctrl_c_in_a_process_of_its_own(tmp_path):
    """In the middle of a run, however fast or slow the machine: the policy says when that is."""
    (tmp_path / "mine.py").write_text(UNDER_WAY)
    long = ["simulate", "--requests", 300_000, "--clients", 512, "--slots", 512, "--policy", "mine.py:Mine"]
    process = start(*long, "--output", 1000, "--out", "r", cwd=tmp_path, stdout=subprocess.DEVNULL)
    while not (tmp_path / "under way").exists() and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.5)  # out of the call that wrote the file
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=LONG)[1].decode()
    assert process.returncode in (1, 130) and said.count("\n") == 1 and "Traceback" not in said, said
    run = Run.load(tmp_path / "r")
    assert run.meta["outcome"] == "interrupted" and len(run.steps["start"]) > 0


def test_streams_that_are_full_closed_or_narrow_minded(tmp_path):
    small = ["simulate", "--requests", 20]
    with open("/dev/full", "w") as full:
        process = start(*small, cwd=tmp_path, stdout=full)
    said = process.communicate(timeout=LONG)[1].decode()
    assert process.returncode == 1 and said.count("\n") == 1 and "No space left on device" in said
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    process = start(*small, cwd=tmp_path, stdout=subprocess.PIPE, env=ascii_only)
    out, said = process.communicate(timeout=LONG)
    assert process.returncode == 0 and said == b"" and out.isascii()
    process = start(*small, cwd=tmp_path, preexec_fn=lambda: (os.close(0), os.close(1)))
    assert process.communicate(timeout=LONG)[1] == b"" and process.returncode == 0
