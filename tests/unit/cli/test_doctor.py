"""`headgate doctor`: what of vLLM is here, whether it is as we expect it, what the settings say."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest

from fleet_worlds import ROUTERS
from headgate.cli import doctor as checkup
from headgate.live.files import release_numbers
from headgate.live.vllm import seams


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    monkeypatch.delenv("HEADGATE_CONFIG", raising=False)
    monkeypatch.setattr("headgate.live.vllm.seams.installed", lambda: None)


def found(headgate, *args) -> tuple[int, dict]:
    done = headgate("doctor", "--json", "-", *args)
    return done.code, json.loads(done.out)["vllm"]


def test_without_vllm(headgate):
    code, vllm = found(headgate)
    assert code == 0 and vllm["problems"] == []
    assert vllm["version"].startswith("not installed") and vllm["seams"] == "not looked at"
    assert vllm["settings"] == "HEADGATE_CONFIG is not set"


def test_in_words(headgate):
    done = headgate("doctor")
    assert done.code == 0 and "prometheus_client" in done.out and "vLLM:" in done.out
    heads = "^(?:policies|routers|cards|traces):$"
    _, policies, routers, cards, traces = re.split(heads, done.out, flags=re.M)
    assert "eb+" in policies and "linear-h200-qwen3-8b" in cards and "azure-conv" in traces
    assert {line.split()[0] for line in routers.splitlines() if line} == set(ROUTERS)


@pytest.mark.parametrize(
    ("text", "code", "active"),
    [
        ('{"policy": "eb:refill=4"}', 0, "policy eb(refill=4), card none"),
        ('{"policy": "eb"}', 1, "nothing; vLLM would refuse to start with our scheduler"),
        ('{"polcy": "eb"}', 1, "nothing; vLLM would refuse to start with our scheduler"),
    ],
)
def test_what_the_settings_say(headgate, tmp_path, monkeypatch, text, code, active):
    (tmp_path / "h.json").write_text(text)
    monkeypatch.setenv("HEADGATE_CONFIG", str(tmp_path / "h.json"))
    left, vllm = found(headgate)
    assert (left, vllm["active"]) == (code, active)
    assert len(vllm["problems"]) == code


@pytest.mark.parametrize(
    ("look", "seams", "problem"),
    [
        ("print('noise'); print('[]')", "as expected", None),
        (
            """print('["Request lacks x"]')""",
            "1 not as expected",
            "relies on: Request lacks x; use vLLM 0.26",
        ),
        ("raise ImportError('no torch')", "unknown", "cannot be imported: ImportError: no torch"),
        ("import time; time.sleep(60)", "unknown", "took more than"),
    ],
)
def test_the_seams(headgate, monkeypatch, look, seams, problem):
    monkeypatch.setattr("headgate.live.vllm.seams.installed", lambda: "0.31.2")
    monkeypatch.setattr(checkup, "LOOK", look)
    if "sleep" in look:
        monkeypatch.setattr(checkup, "PATIENCE", 0.3)
    code, vllm = found(headgate)
    assert vllm["version"] == "0.31.2, supported" and vllm["seams"] == seams
    assert code == bool(problem) and (not problem or problem in vllm["problems"][0])
    meaning = "policies do not run in it: see the problems below" if problem else "policies run in it"
    assert vllm["meaning"] == meaning
    bare = found(headgate, "--no-seams")[1]
    assert bare["seams"] == "not looked at" and bare["meaning"].startswith("unknown")


def test_another_release(headgate, monkeypatch):
    monkeypatch.setattr("headgate.live.vllm.seams.installed", lambda: "0.25.1")
    code, vllm = found(headgate, "--no-seams")
    assert code == 1 and vllm["version"] == "0.25.1, not supported"
    assert "vLLM 0.25.1 is older than those headgate knows (0.26 to 0.33); use" in vllm["problems"][0]


@pytest.mark.parametrize("release", ["0.99.1", "dev"])
@pytest.mark.parametrize("faults", ["[]", '["Scheduler lacks x"]'])
def test_a_release_that_nobody_has_tested(headgate, monkeypatch, release, faults):
    """Its seams decide, not its number."""
    monkeypatch.setattr("headgate.live.vllm.seams.installed", lambda: release)
    monkeypatch.setattr(checkup, "LOOK", f"print({faults!r})")
    code, vllm = found(headgate)
    assert vllm["version"] == f"{release}, not tested (0.26 to 0.33 are)"
    if faults == "[]":
        assert code == 0 and vllm["meaning"].startswith("policies run in it, with a warning")
    else:
        assert code == 1 and "Scheduler lacks x; use vLLM 0.26 to 0.33" in vllm["problems"][0]


def test_the_release_is_told_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.undo()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = version = '0.28.1+cpu'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert seams.installed() == "0.28.1+cpu" and "vllm" not in sys.modules
    assert release_numbers("0.28.1+cpu") == (0, 28, 1) and release_numbers("dev") == ()
    (tmp_path / "vllm" / "_version.py").unlink()
    assert seams.installed() == "unknown"


@pytest.mark.parametrize(
    ("release", "problem", "plugins", "code", "said"),
    [
        (None, None, "", 0, "not installed"),
        ("0.5.23", None, "", 0, "0.5.23, supported"),
        ("0.5.12", "SGLang 0.5.12 has changed", "", 1, "0.5.12, not supported"),
        ("0.5.23", None, "other", 1, "0.5.23, supported"),
    ],
)
def test_sglang(headgate, monkeypatch, release, problem, plugins, code, said):
    monkeypatch.setattr("headgate.live.sglang.seams.installed", lambda folder=None: release)
    monkeypatch.setattr("headgate.live.sglang.seams.problem", lambda: problem)
    monkeypatch.setattr(checkup, "entry_points", lambda group: [SimpleNamespace(name="headgate")])
    monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    done = headgate("doctor", "--json", "-")
    sglang = json.loads(done.out)["sglang"]
    assert (done.code, len(sglang["problems"])) == (code, code)
    assert sglang["version"].startswith(said)
    assert ("left out by SGLANG_PLUGINS" in sglang["plug-in"]) is (plugins == "other")
