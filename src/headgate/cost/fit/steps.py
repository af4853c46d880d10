"""StepTable: timed steps as columns, checked, and where each came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headgate.core.errors import InputError

Floats = NDArray[np.float64]
Rows = NDArray[np.bool_]

NOTHING, DECODE, PREFILL, MIXED = 0, 1, 2, 3  # the shape class of a step; NOTHING: the engine stood idle
LONGEST = 60.0  # seconds; a step that took longer was not a step (a laptop slept, a clock was set)
FEWEST = 30  # steps
KINDS = ("nothing", "decode", "prefill", "mixed")


@dataclass(frozen=True)
class StepTable:
    """Timed steps, one entry per step and column; all columns have equal length.

    Rows of one part stand in the order in which the steps ran.
    """

    seconds: Floats
    decodes: Floats
    context: Floats  # KV tokens the decodes read
    prefill: Floats  # prompt tokens
    behind: Floats  # KV tokens already there for those prompts
    prompts: Floats  # prompts in the step; NaN: unknown
    attention: Floats  # sum over prompt chunks of tokens * (start + tokens / 2); NaN: unknown
    before: NDArray[np.int8]  # shape class of the step before: NOTHING, DECODE, PREFILL, MIXED
    busy: Rows  # the next step was scheduled before this one ended: the host was ahead
    part: NDArray[np.int32]  # index into labels: the grid cell or run it came from
    labels: tuple[str, ...] = ("all",)
    dropped: int = 0  # rows left out: no time, or an absurd one

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def kind(self) -> NDArray[np.int8]:
        """The shape class of each step."""
        return shape_class(self.decodes, self.prefill)

    @property
    def tokens(self) -> Floats:
        total: Floats = self.decodes + self.prefill
        return total

    def take(self, rows: Rows | NDArray[np.intp]) -> StepTable:
        """Some of the rows, labels kept."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    def split(self) -> Iterator[tuple[str, StepTable]]:
        """Each part that has rows, by its label."""
        for index in np.unique(self.part):
            yield self.labels[index], self.take(self.part == index)

    def save(self, path: str | Path) -> None:
        """Writes an .npz that `load` reads back equal."""
        columns = {name: getattr(self, name) for name in COLUMNS}
        np.savez_compressed(path, **columns, labels=np.array(self.labels), dropped=np.array(self.dropped))

    @classmethod
    def load(cls, path: str | Path) -> StepTable:
        """A table that `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                columns = {name: stored[name] for name in COLUMNS}
                labels, dropped = stored["labels"].tolist(), int(stored["dropped"])
        except OSError as error:
            fault = error.strerror or "not an .npz file"
            raise InputError(f"step table {path}: {fault}; give one that calibrate wrote") from None
        except (KeyError, ValueError, EOFError, BadZipFile):
            wanted = f"not an .npz with the columns {', '.join(COLUMNS)}"
            raise InputError(f"step table {path}: {wanted}; give one that calibrate wrote") from None
        table = cls.from_columns(columns, labels)
        return replace(table, dropped=table.dropped + dropped)

    @classmethod
    def from_columns(cls, columns: Mapping[str, ArrayLike], labels: Sequence[str] = ("all",)) -> StepTable:
        """From plain columns. `seconds`, `decodes`, `context` and `prefill` must be given.

        Without `behind` nothing lies behind; without `before` it is taken from the row above; without `busy`
        the host was always ahead; without `part` all rows are one. Rows with a clock jump (no time, negative
        time, more than a minute) or nothing in them are left out and counted.
        """
        missing = [name for name in ("seconds", "decodes", "context", "prefill") if name not in columns]
        if missing:
            raise InputError(f"timed steps have no column {missing[0]!r}; known: {', '.join(COLUMNS)}")
        given = {name: np.asarray(values) for name, values in columns.items() if name in COLUMNS}
        count = len(given["seconds"])
        for name, values in given.items():
            if values.shape != (count,):
                raise InputError(f"column {name!r} of timed steps has {values.size} rows, seconds {count}")
        table = _filled(given, count, tuple(labels))
        if count and not 0 <= table.part.min() <= table.part.max() < len(labels):
            raise InputError(f"column 'part' of timed steps must index the {len(labels)} labels")
        _refuse_nonsense(table)
        good = (table.seconds > 0) & (table.seconds <= LONGEST) & (table.tokens > 0)
        kept = table.take(good)
        return replace(kept, dropped=int((~good).sum()))

    def checked(self) -> StepTable:
        """This table, if a cost can be fitted to it."""
        if len(self) < FEWEST:
            raise InputError(
                f"{len(self)} timed steps ({self.dropped} dropped for their times); a fit needs at least "
                f"{FEWEST}, measure longer"
            )
        shapes = np.column_stack((self.decodes, self.context, self.prefill, self.behind))
        if not np.any(shapes != shapes[0]):
            one = f"{shapes[0, 0]:.0f} decodes, {shapes[0, 2]:.0f} prompt tokens"
            raise InputError(f"all {len(self)} timed steps have one shape ({one}); measure other batch sizes")
        if self.dropped > len(self):
            raise InputError(
                f"{self.dropped} steps of {len(self) + self.dropped} have no valid time; fix the clock"
            )
        return self


COLUMNS = tuple(field.name for field in fields(StepTable) if field.name not in ("labels", "dropped"))


def shape_class(decodes: ArrayLike, prefill: ArrayLike) -> NDArray[np.int8]:
    """DECODE, PREFILL, MIXED or NOTHING for each step."""
    has_decodes, has_prefill = np.asarray(decodes) > 0, np.asarray(prefill) > 0
    return (DECODE * has_decodes + PREFILL * has_prefill).astype(np.int8)


def concat(tables: Iterable[StepTable]) -> StepTable:
    """Several tables as one; parts with the same label stay apart."""
    given = list(tables)
    if not given:
        raise InputError("no timed steps at all; measure some")
    offsets = np.cumsum([0, *(len(table.labels) for table in given)])
    parts = [table.part + np.int32(offset) for table, offset in zip(given, offsets, strict=False)]
    columns = {name: np.concatenate([getattr(table, name) for table in given]) for name in COLUMNS}
    columns["part"] = np.concatenate(parts)
    labels = tuple(label for table in given for label in table.labels)
    return StepTable(**columns, labels=labels, dropped=sum(table.dropped for table in given))


def _filled(given: Mapping[str, NDArray[np.generic]], count: int, labels: tuple[str, ...]) -> StepTable:
    """The given columns with their types, the others as `from_columns` says."""
    zero, unknown = np.zeros(count), np.full(count, np.nan)
    defaults = {"behind": zero, "prompts": unknown, "attention": unknown}
    try:
        numbers = {
            name: np.asarray(given.get(name, defaults.get(name)), dtype=np.float64)
            for name in ("seconds", "decodes", "context", "prefill", "behind", "prompts", "attention")
        }
        part = np.asarray(given.get("part", np.zeros(count)), dtype=np.int32)
    except (TypeError, ValueError):
        raise InputError("timed steps hold something that is not a number; fix the file") from None
    alone = numbers["prefill"] == 0
    numbers["prompts"] = np.where(alone, 0.0, numbers["prompts"])
    numbers["attention"] = np.where(alone, 0.0, numbers["attention"])
    if "before" in given:
        before = np.asarray(given["before"], dtype=np.int8)
    else:
        kinds = shape_class(numbers["decodes"], numbers["prefill"])
        same = np.concatenate(([False], part[1:] == part[:-1]))[:count]
        before = np.where(same, np.roll(kinds, 1), NOTHING).astype(np.int8)
    busy = np.asarray(given.get("busy", np.ones(count)), dtype=np.bool_)
    return StepTable(**numbers, before=before, busy=busy, part=part, labels=labels, dropped=0)


def _refuse_nonsense(table: StepTable) -> None:
    for name in ("decodes", "context", "prefill", "behind"):
        values = getattr(table, name)
        bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(bad):
            raise InputError(
                f"row {bad[0]} of the timed steps: {name} is {values[bad[0]]}; must be zero or more"
            )
