"""The panel of promises, the answer in bold, the bound of the same window as the rates."""

from __future__ import annotations

import headgate
from headgate.report.html.page import render
from headgate.report.runs.grids import promise_panel
from headgate.report.runs.page import runs_page
from headgate.report.runs.scenes import scene_of
from headgate.stats.measured import Measured

ENGINE = headgate.card_engine("cal-h200-qwen3-8b", slots=16)
LAWS = {"prompt": headgate.length_law("fixed", 300), "output": headgate.length_law("fixed", 20)}


def run(rate: float, *promise, requests: int = 200):
    from headgate.core.request import Slo
    from headgate.workloads.arrivals import arrival_process
    from headgate.workloads.synthetic import Share, generate
    from headgate.workloads.workload import Kind

    share = Share(1.0, Kind("chat", Slo(*promise or (0.2, 0.05))), LAWS["prompt"], LAWS["output"])
    offered = generate(requests, seed=0, arrivals=arrival_process("poisson", rate), classes=[share])
    made = headgate.simulate(ENGINE, "mixed", offered)
    made.meta.update({"card": "cal-h200-qwen3-8b", "engine": ENGINE.limits, "asynchronous": True})
    return made


def test_kept_and_broken_promises_are_told_apart():
    light, heavy = Measured(run(5.0)), Measured(run(200.0))
    (grid,) = promise_panel({"light": light, "heavy": heavy})
    rows = [[cell.text for cell in row] for row in grid.rows]
    assert [row[0] for row in rows] == ["light", "heavy"]
    assert rows[0][1:5] == ["chat", "yes", "100.0 %", "TTFT ≤ 200 ms, gaps ≤ 50 ms"]
    assert rows[1][2] == "no" and grid.rows[1][2].tone.endswith("bad")


def test_a_mean_is_kept_where_a_gap_is_not():
    gap, mean = (Measured(run(20.0, None, 0.01, kind)) for kind in ("gap", "mean"))
    (grid,) = promise_panel({"gap": gap, "mean": mean})
    rows = [[cell.text for cell in row] for row in grid.rows]
    assert [row[4] for row in rows] == ["gaps ≤ 10 ms", "TPOT ≤ 10 ms"]
    assert [row[2] for row in rows] == ["no", "yes"] and rows[1][6] == "100.0 %" != rows[0][6]


def test_without_a_promise_there_is_no_panel():
    assert list(promise_panel({"x": Measured(run(5.0, None, None))})) == []


def test_the_answer_is_one_bold_sentence_and_the_setup_is_in_sight():
    page = render(runs_page([scene_of({"mixed": [run(5.0)]})]))
    bold = page.partition('<p class="verdict"><strong>')[2].partition("</strong>")[0]
    assert bold.startswith("mixed serves ") and bold.endswith(".") and bold.count(". ") == 0
    assert page.index('<p class="verdict">') < page.index("<table>")
    for part in ("asynchronous engine", "16 slots", "8,192 tokens a step", "17,408 tokens a request at most"):
        assert part in page.partition('<p class="setup">')[2].partition("</p>")[0]
    assert "<h3>Promises</h3>" in page


def test_the_bound_is_of_the_window_that_rates_are_measured_in():
    """Heavy requests before and after the window do not lower the bound that its rates are compared with."""
    prompts = [4000] * 30 + [200] * 240 + [4000] * 30
    offered = headgate.Workload.of(prompts, [20] * 300, arrival=[0.1 * place for place in range(300)])
    found = headgate.simulate(ENGINE, "mixed", offered)
    found.meta.update({"card": "cal-h200-qwen3-8b", "engine": ENGINE.limits})
    scene = scene_of({"mixed": [found]})
    light = headgate.Workload.of([200] * 300, [20] * 300, arrival=[0.1 * place for place in range(300)])
    alone = headgate.simulate(ENGINE, "mixed", light)
    alone.meta.update({"card": "cal-h200-qwen3-8b", "engine": ENGINE.limits})
    only = scene_of({"mixed": [alone]})
    assert scene.bound is not None and only.bound is not None
    assert abs(scene.bound.rate / only.bound.rate - 1) < 0.1
