"""A page as one HTML file that asks for nothing from anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import chain, count, groupby
from typing import Any

from headgate.report import document as doc

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
SCRIPTS = ("script.js", "timeline.js")
TIMELINE_TOOLS = (
    ("earlier", "◀", "Earlier"),
    ("later", "▶", "Later"),
    ("in", "+", "Zoom in"),
    ("out", "−", "Zoom out"),  # noqa: RUF001
    ("all", "Whole run", "Show the whole run"),
)


def render(page: doc.Page) -> str:
    numbers = count(1)
    several = len(page.chapters) > 1
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content="headgate"),
        tag("title", page.title),
        tag("style", Markup(_shipped("style.css"))),
    )
    chapters = [_chapter(chapter, numbers, several) for chapter in page.chapters]
    switch = tag("button", "Theme", type="button", id="theme", title="Light, dark, or as the system has it")
    words = tag("div", tag("h1", page.title), tag("p", page.about, class_="about"))
    body = tag(
        "body",
        tag("header", words, switch),
        tag("main", _items(page.warnings, "warnings"), *chapters, _made(page)),
        tag("div", id="tip", hidden="hidden", role="status"),
        tag("script", Markup("\n".join(map(_shipped, SCRIPTS)))),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en', data_kind=page.kind)}\n"


def _shipped(name: str) -> str:
    return files("headgate.report.html").joinpath(name).read_text(encoding="utf-8")


def _items(items: Sequence[str], style: str) -> Markup | None:
    return tag("ul", *(tag("li", item) for item in items), class_=style) if items else None


def _chapter(chapter: doc.Chapter, numbers: Iterator[int], several: bool) -> Markup:
    parts: list[Markup | None] = [tag("h2", chapter.title) if several or chapter.title else None]
    parts += [tag("p", alarm, class_="alarm", role="alert") for alarm in chapter.alarms]
    # The answer, one sentence, in bold; what else there is to say follows it.
    first, *rest = re.split(r"(?<=\.)\s+(?=[A-Z])", chapter.verdict, maxsplit=1)
    parts.append(tag("p", tag("strong", first), *(f" {text}" for text in rest if text), class_="verdict"))
    parts.append(tag("p", chapter.setup, class_="setup") if chapter.setup else None)
    parts.append(_items(chapter.notes, "notes"))
    parts += [_section(section, numbers) for section in chapter.sections]
    return tag("article", *parts)


def _section(section: doc.Section, numbers: Iterator[int]) -> Markup | None:
    inside: list[Markup] = []
    drawn = (block.make() if isinstance(block, doc.Drawn) else (block,) for block in section.blocks)
    blocks = chain.from_iterable(drawn)
    for narrow, group in groupby(blocks, lambda block: isinstance(block, doc.Figure) and not block.wide):
        parts = [_figure(one, next(numbers)) if isinstance(one, doc.Figure) else _plain(one) for one in group]
        inside += [tag("div", *parts, class_="figures")] if narrow else parts
    if not inside:
        return None
    if section.depth > doc.SHOWN:
        return tag("details", tag("summary", section.title), *inside)
    return tag("section", tag("h3", section.title) if section.title else None, *inside)


def _plain(block: doc.Block) -> Markup:
    if isinstance(block, doc.Grid):
        return _grid(block)
    if isinstance(block, doc.Code):
        return tag("pre", block.text, tabindex="0")
    if isinstance(block, doc.Facts):
        return tag("dl", *(join(tag("dt", name), tag("dd", said)) for name, said in block.rows.items()))
    if isinstance(block, doc.Listed):
        return _items(block.items, "words") or Markup()
    return tag("p", str(block), class_="words")


def _figure(figure: doc.Figure, number: int) -> Markup:
    timeline = "timeline" in figure.data
    kind = "wide" if figure.wide else "bars" if "rows" in figure.data else ""
    entries = [
        tag("button", tag("i", class_=style), name, type="button", class_="entry", data_for=name)
        for name, style in figure.legend
    ]
    tools = [tag("button", "PNG", type="button", data_save="png", title="Save this figure as an image")]
    tools.append(tag("button", "CSV", type="button", data_save="csv", title="Save its numbers"))
    zoom = [
        tag("button", word, type="button", data_zoom=name, title=why, aria_label=why)
        for name, word, why in (TIMELINE_TOOLS if timeline else ())
    ]
    note = [tag("p", figure.note, class_="note")] if figure.note else []
    above, below = (note, []) if figure.wide else ([], note)  # so that plots side by side stand in line
    return tag(
        "figure",
        tag("figcaption", tag("h4", figure.title), tag("p", figure.look, class_="look"), *above),
        tag("div", *entries, class_="legend") if entries else None,
        tag("div", *zoom, class_="zoom") if zoom else None,
        tag("div", figure.drawing, class_="plot", tabindex="0" if timeline else None),
        *below,
        tag("div", *tools, class_="tools"),
        tag("script", embedded(figure.data), type="application/json"),
        id=f"figure-{number}",
        class_=kind or None,
    )


def _grid(grid: doc.Grid) -> Markup:
    words = [cell.is_words for cell in grid.rows[0]] if grid.rows else [False] * len(grid.heads)
    heads = []
    for head, left in zip(grid.heads, words, strict=True):
        name, _, unit = head.partition("\n")
        sorts = tag("button", name, tag("small", unit) if unit else None, type="button")
        heads.append(tag("th", sorts, scope="col", class_="words" if left else None))
    rows = [tag("tr", *(_cell(cell, place) for place, cell in enumerate(row))) for row in grid.rows]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    copy = tag("button", "Copy", type="button", data_copy="tsv", title="Copy for a spreadsheet")
    notes = [tag("p", note, class_="note") for note in grid.notes]
    caption = tag("div", tag("h4", grid.title) if grid.title else tag("span"), copy, class_="caption")
    return tag("div", caption, tag("div", table, class_="scroll", tabindex="0"), *notes, class_="grid-box")


def _cell(cell: doc.Cell, place: int) -> Markup:
    value = None if cell.value is None else f"{cell.value:.6g}"
    if not place:
        return tag("th", cell.text, scope="row", data_value=value)
    return tag("td", cell.text, class_=cell.tone or None, data_value=value)


def _made(page: doc.Page) -> Markup | None:
    if not page.made:
        return None
    parts = [join(tag("dt", name), tag("dd", value)) for name, value in page.made]
    return tag("section", tag("h2", "How it was made"), tag("dl", *parts), id="made")


# -- elements; all that is not markup is escaped

VOID = frozenset({"meta", "br", "hr", "input"})


class Markup(str):
    __slots__ = ()


def tag(element: str, /, *children: str | None, **attributes: object) -> Markup:
    """An element. Children that are not markup are escaped; None, as child or attribute, is left out.

    An underscore at the end of an attribute's name is dropped (`class_`), the others become dashes.
    """
    words = [element]
    for key, value in attributes.items():
        if value is not None:
            text = position(value) if isinstance(value, float) else str(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(text)}"')
    opening = f"<{' '.join(words)}>"
    return Markup(opening if element in VOID else f"{opening}{join(*children)}</{element}>")


def join(*parts: str | None) -> Markup:
    return Markup(
        "".join(part if isinstance(part, Markup) else escape(part, quote=False) for part in parts if part)
    )


def position(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def embedded(data: Any) -> Markup:
    """JSON that is safe inside a script element, whatever a label says."""
    plain = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return Markup(plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
