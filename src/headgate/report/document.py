"""What a report is made of, before it becomes HTML."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headgate.report.html.markup import Markup


@dataclass(frozen=True)
class Cell:
    """One entry of a table; `value` is what sorting and copying use, where it is not the text."""

    text: str
    value: float | None = None
    tone: str = ""  # "words", "prose", "good", "bad", "best", "level": how it is shown, never the only sign

    @property
    def copied(self) -> str:
        """As it goes into a spreadsheet: the number with all its digits."""
        return self.text if self.value is None else f"{self.value:.6g}"


@dataclass(frozen=True)
class Grid:
    """A table. Heads may have two lines, the second being the unit."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Printed:
    """Text as a terminal shows it, line by line."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A drawing with its data. `look` says in one line what to look for."""

    title: str
    look: str
    drawing: Markup
    data: dict[str, Any]  # what the page's script reads: axes, series
    legend: tuple[tuple[str, str], ...] = ()  # name and CSS class of each entry
    wide: bool = False
    note: str = ""


Block = Grid | Figure | Printed | str


@dataclass(frozen=True)
class Section:
    """A heading with what stands under it."""

    title: str
    blocks: tuple[Block, ...]
    closed: bool = False  # folded away until asked for


@dataclass(frozen=True)
class Chapter:
    """One comparison, run or plan with its verdict."""

    title: str
    verdict: str
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """The whole report."""

    title: str
    about: str  # one line under the title
    chapters: tuple[Chapter, ...]
    made: tuple[tuple[str, str], ...] = ()  # how it was made: names and values
    kind: str = "runs"
    warnings: tuple[str, ...] = field(default=())
