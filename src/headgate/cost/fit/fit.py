"""fit: a cost card from timed steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headgate.cost.card import Card, Cell, Provenance, Region
from headgate.cost.fit.about import About
from headgate.cost.fit.choose import Choice, choose, unseen
from headgate.cost.fit.family import MEANING, Law
from headgate.cost.fit.host import fit_host
from headgate.cost.fit.quality import Quality, measure
from headgate.cost.fit.solve import Problem
from headgate.cost.fit.steps import Floats, StepTable
from headgate.cost.laws.host import HostTerms
from headgate.cost.laws.work import WorkTerms

LARGEST_GRAPH = "largest CUDA graph"  # the setting that names it
RESAMPLES = 200
SEED = 20_261_115


@dataclass(frozen=True)
class Fitted:
    """The law that was chosen, its coefficients with 95 % intervals, and how far it is from unseen steps."""

    about: About
    table: StepTable
    choice: Choice
    terms: WorkTerms
    intervals: dict[str, tuple[float, float]]
    quality: Quality
    host: HostTerms | None = None  # None: the steps do not show it

    def card(self) -> Card:
        """The card, ready to be saved."""
        about, table = self.about, self.table
        return Card(
            name=about.name,
            gpu=about.gpu,
            model=about.model,
            description=f"Calibrated: {len(table)} steps in {len(np.unique(table.part))} parts.",
            kv_tokens=about.kv_tokens,
            block=about.block,
            max_model_len=about.max_model_len,
            max_running=about.max_running,
            max_batch_tokens=about.max_batch_tokens,
            work=self.terms,
            host=self.host,
            region=region(table),
            provenance=self._provenance(),
        )

    def lines(self) -> list[str]:
        """What was fitted and how well, for a terminal of 80 columns."""
        found = [
            f"{len(self.table)} steps ({self.table.dropped} dropped), law of {self.choice.law.size} numbers"
        ]
        for name in [name for name in self.choice.law.names if getattr(self.terms, name) > 0]:
            value, (low, high) = getattr(self.terms, name), self.intervals[name]
            found.append(
                f"  {name:<18}{_micro(value):>9} us [{_micro(low)}, {_micro(high)}]  {MEANING[name]}"
            )
        if self.terms.least_tokens:
            found.append(
                f"  {'least_tokens':<18}{self.terms.least_tokens:>9}     the weights are read anyway"
            )
        if self.terms.tile > 1:
            found.append(f"  {'tile':<18}{self.terms.tile:>9}     tokens go in whole tiles")
        if self.host:
            ungraphed = f", {_milli(self.host.ungraphed)} beyond graphs" if self.host.graph else ""
            each = [_milli(getattr(self.host, name)) for name in ("constant", "per_request", "prompts")]
            found.append(
                f"host beside it, ms: {each[0]}, {each[1]} a request, {each[2]} with prompts{ungraphed}"
            )
        found.append("errors on held-out parts:  median     p95   total  pieces")
        for name, figures in self.quality.regions.items():
            shown = "".join(f"{100 * figures[key]:>6.1f} %" for key in ("median", "p95", "total"))
            found.append(f"  {name:<22}{shown}{figures['pieces']:>8.0f}")
        return found

    def _provenance(self) -> Provenance:
        about = self.about
        return Provenance(
            source=about.source,
            measured=HOW,
            date=about.date,
            versions=about.versions,
            residuals=self.quality.regions,
            assumptions=_assumptions(self.choice.law, self.table),
            extrapolated=_extrapolated(self.table),
            settings=about.settings,
            model_shape=about.model_shape,
            intervals=self.intervals,
            chosen=[f"{_added(tried.law)}: {100 * tried.loss:.2f} %" for tried in self.choice.path],
            grid=_grid(self.table, self.quality),
        )


HOW = (
    "Step by step inside the engine, from the end of the step before (or its own scheduling, if later) to "
    "its end; bursts of prompts summed; least squares on relative errors, none negative, Huber weights; "
    "law chosen by cross-validation over parts, the simplest within one standard error."
)


def fit(table: StepTable, about: About) -> Fitted:
    """The member of the family that predicts unseen parts best, fitted to all of them.

    Raises InputError (one line) where the table is too short or has one shape only.
    """
    table.checked()
    told = about.settings.get(LARGEST_GRAPH, "")
    graph = int(told) if told.isdigit() else 0
    problem = Problem(table, graph)
    shape = about.model_shape
    choice = choose(problem, (shape.get("experts", 0), shape.get("experts_per_token", 0)))
    everything = np.ones(len(problem.pieces), bool)
    law = _without_zeros(choice.law, problem.solve(choice.law, everything)[0])
    choice = replace(choice, law=law)
    found, weights = problem.solve(law, everything)
    terms = law.terms(found)
    return Fitted(
        about,
        table,
        choice,
        terms,
        _intervals(problem, law, weights),
        measure(table, unseen(problem, law)),
        fit_host(table, terms, graph),
    )


def _without_zeros(law: Law, found: Floats) -> Law:
    """The law without extras that came out as nothing."""
    there = dict(zip(law.names, found > 0, strict=True))
    return replace(law, extras=tuple(name for name in law.extras if there[name]))


def region(table: StepTable) -> Region:
    """What was in the steps: smallest and largest of each feature, where it is there."""

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


def _grid(table: StepTable, quality: Quality) -> list[Cell]:
    cells = []
    for index in np.unique(table.part):
        rows = table.part == index
        ranges = {
            name: (int(getattr(table, name)[rows].min()), int(getattr(table, name)[rows].max()))
            for name in ("decodes", "context", "prefill")
        }
        label = table.labels[index]
        cells.append(Cell(label=label, steps=int(rows.sum()), error=_known(quality, index), **ranges))
    return cells


def _known(quality: Quality, index: int) -> float | None:
    error = quality.parts.get(str(index))  # a part may have given all its steps to pieces of others
    return None if error is None else round(error, 4)


def _added(law: Law) -> str:
    words = ["affine", *law.extras]
    words += [f"least_tokens={law.least_tokens}"] if law.least_tokens else []
    words += [f"tile={law.tile}"] if law.tile > 1 else []
    return " + ".join([*words, "host"] if law.host else words)


def _assumptions(law: Law, table: StepTable) -> list[str]:
    found = []
    if "per_attention" not in law.extras:
        found.append(
            "Attention among the tokens of a prompt costs nothing extra: long prompts come out too cheap."
        )
    if "per_context" in law.extras and not np.any(table.behind > 0):
        found.append("KV behind prompts costs what the context of decodes costs.")
    return found


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
