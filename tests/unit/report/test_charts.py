from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from check_html import Reader

from headgate.report.charts import (
    LOG,
    TAIL,
    Axis,
    Bar,
    Bars,
    Chart,
    Mark,
    Scale,
    Series,
    draw_marks,
    labels,
    nice,
    style_of,
)
from headgate.report.html.page import embedded, tag
from headgate.report.runs.timeline import gauge_blocks


def test_markup_escapes_text_and_attributes():
    made = tag("p", "<script>alert(1)</script>", tag("b", "x"), title='"><i>')
    assert made == '<p title="&quot;&gt;&lt;i&gt;">&lt;script&gt;alert(1)&lt;/script&gt;<b>x</b></p>'


def test_embedded_json_cannot_end_its_script():
    assert "</script>" not in embedded({"name": "</script><script>alert(1)//", "and": "a&b"})


@pytest.mark.parametrize(
    ("low", "high", "kind", "expected"),
    [
        (0.0, 10.0, "linear", ["0", "2", "4", "6", "8", "10"]),
        (0.0, 0.01, "linear", ["0", "0.002", "0.004", "0.006", "0.008", "0.01"]),
        (0.0, 40_000.0, "linear", ["0", "10k", "20k", "30k", "40k"]),
        (1.0, 1000.0, LOG, ["1", "3", "10", "30", "100", "300", "1,000"]),
        (0.01, 0.999, TAIL, ["1 %", "10 %", "50 %", "90 %", "99 %", "99.9 %"]),
    ],
)
def test_ticks_are_round_numbers(low, high, kind, expected):
    assert [label for _, label in Scale(low, high, 0, 100, kind).ticks(7)] == expected


def test_scales_map_ends_to_pixels_and_keep_what_is_outside_on_the_edge():
    for kind in ("linear", LOG):
        scale = Scale(1.0, 100.0, 50.0, 250.0, kind)
        assert scale([1.0, 100.0, 0.5, 1000.0]).tolist() == [50.0, 250.0, 50.0, 250.0]
    assert Scale(1.0, 100.0, 0.0, 100.0, LOG)(10.0) == pytest.approx(50.0)
    assert Scale(0.1, 0.9, 0.0, 100.0, TAIL)(0.5) == pytest.approx(50.0)


def test_ticks_of_nothing_and_of_one_value():
    assert nice(3.0, 3.0, 5) == [3.0]
    assert labels([]) == [] and labels([0.25]) == ["0.25"]


def test_a_chart_has_units_marks_and_its_data():
    x, y = np.array([1.0, 2.0, np.nan, 4.0]), np.array([10.0, 20.0, 15.0, np.nan])
    chart = Chart(
        Axis("load", "requests/s"),
        Axis("TTFT", "ms", LOG),
        [Series("a<b", x, y)],
        [Mark("promised", 12.0, "y")],
    )
    figure = chart.figure("A title", "What to look for.")
    drawn = Reader(figure.drawing)
    assert (
        "load (requests/s)" in drawn.text
        and "TTFT (ms), log scale" in drawn.text
        and "promised" in drawn.text
    )
    assert "nan" not in figure.drawing and figure.legend == (("a<b", "c0 d0"),)
    assert figure.data["series"][0]["y"] == [10.0, 20.0, 15.0, None]


def test_tick_labels_never_touch():
    for high in (0.001, 7.0, 99_999.0, 3e7):
        x = np.linspace(0, high, 20)
        drawn = Reader(Chart(Axis("x", "s"), Axis("y", "s"), [Series("a", x, x)]).draw("t"))
        ticks = [(float(drawn.attributes[place + 1][2]), None) for place, each in enumerate(drawn.attributes)
                 if each == ("text", "class", "tick")]  # fmt: skip
        assert ticks
        across = sorted({at for at, _ in ticks if at > 62})
        assert all(later - earlier > 20 for earlier, later in pairwise(across))


def test_no_two_of_many_runs_look_alike():
    assert len({style_of(place) for place in range(32)}) == 32


def test_lines_with_the_same_values_are_drawn_side_by_side():
    x = np.linspace(1, 10, 10)
    names = ("first", "other", *"abcdef")
    series = [
        Series(name, x, x if name != "other" else x[::-1], place, "linked")
        for place, name in enumerate(names)
    ]
    figure = Chart(Axis("x"), Axis("y"), series).figure("t", "look")
    starts = dict(re.findall(r'data-series="(\w+)"><path class="[^"]*" d="M([\d.]+ [\d.]+)', figure.drawing))
    assert len(set(starts.values())) == len(names) and "side by side" in figure.note
    left, top = (float(place) for place in starts["first"].split())
    last = [float(place) for place in starts["f"].split()]
    assert last == pytest.approx([left + 6, top + 6], abs=0.11)  # never far from the truth
    assert figure.data["series"][2]["y"] == figure.data["series"][0]["y"]
    alone = Chart(Axis("x"), Axis("y"), series[:2]).figure("t", "look")
    assert alone.note == "" and starts["first"] in alone.drawing and starts["other"] in alone.drawing
    empty = [Series(name, np.empty(0), np.empty(0), 0) for name in "ab"]
    assert Chart(Axis("x"), Axis("y"), empty).figure("t", "look").note == ""


def test_lines_with_gaps_lie_above_lines_without():
    x = np.linspace(1, 10, 10)
    series = [Series(str(place), x, x * place, place) for place in range(5)]
    drawn = Chart(Axis("x"), Axis("y"), series).draw("t")
    assert re.findall(r'data-series="(\d)"', drawn) == ["0", "4", "1", "3", "2"]


def test_colours_of_steps_are_not_those_of_runs():
    """In the light and in the dark, each kind of step is far in hue or lightness from every run's colour."""
    sheet = files("headgate.report.html").joinpath("style.css").read_text(encoding="utf-8")
    blocks = [part for part in sheet.split("color-scheme:") if "--prefill" in part]
    assert len(blocks) == 3
    for block in blocks:
        named = dict(re.findall(r"--(c\d|prefill|decode|mixed): #([0-9a-f]{6})", block))
        colours = {
            name: np.array([int(code[at : at + 2], 16) for at in (0, 2, 4)]) for name, code in named.items()
        }
        assert len(colours) == 11
        for one, other in combinations(colours, 2):
            assert np.linalg.norm(colours[one] - colours[other]) > 60, (one, other)


def test_bars_have_intervals_and_numbers():
    bars = Bars("sustained", "requests/s", [Bar("one", "c0", 4.0, 3.5, 4.5)], Mark("λ*", 5.0))
    figure = bars.figure("Rates", "Longer is more.")
    drawn = Reader(figure.drawing)
    assert "sustained (requests/s)" in drawn.text and "λ*" in drawn.text and "4.000" in drawn.text
    assert figure.data["rows"] == [["one", 4.0, 3.5, 4.5]]


def test_bars_of_nothing_are_drawn():
    assert "<svg" in Bars("x", "s", [Bar("none", "c0", 0.0)], Mark("λ*", 0.0)).draw("t")


def test_names_of_marks_keep_out_of_each_others_way():
    x, y = Scale(0.0, 100.0, 0.0, 400.0), Scale(0.0, 10.0, 200.0, 0.0)
    left, right = draw_marks([Mark("one", 49.0), Mark("two", 51.0)], x, y)
    assert 'text-anchor="end"' in left and 'text-anchor="start"' in right
    (alone,) = draw_marks([Mark("one", 80.0)], x, y)
    assert 'text-anchor="end"' in alone and 'y="11"' in alone
    crossed, _ = draw_marks([Mark("one", 80.0), Mark("level", 9.5, "y")], x, y)
    assert 'y="24"' in crossed  # below the level line, which runs at 10


def test_things_that_cannot_be_cut_have_whole_ticks():
    assert [label for _, label in Scale(5.0, 6.0, 0.0, 400.0, whole=True).ticks(7)] == ["5", "6"]


def test_a_mode_that_never_changes_is_told_in_words():
    def run(*modes: float) -> SimpleNamespace:
        return SimpleNamespace(plans={"time": np.arange(len(modes)), "gauge.exclusive": np.array(modes)})

    said = gauge_blocks({"a": run(0, 0), "b": run(1, 1), "c": run(0, 1), "d": SimpleNamespace(plans={})})
    assert said[:2] == [
        "a ran mixed batches all the time: the mode never changed.",
        "b ran exclusive batches all the time: the mode never changed.",
    ]
    assert [figure.title for figure in said[2:]] == ["Mode"]
