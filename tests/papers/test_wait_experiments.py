"""The WAIT experiments in small worlds: they run, their numbers are right where theory knows them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from as_text import as_text
from headgate_papers import EXPERIMENTS, Options, find, reproduce
from headgate_papers.page import published_page
from headgate_papers.serving import Outcomes, carry_out
from headgate_papers.wait import fig6 as wait_fig6
from headgate_papers.wait import high as wait_high
from headgate_papers.wait import lmsys as wait_lmsys
from headgate_papers.wait import low as wait_low
from headgate_papers.wait import memory as wait_memory
from headgate_papers.wait import nested as wait_nested
from headgate_papers.wait import theorems as wait_theorems
from headgate_papers.wait import tiny as wait_tiny
from headgate_papers.wait.runs import Machine, Mix, WaitJob, draw, serve
from headgate_papers.wait.study import Scene, at_load, claim, jobs_of, load_of, nested, paced, printed

SMALL, SMALL_DEAR = Machine(kv=2000), Machine(kv=2000, per_new=30e-6)
FULL = Options()


@pytest.fixture
def small(monkeypatch):
    """Memory for a fiftieth of the requests, and the paper's rates in proportion: minutes become seconds."""
    for module in (wait_high, wait_nested):
        monkeypatch.setattr(module, "FREE", SMALL)
        monkeypatch.setattr(module, "DEAR", SMALL_DEAR)
    monkeypatch.setattr(wait_high, "SLOTS", Machine(kv=10**6, slots=16))
    monkeypatch.setattr(wait_high, "LOADS", (0.95,))
    monkeypatch.setattr(wait_high, "PRICED", (1.2,))
    monkeypatch.setattr(wait_high, "MIX", wait_high.MIX.times(0.01))
    monkeypatch.setattr(wait_nested, "LOADS", (0.9,))
    monkeypatch.setattr(wait_nested, "PRICED", (1.2,))
    monkeypatch.setattr(wait_nested, "MIX", wait_nested.MIX.times(0.02))
    monkeypatch.setattr(wait_lmsys, "MACHINE", Machine(kv=3000))
    monkeypatch.setattr(wait_lmsys, "LOADS", (0.9,))
    monkeypatch.setattr(wait_lmsys, "MIX", wait_lmsys.MIX.times(0.03))
    monkeypatch.setattr(wait_low, "MIX", wait_low.MIX.times(0.05))
    monkeypatch.setattr(wait_low, "MACHINE", Machine(slots=32))
    monkeypatch.setattr(wait_low, "FACTORS", (0.5, 1.0))
    monkeypatch.setattr(wait_tiny, "SECONDS", 800.0)
    monkeypatch.setattr(wait_theorems, "HORIZONS", (100.0, 400.0))
    monkeypatch.setattr(wait_memory, "RUNS", 80)
    monkeypatch.setattr(wait_memory, "SECONDS", 1.0)


@pytest.mark.parametrize("name", sorted(name for name in EXPERIMENTS if name.startswith("wait-")))
def test_every_experiment_runs_and_its_report_fits(name, small):
    quick = Options(quick=True)
    report = reproduce(name, quick, find(name).jobs(quick))
    assert report.counts and report.remarks and report.setup
    assert all(0 <= count.agree <= count.of for count in report.counts)
    assert all(0 <= ratio < math.inf for section in report.sections for ratio in section.ratios())
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["experiment"] == name
    out = as_text(published_page(report, []))
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


def test_the_papers_rates_by_what_hardware_can_carry():
    """High demand is 92 times too much, 300/s is 1.026, 55/s 0.596, low demand with 512 slots 0.675."""
    assert load_of(wait_high.FREE, wait_high.MIX) == pytest.approx(91.67, rel=1e-3)
    assert load_of(wait_nested.FREE, wait_nested.MIX) == pytest.approx(1.026, rel=1e-3)
    assert load_of(wait_lmsys.MACHINE, wait_lmsys.MIX) == pytest.approx(0.5958, rel=1e-3)
    assert load_of(wait_low.MACHINE, wait_low.MIX) == pytest.approx(0.675, rel=1e-2)
    assert load_of(SMALL, at_load(SMALL, wait_nested.MIX, 0.7)) == pytest.approx(0.7)


def test_thresholds_of_the_runs():
    """WAITf at 1.05 DT*, the printed rule with B = 512, Nested at min(1.05 t_min, 0.9 C/ww)."""
    name, words = paced(wait_high.FREE, wait_high.MIX.times(0.01))
    sizes = [float(part.split("=")[1]) for part in words["thresholds"].split("+")]
    assert (name, sizes) == ("wait", pytest.approx([1.05 * x for x in (1.7374, 1.1582, 0.5791)], rel=1e-3))
    _, words = printed(wait_low.MACHINE, wait_low.MIX)
    sizes = [float(part.split("=")[1]) for part in words["thresholds"].split("+")]
    assert sizes == pytest.approx([23.273, 12.190], abs=1e-3)
    _, words = nested(0.0)(wait_nested.FREE, wait_nested.MIX)
    sizes = [float(part) for part in words["thresholds"].split("/")]
    assert [size / sizes[-1] for size in sizes] == pytest.approx([15 / 8, 14 / 8, 12 / 8, 1])
    assert sizes[-1] == pytest.approx(0.9 * 100_000 / 135_000 * 8)


def test_nobody_is_evicted_while_full_of_known_lengths():
    """Overload, thresholds as large as memory allows: WAIT evicts nobody, mixed batching many."""
    mix = at_load(SMALL, wait_high.MIX, 1.3)
    wait, mixed = jobs_of(
        [Scene("x", SMALL, mix, 30.0)], {"paced": paced, "mixed": lambda *_: ("mixed", {})}, FULL
    )
    assert serve(wait, 0).evictions == 0
    assert serve(mixed, 0).evictions > 10


def test_memory_exceeds_the_bound_no_more_often_than_promised(monkeypatch):
    """(12) for δ = 0.5, 0.1 and 0.01, over runs of one second each."""
    monkeypatch.setattr(wait_memory, "SECONDS", 1.0)
    jobs = wait_memory.jobs(FULL)[:40]
    held = wait_memory.peaks(carry_out(wait_memory.run, jobs, 0))
    assert len(set(held)) > 10  # they are different runs
    for miss, (bound, share) in wait_memory._shares(held).items():
        assert share <= miss
        assert bound > 378
    # The bound is not idle: full segments alone, M^π = 378, are exceeded.
    assert max(held) > 378


def test_figure_6():
    found = carry_out(wait_fig6.run, wait_fig6.jobs(FULL), 0)
    (watch,) = found.every("figure 6")
    assert [look.batch for look in watch.looks[:3]] == [(1, 2, 3), (4, 5, 6), (3, 5, 6, 7, 8, 9)]
    assert [look.held for look in watch.looks[:3]] == [6, 8, 15]
    report = wait_fig6.judge(found, FULL)
    assert (report.counts[0].agree, report.counts[0].of) == (2, 3)


def test_a_claim_counts_both_baselines_and_both_directions():
    scene = Scene("s", SMALL, wait_high.MIX)
    found = Outcomes()
    base = serve(WaitJob("b", SMALL, Mix(((5.0, 10, 4),)), 4.0, "mixed", {}), 0)
    found.add(("s", "w"), replace(base, decodes=110.0, latency=2.0))
    found.add(("s", "v0"), replace(base, decodes=100.0, latency=3.0))
    found.add(("s", "mixed"), replace(base, decodes=109.5, latency=1.0))
    more = claim(found, [scene], ("w",), "decodes", "more")
    sooner = claim(found, [scene], ("w",), "latency", "sooner")
    assert (more.agree, more.of) == (1, 2)
    assert (sooner.agree, sooner.of) == (1, 2)


def test_exponents_of_the_theorems():
    """A strict condition loses 1/T and keeps latency, also where rates vary and lengths share a segment."""
    options = Options(quick=True)
    report = reproduce("wait-theorems", options, find("wait-theorems").jobs(options))
    rates = {row.setting: [cell.ours for cell in row.cells] for row in report.sections[0].rows}
    for name in ("WAIT, n > λΔT", "Nested WAIT", "Nested, rates vary", "Nested, 1 segment"):
        assert rates[name] == pytest.approx([-1, 0], abs=0.15)
    assert rates["WAIT, n = λΔT"][0] > rates["WAIT, n > λΔT"][0] + 0.1
    assert rates["WAIT, n = λΔT"][1] > 0.05
    assert report.counts[-1].agree == report.counts[-1].of == 2


def test_rates_that_vary_bring_as_many_requests():
    steady = draw(Mix(((20.0, 10, 4),)), 1000.0, 0)
    swaying = wait_theorems._swaying(steady, 1000.0, 0.05)
    assert len(swaying) == len(steady) and (swaying.arrival + swaying.abort == 1000.0).all()
    rising = swaying.arrival % 100 < 50  # the half of the period that brings more: 1 + 2 x 0.05 / pi
    assert rising.mean() - (steady.arrival % 100 < 50).mean() == pytest.approx(0.05 / math.pi, abs=0.004)
