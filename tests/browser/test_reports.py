"""What a reader could not live without, in a real browser, for every kind of report."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from report_kinds import KINDS

LONGEST = 5_000_000  # bytes
CLASHES = """() => [...document.querySelectorAll("figure svg")].flatMap((svg) => {
    const texts = [...svg.querySelectorAll(".tick, .axis")];
    const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()]).filter(([, a]) => a.width);
    const apart = (a, b) => a.left >= b.right - 1 || b.left >= a.right - 1 || a.top >= b.bottom - 3 || b.top >= a.bottom - 3;
    return boxes.flatMap(([one, a], place) => boxes.slice(place + 1).filter(([, b]) => !apart(a, b))
        .map(([other]) => `${one} / ${other}`));
})"""  # noqa: E501


@pytest.mark.parametrize("kind", KINDS)
def test_verdict_tables_and_axes_are_there(look, reports, kind):
    page = look(kind)
    assert reports[kind].stat().st_size < LONGEST
    verdict = page.locator(".verdict").first
    assert verdict.is_visible() and len(verdict.inner_text()) > 30
    assert page.locator("table").first.is_visible() and page.locator("tbody tr").count() >= 1
    assert (
        page.get_by_text("How it was made").is_visible() and "headgate" in page.locator("#made").inner_text()
    )
    for figure in page.locator("figure").all():
        if not figure.is_visible():  # folded away
            continue
        assert figure.locator("h4").inner_text() and len(figure.locator(".look").inner_text()) > 10
        labels = figure.locator("svg .axis, svg .name").all_text_contents()
        assert any("(" in label for label in labels), labels  # a unit
        assert figure.locator("svg .tick").count() >= 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "theme"), [(380, "light"), (380, "dark"), (1280, "dark")])
def test_it_fits_a_phone_and_the_dark(look, kind, width, theme, tmp_path):
    page = look(kind, width, theme)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (theme == "light")
    assert page.locator(".verdict").first.is_visible()
    _keep(page, f"{kind}-{width}-{theme}")


def _keep(page, name: str) -> None:
    """Pictures for people to look at, where asked for."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


@pytest.mark.parametrize("kind", ["compare", "loads", "threshold", "engines"])
def test_labels_on_an_axis_do_not_overlap(look, kind):
    page = look(kind, 380)
    clashes = page.evaluate(CLASHES)
    assert clashes == []


def test_a_report_of_routers_calls_them_routers(look):
    page = look("fleet")
    assert page.locator("h1").inner_text() == "2 routers compared"
    assert page.locator("thead th").first.inner_text() == "router"
    assert "Engines\n4" in page.locator("#made").inner_text()


def test_the_timeline_zooms_and_goes_back(look):
    page = look("compare")
    figure = page.locator("figure[data-zooms=yes]").first
    figure.wait_for()  # its steps are unpacked after the page is ready
    ticks = figure.locator("svg .tick").all_text_contents
    whole = ticks()
    figure.locator("[data-zoom=in]").click()
    assert ticks() != whole
    figure.locator("[data-zoom=all]").click()
    assert ticks() == whole
    plot = figure.locator(".plot")
    box = plot.bounding_box()
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 45, steps=4)
    assert "waiting" in page.locator("#tip").inner_text() or "idle" in page.locator("#tip").inner_text()
    page.mouse.up()
    assert ticks() != whole
    plot.dblclick()
    assert ticks() == whole
    assert figure.locator("svg path.bar.prefill").first.get_attribute("d")


def test_values_show_where_one_points(look):
    page = look("compare")
    plot = page.locator("figure .plot").first
    plot.scroll_into_view_if_needed()
    plot.hover()
    tip = page.locator("#tip").inner_text()
    assert "are at most" in tip and "mixed:" in tip and "eb+:" in tip


def test_a_run_can_be_hidden(look):
    page = look("compare")
    figure = page.locator("figure").first
    entry = figure.locator(".entry").first
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    assert figure.locator("[data-series=mixed]").first.is_hidden()


def test_pointing_at_a_name_fades_the_others(look):
    page = look("compare")
    for figure in (page.locator("figure").first, page.locator("figure[data-zooms=yes]").first):
        figure.wait_for()
        figure.locator(".entry[data-for=mixed]:enabled").hover()  # not the kind of step
        assert figure.locator("[data-series='eb+'].faded").count() > 0
        assert figure.locator("[data-series=mixed].faded").count() == 0
        page.mouse.move(0, 0)
        assert figure.locator(".faded").count() == 0


def test_tables_sort_and_copy(look):
    page = look("compare")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate("window.setTimeout = () => 0")  # or "Copied" may be gone again before anybody looks
    box = page.locator(".grid-box").first
    box.locator("thead button").nth(1).click()
    column = box.locator("tbody tr td:nth-child(2)")
    first = [float(value) for value in column.evaluate_all("all => all.map(cell => cell.dataset.value)")]
    assert first == sorted(first)
    box.locator("thead button").nth(1).click()
    assert box.locator("thead th").nth(1).get_attribute("aria-sort") == "descending"
    box.locator("[data-copy]").click()
    box.get_by_text("Copied", exact=True).wait_for()  # not by a script: the page's policy forbids eval
    lines = page.evaluate("navigator.clipboard.readText()").strip().split("\n")
    assert lines[0].startswith("policy\trequests") and len(lines) == 4
    assert all(len(line.split("\t")) == len(lines[0].split("\t")) for line in lines)


def test_a_figure_can_be_saved(look, tmp_path):
    page = look("compare")
    for kind, place in (("csv", 0), ("png", 0), ("csv", -1), ("png", -1)):
        figure = page.locator("figure").nth(0) if place == 0 else page.locator("figure[data-zooms=yes]").first
        with page.expect_download() as waiting:
            figure.locator(f"[data-save={kind}]").click()
        path = tmp_path / f"{place}.{kind}"
        waiting.value.save_as(path)
        if kind == "png":
            assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5_000
        else:
            rows = list(csv.reader(path.read_text().splitlines()))
            assert len(rows) > 50 and len({len(row) for row in rows}) == 1


def test_the_theme_can_be_switched(look):
    page = look("one")
    button = page.locator("#theme")
    for expected in ("light", "dark"):
        button.click()
        assert button.inner_text() == f"Theme: {expected}"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"


def test_without_scripts_everything_is_still_drawn(look):
    page = look("compare", script=False)
    assert page.locator(".verdict").is_visible() and page.locator("figure svg").count() >= 4


def test_it_prints(look):
    page = look("compare", theme="dark")
    page.emulate_media(media="print")
    assert page.locator(".tools").first.is_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")
