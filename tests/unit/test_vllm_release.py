"""The look at a release of vLLM: what it fetches, what it calls a change, and its table on the page."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest

from headgate.live.files import release_numbers
from headgate.live.vllm.seams import NEWEST, OLDEST
from tools import vllm_release
from tools.vllm_release import BEGIN, END, PAGE, SCHED, changes, differences, symbols, unpack

SCHEDULER = '''
class Scheduler:
    """Made up."""

    def schedule(self, throttle_prefills=False):
        """Compose."""
        step = 1  # a step
        return step

    def add_request(self, request):
        self.requests.append(request)
'''
CONFIG = '''
class SchedulerConfig:
    max_num_seqs: int = 1
    """Slots."""
'''


def release(folder: Path, scheduler: str = SCHEDULER, config: str = CONFIG) -> Path:
    """Sources with these two files."""
    for name, text in ((f"{SCHED}/scheduler.py", scheduler), ("vllm/config/scheduler.py", config)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"""Compose."""', '"""Compose a step."""', []),
        ("# a step", "# one step", []),
        ("step = 1", "step = 2", ["Scheduler.schedule: another body, +1, -1 lines"]),
        ("self, request)", "self, request, hurry)", ["Scheduler.add_request: with hurry, +1, -1 lines"]),
        (
            "add_request",
            "take_request",
            ["Scheduler: with take_request; without add_request", "Scheduler.add_request: gone"],
        ),
        (
            "throttle_prefills=False",
            "*, throttle=False",
            ["Scheduler.schedule: with *, throttle=False; without "],
        ),
    ],
)
def test_what_counts_as_a_change(tmp_path, old, new, said):
    before = symbols(release(tmp_path / "a"))
    after = symbols(release(tmp_path / "b", SCHEDULER.replace(old, new)))
    lines = changes(before, after)
    assert len(lines) == len(said) and all(
        line.startswith(start) for line, start in zip(lines, said, strict=True)
    )
    shown = differences(before, after)
    assert bool(shown) == bool(said)  # comments are no change; what is gone is shown
    assert not said or f"--- {SCHED}/scheduler.py:" in shown
    recorded = {name: symbol._replace(text="", place="") for name, symbol in before.items()}
    assert len(changes(recorded, after)) == len(said)


def test_a_new_flag_and_a_file_that_is_gone(tmp_path):
    before = symbols(release(tmp_path / "a"))
    more = symbols(release(tmp_path / "b", config=CONFIG + "    prompts_on_sundays: bool = False\n"))
    assert changes(before, more) == ["SchedulerConfig: with prompts_on_sundays, +1, -0 lines"]
    (tmp_path / "b" / SCHED / "scheduler.py").unlink()
    gone = changes(before, symbols(tmp_path / "b"))
    assert "Scheduler.schedule: gone" in gone


def test_only_sources_are_unpacked_and_they_say_that_they_are_for_a_cpu(tmp_path):
    wheel = tmp_path / "vllm-9.9.0-cp38-abi3-any.whl"
    with ZipFile(wheel, "w") as archive:
        for name in ("vllm/a.py", "vllm/_C.abi3.so", "vllm-9.9.0.dist-info/METADATA"):
            archive.writestr(name, "")
    unpack(wheel, tmp_path / "out", "9.9.0")
    files = {
        path.relative_to(tmp_path / "out").as_posix()
        for path in (tmp_path / "out").rglob("*.*")
        if path.is_file()
    }
    assert files == {"vllm/a.py"}
    assert "Version: 9.9.0+cpu" in (tmp_path / "out/vllm-9.9.0+cpu.dist-info/METADATA").read_text()


def test_counts_of_a_suite(tmp_path):
    report = tmp_path / "report.xml"
    assert vllm_release.read_report(report)["failed"] == {"did not run": 1}
    bad = "".join(f'<testcase name="test_b[{n}]"><failure/></testcase>' for n in "xy")
    report.write_text(
        f'<suite><testcase name="test_a"/>{bad}<testcase name="c"><skipped/></testcase></suite>'
    )
    assert vllm_release.read_report(report) == {"passed": 1, "failed": {"test_b": 2}}


def test_what_fails_in_plain_vllm_is_counted_apart(tmp_path):
    report = tmp_path / "report.xml"
    texts = {
        "a": "oracle.py:9: in serve_plain\nWrong",
        "b": "oracle.py:9: in run",
        "c": "Exception Group: in serve_plain, and another",
    }
    cases = "".join(f'<testcase name="{n}"><failure>{text}</failure></testcase>' for n, text in texts.items())
    report.write_text(f"<suite>{cases}</suite>")
    assert vllm_release.read_report(report) == {
        "passed": 0,
        "failed": {"b": 1, "c": 1},
        "plain": {"a": 1},
    }
    oracle = Path(vllm_release.ROOT, "tests/engine/oracle.py").read_text()
    assert f"def {vllm_release.PLAIN.removeprefix('in ')}(" in oracle


def test_sources_that_cannot_be_imported_say_so(tmp_path):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert vllm_release.seams_of(tmp_path)[0].startswith("cannot import vllm.v1")
    (package / "__init__.py").write_text("raise OSError('wants torch 9')")
    assert vllm_release.seams_of(tmp_path) == ["cannot be imported: OSError: wants torch 9"]


def test_sources_are_there_whole_or_not_at_all(tmp_path, monkeypatch):
    """A look that was interrupted while it unpacked is not taken for a release."""

    def download(command, check):
        with ZipFile(Path(command[command.index("--dest") + 1], "vllm-9.9.0-py3-none-any.whl"), "w") as wheel:
            wheel.writestr("vllm/a.py", "")

    monkeypatch.setattr(vllm_release.subprocess, "run", download)
    with monkeypatch.context() as broken:
        broken.setattr(ZipFile, "extractall", lambda *words: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            vllm_release.fetch("newest", tmp_path)
    assert not list(tmp_path.iterdir())
    assert vllm_release.fetch("newest", tmp_path) == ("9.9.0", tmp_path / "9.9.0")
    assert [path.name for path in (tmp_path / "9.9.0/vllm").iterdir()] == ["a.py"]
    monkeypatch.undo()
    assert vllm_release.fetch("9.9.0", tmp_path)[1] == tmp_path / "9.9.0"  # without the network


@pytest.mark.parametrize(
    ("version", "failed", "complete", "advice"),
    [
        ("99.0.0", False, True, "set NEWEST"),
        (".".join(map(str, NEWEST)), False, True, "passes"),
        ("99.0.0", False, False, "not every suite"),
        ("99.0.0", True, True, "does not pass"),
    ],
)
def test_the_last_line_says_what_to_do(version, failed, complete, advice):
    assert advice in vllm_release.advice(version, failed, complete)


def test_the_table_on_the_page_is_that_of_the_record():
    record = vllm_release.read_record()
    assert vllm_release.table(record) == PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    releases = [release_numbers(version)[:2] for version in record]
    assert min(releases) == OLDEST and max(releases) == NEWEST
    assert vllm_release.last_before(record, "99.0") == max(record, key=release_numbers)
    assert all(not suites["test_seams"]["failed"] for suites in (each["suites"] for each in record.values()))
