"""What one command works out, it works out once: counted, not timed."""

from __future__ import annotations

from collections import Counter

import pytest

from headgate.stats.gaps import Gaps

LOAD = ("--requests", 60, "--prompt", 64, "--output", 16, "--clients", 16, "--slots", 8)


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often each step of the work is done, wherever it is called from."""
    found: Counter[str] = Counter()

    def count(target: str, name: str) -> None:
        module, _, attribute = target.rpartition(".")
        original = getattr(__import__(module, fromlist=[attribute]), attribute)

        def counted(*args, **more):
            found[name] += 1
            return original(*args, **more)

        monkeypatch.setattr(target, counted)

    count("headgate.stats.metrics.compute_metrics", "summaries")
    count("headgate.stats.measured.choose", "windows")
    count("headgate.report.runs.scenes.compare", "comparisons")
    count("headgate.experiment.run.make_policy", "policies")
    count("headgate.stats.flow.judge", "trends")
    init = Gaps.__init__

    def built(self, run):
        found["gaps"] += 1
        init(self, run)

    monkeypatch.setattr(Gaps, "__init__", built)
    return found


def test_one_comparison_of_two_policies(headgate, calls):
    """Terminal, JSON, bench.json and the HTML report are made from the same figures."""
    words = ("--policy", "mixed", "--policy", "eb:refill=4", *LOAD)
    assert headgate("compare", *words, "--out", "c", "--json", "c.json").code == 0
    twice = dict.fromkeys(("summaries", "gaps", "windows", "policies", "trends"), 2)
    assert calls == {**twice, "comparisons": 1}


def test_one_comparison_over_seeds_and_routers(headgate, calls):
    words = ("--engines", 2, "--router", "round-robin", "--router", "random", "--seeds", 2, *LOAD[:6])
    assert headgate("compare", *words, "--rate", 40, "--out", "c", "--json", "c.json").code == 0
    assert calls["summaries"] == calls["gaps"] == calls["windows"] == calls["trends"] == 4
    assert calls["comparisons"] == 1 and calls["policies"] == 8  # one for each engine


def test_one_run(headgate, calls):
    assert headgate("simulate", *LOAD, "--out", "s", "--json", "s.json", "--report", "s.html").code == 0
    assert calls == dict.fromkeys(("summaries", "gaps", "windows", "policies", "trends"), 1)


def test_a_sweep_summarises_each_run_once(headgate, calls):
    words = ("--policy", "mixed", "--policy", "v0", "--over", "clients=4,16", *LOAD[:6], "--jobs", 1)
    assert headgate("sweep", *words, "--out", "grid", "--json", "g.json").code == 0
    assert calls["summaries"] == 4 and calls["windows"] == 4 and calls["comparisons"] == 2
