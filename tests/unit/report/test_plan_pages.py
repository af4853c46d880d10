from __future__ import annotations

import math

from check_html import Reader, read

from as_text import as_text
from headgate.advisor.capacity.plan import plan_capacity
from headgate.advisor.capacity.traffic import parse_levels
from headgate.advisor.fewest_engines import make_ways, plan_engines
from headgate.advisor.flags import plan_flags
from headgate.advisor.set_up import Asked
from headgate.advisor.settings import (
    SearchSettings,
)
from headgate.advisor.situation import situation
from headgate.advisor.threshold import plan_threshold
from headgate.experiment.settings import experiment
from headgate.report.document import Chapter, Drawn, Facts, Grid, Page, Section
from headgate.report.html.page import render
from headgate.report.plans.capacity import capacity_page, engines_page
from headgate.report.plans.flags import flags_page
from headgate.report.plans.threshold import threshold_page
from headgate_papers.page import published_page
from headgate_papers.report import Cell, Count, Report, Row
from headgate_papers.report import Section as Table
from headgate_papers.wait.page import wait_page
from headgate_papers.wait.plan import WaitSettings, plan_wait


def both(page: Page) -> Reader:
    """The page as HTML. Every sentence, fact and number that a terminal shows of it stands there too."""
    found = read(render(page))
    shown = as_text(page)
    assert max(len(line) for line in shown.splitlines()) <= 80 and "…" not in shown
    (chapter,) = page.chapters
    flat = " ".join(shown.split())
    for said in (page.title, page.about, chapter.verdict, *chapter.notes):
        assert said in flat and said in found.text
    for block in (block for section in chapter.sections for block in section.blocks if section.depth < 2):
        for cell in (cell for row in block.rows for cell in row) if isinstance(block, Grid) else ():
            assert " ".join(cell.text.split()[:2]) in flat and cell.text in found.text
        for name, said in block.rows.items() if isinstance(block, Facts) else ():
            assert f"{name} {said}" in flat and said in found.text
        assert not isinstance(block, str) or (block in flat and block in found.text)
    return found


def test_the_threshold_curve_has_its_optimum_at_the_bottom():
    plan = plan_threshold(
        situation(experiment({"prompt": 512.0, "output": 256.0, "clients": 1024, "slots": 512}))
    )
    found = both(threshold_page(plan, ["plan", "threshold"]))
    assert f"θ* = {plan.thresholds.stationary.share:.3f}" in found.text
    curve = found.data[0]["series"][0]
    lowest = min(range(len(curve["y"])), key=curve["y"].__getitem__)
    assert abs(math.log(curve["x"][lowest] / plan.thresholds.stationary.share)) < 0.2


def test_a_capacity_plan_has_a_bar_for_each_policy_and_the_bound():
    words = experiment({"prompt": 100.0, "output": 20.0, "requests": 60})
    asks = Asked(parse_levels(["ttft=1s@p50"]), SearchSettings(seeds=1, precision=0.5))
    plan = plan_capacity(words, ["mixed", "v0"], asks)
    found = both(capacity_page(plan, ["plan", "capacity"]))
    assert "sustained (requests/s)" in found.text and "λ* =" in found.text
    assert [row[0] for row in found.data[0]["rows"]] in (["mixed", "v0"], ["v0", "mixed"])


def test_the_fewest_engines_are_shown_with_every_number_tried():
    words = experiment({"prompt": 200.0, "output": 40.0, "requests": 300, "slots": 32, "rate": 120.0})
    ways, options = make_ways(["round-robin"], ["mixed"], words), SearchSettings(seeds=2)
    plan = plan_engines(words, ways, Asked(parse_levels(["ttft=25ms@p95"]), options))
    page = both(engines_page(plan, ["plan", "capacity"]))
    sizes = plan.found[0].sizes
    assert len(sizes) > 1 and sizes[-1].kept == 2
    assert "2/2" in page.text and "wanted: 95 %" in page.text and "p95 TTFT <= 25 ms, by engines" in page.text
    curve = page.data[0]["series"][0]
    assert curve["x"] == [size.engines for size in sizes] and max(curve["high"]) <= 100.0
    assert f"of fewer than {plan.least} keeps up" in page.text


def test_a_wait_plan_has_its_thresholds_by_type_and_by_segment():
    plan = plan_wait(experiment({"prompt": 200.0, "output": 60.0}), WaitSettings(load=0.8))
    text = both(wait_page(plan, ["plan", "wait"])).text
    assert "WAIT, where output lengths are known by type" in text and "812,144" in text
    assert "Nested WAIT, where they are not known" in text and "--policy nested-wait" in text
    assert f"{plan.nested.thresholds.sizes[-1]:.4g}" in text and "with probability 0.99" in text


def test_a_reproduction_has_tables_and_a_scatter():
    rows = tuple(Row(f"c={n}", (Cell(n, n * 1.1), Cell(2 * n, math.nan))) for n in (1.0, 10.0, 100.0, 1000.0))
    report = Report("x-1", "A <table>", ("set up",), (Table("tok/s", "load", ("v1", "EB"), rows),),
                    (Count("signs", 3, 4),), ("because",))  # fmt: skip
    found = both(published_page(report, ["reproduce", "x-1"], quick=True))
    assert "3 of 4 checked signs" in found.text and "1.10 times the published one" in found.text
    assert "Ours against theirs" in found.text and "do not quote" in found.text and "because" in found.text
    assert "A <table>" in "".join(found.words)


def test_a_reproduction_without_published_numbers_says_so():
    rows = (Row("a", (Cell(math.nan, 1.0),)),)
    page = published_page(Report("x", "t", (), (Table("s", "f", ("c",), rows),), (), ()), [])
    assert "Nothing was published" in both(page).text


def test_flags_have_their_reasons_and_the_command():
    plan = plan_flags(experiment({"prompt": 512.0, "output": 256.0, "tpot": 0.05, "ttft": 0.5}))
    found = both(flags_page(plan, ["plan", "flags"]))
    flags = f"--max-model-len 17408 --max-num-seqs {plan.flags[0].value}"
    assert f"vllm serve Qwen/Qwen3-8B {flags}" in found.text
    assert all(flag.why in found.text for flag in plan.flags) and found.seen["pre"] == 1


def test_figures_are_drawn_for_a_page_only():
    made = []
    section = Section("Drawn", (Drawn(lambda: made.append(1) or ["words of a page"]),))
    chapter = Chapter("one", "The verdict.", (section,))
    assert "Drawn" not in as_text(chapter) and not made
    assert "words of a page" in render(Page("title", "", (chapter,))) and made == [1]
