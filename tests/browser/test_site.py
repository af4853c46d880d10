"""The built pages, opened from a folder without any server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 300_000  # milliseconds: only what hangs takes so long


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("start", ["index.html", "policies/eb.html"])
def test_search_finds_pages_without_a_server(browser, site, start):
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or complaints.append(asked.url))
    page.goto((site / start).as_uri())
    page.get_by_label("Search").first.click()
    page.keyboard.type("Hodgson")
    found = page.locator(".md-search-result__item a").first
    found.wait_for()
    found.click()
    page.wait_for_url("**/*.html*")
    assert "Hodgson" in page.locator("article").inner_text()
    context.close()
    assert not complaints, complaints
