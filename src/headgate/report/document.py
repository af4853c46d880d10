"""What a result says: each plan, run or comparison is one document, for `terminal.py` and `html/`."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from shlex import join as shell
from typing import TYPE_CHECKING, Any

from headgate.core.build import build_name
from headgate.core.version import VERSION
from headgate.stats.comparison import Difference
from headgate.stats.figures import Estimate

if TYPE_CHECKING:
    from headgate.report.html.page import Markup

BEST, LEVEL = "*", "="
TIED = "\N{NO-BREAK SPACE}"
ALIKE = "no significant difference"
MARKS = f"{BEST} best, {LEVEL} {ALIKE} from the best; a column without {BEST}: {ALIKE}."


@dataclass(frozen=True)
class Cell:
    """One entry of a table; `value` is what sorting and copying use, where it is not the text."""

    text: str
    value: float | None = None
    tone: str = ""  # "words", "prose", "good", "bad", "best", "level": how it is shown, never the only sign

    @property
    def is_words(self) -> bool:
        return self.tone.split(" ")[0] in ("words", "prose")


Row = tuple[Cell, ...]


def valued(text: str, value: float, tone: str = "") -> Cell:
    return Cell(text, float(value) if isfinite(value) else None, tone)


def share(value: float) -> Cell:
    return valued(percent(value), 100 * value)


def span(rate: Estimate) -> Cell:
    return valued(interval(rate), rate.value)


def row(*entries: Cell | str | float) -> Row:
    """Text stays text, integers are written in full, other numbers with four digits."""

    def cell(entry: Cell | str | float) -> Cell:
        if isinstance(entry, Cell):
            return entry
        if isinstance(entry, str):
            return Cell(entry, tone="words")
        return valued(f"{entry:,}" if isinstance(entry, int) else number(entry), entry)

    return tuple(map(cell, entries))


@dataclass(frozen=True)
class Grid:
    title: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    grouped: bool = False  # rows with the same first cell belong together; a terminal writes it once
    minor: tuple[str, ...] = ()  # heads of columns that a terminal may leave out, the last first
    joined: bool = False  # neighbouring heads with the same first line are one head over several columns


@dataclass(frozen=True)
class Facts:
    rows: Mapping[str, str]


@dataclass(frozen=True)
class Listed:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Figure:
    title: str
    look: str  # in one line what to look for
    drawing: Markup  # SVG
    data: dict[str, Any]  # what the page's script reads: axes, series
    legend: tuple[tuple[str, str], ...] = ()  # name and CSS class of each entry
    wide: bool = False
    note: str = ""


@dataclass(frozen=True)
class Drawn:
    make: Callable[[], Iterable[Grid | Figure | str]]


Block = Grid | Facts | Listed | Code | Figure | Drawn | str
SHOWN, FOLDED, PAGE_ONLY = 0, 1, 2


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]
    depth: int = SHOWN  # FOLDED: details, folded away on a page; PAGE_ONLY: and not on a terminal


@dataclass(frozen=True)
class Chapter:
    """One comparison, run or plan with its answer in a sentence or two."""

    title: str
    verdict: str
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()
    setup: str = ""  # what the answer rests on: card, engine, longest request, arrivals
    answer_first: bool = False  # on a terminal too, where otherwise it stands last, beside the prompt
    alarms: tuple[str, ...] = ()  # before everything: why the figures mean something else than they seem to


@dataclass(frozen=True)
class Page:
    title: str
    about: str  # one line under the title
    chapters: tuple[Chapter, ...]
    made: tuple[tuple[str, str], ...] = ()  # how it was made: names and values
    kind: str = "runs"
    warnings: tuple[str, ...] = ()


def plan_page(
    title: str,
    about: str,
    verdict: str,
    sections: Sequence[Section],
    notes: Iterable[str],
    command: Sequence[str],
    caution: str = "",
    answer_first: bool = False,
    alarms: Iterable[str] = (),
) -> Page:
    """The document of a plan, which has no run: one chapter, with `caution` as its last note."""
    chapter = Chapter(
        title="",
        verdict=verdict,
        sections=tuple(section for section in sections if section.blocks),
        notes=(*map(sentence, notes), *([caution] if caution else [])),
        answer_first=answer_first,
        alarms=tuple(map(sentence, alarms)),
    )
    versions = f"headgate {VERSION} ({build_name()}), Python {platform.python_version()}"
    made = ("Command", shell(["headgate", *command])), ("Versions", versions)
    return Page(title, about, (chapter,), made, kind="plan")


# -- numbers as people read them


def number(value: float) -> str:
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:#.4g}"


def whole(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def signed(percent: float) -> str:
    return f"{percent:+,.0f}" if abs(percent) >= 99.95 else f"{percent:+.1f}"


def interval(estimate: Estimate, scale: float = 1.0) -> str:
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"[{number(estimate.low * scale)}, {number(estimate.high * scale)}]"


def change(found: Difference) -> str:
    percent = found.percent
    if math.isnan(percent.value):
        return "-"
    if percent.low is None or percent.high is None:
        return signed(percent.value)
    return f"{signed(percent.value)} [{signed(percent.low)}, {signed(percent.high)}]"


def time_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 1 else (1000.0, "ms")


def timed(seconds: float) -> str:
    scale, unit = time_unit(seconds)
    return f"{number(seconds * scale)} {unit}"


def fine_time(seconds: float) -> str:
    """In the unit that suits it, down to microseconds; the cost of one token is that small."""
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.4g} {unit}"


def plural(count: int, one: str) -> str:
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}{'' if note.endswith(('.', ':')) else '.'}"
