"""Coefficients of one law, by least squares on relative errors, none negative, deaf to outliers; which law.

The law is chosen by cross-validation over parts: the simplest within one standard error of the best.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls  # type: ignore[import-untyped]

from headgate.cost.fit.family import (
    PER_EXPERT,
    TILES,
    Law,
    gpu_columns,
    host_can_show,
    host_columns,
    longer,
    offered,
    offered_floors,
)
from headgate.cost.fit.steps import DECODE, KINDS, Cuts, Floats, Rows, StepTable, cut, single

HUBER = 2.0  # residuals beyond so many deviations of their region count less
ROUNDS = 5  # of reweighting
TURNS = 6  # of deciding which steps the host held up
GUESSES = ((0.15, 0.0), (0.5, 0.0), (0.5, 0.3), (0.5, 0.6))  # shares of decode steps and others it held up
FEW_HELD = 8  # units of decodes alone that the host must hold up for its price to be known
MOST_BOOST = 10.0  # a region with few pieces weighs at most so much more than its pieces
MOST_LEVEL = 0.02  # how far the level may be corrected
WILD = 0.5  # relative error of pieces that do not count for the level
WORST = 0.2  # a piece's relative error counts no more than this when laws are compared
TINY = 1e-9


class Problem:
    """A table cut into pieces, with the columns of laws computed once.

    Between rows and pieces lie units: runs of equal decode steps that are held up by the host all or none,
    and single steps with prompts. Sums of their columns are all a fit needs.
    """

    def __init__(self, table: StepTable, graph: int = 0) -> None:
        self.table = table
        self.graph = graph
        self.pieces = cut(table)
        units = single(table, self.pieces)
        self._units = units
        self._piece_starts = np.searchsorted(units, self.pieces.starts)
        self._piece_of_unit = np.searchsorted(self._piece_starts, np.arange(len(units)), side="right") - 1
        self._host = np.add.reduceat(host_columns(table, graph), units, axis=0)
        self._laws: dict[Law, tuple[Floats, Floats]] = {}
        self._held: dict[Law, Rows] = {}  # units that the host holds up
        self._known: list[Rows] = []  # what was found for the laws that others grew from
        self._balance = _balance(self.pieces.kind)
        self._quiet = table.kind[units] == DECODE
        self._work = (table.context + 800.0 * table.tokens)[units]  # about the order of their times
        self._guesses = [self._lightest(*shares) for shares in GUESSES]
        self._starts = self._guesses  # where to begin with a law not seen before

    def grow_from(self, law: Law) -> None:
        """The next laws add something to this one: what was kept of others is dropped."""
        self._laws.clear()
        if law in self._held:
            self._known.append(self._held[law])
        self._starts = self._known[-1:] or self._guesses
        self._held.clear()

    def grown(self) -> None:
        """The law is chosen: from now on nothing that is known of the host is left untried."""
        self._held.clear()
        self._starts = [*self._guesses, *self._known]

    def predicted(self, law: Law, found: Floats) -> Floats:
        """Seconds of each piece by a law with these coefficients."""
        units, sums = self._columns(law)
        if not law.host:
            plain: Floats = sums @ found
            return plain
        return self._summed(longer(law, units, self._host, found))

    def rows(self, law: Law, found: Floats) -> Floats:
        return longer(law, gpu_columns(self.table, law), host_columns(self.table, self.graph), found)

    def solve(self, law: Law, use: Rows, weights: Floats | None = None) -> tuple[Floats, Floats]:
        """Coefficients from the pieces in use, and the weight each piece ended with.

        With a host, steps are given to whichever of GPU and host takes longer, by all pieces, whichever are
        in use: from a part of them the sides would not be found again. `weights` (by piece) are taken as they
        are, without looking for outliers.
        """
        if not law.host:
            found, ended = self._robust(self._columns(law)[1], use, weights)
        else:
            if law not in self._held:
                self._held[law] = self._held_up(law)
            found, ended = self._given(law, self._held[law], use, weights)
        real, priced = self.pieces.seconds[use], self.predicted(law, found)[use]
        return found * level(real, priced, self.pieces.kind[use], 1 - MOST_LEVEL, 1 + MOST_LEVEL), ended

    def loss(self, law: Law) -> float:
        """The mean relative error of the pieces the law was fitted to, all of them."""
        return self._error(law, self.solve(law, np.ones(len(self.pieces), bool))[0])

    def _columns(self, law: Law) -> tuple[Floats, Floats]:
        if law not in self._laws:
            units: Floats = np.add.reduceat(gpu_columns(self.table, law), self._units, axis=0)
            self._laws[law] = units, self._summed(units)
        return self._laws[law]

    def _summed(self, units: Floats) -> Floats:
        found: Floats = np.add.reduceat(units, self._piece_starts, axis=0)
        return found

    def _lightest(self, decodes: float, prompts: float) -> Rows:
        """Units with the least work: a share of those of decodes alone, a share of those with prompts."""
        held = np.zeros(len(self._work), bool)
        for units, share in ((self._quiet, decodes), (~self._quiet, prompts)):
            if share and units.any():
                held |= units & (self._work <= np.quantile(self._work[units], share))
        return held

    def _held_up(self, law: Law) -> Rows:
        """Units that the host holds up, by all pieces: of all turns from all starts the best."""
        everything = np.ones(len(self.pieces), bool)
        units, _ = self._columns(law)
        count = units.shape[1]
        best, least = np.zeros(len(units), bool), np.inf
        for held in self._starts:
            for _ in range(TURNS):
                found, _ = self._given(law, held, everything, None)
                error = self._error(law, found)
                if error < least:
                    best, least = held, error
                before = held
                held = self._host @ found[count:] > units @ np.where(law.outside, 0.0, found[:count])
                if not np.any(held != before):
                    break
        return best

    def _given(self, law: Law, held: Rows, use: Rows, weights: Floats | None) -> tuple[Floats, Floats]:
        """Coefficients when the host holds up these units, and the weights of the pieces."""
        units, _ = self._columns(law)
        of_gpu = np.where(held[:, None] & ~law.outside, 0.0, units)
        of_host = self._host * held[:, None]
        if np.sum(held & self._quiet & use[self._piece_of_unit]) < FEW_HELD:
            of_host[:, :2] = 0.0  # steps with prompts cannot tell what the host takes for others
        return self._robust(self._summed(np.hstack((of_gpu, of_host))), use, weights)

    def _error(self, law: Law, found: Floats) -> float:
        errors = np.minimum(np.abs(self.predicted(law, found) / self.pieces.seconds - 1), WORST)
        return float(np.average(errors, weights=self._balance))

    def _robust(self, sums: Floats, use: Rows, weights: Floats | None) -> tuple[Floats, Floats]:
        relative = sums[use] / self.pieces.seconds[use, None]
        ended = np.zeros(len(use))
        if weights is not None:
            ended[use] = weights[use]
            return _least_squares(relative, weights[use]), ended
        base, kinds = self._balance[use], self.pieces.kind[use]
        now = base
        for _ in range(ROUNDS):
            found = _least_squares(relative, now)
            now = base * _trust(np.abs(relative @ found - 1), kinds)
        ended[use] = now
        return found, ended


def level(real: Floats, priced: Floats, kinds: NDArray[np.int8], low: float, high: float) -> float:
    """A factor that makes sums right: what a fit ignores as jitter takes time all the same."""
    masks = [(np.abs(priced / real - 1) < WILD) & (kinds == kind) for kind in np.unique(kinds)]
    ratios = [real[sane].sum() / priced[sane].sum() for sane in masks if sane.any()]
    return min(max(float(np.mean(ratios)) if ratios else 1.0, low), high)


def _least_squares(relative: Floats, weight: Floats) -> Floats:
    """Sum of weight * (relative @ x - 1)**2 over x >= 0, by its normal equations: they are small."""
    weighted = relative * weight[:, None]
    square, right = weighted.T @ relative, weighted.sum(axis=0)
    scale = np.sqrt(np.diag(square))
    scale[scale == 0] = 1.0
    square = square / np.outer(scale, scale) + TINY * np.eye(len(scale))
    factor = np.linalg.cholesky(square)
    found, _ = nnls(factor.T, np.linalg.solve(factor, right / scale))
    return np.asarray(found / scale, dtype=np.float64)


def _trust(residual: Floats, kinds: NDArray[np.int8]) -> Floats:
    """Huber's weights, with the spread of each region."""
    trust = np.ones(len(residual))
    for kind in range(1, len(KINDS)):
        here = kinds == kind
        if here.any():
            spread = max(1.4826 * float(np.median(residual[here])), 1e-4)
            trust[here] = np.minimum(1.0, HUBER * spread / np.maximum(residual[here], 1e-12))
    return trust


def _balance(kinds: NDArray[np.int8]) -> Floats:
    """Weights that let regions count alike, whatever the number of their pieces, within limits."""
    weight = np.ones(len(kinds))
    counts = {kind: int((kinds == kind).sum()) for kind in np.unique(kinds)}
    most = max(counts.values(), default=1)
    for kind, count in counts.items():
        weight[kinds == kind] = min(most / count, MOST_BOOST)
    return weight


# -- which law of the family

Whole = NDArray[np.int64]

FOLDS = 8
STRETCHES = 32  # blocks into which a table of few parts is cut
HOPELESS = 2  # additions in a row without gain end the search
GAIN = 1e-3  # of the loss: less is no gain,
NOTHING = 1e-4  # nor is less than this, whatever the loss
INTERFERENCE = ("mixed_constant", "mixed_per_context", "mixed_per_decode", "per_meeting")


@dataclass(frozen=True)
class TriedLaw:
    """A law and its held-out errors: one number per part and region, so that laws can be paired."""

    law: Law
    losses: Floats

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


@dataclass(frozen=True)
class ChosenLaw:
    """The law chosen, and the path it was chosen from: each the best addition, the last the choice."""

    law: Law
    path: tuple[TriedLaw, ...]


def choose(problem: Problem, experts: tuple[int, int] = (0, 0)) -> ChosenLaw:
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
    path = [TriedLaw(law, _held_out(problem, law)) for law in roots]
    idle = 0
    while idle < HOPELESS:
        groups = _additions(path[-1].law, extras, floors, host)
        if not groups:
            break
        laws = [min(group, key=problem.loss) if len(group) > 1 else group[0] for group in groups]
        grown = [TriedLaw(law, _held_out(problem, law)) for law in laws]
        best = min(grown, key=lambda tried: tried.loss)
        problem.grow_from(best.law)
        least = min(tried.loss for tried in path)
        idle = 0 if best.loss < least - max(GAIN * least, NOTHING) else idle + 1
        path.append(best)
    problem.grown()
    chosen = _corrected(problem, _simplest(path), extras)
    return ChosenLaw(chosen.law, (*path, chosen))


def unseen(problem: Problem, law: Law) -> Floats:
    """Seconds the law gives each row when it is fitted without the row's own part, nor one of its label.

    A cell that two grids visited is two parts: a fit that had seen one of them would know the other.
    """
    told = np.zeros(len(problem.table))
    labels = problem.table.labels
    first = np.array([labels.index(label) for label in labels], dtype=np.int32)  # parts of one label are one
    folds = _blocks(replace(problem.pieces, part=first[problem.pieces.part])) % FOLDS
    by_row = np.repeat(folds, np.diff(np.append(problem.pieces.starts, len(told))))
    for number in np.unique(folds):
        found, _ = problem.solve(law, folds != number)
        rows = by_row == number
        told[rows] = problem.rows(law, found)[rows]
    return told


def _simplest(path: list[TriedLaw]) -> TriedLaw:
    best = min(path, key=lambda tried: tried.loss)
    for tried in path:
        worse = tried.losses - best.losses
        error = float(worse.std(ddof=1)) / len(worse) ** 0.5 if len(worse) > 1 else 0.0
        if float(worse.mean()) <= max(error, NOTHING):
            return tried
    return best


def _corrected(problem: Problem, tried: TriedLaw, extras: tuple[str, ...]) -> TriedLaw:
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
        again = [TriedLaw(law, _held_out(problem, law)) for law in laws]
        spare = [other for other in again[: len(fewer)] if other.loss <= tried.loss + NOTHING]
        better = [other for other in again[len(fewer) :] if other.loss < tried.loss - NOTHING]
        if not (spare or better):
            return tried
        tried = min(spare or better, key=lambda other: other.loss)


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
