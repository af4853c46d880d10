"""Where a log of steps may be cut so that each piece's time is its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headgate.cost.fit.steps import DECODE, Floats, StepTable

Starts = NDArray[np.intp]

TOGETHER = 8  # equal decode steps in a piece, at most
LONGEST = 12  # rows of a burst, at most


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
        """Rows added up by piece."""
        found: Floats = np.add.reduceat(rows, self.starts, axis=0)
        return found


def cut(table: StepTable, together: int = TOGETHER) -> Cuts:
    """The pieces of a table, decode steps up to `together` at a time; 1 leaves them single."""
    starts = _fine(table)
    if together > 1:
        starts = _merged(table, starts, together)
    return Cuts(
        starts,
        np.add.reduceat(table.seconds, starts),
        np.maximum.reduceat(table.kind, starts),
        _mostly(table, starts),
    )


def _fine(table: StepTable) -> Starts:
    """Before every step of decodes alone, between two parts that both have prompts, in long bursts."""
    quiet = table.prefill == 0
    between = np.concatenate(([True], (table.part[1:] != table.part[:-1]) & ~quiet[:-1]))
    starts, cuts = [0], (quiet | between).tolist()
    for row in range(1, len(table)):
        if cuts[row] or row - starts[-1] >= LONGEST:
            starts.append(row)
    return np.array(starts, dtype=np.intp)


def _merged(table: StepTable, starts: Starts, together: int) -> Starts:
    """Neighbouring pieces of one decode step each, joined within their part."""
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


def _mostly(table: StepTable, starts: Starts) -> NDArray[np.int32]:
    """The part of each piece's longest row."""
    piece = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(table))))
    order = np.lexsort((table.seconds, piece))  # the longest row of each piece comes last
    last = np.append(starts[1:], len(table)) - 1
    found: NDArray[np.int32] = table.part[order[last]]
    return found


def single(table: StepTable, pieces: Cuts) -> Starts:
    """The starts of units: pieces of decode steps as they are, those of bursts step by step."""
    bursts = np.repeat(pieces.kind != DECODE, np.diff(np.append(pieces.starts, len(table))))
    return np.union1d(pieces.starts, np.flatnonzero(bursts))
