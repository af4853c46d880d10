"""Arms become settings; the settings file is put back byte for byte, whatever happens."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from headgate.core.errors import InputError, RunError
from headgate.live.engine.settings import read_settings
from headgate.live.trial.arms import AS_IS, BACK, LEFT, SettingsFile, base_settings, read_arms

ORIGINAL = b'# mine\r\npolicy = "eb"\n\n[set]\nrefill = 8\n'
SRC = Path(__file__).resolve().parents[3] / "src"


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_bytes(ORIGINAL)
    file.chmod(0o640)
    return file


def test_one_arm_is_compared_with_the_file_as_it_is(path):
    arms = read_arms(["mixed:slots=4"], str(path), {"ttft": "500ms", "tbt": "100ms"})
    assert [arm.name for arm in arms] == [AS_IS, "mixed:slots=4"]
    assert arms[0].words["set"] == {"refill": 8} and "set" not in arms[1].words  # it belonged to the policy
    assert arms[0].words["ttft"] == arms[1].words["ttft"] == "500ms"
    assert base_settings(str(path), {"ttft": "500ms"}).ttft == 0.5


def test_names_files_and_servers(path, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text('policy = "mixed"\nset = {}\n')
    arms = read_arms(["plain=vllm", str(other), "b=eb:refill=2"], str(path), {})
    assert [arm.name for arm in arms] == ["plain", str(other), "b"]
    assert [arm.words["policy"] for arm in arms] == ["vllm", "mixed", "eb:refill=2"]
    servers = read_arms(["old=http://a:1/", "http://b:2"], None, {})
    assert [(arm.name, arm.url) for arm in servers] == [("old", "http://a:1"), ("b:2", "http://b:2")]
    again = read_arms(["a=mixed", "b=mixed"], str(path), {})  # on purpose: no difference
    assert again[0].words == again[1].words
    with pytest.raises(InputError, match="two arms are called mixed"):
        read_arms(["mixed", "mixed"], str(path), {})


def test_the_file_is_taken_and_given_back(path):
    file = SettingsFile(str(path))
    file.take()
    file.put({"policy": "mixed"}, "block 1")
    assert read_settings(str(path)).policy == "mixed" and read_settings(str(path)).mark == "block 1"
    assert json.loads(path.read_bytes()) == {"policy": "mixed", "mark": "block 1"}
    file.restore()
    file.restore()
    assert path.read_bytes() == ORIGINAL and path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(path.parent) == ["settings.toml"]


def test_a_link_stays_a_link(path, tmp_path):
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    file = SettingsFile(str(link))
    file.take()
    file.put({"policy": "mixed"}, "block 1")
    assert link.is_symlink() and b"mixed" in path.read_bytes()
    file.restore()
    assert link.is_symlink() and path.read_bytes() == ORIGINAL


def test_a_file_that_cannot_be_replaced_is_written_in_place(path, monkeypatch):
    def refuse(*args: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("os.replace", refuse)
    file = SettingsFile(str(path))
    file.take()
    file.put({"policy": "mixed"}, "block 1")
    assert read_settings(str(path)).policy == "mixed"
    file.restore()
    assert path.read_bytes() == ORIGINAL and os.listdir(path.parent) == ["settings.toml"]


@contextmanager
def full_disk(size):
    """No file may be longer than so many bytes."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_leaves_the_file_whole(path):
    file = SettingsFile(str(path))
    file.take()
    with full_disk(60), pytest.raises(RunError, match="File too large; the trial ends"):
        file.put({"policy": "mixed", "card": "x" * 300}, "block 1")
    assert path.read_bytes() == ORIGINAL and os.listdir(path.parent) == ["settings.toml"]
    file.restore()
    assert path.read_bytes() == ORIGINAL


def test_a_full_disk_where_it_is_written_in_place_is_repaired(path, monkeypatch):
    def refuse(*args: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("os.replace", refuse)
    file = SettingsFile(str(path))
    file.take()
    with full_disk(400), pytest.raises(RunError, match="the trial ends"):
        monkeypatch.setattr("headgate.live.trial.arms.replace", refuse)
        file.put({"policy": "mixed", "card": "x" * 500}, "block 1")
    assert path.read_bytes() != ORIGINAL
    file.restore()
    assert path.read_bytes() == ORIGINAL


def test_what_another_wrote_meanwhile_stays(path):
    file = SettingsFile(str(path))
    file.take()
    file.put({"policy": "mixed"}, "block 1")
    path.write_text('policy = "v0"\n')
    with pytest.raises(RunError, match="changed by another"):
        file.put({"policy": "eb"}, "block 2")
    assert file.restore() == file.restore() == LEFT
    assert path.read_text() == 'policy = "v0"\n'


def test_files_beside_it_stay(path, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (tmp_path / "settings.toml.new").write_text("mine")
    (tmp_path / "settings.toml.restored").symlink_to(elsewhere)
    file = SettingsFile(str(path))
    file.take()
    file.put({"policy": "mixed"}, "block 1")
    file.restore()
    killed(path)
    names = ["elsewhere", "settings.toml", "settings.toml.new", "settings.toml.restored"]
    assert (tmp_path / "settings.toml.new").read_text() == elsewhere.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == names and path.read_bytes() == ORIGINAL


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_the_owner_stays(path):
    os.chown(path, 1234, 1235)
    file = SettingsFile(str(path))
    file.take()
    file.put({"policy": "mixed"}, "block 1")
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235)
    file.restore()
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235)
    killed(path)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235) and path.read_bytes() == ORIGINAL


def test_a_file_of_another_is_written_in_place(path, monkeypatch):
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.chown", refuse)
    number = path.stat().st_ino
    file = SettingsFile(str(path))
    file.take()
    file.put({"policy": "mixed"}, "block 1")
    assert path.stat().st_ino == number and read_settings(str(path)).policy == "mixed"
    assert file.restore() == BACK
    assert path.read_bytes() == ORIGINAL and os.listdir(path.parent) == ["settings.toml"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trial_that_is_killed_leaves_the_file_as_it_was(path, number):
    killed(path, number)
    assert path.read_bytes() == ORIGINAL and path.stat().st_mode & 0o777 == 0o640


def test_a_trial_that_is_killed_leaves_what_another_wrote(path):
    edit = b'policy = "v0"\n'
    killed(path, edit=edit)
    assert path.read_bytes() == edit


def test_a_trial_that_is_killed_in_a_write_in_place(path):
    killed(path, code="file._tell_guard('*'); open(file.path, 'w').write('half of')")
    assert path.read_bytes() == ORIGINAL


def test_a_disk_that_is_full_at_the_end(path):
    """The guard puts it back when there is room."""
    code = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
assert 'not put back yet: File too large' in file.restore(), 'it was'
"""
    killed(path, code=code)
    assert path.read_bytes() == ORIGINAL


def killed(path, number=signal.SIGKILL, edit=None, code=""):
    """A trial that put an arm, and ends; another may edit the file before. Waits for the guard."""
    lines = f"""
import os, sys, time
from headgate.live.trial.arms import SettingsFile
file = SettingsFile({str(path)!r})
file.take()
file.put({{"policy": "mixed"}}, "block 1")
guard = file._guard.pid
{code}
print(guard, flush=True)
time.sleep(60)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", lines], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(SRC)}
    )
    assert child.stdout is not None
    guard = Path("/proc") / str(int(child.stdout.readline())) / "cmdline"
    if edit is not None:
        path.write_bytes(edit)
    child.send_signal(number)
    child.wait()
    child.stdout.close()
    end = time.monotonic() + 20
    while guard.exists() and guard.read_bytes() and time.monotonic() < end:  # a zombie has no line
        time.sleep(0.02)
