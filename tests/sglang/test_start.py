"""How headgate gets into SGLang, and what it says when it cannot."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import virtual
from bench import Bench
from sglang.srt.managers import scheduler as schedulers
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

import sglang
from headgate.live.sglang import LOADED, seams
from headgate.live.sglang.entry import SCHEDULER, register
from headgate.live.sglang.scheduler import HeadgateScheduler

TARGET = f"{SCHEDULER}.Scheduler"


@pytest.fixture
def hooks(monkeypatch):
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(schedulers, "Scheduler", schedulers.Scheduler)
    return HookRegistry._hooks


def test_the_entry_point_is_found_by_sglang():
    found = {point.name: point.value for point in metadata.entry_points(group=GENERAL_PLUGINS_GROUP)}
    assert found["headgate"] == "headgate.live.sglang.entry:register"


def test_ours_takes_the_place_of_sglangs(hooks, monkeypatch):
    virtual.configured()
    register()
    assert [hook[:2] for hook in hooks[TARGET]] == [(HookType.REPLACE, HeadgateScheduler)]
    HookRegistry.apply_hooks()
    assert schedulers.Scheduler is HeadgateScheduler


def test_without_settings_nothing_is_touched(hooks, monkeypatch):
    monkeypatch.delenv("HEADGATE_CONFIG", raising=False)
    register()
    assert not hooks


def test_in_a_process_that_does_not_schedule_nothing_is_imported(hooks, monkeypatch):
    virtual.configured()
    monkeypatch.delitem(sys.modules, SCHEDULER)
    register()
    assert not hooks


def test_a_plug_in_that_cannot_load_ends_the_process(hooks, monkeypatch, capsys):
    virtual.configured()
    monkeypatch.setitem(sys.modules, "headgate.live.sglang.scheduler", None)
    with pytest.raises(SystemExit):
        register()
    assert "headgate: cannot run in this SGLang" in capsys.readouterr().err


def test_the_first_word(monkeypatch, tmp_path):
    monkeypatch.setenv(LOADED, str(tmp_path / "loaded"))
    virtual.configured()
    Bench(HeadgateScheduler, enable_mixed_chunk=True)
    assert (tmp_path / "loaded").exists()


def test_seams_of_the_installed_release():
    home = Path(sglang.__file__).parent
    assert seams.home() == home
    assert seams.faults(home) == []
    assert seams.problem() is None
    assert seams.RELEASES.doubt(seams.installed()) is None


def test_our_metrics_are_on_sglangs_page():
    """SGLang counts the same passes."""
    script = Path(__file__).with_name("metrics_page.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = (
        dict(re.findall(pattern, done.stdout, re.MULTILINE))
        for pattern in (
            r'^headgate_steps_total\{engine="0",kind="(\w+)"\} (.+)$',
            r'^sglang:cuda_graph_passes_total\{.*mode="(\w+)_none".*\} (.+)$',
        )
    )
    assert float(ours["prefill"]) > 10 and float(ours["decode"]) > 10
    assert {kind: ours[kind] for kind in ("prefill", "decode")} == theirs
    assert 'headgate_finished_total{engine="0",how="limit"} 30.0' in done.stdout
