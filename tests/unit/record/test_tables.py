from __future__ import annotations

import json

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.record.tables import COLUMNS, Run
from small_runs import make_run, naive_run, open_run, request


def same(one: Run, two: Run) -> bool:
    pairs = [(getattr(one, name), getattr(two, name)) for name in COLUMNS]
    return one.meta == two.meta and all(
        ours.keys() == theirs.keys()
        and all(np.array_equal(ours[name], theirs[name], equal_nan=True) for name in ours)
        for ours, theirs in pairs
    )


def test_a_run_comes_back_as_it_was_saved(tmp_path):
    run, _ = naive_run(3)
    run.plans["gauge.mode"] = np.empty(0)
    run.meta.update(seed=4, kinds=[{"name": "chat", "first_token": 1.0, "between_tokens": None}])
    run.save(tmp_path / "deep" / "run")
    assert same(Run.load(tmp_path / "deep" / "run"), run)
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["run"]  # nothing left behind


def test_numpy_numbers_in_the_description_become_plain(tmp_path):
    run = make_run(rate=np.float64(2.5), slots=np.int64(3), sizes=np.array([1, 2]))
    run.save(tmp_path / "run")
    assert Run.load(tmp_path / "run").meta == {"rate": 2.5, "slots": 3, "sizes": [1, 2]}


def test_a_full_folder_is_kept_unless_overwriting_is_allowed(tmp_path):
    folder = tmp_path / "run"
    open_run(5).save(folder)
    with pytest.raises(InputError, match="not empty; choose another or allow overwriting"):
        open_run(6).save(folder)
    assert len(Run.load(folder).requests["id"]) == 5
    open_run(6).save(folder, overwrite=True)
    assert len(Run.load(folder).requests["id"]) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_empty_folder_may_be_used(tmp_path):
    open_run(5).save(tmp_path)
    assert len(Run.load(tmp_path).requests["id"]) == 5


def test_a_failed_save_leaves_the_old_run(tmp_path):
    folder = tmp_path / "run"
    open_run(5).save(folder)
    broken = open_run(6, rate_now=float("nan"))
    with pytest.raises(InputError, match=r"run\.json cannot hold"):
        broken.save(folder, overwrite=True)
    assert len(Run.load(folder).requests["id"]) == 5


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(InputError, match="is a file; name a folder"):
        open_run(5).save(tmp_path / "run")


def bare_column(path):
    with path.open("wb") as file:
        np.save(file, np.ones(3))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "steps.npz").unlink(), r"cannot read .*steps\.npz: No such file"),
        (lambda folder: (folder / "run.json").unlink(), r"cannot read .*run\.json: No such file"),
        (lambda folder: (folder / "run.json").write_text("{"), r"run\.json is not JSON"),
        (lambda folder: (folder / "run.json").write_text("[]"), r"run\.json holds a list, not an object"),
        (lambda folder: (folder / "run.json").write_text('{"format": 99}'), "has format 99, this .* reads 1"),
        (lambda folder: (folder / "stays.npz").write_bytes(b"nonsense"), r"stays\.npz is not a table"),
        (lambda folder: (folder / "stays.npz").write_bytes(b""), r"stays\.npz is not a table"),
        (lambda folder: bare_column(folder / "stays.npz"), r"stays\.npz is not a table"),
        (lambda folder: np.savez(folder / "stays.npz", a=np.array([{}])), r"stays\.npz is not a table"),
        (lambda folder: np.savez(folder / "plans.npz", time=np.empty(0)), "'plans' lacks the column 'step'"),
    ],
)
def test_a_broken_folder_is_explained_in_one_line(tmp_path, damage, message):
    open_run(5).save(tmp_path / "run")
    damage(tmp_path / "run")
    with pytest.raises(InputError, match=message) as caught:
        Run.load(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_truncated_table_is_explained(tmp_path):
    open_run(5).save(tmp_path / "run")
    path = tmp_path / "run" / "requests.npz"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"requests\.npz is not a table"):
        Run.load(tmp_path / "run")


def test_no_folder(tmp_path):
    with pytest.raises(InputError, match="no run folder"):
        Run.load(tmp_path / "nowhere")


def test_the_format_is_written_and_strict(tmp_path):
    open_run(5, label="x").save(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"format": 1, "label": "x"}


def test_columns_must_have_one_length_and_requests_one_order():
    run = open_run(5)
    short = {**run.steps, "kv": run.steps["kv"][:-1]}
    with pytest.raises(InputError, match=r"'kv' of table 'steps' has shape \(9,\), the others \(10,\)"):
        Run({}, run.requests, short, run.stays, run.plans)
    with pytest.raises(InputError, match="each request once, by growing id"):
        make_run([request(1, 0, 0, 0, 1, 1, 1), request(1, 0, 0, 0, 1, 1, 1)])


def test_how_requests_were_sent():
    two = [request(0, 0, 0, 0, 1, 1, 1), request(1, 0, 0, 0, 1, 1, 1)]
    later = [two[0], two[1] | {"arrival": 1.0}]
    assert make_run(two).sending == "all-at-once"
    assert make_run(later).sending == "open"
    assert make_run(later, clients=1).sending == "closed"
    assert make_run(two, load="open").sending == "open"


def test_only_stopped_and_limit_are_completed():
    ends = ["stopped", "limit", "aborted", "abandoned", "refused", ""]
    run = make_run([request(number, 0, 0, 0, 1, 1, 1, how) for number, how in enumerate(ends)])
    assert run.completed().tolist() == [True, True, False, False, False, False]
