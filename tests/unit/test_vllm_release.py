"""The look at a release of vLLM: what it fetches, what it calls a change, and its table on the page."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest

from headgate.live.vllm.seams import NEWEST, OLDEST, release_numbers
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
        ("step = 1", "step = 2", ["Scheduler.schedule: another body, "]),
        ("self, request)", "self, request, hurry)", ["Scheduler.add_request: with hurry"]),
        ("add_request", "take_request", ["Scheduler.add_request: gone"]),
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
    assert bool(differences(before, after)) == (old != "add_request")


def test_a_new_flag_and_a_file_that_is_gone(tmp_path):
    before = symbols(release(tmp_path / "a"))
    more = symbols(release(tmp_path / "b", config=CONFIG + "    prompts_on_sundays: bool = False\n"))
    assert changes(before, more) == ["SchedulerConfig: with prompts_on_sundays"]
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


def test_the_table_on_the_page_is_that_of_the_record():
    record = vllm_release.read_record()
    assert vllm_release.table(record) == PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    releases = [release_numbers(version)[:2] for version in record]
    assert min(releases) == OLDEST and max(releases) == NEWEST
    assert vllm_release.last_before(record, "99.0") == max(record, key=release_numbers)
    assert all(not suites["test_seams"]["failed"] for suites in (each["suites"] for each in record.values()))
