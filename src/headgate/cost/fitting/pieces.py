"""Where a log of steps may be cut so that each piece's time is its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headgate.cost.fitting.steps import DECODE, Floats, StepTable

Starts = NDArray[np.intp]

TOGETHER = 8  # rows that make a piece at most


@dataclass(frozen=True)
class Pieces:
    """Runs of consecutive rows whose times are summed.

    An engine that schedules ahead sees a step end late while it launches one with prompts, which takes tens
    of milliseconds: the step before looks longer and the one with prompts shorter, by as much. So a log is
    cut only before steps of decodes alone, whose launch takes next to nothing: a burst of prompts and the
    decode step before it are one piece, and their sum is right. A burst that does not end is cut after eight
    rows, where the error no longer matters.
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


def cut(table: StepTable, together: int = TOGETHER) -> Pieces:
    """The pieces of a table, decode steps up to `together` at a time; 1 leaves them single."""
    starts = _fine(table)
    if together > 1:
        starts = _merged(table, starts, together)
    return Pieces(
        starts,
        np.add.reduceat(table.seconds, starts),
        np.maximum.reduceat(table.kind, starts),
        table.part[starts],
    )


def _broken(table: StepTable) -> NDArray[np.bool_]:
    """Rows that do not follow the row above: another part, or the step before was another."""
    part, kind = table.part, table.kind
    follows = (part[1:] == part[:-1]) & (table.before[1:] == kind[:-1])
    return np.concatenate(([True], ~follows))


def _fine(table: StepTable) -> Starts:
    starts, broken, quiet = [0], _broken(table).tolist(), (table.prefill == 0).tolist()
    for row in range(1, len(table)):
        if broken[row] or quiet[row] or row - starts[-1] >= TOGETHER:
            starts.append(row)
    return np.array(starts, dtype=np.intp)


def _merged(table: StepTable, starts: Starts, together: int) -> Starts:
    """Neighbouring pieces of one decode step each, joined."""
    ends = np.append(starts[1:], len(table))
    broken = _broken(table)
    single = ((ends - starts == 1) & (table.kind[starts] == DECODE)).tolist()
    kept, held = [0], 1
    for piece in range(1, len(starts)):
        if single[piece] and single[piece - 1] and held < together and not broken[starts[piece]]:
            held += 1
        else:
            kept.append(piece)
            held = 1
    return starts[np.array(kept, dtype=np.intp)]


def single(table: StepTable, pieces: Pieces) -> Starts:
    """The starts of units: pieces of decode steps as they are, steps with prompts and beside them one by one."""
    bursts = np.repeat(pieces.kind != DECODE, np.diff(np.append(pieces.starts, len(table))))
    return np.union1d(pieces.starts, np.flatnonzero(bursts))
