"""Coefficients of one law, by least squares on relative errors, none negative, deaf to outliers; which law.

The law is chosen by cross-validation over parts: the simplest within one standard error of the best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls  # type: ignore[import-untyped]

from headgate.cost.fit.steps import DECODE, KINDS, MIXED, PREFILL, Cuts, Floats, Rows, StepTable, cut, single
from headgate.cost.laws.work import HOST, WorkTerms, experts_met

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
        units, sums = self._columns(law)
        if not law.host:
            return np.asarray(sums @ found)
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
        return self._error(law, self.solve(law, np.ones(len(self.pieces), bool))[0])

    def _columns(self, law: Law) -> tuple[Floats, Floats]:
        if law not in self._laws:
            units: Floats = np.add.reduceat(gpu_columns(self.table, law), self._units, axis=0)
            self._laws[law] = units, self._summed(units)
        return self._laws[law]

    def _summed(self, units: Floats) -> Floats:
        return np.asarray(np.add.reduceat(units, self._piece_starts, axis=0))

    def _lightest(self, decodes: float, prompts: float) -> Rows:
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


# -- the family of laws: features of a step, and which of them a law has

Column = Callable[[StepTable], Floats]


def _mixed(table: StepTable) -> Floats:
    return np.asarray(table.kind == MIXED, dtype=np.float64)


# What may be added to the affine law, by the name of its coefficient in WorkTerms; none may be negative.
EXTRAS: Mapping[str, Column] = {
    "per_context": lambda table: table.context + table.behind,
    "per_attention": lambda table: table.attention,
    "prompt_constant": lambda table: (table.prefill > 0).astype(np.float64),
    "per_prompt": lambda table: table.prompts,
    "mixed_constant": _mixed,
    "mixed_per_context": lambda table: _mixed(table) * table.context,
    "mixed_per_decode": lambda table: _mixed(table) * table.decodes,
    "per_meeting": lambda table: table.decodes * table.prefill / table.tokens,
    "switch": lambda table: ((table.kind == DECODE) & (table.before == PREFILL)).astype(np.float64),
}
PER_EXPERT = "per_expert"  # the one extra that needs to know the model
AFFINE = ("constant", "per_token", "per_decode")
LEAST_TOKENS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 384)  # tried for the reading of the weights
SMALL = 32  # decodes
TILES = (8, 16, 32, 64, 128, 256)
MEANING = {
    "constant": "per step",
    "per_token": "per token, decodes and prompts",
    "per_decode": "per decode, beyond a token",
    "per_context": "per KV token read",
    "per_attention": "per pair of prompt tokens",
    "prompt_constant": "per step with prompts",
    "per_prompt": "per prompt",
    "mixed_constant": "per mixed step",
    "mixed_per_context": "per KV token read in a mixed step, more",
    "mixed_per_decode": "per decode in a mixed step, more",
    "per_meeting": "per decode x prompt token / tokens, mixed",
    "switch": "first decode step after prompts alone",
    "per_expert": "per expert met in a layer",
    "host_constant": "host, per step",
    "host_per_request": "host, per request",
    "host_prompts": "host, per step with prompts",
    "host_ungraphed": "host, per step beyond the largest graph",
}


@dataclass(frozen=True)
class Law:
    """Which features a law has: a member of the family, without its coefficients."""

    extras: tuple[str, ...] = ()
    least_tokens: int = 0
    tile: int = 1
    host: bool = False
    experts: tuple[int, int] = (0, 0)  # of a layer, and those each token is sent to
    graph: int = 0  # tokens of the largest CUDA graph, 0 where none is known

    def __str__(self) -> str:
        words = ["affine", *self.extras]
        words += [f"least_tokens={self.least_tokens}"] if self.least_tokens else []
        words += [f"tile={self.tile}"] if self.tile > 1 else []
        return " + ".join([*words, "host"] if self.host else words)

    @property
    def names(self) -> tuple[str, ...]:
        return (*AFFINE, *self.extras, *(HOST if self.host else ()))

    @property
    def outside(self) -> Rows:
        """Which GPU columns come on top of whichever takes longer: the change of phase."""
        return np.array([name == "switch" for name in (*AFFINE, *self.extras)])

    @property
    def size(self) -> int:
        return len(self.names) + (self.least_tokens > 0) + (self.tile > 1)

    def terms(self, found: Floats) -> WorkTerms:
        values = {name: float(f"{value:.6g}") for name, value in zip(self.names, found, strict=True)}
        experts, each = self.experts if PER_EXPERT in self.extras else (0, 0)
        return WorkTerms(
            **values,
            least_tokens=self.least_tokens,
            tile=self.tile,
            experts=experts,
            experts_per_token=each,
            graph=self.graph if self.host else 0,
        )


def gpu_columns(table: StepTable, law: Law) -> Floats:
    # whole tiles, and not fewer tokens than the weights' reading takes
    charged = np.maximum(np.ceil(table.tokens / law.tile) * law.tile, law.least_tokens)
    columns = [np.ones(len(table)), charged, table.decodes]
    for name in law.extras:
        known = name != PER_EXPERT
        columns.append(EXTRAS[name](table) if known else experts_met(table.tokens, *law.experts))
    return np.column_stack(columns)


def host_columns(table: StepTable, graph: int) -> Floats:
    prompting = table.prefill > 0
    prompts = np.where(np.isnan(table.prompts), prompting, table.prompts)
    ungraphed = (table.tokens > graph) & (graph > 0)
    return np.column_stack((np.ones(len(table)), table.decodes + prompts, prompting, ungraphed))


def longer(law: Law, gpu: Floats, host: Floats, found: Floats) -> Floats:
    """Seconds of rows with these columns: GPU or host, whichever takes longer, and the change of phase."""
    own = found[: gpu.shape[1]]
    spent: Floats = gpu @ np.where(law.outside, 0.0, own)
    if law.host:
        spent = np.maximum(spent, host @ found[gpu.shape[1] :])
    return spent + gpu @ np.where(law.outside, own, 0.0)


def seconds(terms: WorkTerms, table: StepTable) -> Floats:
    extras = tuple(name for name in (*EXTRAS, PER_EXPERT) if getattr(terms, name) > 0)
    experts = (terms.experts, terms.experts_per_token)
    law = Law(extras, terms.least_tokens, terms.tile, True, experts, terms.graph)
    found = np.array([getattr(terms, name) for name in law.names])
    return longer(law, gpu_columns(table, law), host_columns(table, terms.graph), found)


def offered(table: StepTable) -> tuple[str, ...]:
    """Extras the table can identify: known in every row, and present in more than one part."""
    columns = {name: column(table) for name, column in EXTRAS.items()}
    finite = {name: values for name, values in columns.items() if np.isfinite(values).all()}
    return tuple(name for name, values in finite.items() if _in_two_parts(table, values > 0))


def host_can_show(table: StepTable) -> bool:
    """Were small batches timed, in two parts? Only there can host and GPU be separated."""
    return _in_two_parts(table, (table.kind == DECODE) & (table.decodes <= SMALL))


def offered_floors(table: StepTable) -> tuple[int, ...]:
    """Numbers of tokens that may be the least charged for: half as many decodes were timed, in two parts.

    Without them a floor would be a guess about batches that were not timed.
    """
    alone = table.kind == DECODE
    below = {least: alone & (table.tokens <= least / 2) for least in LEAST_TOKENS}
    return tuple(least for least, rows in below.items() if _in_two_parts(table, rows))


def _in_two_parts(table: StepTable, rows: Rows) -> bool:
    """Whether these rows are of two parts at least, or of the only one there is."""
    return len(np.unique(table.part[rows])) >= min(2, len(np.unique(table.part)))
