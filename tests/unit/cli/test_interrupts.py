"""Ctrl-C: what was done is kept and can be read."""

from __future__ import annotations

import os
import pkgutil
import signal

import pytest

from headgate.cli.output import save
from headgate.core.errors import RunError
from headgate.record.tables import Run

SMALL = ["--requests", 80, "--prompt", 60, "--output", 20, "--clients", 8]


def interrupt_after(monkeypatch, where: str, calls: int) -> None:
    """The nth call of a function, or of a method, is interrupted."""
    place, name = where.rsplit(".", 1)
    owner = pkgutil.resolve_name(place)
    plain, seen = getattr(owner, name), []

    def called(*args, **words):
        seen.append(1)
        if len(seen) == calls:
            raise KeyboardInterrupt
        return plain(*args, **words)

    monkeypatch.setattr(where, called)


def test_simulate_leaves_a_partial_run_that_can_be_reported(headgate, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("headgate.sim.engine.simulator.Simulator.run", _stop_half_way)
        said = headgate("simulate", *SMALL, "--out", "half")
    assert said.code == 130 and "interrupted" in said.err and "half" in said.err
    assert Run.load(tmp_path / "half").meta["outcome"] == "interrupted"
    said = headgate("report", "half")
    assert said.code == 0 and "The run ended early (interrupted)" in " ".join(said.out.split())


def _stop_half_way(self):
    raise KeyboardInterrupt


def test_a_search_for_capacity_says_what_it_knew(headgate, monkeypatch):
    interrupt_after(
        monkeypatch, "headgate.advisor.capacity.trials.simulate", 3
    )  # one looks at an idle engine
    words = [
        "--cache",
        "kept",
        "--slo",
        "ttft=1s@p50",
        "--policy",
        "mixed",
        "--seeds",
        1,
        "--jobs",
        1,
        "--precision",
        0.01,
    ]
    said = headgate("plan", "capacity", *words, "--requests", 80, "--prompt", 60, "--output", 20)
    assert said.code == 130 and "Interrupted with 1 of 1 searches unfinished" in " ".join(said.out.split())
    assert said.err.endswith("what was found is kept in kept: the same command goes on from there\n")


def test_an_interrupted_search_does_not_say_that_no_promise_can_be_kept(headgate, monkeypatch):
    """The idle look, one rate that misses, and the interrupt."""
    interrupt_after(monkeypatch, "headgate.advisor.capacity.trials.simulate", 3)
    words = ["--slo", "ttft=20ms@p99", "--seeds", 1, "--jobs", 1, "--cache", "none", "--requests", 300]
    said = headgate("plan", "capacity", *words, "--prompt", 60, "--output", 20)
    assert said.code == 130 and said.err.endswith("in 30 s\nheadgate: interrupted\n")
    assert "Interrupted before any rate was found that is sustained." in said.out


def test_a_search_that_knew_nothing_is_just_interrupted(headgate, monkeypatch):
    interrupt_after(monkeypatch, "headgate.advisor.capacity.trials.simulate", 1)
    said = headgate("plan", "capacity", "--slo", "ttft=1s@p50", "--seeds", 1, "--jobs", 1, "--requests", 80)
    assert said.code == 130 and said.err == "headgate: interrupted\n"


def test_a_reproduction_judges_the_runs_it_has(headgate, monkeypatch):
    interrupt_after(monkeypatch, "headgate_papers.serving.simulate", 3)
    said = headgate("reproduce", "eb-table13", "--quick")
    assert said.code == 130 and "runs, which stopped" in " ".join(said.out.split())


def test_a_reproduction_with_fleets_stops_when_told(headgate, monkeypatch):
    interrupt_after(monkeypatch, "headgate.sim.fleet.fleet.FleetSimulator.run", 3)
    said = headgate("reproduce", "eb-table19", "--quick")
    assert said.code == 130 and "runs, which stopped" in " ".join(said.out.split())


def test_saving_is_not_cut_short(headgate, tmp_path, monkeypatch):
    assert headgate("simulate", *SMALL, "--out", "whole").code == 0
    run = Run.load(tmp_path / "whole")

    def interrupted(found):
        os.kill(os.getpid(), signal.SIGINT)
        return {}

    monkeypatch.setattr("headgate.stats.vllm_bench.bench_result", interrupted)
    with pytest.raises(RunError, match="interrupted; what there is stands in"):
        save(run, tmp_path / "again", overwrite=False)
    assert Run.load(tmp_path / "again").requests["id"].tolist() == run.requests["id"].tolist()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
