"""Timed steps as columns, checked; the pieces whose times are their own; the engine they were timed on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
NUMBERS = ("seconds", "decodes", "context", "prefill", "behind", "prompts", "attention", "drafts")
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
    drafts: Floats  # draft tokens that were verified, of all decodes together
    before: NDArray[np.int8]  # shape class of the step before: NOTHING, DECODE, PREFILL, MIXED
    busy: Rows  # the next step was scheduled before this one ended: the host was ahead
    part: NDArray[np.int32]  # index into labels: the grid cell or run it came from
    labels: tuple[str, ...] = ("all",)
    dropped: int = 0  # rows left out: no time, or an absurd one
    exact: bool = False  # the time of each step is its own: bursts need not be summed

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def kind(self) -> NDArray[np.int8]:
        return shape_class(self.decodes, self.prefill)

    @property
    def tokens(self) -> Floats:
        return self.decodes + self.prefill

    def take(self, rows: Rows | NDArray[np.intp]) -> StepTable:
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    def save(self, path: str | Path) -> None:
        columns = {name: getattr(self, name) for name in COLUMNS if name != "drafts" or self.drafts.any()}
        np.savez_compressed(path, **columns, labels=np.array(self.labels), dropped=np.array(self.dropped))

    @classmethod
    def load(cls, path: str | Path) -> StepTable:
        try:
            with np.load(path, allow_pickle=False) as stored:
                columns = {name: stored[name] for name in COLUMNS if name != "drafts" or name in stored}
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

        Without `behind` nothing lies behind; without `drafts` none were verified; without `before` it is
        taken from the row above; without `busy` the host was always ahead; without `part` all rows are one.
        Rows with a clock jump (no time, negative time, more than a minute) or nothing in them are left out
        and counted.
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
        for name in ("decodes", "context", "prefill", "behind", "drafts"):
            values = getattr(table, name)
            bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
            if len(bad):
                raise InputError(
                    f"row {bad[0]} of the timed steps: {name} is {values[bad[0]]}; must be zero or more"
                )
        good = (table.seconds > 0) & (table.seconds <= LONGEST) & (table.tokens > 0)
        kept = table.take(good)
        return replace(kept, dropped=int((~good).sum()))

    def checked(self) -> StepTable:
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


def shape_class(decodes: ArrayLike, prefill: ArrayLike) -> NDArray[np.int8]:
    has_decodes, has_prefill = np.asarray(decodes) > 0, np.asarray(prefill) > 0
    return (DECODE * has_decodes + PREFILL * has_prefill).astype(np.int8)


def _filled(given: Mapping[str, NDArray[np.generic]], count: int, labels: tuple[str, ...]) -> StepTable:
    zero, unknown = np.zeros(count), np.full(count, np.nan)
    defaults = {"behind": zero, "drafts": zero, "prompts": unknown, "attention": unknown}
    try:
        numbers = {
            name: np.asarray(given.get(name, defaults.get(name)), dtype=np.float64) for name in NUMBERS
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
    return StepTable(**numbers, before=before, busy=busy, part=part, labels=labels, dropped=0, exact=False)


COLUMNS = tuple(field.name for field in fields(StepTable) if field.name not in ("labels", "dropped", "exact"))


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
    dropped, exact = sum(table.dropped for table in given), all(table.exact for table in given)
    return StepTable(**columns, labels=labels, dropped=dropped, exact=exact)


# -- pieces: where a log of steps may be cut

Starts = NDArray[np.intp]

TOGETHER = 8  # equal decode steps in a piece, at most
LONGEST_PIECE = 12  # rows of a burst, at most


@dataclass(frozen=True)
class Cuts:
    """Runs of consecutive rows whose times are summed.

    An engine that schedules ahead sees a step end late while it launches one with prompts, which takes tens
    of milliseconds: the step before looks longer and the one with prompts shorter, by as much. So a log is
    cut only before steps of decodes alone, whose launch takes next to nothing: a burst of prompts and the
    decode step before it are one piece, and their sum is right. A burst is cut where another part begins, for
    both ends are late there, and after twelve rows, where it no longer matters. A piece belongs to the part
    in which it spent most time.
    """

    starts: Starts
    seconds: Floats
    kind: NDArray[np.int8]  # DECODE, PREFILL (some prompts alone) or MIXED (some mixed step)
    part: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.starts)

    def sums(self, rows: Floats) -> Floats:
        return np.asarray(np.add.reduceat(rows, self.starts, axis=0))


def cut(table: StepTable, together: int = TOGETHER) -> Cuts:
    """The pieces of a table, decode steps up to `together` at a time; 1 leaves them single."""
    starts = _fine(table)
    starts = _merged(table, starts, together) if together > 1 else starts
    seconds, kind = np.add.reduceat(table.seconds, starts), np.maximum.reduceat(table.kind, starts)
    piece = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(table))))
    order = np.lexsort((table.seconds, piece))  # the longest row of each piece comes last
    last = np.append(starts[1:], len(table)) - 1
    return Cuts(starts, seconds, kind, np.asarray(table.part[order[last]]))


def _fine(table: StepTable) -> Starts:
    """Before every step of decodes alone, between two parts that both have prompts, in long bursts."""
    if table.exact:
        return np.arange(len(table), dtype=np.intp)
    quiet = table.prefill == 0
    between = np.concatenate(([True], (table.part[1:] != table.part[:-1]) & ~quiet[:-1]))
    starts, cuts = [0], (quiet | between).tolist()
    for row in range(1, len(table)):
        if cuts[row] or row - starts[-1] >= LONGEST_PIECE:
            starts.append(row)
    return np.array(starts, dtype=np.intp)


def _merged(table: StepTable, starts: Starts, together: int) -> Starts:
    alone = (np.diff(np.append(starts, len(table))) == 1) & (table.kind[starts] == DECODE)
    part, alike = table.part[starts].tolist(), alone.tolist()
    kept, held = [0], 1
    for piece in range(1, len(starts)):
        joins = alike[piece] and alike[piece - 1] and part[piece] == part[piece - 1]
        if joins and held < together:
            held += 1
        else:
            kept.append(piece)
            held = 1
    return starts[np.array(kept, dtype=np.intp)]


def single(table: StepTable, pieces: Cuts) -> Starts:
    """The starts of units: pieces of decode steps as they are, those of bursts step by step."""
    bursts = np.repeat(pieces.kind != DECODE, np.diff(np.append(pieces.starts, len(table))))
    return np.union1d(pieces.starts, np.flatnonzero(bursts))


@dataclass(frozen=True)
class About:
    """GPU, model, versions, settings and limits of the engine that was timed; all of it goes on the card."""

    name: str  # of the card
    gpu: str
    model: str
    kv_tokens: int
    max_model_len: int
    max_running: int
    max_batch_tokens: int
    block: int = 16
    versions: dict[str, str] = field(default_factory=dict)  # {"vllm": "0.26.0", "torch": ...}
    settings: dict[str, str] = field(default_factory=dict)  # flags of the engine that change step times
    model_shape: dict[str, int] = field(default_factory=dict)  # layers, hidden, heads, kv_heads, ...
    date: str = "unknown"
    source: str = "headgate calibrate"
