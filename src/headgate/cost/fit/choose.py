"""Which law of the family: cross-validation over parts, and the simplest within one standard error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headgate.cost.fit.cuts import Cuts
from headgate.cost.fit.family import PER_EXPERT, TILES, Law, host_can_show, offered, offered_floors
from headgate.cost.fit.solve import WORST, Problem
from headgate.cost.fit.steps import KINDS, Floats

Whole = NDArray[np.int64]

FOLDS = 8
STRETCHES = 32  # blocks into which a table of few parts is cut
HOPELESS = 2  # additions in a row without gain end the search
GAIN = 1e-3  # of the loss: less is no gain,
NOTHING = 1e-4  # nor is less than this, whatever the loss


INTERFERENCE = ("mixed_constant", "mixed_per_context", "mixed_per_decode", "per_meeting")


@dataclass(frozen=True)
class Tried:
    """A law and its held-out errors: one number per part and region, so that laws can be paired."""

    law: Law
    losses: Floats

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


@dataclass(frozen=True)
class Choice:
    """The law chosen, and the path it was chosen from: each the best addition, the last the choice."""

    law: Law
    path: tuple[Tried, ...]


def choose(problem: Problem, experts: tuple[int, int] = (0, 0)) -> Choice:
    """Greedy from the affine law and KV reads on; then the smallest within one standard error of the best.

    The error is that of pieces of parts that the fit had not seen; the standard error is that of the
    difference to the best law, paired by part and region. The size of a tile and of the least batch is the
    one that fits best, not one more thing to hold out. Neighbouring steps are alike, so holding out rows
    instead of parts would prefer any law that can follow noise.
    """
    extras, floors, host = offered(problem.table), offered_floors(problem.table), host_can_show(problem.table)
    extras += (PER_EXPERT,) if experts[0] else ()
    roots = [Law(experts=experts, graph=problem.graph)]
    if "per_context" in extras:
        roots.append(replace(roots[0], extras=("per_context",)))
    path = [Tried(law, _held_out(problem, law)) for law in roots]
    idle = 0
    while idle < HOPELESS:
        groups = _additions(path[-1].law, extras, floors, host)
        if not groups:
            break
        laws = [min(group, key=problem.loss) if len(group) > 1 else group[0] for group in groups]
        grown = [Tried(law, _held_out(problem, law)) for law in laws]
        best = min(grown, key=lambda tried: tried.loss)
        problem.grow_from(best.law)
        least = min(each.loss for each in path)
        idle = 0 if best.loss < least - max(GAIN * least, NOTHING) else idle + 1
        path.append(best)
    problem.grown()
    chosen = _corrected(problem, _simplest(path), extras)
    return Choice(chosen.law, (*path, chosen))


def unseen(problem: Problem, law: Law) -> Floats:
    """Seconds the law gives each row when it is fitted without the row's own part, nor one of its label.

    A cell that two grids visited is two parts: a fit that had seen one of them would know the other.
    """
    told = np.zeros(len(problem.table))
    folds = _blocks(_labelled(problem)) % FOLDS
    by_row = np.repeat(folds, np.diff(np.append(problem.pieces.starts, len(told))))
    for number in np.unique(folds):
        found, _ = problem.solve(law, folds != number)
        rows = by_row == number
        told[rows] = problem.rows(law, found)[rows]
    return told


def _simplest(path: list[Tried]) -> Tried:
    best = min(path, key=lambda tried: tried.loss)
    for tried in path:
        worse = tried.losses - best.losses
        error = float(worse.std(ddof=1)) / len(worse) ** 0.5 if len(worse) > 1 else 0.0
        if float(worse.mean()) <= max(error, NOTHING):
            return tried
    return best


def _corrected(problem: Problem, tried: Tried, extras: tuple[str, ...]) -> Tried:
    """Without what later additions have made superfluous, and with the best of the ways to say the same.

    The greedy path may take what stands for another feature before that one comes.
    """
    while True:
        law = tried.law
        fewer = [replace(law, extras=tuple(x for x in law.extras if x != name)) for name in law.extras]
        fewer += [replace(law, host=False)] if law.host else []
        others = [
            replace(law, extras=tuple(other if x == name else x for x in law.extras))
            for name in INTERFERENCE
            for other in INTERFERENCE
            if name in law.extras and other in extras and other not in law.extras
        ]
        laws = [*fewer, *others]
        if not laws:
            return tried
        found = [Tried(each, _held_out(problem, each)) for each in laws]
        spare = [each for each in found[: len(fewer)] if each.loss <= tried.loss + NOTHING]
        better = [each for each in found[len(fewer) :] if each.loss < tried.loss - NOTHING]
        if not (spare or better):
            return tried
        tried = min(spare or better, key=lambda each: each.loss)


def _additions(law: Law, extras: tuple[str, ...], floors: tuple[int, ...], host: bool) -> list[list[Law]]:
    """The law with one thing more; a list for each thing, with one law for each value it may have."""
    groups = [[replace(law, extras=(*law.extras, name))] for name in extras if name not in law.extras]
    if not law.least_tokens and floors:
        groups.append([replace(law, least_tokens=least) for least in floors])
    if law.tile == 1:
        groups.append([replace(law, tile=tile) for tile in TILES])
    if host and not law.host:
        groups.append([replace(law, host=True)])
    return groups


def _labelled(problem: Problem) -> Cuts:
    """The pieces, parts of one label being one part."""
    labels = problem.table.labels
    first = np.array([labels.index(label) for label in labels], dtype=np.int32)
    return replace(problem.pieces, part=first[problem.pieces.part])


def _blocks(pieces: Cuts) -> Whole:
    """What is held out together: a part, or a stretch of pieces where parts are few."""
    parts, index = np.unique(pieces.part, return_inverse=True)
    if len(parts) >= FOLDS // 2:
        return np.asarray(index, dtype=np.int64)
    return np.arange(len(pieces), dtype=np.int64) * STRETCHES // len(pieces)


def _held_out(problem: Problem, law: Law) -> Floats:
    """The mean relative error of each block and region, fitted without the blocks of its fold."""
    pieces, blocks = problem.pieces, _blocks(problem.pieces)
    folds = blocks % FOLDS
    errors = np.zeros(len(pieces))
    for number in np.unique(folds):
        out = folds == number
        found, _ = problem.solve(law, ~out)
        predicted = problem.predicted(law, found)
        errors[out] = np.minimum(np.abs(predicted / pieces.seconds - 1), WORST)[out]
    _, unit = np.unique(blocks * len(KINDS) + pieces.kind, return_inverse=True)
    means: Floats = np.bincount(unit, errors) / np.bincount(unit)
    return means
