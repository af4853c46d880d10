"""A cost card from timed steps: the law that fits best, its host, and how far both are from unseen steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls  # type: ignore[import-untyped]

from headgate.core.errors import InputError
from headgate.cost.card import Card, GridCell, Provenance, Region
from headgate.cost.fit.solve import MEANING, ROUNDS, ChosenLaw, Law, Problem, choose, seconds, unseen
from headgate.cost.fit.steps import DECODE, KINDS, About, Floats, StepTable, cut
from headgate.cost.fit.steps import FEWEST as FEWEST_TIMED
from headgate.cost.laws.terms import DraftTerms, HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms

LARGEST_GRAPH = "largest CUDA graph"  # the setting that names it
ON_CARD = ("name", "gpu", "model", "kv_tokens", "block", "max_model_len", "max_running", "max_batch_tokens")
BEHIND_IT = ("source", "date", "versions", "settings", "model_shape")  # of `About`, as above
RESAMPLES = 200
SEED = 20_261_115
GOOD = 0.03
HOW = (
    "Step by step inside the engine, from the end of the step before (or its own scheduling, if later) to "
    "its end; bursts of prompts summed; least squares on relative errors, none negative, Huber weights; "
    "law chosen by cross-validation over parts, the simplest within one standard error."
)


@dataclass(frozen=True)
class Fitted:
    about: About
    table: StepTable
    choice: ChosenLaw
    terms: WorkTerms
    intervals: dict[str, tuple[float, float]]
    quality: Quality
    host: HostTerms | None = None  # None: the steps do not show it
    drafting: DraftTerms | None = None  # None: no step verified drafts

    def card(self) -> Card:
        table = self.table
        return Card(
            **{name: getattr(self.about, name) for name in ON_CARD},
            description=f"Calibrated: {len(table)} steps in {len(np.unique(table.part))} parts.",
            work=self.terms,
            host=self.host,
            speculation=self.drafting,
            region=region(table),
            provenance=Provenance(
                **{name: getattr(self.about, name) for name in BEHIND_IT},
                measured=HOW,
                residuals=self.quality.regions,
                assumptions=_assumptions(self.choice.law, table),
                extrapolated=_extrapolated(table),
                intervals=self.intervals,
                chosen=[f"{tried.law}: {100 * tried.loss:.2f} %" for tried in self.choice.path],
                grid=_grid(table, self.quality),
            ),
        )

    def lines(self) -> list[str]:
        steps, dropped = len(self.table), self.table.dropped
        text = [f"{steps} steps ({dropped} dropped), law of {self.choice.law.size} numbers"]
        for name in [name for name in self.choice.law.names if getattr(self.terms, name) > 0]:
            value, (low, high) = getattr(self.terms, name), self.intervals[name]
            text.append(f"  {name:<18}{_micro(value):>9} us [{_micro(low)}, {_micro(high)}]  {MEANING[name]}")
        if self.terms.least_tokens:
            text.append(f"  {'least_tokens':<18}{self.terms.least_tokens:>9}     the weights are read anyway")
        if self.terms.tile > 1:
            text.append(f"  {'tile':<18}{self.terms.tile:>9}     tokens go in whole tiles")
        if self.host:
            ungraphed = f", {_milli(self.host.ungraphed)} beyond graphs" if self.host.graph else ""
            names = ("constant", "per_request", "prompts")
            step, request, prompts = (_milli(getattr(self.host, name)) for name in names)
            text.append(f"host beside it, ms: {step}, {request} a request, {prompts} with prompts{ungraphed}")
        if self.drafting:
            names = ("draft", "draft_per_decode", "speculating")
            draft, each, step = (_micro(getattr(self.drafting, name)) for name in names)
            text.append(f"drafts, us: {draft} a pass, {each} a decode in it, {step} a step that has any")
        text.append("errors on held-out parts:  median     p95   total  pieces")
        for name, figures in self.quality.regions.items():
            shown = "".join(f"{100 * figures[key]:>6.1f} %" for key in ("median", "p95", "total"))
            text.append(f"  {name:<22}{shown}{figures['pieces']:>8.0f}")
        return text


def fit(table: StepTable, about: About) -> Fitted:
    """The member of the family that predicts unseen parts best, fitted to all of them.

    Parts in which drafts were verified are left out of it, for a drafter makes prompts dearer as well (their
    steps without drafts count where there is nothing else); what drafts take is fitted to what remains of
    them.
    """
    drafted = np.isin(table.part, table.part[table.drafts > 0])
    speculated = table.take(drafted)
    if len(speculated):
        every, table = table, table.take(~drafted)
        if (table.decodes > 0).sum() < FEWEST_TIMED:
            table = every.take(every.drafts == 0)
        if (table.decodes > 0).sum() < FEWEST_TIMED:
            raise InputError(
                f"{(every.drafts > 0).sum()} of {len(every)} timed steps verified drafts; a fit needs "
                f"{FEWEST_TIMED} steps of decodes without any: measure without speculation, too, and pass "
                "--from-steps for each"
            )
    table.checked()
    setting = about.settings.get(LARGEST_GRAPH, "")
    graph = int(setting) if setting.isdigit() else 0
    problem = Problem(table, graph)
    shape = about.model_shape
    choice = choose(problem, (shape.get("experts", 0), shape.get("experts_per_token", 0)))
    everything = np.ones(len(problem.pieces), bool)
    solved = dict(zip(choice.law.names, problem.solve(choice.law, everything)[0], strict=True))
    law = replace(choice.law, extras=tuple(name for name in choice.law.extras if solved[name] > 0))
    coefficients, weights = problem.solve(law, everything)
    terms = law.terms(coefficients)
    return Fitted(
        about=about,
        table=table,
        choice=replace(choice, law=law),
        terms=terms,
        intervals=_intervals(problem, law, weights),
        quality=measure(table, unseen(problem, law)),
        host=fit_host(table, terms, graph),
        drafting=fit_drafts(speculated, terms, about.settings.get(METHOD, "eagle")),
    )


def region(table: StepTable) -> Region:
    def span(values: Floats) -> tuple[int, int]:
        there = values[values > 0]
        return (int(there.min()), int(there.max())) if len(there) else (0, 0)

    return Region(decodes=span(table.decodes), context=span(table.context), prefill=span(table.prefill))


def _intervals(problem: Problem, law: Law, weights: Floats) -> dict[str, tuple[float, float]]:
    """Where each coefficient lies when parts are drawn anew, 95 % of the time."""
    draw = np.random.default_rng(SEED)
    parts, index = np.unique(problem.pieces.part, return_inverse=True)
    if len(parts) < 4:  # one run: neighbouring pieces are drawn together
        index = np.arange(len(index)) * 32 // len(index)
    count = int(index.max()) + 1
    everything = np.ones(len(problem.pieces), bool)
    drawn = []
    for _ in range(RESAMPLES if not law.host else RESAMPLES // 4):
        times = np.bincount(draw.integers(0, count, count), minlength=count)
        drawn.append(problem.solve(law, everything, weights * times[index])[0])
    low, high = np.quantile(np.array(drawn), (0.025, 0.975), axis=0)
    return {
        name: (float(f"{a:.4g}"), float(f"{b:.4g}")) for name, a, b in zip(law.names, low, high, strict=True)
    }


def _grid(table: StepTable, quality: Quality) -> list[GridCell]:
    cells = []
    for index in np.unique(table.part):
        rows = table.part == index
        ranges = {
            name: (int(getattr(table, name)[rows].min()), int(getattr(table, name)[rows].max()))
            for name in ("decodes", "context", "prefill")
        }
        error = quality.parts.get(str(index))  # a part may have given all its steps to pieces of others
        known = None if error is None else round(error, 4)
        cells.append(GridCell(label=table.labels[index], steps=int(rows.sum()), error=known, **ranges))
    return cells


def _assumptions(law: Law, table: StepTable) -> list[str]:
    notes = []
    if "per_attention" not in law.extras:
        notes.append(
            "Attention among the tokens of a prompt costs nothing extra: long prompts come out too cheap."
        )
    if "per_context" in law.extras and not np.any(table.behind > 0):
        notes.append("KV behind prompts costs what the context of decodes costs.")
    return notes


def _extrapolated(table: StepTable) -> list[str]:
    there = region(table)
    kinds = {1: "decodes alone", 2: "prompts alone", 3: "decodes and prompts together"}
    missing = [words for kind, words in kinds.items() if not np.any(table.kind == kind)]
    outside = (
        f"Steps outside {there.decodes[0]} to {there.decodes[1]} decodes, {there.context[0]} to "
        f"{there.context[1]} context tokens, {there.prefill[0]} to {there.prefill[1]} prompt tokens."
    )
    return [outside, *(f"Steps of {words}: none were timed." for words in missing)]


def _milli(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.4g}"


# -- how far a fit is from steps it has not seen


@dataclass(frozen=True)
class Quality:
    """Relative errors of pieces that the fit had not seen.

    `regions`: decode, prefill, mixed (those there are) and all, each with `median` and `p95` of absolute
    errors, `total` (the signed error of the sum of times), and `pieces`, how many there were. A piece is a
    decode step, or a burst of prompts with the decode step before it. `parts`: the signed error of the sum
    of times of each part's pieces, by its number.
    """

    regions: dict[str, dict[str, float]]
    parts: dict[str, float]

    def good_enough(self, threshold: float = GOOD) -> bool:
        """Are the median error and the error of the total of every region below the threshold?"""
        return all(
            max(figures["median"], abs(figures["total"])) < threshold for figures in self.regions.values()
        )


def measure(table: StepTable, told: Floats) -> Quality:
    pieces = cut(table, together=1)
    real, priced = pieces.seconds, pieces.sums(told)
    masks = {KINDS[kind]: pieces.kind == kind for kind in np.unique(pieces.kind)}
    regions = {name: _figures(real[rows], priced[rows]) for name, rows in masks.items()}
    regions["all"] = _figures(real, priced)
    parts = {f"{index}": pieces.part == index for index in np.unique(pieces.part)}
    totals = {name: float(priced[rows].sum() / real[rows].sum() - 1) for name, rows in parts.items()}
    return Quality(regions, totals)


def _figures(real: Floats, priced: Floats) -> dict[str, float]:
    errors = np.abs(priced / real - 1)
    total = priced.sum() / real.sum() - 1
    figures = {"median": np.median(errors), "p95": np.quantile(errors, 0.95), "total": total}
    return {name: float(f"{value:.4g}") for name, value in figures.items()} | {"pieces": float(len(real))}


# -- speculative decoding, from steps that verified drafts

METHOD = "speculative method"  # the setting that names it


def fit_drafts(table: StepTable, terms: WorkTerms, method: str = "eagle") -> DraftTerms | None:
    """What drafts take beyond their verification, which `terms` price as tokens in the linear layers.

    Least squares on relative errors, none negative, outliers counting less and parts alike, over pieces
    without prompts: the drafter computes those, too, which no term prices. Steps that the host holds up even
    without drafts are left out. Where too few remain, all with drafts count. Passes and steps are told apart
    only where two numbers of drafts were timed: with one, all of it counts as passes. None: no step had
    drafts.
    """
    if not table.drafts.any():
        return None
    layers = np.vectorize(WorkCost(terms).layers, otypes=[np.float64])
    verified = layers((table.tokens + table.drafts).astype(np.int64)) - layers(table.tokens.astype(np.int64))
    gpu = seconds(WorkCost(terms).unhosted().terms, table)
    pieces = cut(table, 1)
    passes = table.drafts / np.maximum(table.decodes, 1.0)
    drafted = pieces.sums(np.where(table.drafts == 0, 1.0, 0.0)) == 0
    alone = drafted & (pieces.kind == DECODE)
    held_up = pieces.sums(np.where(gpu < seconds(terms, table), 1.0, 0.0)) > 0
    use = next(
        (np.flatnonzero(kind) for kind in (alone & ~held_up, alone, drafted) if kind.sum() >= FEWEST),
        np.flatnonzero(drafted),
    )
    columns = [passes, table.drafts]
    if np.ptp(np.rint(passes[table.drafts > 0])) >= 1:
        columns.append(np.ones(len(table)))
    if len(use) < FEWEST:
        raise InputError(f"{len(use)} timed steps with drafts; a fit needs at least {FEWEST}, measure longer")
    real = pieces.seconds[use]
    left = (real - pieces.sums(gpu + verified)[use]) / real
    features = pieces.sums(np.column_stack(columns))[use] / real[:, None]
    part = pieces.part[use]
    alike = weights = 1.0 / np.sqrt(np.bincount(part)[part])
    for _ in range(ROUNDS):
        found, _ = nnls(features * weights[:, None], left * weights)
        off = np.abs(features @ found - left)
        weights = alike * np.sqrt(np.minimum(1.0, JITTER / np.maximum(off, JITTER)))
    draft, each, *step = (float(f"{value:.4g}") for value in found)
    return DraftTerms(round(float(passes.max())), draft, each, step[0] if step else 0.0, method)


# -- the host, from the steps it kept waiting

Whole = NDArray[np.intp]
FEWEST = 8  # steps of a kind that are launched; with fewer its time is a guess
JITTER = 0.1  # errors beyond it count less and less
START = (0.002, 2e-5, 0.01, 0.03)  # seconds; where the search begins, and its scale


def fit_host(table: StepTable, terms: WorkTerms, graph: int = 0) -> HostTerms | None:
    """The law of `HostTerms`, beside what the GPU takes by `terms`; None where the table does not show it.

    A decode step after a decode step ends when the GPU has done it or when the host, busy with the next step,
    looks, whichever is later (see `sim.engine`): its time is max(c, H of the next step). Before decodes alone
    that is hardly ever the host, before prompts mostly. Steps before decodes, before prompts that fit
    a CUDA graph and before others weigh alike; where there are too few of one of the last two, prompts are
    of one kind and the law has no graph. Least squares on logarithms, for hosts scatter by a quarter and
    relative errors would pull the law down; none negative, outliers counting less.
    """
    first = waiting(table)
    then = table.take(first + 1)
    gpu = seconds(WorkCost(terms).unhosted().terms, table)[first]
    columns, groups = _columns(then, graph)
    if graph and columns[:, 2:].sum(axis=0).min() < FEWEST:  # too few of one kind to separate the two
        graph = 0
        columns, groups = _columns(then, graph)
    if columns[:, 2:].sum() < FEWEST:
        return None
    real = table.seconds[first]
    weight = np.sqrt(1.0 / np.bincount(groups)[groups])
    scale = np.array(START[: columns.shape[1]])

    def off(found: Floats) -> Floats:
        errors: Floats = weight * np.log(np.maximum(gpu, columns @ found) / real)
        return errors

    done = least_squares(
        off, scale, loss="soft_l1", f_scale=JITTER * float(weight.mean()), bounds=(0.0, 1.0), x_scale=scale
    )
    constant, request, prompts, *ungraphed = (float(f"{value:.4g}") for value in done.x)
    return HostTerms(constant, request, prompts, ungraphed[0] if graph else 0.0, graph)


def waiting(table: StepTable) -> Whole:
    """Decode steps after decode steps, in an engine that was ahead before and after them."""
    quiet = (table.kind[:-1] == DECODE) & (table.before[:-1] == DECODE) & (table.before[1:] == DECODE)
    return np.flatnonzero(quiet & table.busy[:-1] & table.busy[1:])


def _columns(table: StepTable, graph: int) -> tuple[Floats, Whole]:
    prompting = table.prefill > 0
    prompts = np.where(np.isnan(table.prompts), prompting, table.prompts)
    beyond = prompting & (table.tokens > graph) & (graph > 0)
    columns = [np.ones(len(table)), table.decodes + prompts, prompting & ~beyond]
    found = np.column_stack((*columns, beyond) if graph else columns).astype(np.float64)
    return found, prompting.astype(np.intp) + beyond
