"""A real Chromium, and one report of every kind to open in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from report_kinds import KINDS

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ("gpu", "quic", "background-networking", "component-update", "sync")
FLAGS = ["--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in QUIET)]
PATIENCE = 300_000  # milliseconds, of everything that is waited for: only what hangs takes so long
SMALL = ["--requests", "300", "--prompt", "200", "--output", "60"]
SLO = ["--ttft", "500ms", "--tpot", "50ms"]
MIX = """
[[classes]]
name = "chat"
share = 3
prompt = 200
output = 60
ttft = "300ms"
tpot = "30ms"
[[classes]]
name = "long"
share = 1
prompt = 900
output = 30
"""
FLUID = ["--engines", "20", "--mixed-fixed", "17.4ms", "--mixed-per-token", "6.2e-5", "--solo-step", "22ms"]
FLUID += ["--patience", "10s", "--class", "code:prompt=300,output=1000,rate=10"]
FLUID += ["--class", "paper:prompt=3000,output=400,rate=10"]


def headgate(*args: str, folder: Path) -> None:
    command = [sys.executable, "-c", "from headgate.cli import main; main()", *args]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == ("No answer: " in done.stdout), done.stderr


@pytest.fixture(scope="session")
def reports(tmp_path_factory) -> dict[str, Path]:
    """Every kind of report, made by the commands users type."""
    folder = tmp_path_factory.mktemp("reports")
    (folder / "mix.toml").write_text(MIX)
    three = ["--policy", "mixed", "--policy", "eb:refill=8", "--policy", "eb+"]
    closed = [*SMALL, "--clients", "64", "--slots", "48"]
    headgate("compare", *three, *closed, *SLO, "--report", "compare.html", folder=folder)
    classes = [
        "--policy",
        "mixed",
        "--policy",
        "slai",
        "--requests",
        "300",
        "--mix",
        "mix.toml",
        "--rate",
        "30",
    ]
    headgate("compare", *classes, "--report", "classes.html", folder=folder)
    routers = ["--engines", "4", "--router", "round-robin", "--router", "split"]
    headgate("compare", *routers, *classes[4:], "--report", "fleet.html", folder=folder)
    for rate in ("5", "20", "60"):
        headgate("compare", *three[:4], *SMALL, *SLO, "--rate", rate, "--out", f"loads/{rate}", folder=folder)
    headgate("report", "loads", "--out", "loads.html", folder=folder)
    headgate("simulate", "--policy", "eb+", *closed, "--report", "one.html", folder=folder)
    headgate("plan", "threshold", *SMALL, "--slots", "256", "--report", "threshold.html", folder=folder)
    headgate("plan", "fluid", *FLUID, "--report", "fluid.html", folder=folder)
    capacity = [
        "--slo",
        "ttft=1s@p50",
        "--policy",
        "mixed",
        "--policy",
        "v0",
        "--seeds",
        "2",
        "--precision",
        "0.3",
    ]
    headgate("plan", "capacity", *capacity, *SMALL, "--jobs", "1", "--report", "capacity.html", folder=folder)
    fewest = ["--find", "engines", "--rate", "200", *capacity[:4], *capacity[6:8], *SMALL]
    headgate("plan", "capacity", *fewest, "--jobs", "1", "--report", "engines.html", folder=folder)
    headgate("plan", "wait", *SMALL, "--load", "0.8", "--report", "wait.html", folder=folder)
    headgate("plan", "flags", *SMALL, *SLO, "--report", "flags.html", folder=folder)
    advice = [*capacity[:4], *capacity[6:], *SMALL, "--rate", "20", "--jobs", "1", "--cache", "none"]
    headgate("advise", *advice, "--report", "advise.html", folder=folder)
    headgate("reproduce", "eb-table13", "--quick", "--report", "reproduce.html", folder=folder)
    return {kind: folder / f"{kind}.html" for kind in KINDS}


@pytest.fixture(scope="session")
def browser():
    if not CHROMIUM:
        pytest.fail("no chromium found; run make test-browser as root, or set CHROMIUM to its path")
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=PATIENCE)
        yield found
        found.close()


@pytest.fixture
def look(browser, reports):
    """Opens a report; fails at the end if the page complained or asked the network for anything."""
    complaints: list[str] = []
    pages = []

    def open_report(kind: str, width: int = 1280, theme: str = "light", script: bool = True):
        size = {"width": width, "height": 900}
        context = browser.new_context(
            viewport=size, color_scheme=theme, java_script_enabled=script, offline=True
        )
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(f"console {said.type}: {said.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", lambda asked: _outside(asked.url, complaints))
        page.goto(reports[kind].as_uri())
        if script:
            page.wait_for_selector("html[data-ready=yes]")
        pages.append(context)
        return page

    yield open_report
    for context in pages:
        context.close()
    assert not complaints, complaints


def _outside(url: str, complaints: list[str]) -> None:
    if not url.startswith(("file:", "data:", "blob:")):
        complaints.append(f"request: {url}")
