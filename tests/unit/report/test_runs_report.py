from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from check_html import read
from some_runs import empty_run, long_run, served

from headgate.record.tables import Run
from headgate.report.document import change, number
from headgate.report.html.page import render
from headgate.report.runs.page import runs_page
from headgate.report.runs.scenes import Scene, gather, load_of, scene_of, swept
from headgate.stats.comparison import compare
from headgate.stats.metrics import summarise

EVIL = "<img src=x onerror=alert(1)>&\"'"


def page_of(*runs: Run, names=None) -> str:
    return render(runs_page(gather(list(runs), names), ["report"]))


@pytest.fixture(scope="module")
def compared() -> str:
    return page_of(*(served(policy, requests=300) for policy in ("mixed", "eb", "eb+")))


def test_a_comparison_has_verdict_table_figures_and_origin(compared):
    found = read(compared)
    assert ("p", "class", "verdict") in found.attributes
    assert "more requests than mixed" in found.text
    for title in ("Time to first token (TTFT)", "Time between two tokens (ITL)", "Phases over time"):
        assert title in found.text
    for word in ("requests/s", "TTFT (", "time since the start (s)", "95 % interval", "How it was made"):
        assert word in found.text
    for word in ("linear-h200-qwen3-8b", "headgate simulate --policy mixed", "Seeds"):
        assert word in found.text


def test_every_figure_says_what_to_look_for_and_has_data(compared):
    found = read(compared)
    assert found.seen["figure"] >= 5 == found.seen["figcaption"] - found.seen["figure"] + 5
    assert (
        sum(1 for _, name, value in found.attributes if name == "class" and value == "look")
        == found.seen["figure"]
    )
    assert len(found.data) == found.seen["figure"]
    assert all("series" in each or "timeline" in each or "rows" in each for each in found.data)


def test_numbers_are_those_of_the_terminal(compared):
    own = served("mixed", requests=300)
    mixed = summarise(own)
    text = read(compared).text
    assert number(mixed.request_rate.value) in text
    row = compare({"mixed": [own], "eb": [served("eb", requests=300)]}, "mixed").rows[0]
    assert change(row.others["eb"]) in text


def test_one_run_needs_no_comparison():
    text = read(page_of(served("mixed"))).text
    assert "mixed serves" in text and "requests/s" in text and "One run: mixed" in text


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_hardly_any_request(cut):
    run = long_run(max(cut, 1)) if cut else empty_run()
    found = read(page_of(run))
    assert ("p", "class", "verdict") in found.attributes


def test_an_interrupted_run_says_so():
    run = served("mixed")
    half = run.requests["arrival"] < np.median(run.requests["arrival"]) + 1
    requests = {name: column[half].copy() for name, column in run.requests.items()}
    late = requests["finished"] > np.median(requests["finished"])
    requests["finished"][late], requests["how"][late] = math.nan, -1
    cut = replace(run, requests=requests, meta={**run.meta, "outcome": "interrupted"})
    text = read(page_of(cut)).text
    assert "The run ended early (interrupted)" in text and "figures cover what there is" in text
    both = read(page_of(served("eb"), cut)).text
    assert "No verdict" in both and "not every run came to its end" in both


def test_labels_cannot_become_markup():
    run = served("mixed")
    evil = replace(
        run, meta={**run.meta, "label": EVIL, "card": EVIL, "command": [EVIL], "workload": {"name": EVIL}}
    )
    html = page_of(evil, served("eb"), names=[EVIL, "eb"])
    found = read(html)
    assert "img" not in found.seen and "<img" not in html
    assert EVIL in "".join(found.words)


def test_a_hundred_thousand_requests_stay_small(tmp_path):
    run = long_run(100_000)
    path = tmp_path / "report.html"
    path.write_text(render(runs_page(gather([run]))))
    assert path.stat().st_size < 1_500_000


def test_classes_promises_and_fleets_have_panels():
    kinds = [{"name": "chat", "first_token": 0.05, "between_tokens": 0.02}, {"name": "batch"}]
    run = long_run(400, replicas=4, kinds=kinds, card="gone.json")
    found = read(page_of(run))
    for title in (
        "By class",
        "Decoding by class",
        "The fleet",
        "Slots in use across the fleet",
    ):
        assert title in found.text
    assert "promised: 50 ms (chat)" in found.text and "promised: 20 ms (chat)" in found.text
    assert "Time per output token (TPOT)" not in found.text
    kinds[0]["between_kind"] = "mean"
    found = read(page_of(long_run(400, replicas=4, kinds=kinds, card="gone.json")))
    assert "promised: 20 ms (chat)" in found.text and "Time per output token (TPOT)" in found.text


def test_tenants_have_a_panel_where_the_data_has_them():
    run = long_run(60)
    tenants = replace(run, requests={**run.requests, "tenant": run.requests["id"] % 3})
    assert "By tenant" in read(page_of(tenants)).text


def test_several_loads_are_drawn_against_load_with_the_bound():
    runs = [served(policy, rate=rate) for rate in (4.0, 16.0, 64.0) for policy in ("mixed", "eb")]
    page = runs_page(gather(runs))
    assert len(page.chapters) == 4 and page.chapters[0].title == "From 4 requests/s to 64 requests/s"
    found = read(render(page))
    assert "Requests served against load" in found.text and "bound: " in found.text
    assert (
        "as offered" in found.text
        and "not corrected for multiple comparisons (3)" in page.chapters[0].notes[0]
    )


def test_many_loads_show_the_highest_in_full():
    runs = [served("mixed", 40, rate=float(rate)) for rate in (1, 2, 4, 8, 16, 32)]
    page = runs_page(gather(runs))
    assert len(page.chapters) == 5 and "4 highest" in page.chapters[0].notes[0]


def test_runs_are_gathered_by_what_was_sent():
    runs = [served("mixed"), served("eb"), served("mixed", seed=1), served("mixed", rate=8.0)]
    scenes = gather(runs)
    assert [sorted(scene.runs) for scene in scenes] == [["eb", "mixed"], ["mixed"]]
    assert len(scenes[0].runs["mixed"]) == 2
    again = gather([served("mixed"), served("mixed")])
    assert list(again[0].runs) == ["mixed", "mixed (2)"]
    assert load_of(served("mixed")).text == "48 clients in a closed loop"


def test_a_scene_knows_the_rate_no_policy_exceeds():
    scene = scene_of({"mixed": [served("mixed")]})
    assert isinstance(scene, Scene) and scene.bound is not None
    run = served("mixed")
    assert len(run.requests["id"]) / run.span()[1] < scene.bound.rate
    assert scene_of({"x": [long_run(30)]}).bound is None


def late(run: Run) -> Run:
    return Run({**run.meta, "asynchronous": True}, run.requests, run.steps, run.stays, run.plans)


def test_asynchronous_runs_say_so_and_are_no_seeds_of_others():
    mixture = [served("mixed"), late(served("mixed", seed=1))]
    (scene,) = gather(mixture)
    assert list(scene.runs) == ["mixed", "mixed (2)"]
    assert "asynchronous engine, 32 slots" in page_of(late(served("mixed")))
    assert "asynchronous" not in page_of(served("mixed"))


def test_the_best_of_several_is_called_that():
    several = runs_page(gather([served("mixed"), served("eb"), served("v0")])).chapters[0]
    assert any("not corrected for multiple comparisons (2)" in note for note in several.notes)
    two = runs_page(gather([served("mixed"), served("eb")])).chapters[0]
    assert not any("multiple comparisons" in note for note in two.notes)


def test_of_many_engines_every_role_is_drawn():
    fleet = replace(
        long_run(400, replicas=40), meta={"label": "split", "roles": ["prefill"] * 30 + ["decode"] * 10}
    )
    found = read(page_of(fleet)).text
    assert "engine 0 (prefill)" in found and "engine 30 (decode)" in found and "engine 29" not in found


def test_a_queue_that_is_always_empty_has_an_axis_one_can_read():
    assert "0.000000" not in read(page_of(long_run(50))).text


def routed(router: str, policy: str = "mixed", **meta) -> Run:
    run = served(policy, requests=300)
    return replace(run, meta=run.meta | {"router": router, "router_parameters": {}, "engines": 2} | meta)


def test_what_is_compared_is_said():
    routers = runs_page(gather([routed("split"), routed("round-robin")], ["split", "round-robin"]))
    text = read(render(routers)).text
    assert routers.title == "2 routers compared" and "policies compared" not in text
    assert "No router is seen to serve more" in routers.chapters[0].verdict
    assert "Routers split; round-robin" in text and "Engines 2" in text
    assert "What the engines did" in text and " and 2 engines no policy serves more than" in text
    both = gather([routed("split"), routed("round-robin", "eb")], ["split mixed", "round-robin eb"])
    assert runs_page(both).title == "2 combinations of router and policy compared"
    setups = gather([served("mixed"), routed("split")], ["one", "two"])
    assert runs_page(setups).title == "2 setups compared"


def test_a_word_that_every_load_changes_is_not_what_is_compared():
    def at(policy: str, slots: int) -> Run:
        run = served(policy)
        return replace(run, meta=run.meta | {"engine": {**run.meta["engine"], "running": slots}})

    scenes = [
        swept({name: [at(name, slots)] for name in ("mixed", "eb")}, "slots", slots) for slots in (8, 32)
    ]
    assert runs_page(scenes).title == "2 policies compared"
    assert runs_page([swept({"mixed": [at("mixed", slots)]}, "slots", slots) for slots in (8, 32)]).title == (
        "2 runs of mixed"
    )


def test_runs_behind_different_routers_are_no_seeds_of_each_other():
    (scene,) = gather([routed("split", seed=0), routed("round-robin", seed=1)])
    assert list(scene.runs) == ["mixed", "mixed (round-robin)"]
