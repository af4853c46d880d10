"""A file that is replaced whole or stays as it was."""

from __future__ import annotations

import pytest

from headgate.record.tables import write_whole


def test_it_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    target = tmp_path / "report.html"
    target.write_text("old")
    write_whole(target, "new")
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]


def test_a_write_that_fails_leaves_the_old_one(tmp_path):
    target = tmp_path / "report.html"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(target, "half of it, then what cannot be written: \ud800")
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
