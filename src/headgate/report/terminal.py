"""Any document as text for a terminal: 80 columns at least, plain where colours are off, without figures."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from io import StringIO
from itertools import groupby
from textwrap import wrap
from typing import IO, TYPE_CHECKING

from headgate.report import document as doc

if TYPE_CHECKING:
    from rich.text import Text

WIDTH = 80
GAP = 2  # spaces between columns; one where there is no room for two
LEAST = 14  # letters that a column of words keeps when the table is too wide
ASCII = str.maketrans("─↑↓±λθΔη", "-^v~ltDn")  # for streams that know no other letters
STYLES = {"good": "green", "bad": "red", "best": "bold"}
Part = doc.Page | doc.Chapter | doc.Section | doc.Grid | str


def show(part: Part, file: IO[str] | None = None, depth: int = doc.FOLDED) -> None:
    """Print it, sections down to `depth`; in colour only on a terminal, and not when NO_COLOR is set."""
    from rich.console import Console

    out = file or sys.stdout
    if "NO_COLOR" in os.environ or not out.isatty():
        console = Console(file=out, width=WIDTH, color_system=None, highlight=False)
    else:  # a narrow terminal wraps; cut numbers help no reader
        console = Console(file=out, width=max(WIDTH, Console(file=out).width), highlight=False)
    lines = list(_lines(part, console.width, depth))
    while lines and not lines[-1].plain:
        lines.pop()
    for before, line in zip([_text(), *lines], lines, strict=False):
        if not console.encoding.startswith("utf"):
            line.plain = line.plain.translate(ASCII).encode("ascii", "replace").decode("ascii")
        if line.plain or before.plain:  # never two empty lines
            console.print(line, soft_wrap=True)


def _lines(part: Part, width: int, depth: int) -> Iterator[Text]:
    if isinstance(part, doc.Page):
        about = f": {part.about}" if part.about else ""
        yield from _said(f"{part.title}{about}", width, "bold", len(part.title))
        yield _text()
        for chapter in part.chapters:
            yield from _lines(chapter, width, depth)
    elif isinstance(part, doc.Chapter):
        yield from _said(part.title, width, "bold")
        for alarm in part.alarms:
            yield from _said(alarm, width, "bold")
        if part.answer_first:
            yield _text()
            yield from _said(part.verdict, width, "bold")
            yield _text()
        yield from _said(part.setup, width, "dim")
        yield _text()
        for section in part.sections:
            yield from _lines(section, width, depth)
        if not part.answer_first:
            yield from _said(part.verdict, width, "bold")
        for note in part.notes:
            yield from _said(note, width, "dim")
        yield _text()
    elif isinstance(part, doc.Section):
        yield from _section(part, width) if part.depth <= depth else ()
    else:
        yield from _grid(part, width) if isinstance(part, doc.Grid) else _said(part, width)


def _section(section: doc.Section, width: int) -> Iterator[Text]:
    blocks = [block for block in section.blocks if not isinstance(block, doc.Drawn | doc.Figure)]
    yield from _said(section.title, width, "bold") if blocks else ()
    for block in blocks:
        if isinstance(block, doc.Grid):
            yield from _grid(block, width)
            yield _text()
        elif isinstance(block, doc.Facts):
            names = max(map(len, block.rows)) + GAP
            for name, said in block.rows.items():
                for place, line in enumerate(wrap(said, width - names) or [""]):
                    yield _text(f"{'' if place else name:{names}}{line}")
            yield _text()
        elif isinstance(block, doc.Code):
            yield from (_text(line, "bold") for line in block.text.splitlines())
        elif isinstance(block, doc.Listed):
            for item in block.items:
                yield from map(_text, wrap(item, width, initial_indent="- ", subsequent_indent="  "))
        else:
            yield from _said(block, width)
    yield _text()


def _text(text: str = "", style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style)


def _said(text: str, width: int, style: str = "", reach: int | None = None) -> Iterator[Text]:
    from rich.console import Console

    whole = _text(text)
    whole.stylize(style, 0, reach)
    for line in whole.wrap(Console(file=StringIO()), width) if text else ():
        line.rstrip()
        yield line


def _grid(grid: doc.Grid, width: int) -> Iterator[Text]:
    """The table; minor columns go, then the rest is continued below, where it is wider than the terminal."""
    yield from _said(grid.title, width)
    for part in _fitting(grid, width):
        yield from Table(part, width).lines()
        yield _text()
    for note in grid.notes:
        yield from _said(note, width, "dim")


def _fitting(grid: doc.Grid, width: int) -> list[doc.Grid]:
    """The grid without as many minor columns as it takes to fit; in several parts where that is too few."""
    for head in (*reversed(grid.minor), None):
        if Table(grid, width).fits:
            return [grid]
        grid = _columns(grid, [place for place, each in enumerate(grid.heads) if each != head])
    names = list(range(2 if grid.grouped else 1))
    parts, chosen = [], names
    for place in range(len(names), len(grid.heads)):
        if chosen != names and not Table(_columns(grid, [*chosen, place]), width).fits:
            parts.append(chosen)
            chosen = names
        chosen = [*chosen, place]
    return [_columns(grid, each) for each in (*parts, chosen)]


def _columns(grid: doc.Grid, places: Sequence[int]) -> doc.Grid:
    rows = tuple(tuple(each[place] for place in places) for each in grid.rows)
    return replace(grid, heads=tuple(grid.heads[place] for place in places), rows=rows)


class Table:
    """A grid laid out in columns: numbers are never broken, words and heads at their spaces."""

    def __init__(self, grid: doc.Grid, width: int) -> None:
        skipped = 1 if grid.grouped else 0
        self.grid, self.width = grid, width
        self.heads = [*grid.heads[skipped:]]
        if grid.joined:  # what stands over several columns needs room in the first
            names = [head.partition("\n")[0] for head in self.heads]
            for place in range(len(names) - 1, 0, -1):
                if names[place] == names[place - 1]:
                    self.heads[place] = self.heads[place].removeprefix(names[place])
        self.groups = [each[0].text if skipped else "" for each in grid.rows]
        self.rows = [each[skipped:] for each in grid.rows]
        columns = list(zip(*self.rows, strict=True)) if self.rows else [() for _ in self.heads]
        self.left = [not place or any(c.is_words for c in column) for place, column in enumerate(columns)]
        self.whole, self.least = [], []
        for head, column, left in zip(self.heads, columns, self.left, strict=True):
            longest = max((_cells(line) for cell in column for line in cell.text.split("\n")), default=0)
            words = min(longest, max(LEAST, _word([cell.text for cell in column])))
            self.whole.append(max(longest, _word([head])))
            self.least.append(max(words if left else longest, _word([head])))

    @property
    def fits(self) -> bool:
        return sum(self.least) + len(self.least) - 1 <= self.width

    @cached_property
    def gap(self) -> int:
        return GAP if sum(self.whole) + GAP * (len(self.whole) - 1) <= self.width else 1

    @cached_property
    def widths(self) -> list[int]:
        """Of the columns. Where they are too wide, words give way; where there is room, heads take it."""
        widths = list(self.whole)
        room = self.width - sum(widths) - self.gap * (len(widths) - 1)
        for _ in range(-room):
            loose = [place for place, least in enumerate(self.least) if widths[place] > least]
            if loose:
                widths[max(loose, key=widths.__getitem__)] -= 1
        wanted = [
            max(width, *map(_cells, head.split("\n"))) for width, head in zip(widths, self.heads, strict=True)
        ]
        return wanted if sum(wanted) - sum(widths) <= room else widths

    def lines(self) -> Iterator[Text]:
        for line in zip(*self._headed(), strict=True):
            yield self._line([doc.Cell(text) for text in line], "bold")
        yield _text("─" * min(sum(self.widths) + self.gap * (len(self.widths) - 1), self.width), "dim")
        rows = zip(self.groups, self.rows, strict=True)
        for title, each in groupby(rows, lambda row: row[0]):
            if title:
                yield _text(title, "bold")
            for _, row in each:
                yield from self._row(row)

    def _headed(self) -> list[list[str]]:
        found = []
        for head, width in zip(self.heads, self.widths, strict=True):
            name, _, unit = head.partition("\n")
            lines = [*(wrap(name, width) or [""]), *wrap(unit, width)]
            found.append([line.replace(doc.TIED, " ") for line in lines])
        tall = max(len(lines) for lines in found)
        return [[""] * (tall - len(lines)) + lines for lines in found]

    def _row(self, row: doc.Row) -> Iterator[Text]:
        broken: list[list[str]] = [[] for _ in row]
        for lines, cell, width in zip(broken, row, self.widths, strict=True):
            for part in cell.text.split("\n"):  # spaces at its start are meant
                lines += [part] if _cells(part) <= width else wrap(part, width)
        for number in range(max(map(len, broken))):
            texts = (lines[number] if number < len(lines) else "" for lines in broken)
            yield self._line([replace(cell, text=text) for cell, text in zip(row, texts, strict=True)])

    def _line(self, cells: Sequence[doc.Cell], style: str = "") -> Text:
        line = _text()
        for cell, width, left in zip(cells, self.widths, self.left, strict=True):
            space = " " * (width - _cells(cell.text))
            tone = next((STYLES[word] for word in cell.tone.split() if word in STYLES), style)
            line.append("" if left else space).append(cell.text, tone).append(space if left else "")
            line.append(" " * self.gap)
        line.rstrip()
        return line


def _word(texts: Sequence[str]) -> int:
    return max(
        (min(_cells(word), 2 * LEAST) for text in texts for word in re.split(r"[ \n]", text)), default=0
    )


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
