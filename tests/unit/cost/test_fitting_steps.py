"""Timed steps: checked on the way in, kept on disk, cut where their times are their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.cost.fit.steps import (
    COLUMNS,
    DECODE,
    LONGEST_PIECE,
    MIXED,
    NOTHING,
    PREFILL,
    TOGETHER,
    StepTable,
    concat,
    cut,
    single,
)

PLAIN = {
    "seconds": [0.01, 0.02, 0.03, 0.01],
    "decodes": [4, 0, 4, 4],
    "context": [40, 0, 44, 48],
    "prefill": [0, 100, 50, 0],
}


def many(count: int, **columns: object) -> dict[str, object]:
    rows = {"seconds": np.full(count, 0.01), "decodes": np.arange(1, count + 1), "prefill": np.zeros(count)}
    return {**rows, "context": 10 * np.arange(1, count + 1), **columns}


def test_what_is_not_given_is_filled_in() -> None:
    table = StepTable.from_columns(PLAIN)
    assert table.kind.tolist() == [DECODE, PREFILL, MIXED, DECODE]
    assert table.before.tolist() == [NOTHING, DECODE, PREFILL, MIXED]
    assert table.busy.all()
    assert table.behind.tolist() == [0.0] * 4
    assert np.isnan(table.prompts).tolist() == [False, True, True, False]  # none where there are no prompts
    assert np.isnan(table.attention).tolist() == [False, True, True, False]
    assert table.labels == ("all",)
    assert table.dropped == 0


def test_nothing_stands_before_the_first_step_of_a_part() -> None:
    table = StepTable.from_columns({**PLAIN, "part": [0, 0, 1, 1]}, ["a", "b"])
    assert table.before.tolist() == [NOTHING, DECODE, NOTHING, MIXED]
    assert [table.labels[index] for index in table.part] == ["a", "a", "b", "b"]


def test_clock_jumps_and_empty_steps_are_dropped_and_counted() -> None:
    seconds = [0.01, -3.0, 7200.0, np.nan, 0.0, 0.02]
    columns = many(6, seconds=seconds, decodes=[1, 2, 3, 4, 5, 0])
    table = StepTable.from_columns(columns)
    assert table.decodes.tolist() == [1.0]
    assert table.dropped == 5


def test_disk(tmp_path: Path) -> None:
    path = tmp_path / "steps.npz"
    table = StepTable.from_columns(
        {**PLAIN, "part": [0, 1, 1, 0], "seconds": [0.01, 0.02, -1, 0.04]}, ["a", "b"]
    )
    table.save(path)
    again = StepTable.load(path)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(again, name), getattr(table, name), name)
    assert (again.labels, again.dropped) == (("a", "b"), 1)


def test_together_parts_stay_apart() -> None:
    one = StepTable.from_columns({**PLAIN, "part": [0, 0, 1, 1]}, ["a", "b"])
    both = concat([one, one])
    assert both.labels == ("a", "b", "a", "b")
    assert both.part.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(both) == 8


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"seconds": [1.0]}, "have no column 'decodes'; known: seconds, decodes"),
        ({**PLAIN, "prefill": [1, 2]}, "column 'prefill' of timed steps has 2 rows, seconds 4"),
        (
            {**PLAIN, "decodes": [1, -1, 1, 1]},
            "row 1 of the timed steps: decodes is -1.0; must be zero or more",
        ),
        ({**PLAIN, "context": [1, 2, np.nan, 1]}, "row 2 of the timed steps: context is nan"),
        ({**PLAIN, "decodes": ["a", "b", "c", "d"]}, "something that is not a number; fix the file"),
        ({**PLAIN, "part": [0, 0, 0, 1]}, "'part' of timed steps must index the 1 labels"),
    ],
)
def test_bad_columns(columns: dict[str, object], says: str) -> None:
    with pytest.raises(InputError) as caught:
        StepTable.from_columns(columns)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (many(12), "12 timed steps (0 dropped for their times); a fit needs at least 30, measure longer"),
        (many(12, seconds=[-1.0] * 12), "0 timed steps (12 dropped for their times)"),
        (
            many(40, decodes=np.full(40, 7), context=np.full(40, 70)),
            "all 40 timed steps have one shape (7 decodes, 0 prompt tokens); measure other batch sizes",
        ),
        (many(90, seconds=[0.01] * 40 + [-1.0] * 50), "50 steps of 90 have no valid time; fix the clock"),
    ],
)
def test_too_little_to_fit(columns: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match="^" + says.replace("(", r"\(").replace(")", r"\)")):
        StepTable.from_columns(columns).checked()  # type: ignore[arg-type]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        StepTable.load(tmp_path / "nowhere.npz")
    text = tmp_path / "text.npz"
    text.write_text("not numpy")
    with pytest.raises(InputError, match=r"not an .npz with the columns seconds, decodes"):
        StepTable.load(text)
    other = tmp_path / "other.npz"
    np.savez(other, a=np.ones(3))
    with pytest.raises(InputError, match=r"not an .npz with the columns seconds, decodes"):
        StepTable.load(other)
    with pytest.raises(InputError, match="no timed steps at all"):
        concat([])


def kinds(text: str, parts: str | None = None) -> StepTable:
    """A table from a word: d decodes, p prompts, m both."""
    columns = {
        "seconds": np.arange(1, len(text) + 1) / 1000,
        "decodes": [0 if letter == "p" else 8 for letter in text],
        "context": [0 if letter == "p" else 80 for letter in text],
        "prefill": [0 if letter == "d" else 100 for letter in text],
        "part": [int(letter) for letter in parts or "0" * len(text)],
    }
    return StepTable.from_columns(columns, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("steps", "parts", "starts", "owners"),
    [
        ("ddppdmd", None, [0, 1, 4, 6], [0, 0, 0, 0]),  # a burst takes the decode step before it along
        (
            "ddppdd",
            "001122",
            [0, 1, 4, 5],
            [0, 1, 2, 2],
        ),  # and belongs to the part that took most of the time
        ("pppppp", "001122", [0, 2, 4], [0, 1, 2]),  # bursts of two parts are cut
        ("m" * (LONGEST_PIECE + 3), None, [0, LONGEST_PIECE], [0, 0]),
    ],
)
def test_where_a_log_is_cut(steps: str, parts: str | None, starts: list[int], owners: list[int]) -> None:
    pieces = cut(kinds(steps, parts), together=1)
    assert pieces.starts.tolist() == starts
    assert pieces.part.tolist() == owners
    assert pieces.seconds.sum() == pytest.approx(sum(range(1, len(steps) + 1)) / 1000)


def test_decode_steps_go_together_within_their_part() -> None:
    table = kinds("d" * (TOGETHER + 2) + "p" + "ddd", "0" * TOGETHER + "11" + "1" + "112")
    pieces = cut(table)
    assert pieces.starts.tolist() == [0, TOGETHER, TOGETHER + 1, TOGETHER + 3, TOGETHER + 5]
    assert pieces.kind.tolist() == [DECODE, DECODE, PREFILL, DECODE, DECODE]
    assert single(table, pieces).tolist() == [
        0,
        TOGETHER,
        TOGETHER + 1,
        TOGETHER + 2,
        TOGETHER + 3,
        TOGETHER + 5,
    ]
