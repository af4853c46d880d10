"""What a reproduction says: published numbers beside ours, what came out as published, and why not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headgate.stats.metrics import without_nan

PAPER, REFERENCE, LIMIT = "paper", "ref.", "limit"  # against what: published, our own reference, theory
TIE = 0.01  # differences below this share are ties: no sign is read from them


@dataclass(frozen=True)
class Cell:
    """One published number and ours; NaN where there is none."""

    published: float
    ours: float

    @property
    def ratio(self) -> float:
        """Ours over the published one, NaN where that is zero or missing."""
        return self.ours / self.published if self.published else math.nan


@dataclass(frozen=True)
class Row:
    """A setting, and a cell for each column."""

    setting: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Section:
    """One table. With `shared` all cells of a row have the same published number, shown once.

    With `points` numbers are percentages, and the difference is shown instead of the ratio. `against` is
    whose the other numbers are: only the paper's count as published.
    """

    title: str
    first: str  # what the rows are
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    shared: bool = False
    points: bool = False
    against: str = PAPER

    @property
    def bare(self) -> bool:
        """Whether nothing was published to put beside our numbers."""
        return all(math.isnan(cell.published) for row in self.rows for cell in row.cells)

    def ratios(self) -> list[float]:
        found = (cell.ratio for row in self.rows for cell in row.cells)
        return [ratio for ratio in found if math.isfinite(ratio)]


@dataclass(frozen=True)
class Count:
    """How many of so many came out as the paper, our reference or the theory has them."""

    what: str
    agree: int
    of: int
    against: str = PAPER

    @classmethod
    def of_pairs(cls, what: str, pairs: list[tuple[object, object]], against: str = PAPER) -> Count:
        """How often both of a pair are the same."""
        return cls(what, sum(published == ours for published, ours in pairs), len(pairs), against)


@dataclass(frozen=True)
class Report:
    """All of one experiment."""

    name: str
    title: str
    setup: tuple[str, ...]  # what was run, and what had to be assumed
    sections: tuple[Section, ...]
    counts: tuple[Count, ...]
    remarks: tuple[str, ...]  # where the numbers differ, and why
    interrupted: bool = False  # some runs are missing because somebody stopped it

    def as_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON; what is not known is None."""
        plain = {
            "experiment": self.name,
            "title": self.title,
            "setup": list(self.setup),
            "sections": [_section(section) for section in self.sections],
            "as_published": [
                {"what": count.what, "agree": count.agree, "of": count.of, "against": count.against}
                for count in self.counts
            ],
            "remarks": list(self.remarks),
        }
        document = without_nan(plain)
        assert isinstance(document, dict)
        return document


def sign(value: float, baseline: float) -> int:
    """1 when above the baseline by more than a tie, -1 when below, else 0."""
    if abs(value - baseline) <= TIE * abs(baseline):
        return 0
    return 1 if value > baseline else -1


def sign_pairs(cells: list[tuple[Cell, Cell]]) -> list[tuple[object, object]]:
    """(published, ours) signs of second against first, where the paper has a difference and we have a run."""
    pairs: list[tuple[object, object]] = []
    for first, second in cells:
        published = sign(second.published, first.published)
        if published and math.isfinite(first.ours) and math.isfinite(second.ours):
            pairs.append((published, sign(second.ours, first.ours)))
    return pairs


def spread(values: list[float]) -> str:
    """The smallest and largest, as text."""
    return f"{min(values):.2f} to {max(values):.2f}" if values else "none"


def _section(section: Section) -> dict[str, Any]:
    return {
        "title": section.title,
        "against": section.against,
        "rows": [
            {"setting": row.setting, "column": column, **_cell(cell)}
            for row in section.rows
            for column, cell in zip(section.columns, row.cells, strict=True)
        ],
    }


def _cell(cell: Cell) -> dict[str, float]:
    return {"published": cell.published, "ours": cell.ours, "ratio": cell.ratio}
