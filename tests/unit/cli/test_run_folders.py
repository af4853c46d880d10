"""Folders and files are whole or not there; nothing of the user's is lost; a broken run is refused."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headgate.cli.output import run_folder, write_json
from headgate.core.errors import InputError
from headgate.core.version import VERSION
from headgate.record.tables import Run

FILES = {"bench.json", "run.json", "requests.npz", "steps.npz", "stays.npz", "plans.npz"}
SMALL = ["simulate", "--requests", 5]


def test_a_run_folder_is_kept_unless_told(headgate, refused, tmp_path):
    assert headgate(*SMALL, "--out", "r").code == 0
    assert {path.name for path in (tmp_path / "r").iterdir()} == FILES
    refused([*SMALL, "--out", "r"], "exists and is not empty; choose another or pass --overwrite")
    assert headgate(*SMALL, "--out", "r", "--overwrite", "--policy", "v0").code == 0
    assert Run.load("r").meta["policy"] == "v0"


def test_runs_and_reports_say_which_build_ran(headgate, tmp_path):
    assert headgate(*SMALL, "--out", "r").code == 0
    assert json.loads((tmp_path / "r" / "run.json").read_text())["versions"]["build"] == "pure Python"
    assert headgate("report", "r", "--out", "r.html").code == 0
    assert f"headgate {VERSION}, build pure Python, python" in (tmp_path / "r.html").read_text()
    plan = ["plan", "wait", "--rate", 5, "--prompt", 200, "--output", 100]
    assert headgate(*plan, "--report", "p.html").code == 0
    assert f"headgate {VERSION} (pure Python), Python" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    "command", [SMALL, ["compare", "--policy", "mixed", "--policy", "v0", "--requests", 5]]
)
def test_overwrite_never_removes_what_is_not_a_run(refused, tmp_path, command):
    for name in ("thesis", "mixed"):
        (tmp_path / "home" / name).mkdir(parents=True)
        (tmp_path / "home" / name / "thesis.tex").write_text("years of work")
    refused([*command, "--out", "home", "--overwrite"], "holds no run (run.json), so it is not overwritten")


def test_an_empty_folder_may_be_used_and_stays_on_failure(headgate, refused, tmp_path):
    (tmp_path / "mine").mkdir()
    refused([*SMALL, "--out", "mine", "--policy", "eb"])
    assert headgate(*SMALL, "--out", "mine").code == 0


@pytest.mark.parametrize("args", [SMALL, ["compare", "--policy", "mixed", "--policy", "v0"], ["demo"]])
def test_no_place_for_runs(refused, tmp_path, args):
    (tmp_path / "runs").write_text("a file")
    refused(args, "folder runs/: File exists; choose another with --out")


def test_commands_at_the_same_time_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def take(number):
        with run_folder(None, ("mixed", "v0")[number % 2], overwrite=False) as folder:
            (folder / "x").write_text("x")
            return folder

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(take, range(40)))
    assert sorted(int(folder.name[:4]) for folder in folders) == list(range(1, 41))
    assert not list(Path("runs").glob(".*"))


def test_a_failed_command_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError), run_folder(None, "x", overwrite=False):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_figures_that_cannot_be_written_after_the_run(headgate, tmp_path):
    said = headgate(*SMALL, "--json", "/dev/full", "--out", "r")
    assert said.code == 2 and "No space left on device" in said.err and said.err.count("\n") == 1
    assert Run.load(tmp_path / "r").meta["outcome"] == "finished"


def test_json_files_are_whole(tmp_path, monkeypatch):
    target = tmp_path / "x.json"
    write_json(str(target), {"a": 1})

    def full(self, text, encoding):
        with self.open("w") as file:
            file.write(text[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match="No space left"):
        write_json(str(target), {"a": 2})
    assert json.loads(target.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [target]


def test_a_full_disk_leaves_no_half_run(headgate, refused, monkeypatch):
    def full(*args, **columns):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    refused(
        [*SMALL, "--out", "r"], "cannot write the run to r: No space left on device; choose another folder"
    )


BREAK = {
    "no record": lambda folder: (folder / "run.json").unlink(),
    "record cut": lambda folder: (folder / "run.json").write_text('{"format": 1'),
    "record binary": lambda folder: (folder / "run.json").write_bytes(b"\xff\x00"),
    "record a list": lambda folder: (folder / "run.json").write_text("[]"),
    "record nested": lambda folder: (folder / "run.json").write_text("[" * 100_000),
    "newer": lambda folder: (folder / "run.json").write_text('{"format": 99}'),
    "no format": lambda folder: (folder / "run.json").write_text('{"format": "x"}'),
    "no table": lambda folder: (folder / "steps.npz").unlink(),
    "table empty": lambda folder: (folder / "steps.npz").write_bytes(b""),
    "table cut": lambda folder: (folder / "stays.npz").write_bytes((folder / "stays.npz").read_bytes()[:200]),
    "table text": lambda folder: (folder / "requests.npz").write_text("hello"),
    "table a folder": lambda folder: [(folder / "plans.npz").unlink(), (folder / "plans.npz").mkdir()],
    "table an array": lambda folder: np.save((folder / "plans.npz").open("wb"), np.arange(3)),
    "column lost": lambda folder: np.savez(folder / "plans.npz", time=np.arange(3)),
    "columns scalar": lambda folder: np.savez(
        folder / "plans.npz", time=1, step=1, decode=1, prompts=1, evict=1
    ),
    "pickle": lambda folder: np.savez(folder / "plans.npz", time=np.array([{}], dtype=object)),
    "damaged": lambda folder: (folder / "requests.npz").write_bytes(
        (folder / "requests.npz").read_bytes().replace(b"\0" * 8, b"\1" * 8)
    ),
    "gone": shutil.rmtree,
}  # fmt: skip


@pytest.mark.parametrize("how", BREAK)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_broken_runs_are_refused_in_one_line(headgate, tmp_path, how):
    assert headgate(*SMALL, "--out", "r").code == 0
    BREAK[how](tmp_path / "r")
    with pytest.raises(InputError) as error:
        Run.load(tmp_path / "r")
    assert "\n" not in str(error.value)


def test_a_policy_file_elsewhere_gets_a_folder_of_its_name(headgate, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "mine.py").write_text("from headgate import Mixed\nclass Mine(Mixed):\n    pass\n")
    for place in ("far/mine.py", tmp_path / "far" / "mine.py"):
        assert headgate(*SMALL, "--policy", f"{place}:Mine").code == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["0001-mine.py:Mine-seed0", "0002-mine.py:Mine-seed0"]
