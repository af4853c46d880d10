"""A derived card fixed by some traffic: few factors, held near one by how well the derivation is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear  # type: ignore[import-untyped]

from headgate.core.errors import InputError
from headgate.cost.card import Card, ExpectedError, Number
from headgate.cost.fit.fit import measure
from headgate.cost.fit.solve import level, seconds
from headgate.cost.fit.steps import DECODE, KINDS, Cuts, Floats, Rows, StepTable, cut
from headgate.cost.laws.terms import HostTerms
from headgate.cost.laws.work import HOST, WorkTerms

GROUPS: Mapping[str, tuple[str, ...]] = {
    "layers": ("constant", "per_token", "per_decode", "per_expert", "prompt_constant", "per_prompt"),
    "context": ("per_context", "mixed_per_context"),
    "attention": ("per_attention",),
    "mixed": ("mixed_constant", "mixed_per_decode", "per_meeting"),
}
ADDED = {"constant": 1e-3, "per_decode": 50e-6}  # seconds more, and how much is usual: a synchronous host
LEAST, MOST = 0.25, 4.0  # of any factor
ROUNDS = 5  # of reweighting
TURNS = 3  # of deciding which steps the host held up
LONGEST = 0.1  # seconds that may be added
MOST_LEVEL = 0.05  # how far the level may be corrected
HUBER = 2.0
NOISE = 0.02  # relative; no piece is trusted further
INDEPENDENT = 4.0  # pieces of a part that count as such: neighbours are alike
FEWEST = 8  # pieces of a kind from which its error is said
SURE = 0.03  # no error bar is narrower
LOWEST_HOST = 0.2  # quantile: so many steps may be shorter than the host's law
FOLDS = 2
TOGETHER, APART = "one factor", "a factor for each group"
WAYS = (TOGETHER, APART)


@dataclass(frozen=True)
class Rescaled:
    card: Card
    factors: dict[str, float]
    added: dict[str, float]
    before: dict[str, dict[str, float]]
    after: dict[str, dict[str, float]]
    steps: int

    def lines(self) -> list[str]:
        scaled = ", ".join(f"{name} x{value:.3f}" for name, value in self.factors.items())
        more = [f"{1e6 * value:.0f} us {name}" for name, value in self.added.items() if value >= 0.5e-6]
        if set(self.factors.values()) == {1.0} and not more:
            scaled = "no factor does better on held-out steps; prices stay as derived"
        added = f"; added: {', '.join(more)}" if more else ""
        text = [f"{self.steps} steps: {scaled}{added}"]
        text.append("errors on held-out steps:      before             after")
        text.append("                            median   total    median   total  pieces")
        for kind, after in self.after.items():
            before = self.before[kind]
            errors = before["median"], before["total"], after["median"], after["total"]
            shown = "".join(f"{100 * error:>7.1f} %" for error in errors)
            text.append(f"  {kind:<22}{shown}{after['pieces']:>8.0f}")
        return text


def rescale(card: Card, table: StepTable, name: str, source: str) -> Rescaled:
    """One factor for all prices, or one for each group, or none: whichever is least off on steps not seen.

    Groups are fitted by least squares on relative errors, with the derivation and its error as prior.
    """
    if card.work is None or card.expected_error is None:
        raise InputError(f"card {card.name} is not derived; only derived cards are rescaled")
    table.checked()
    law = card.work
    problem = _Problem(table, law, card.expected_error)
    before = measure(table, seconds(law, table)).regions
    tried = {way: measure(table, _unseen(problem, law, table, way)).regions for way in WAYS}
    losses = {way: _loss(regions) for way, regions in tried.items()}
    way = min(WAYS, key=lambda way: losses[way])
    if _loss(before) <= losses[way]:
        found, after, terms = problem.mean, before, law
    else:
        found, after = problem.solve(np.ones(len(problem.pieces), bool), way), tried[way]
        terms = _applied(law, found, table)
    factors = dict(zip(GROUPS, found.tolist(), strict=False))
    added = dict(zip(ADDED, found[len(GROUPS) :].tolist(), strict=True))
    host, alone = card.host, table.kind == DECODE
    if host is not None and terms is not law and alone.sum() >= FEWEST:  # no slower than what was seen
        said = host.constant + host.per_request * table.decodes[alone]
        share = min(1.0, float(np.quantile(table.seconds[alone] / said, LOWEST_HOST)))
        host = replace(host, constant=host.constant * share, per_request=host.per_request * share)
    made = _card(card, terms, host, name, source, (before, after), len(table))
    return Rescaled(made, factors, added, before, after, len(table))


def _unseen(problem: _Problem, law: WorkTerms, table: StepTable, way: str) -> Floats:
    told = np.zeros(len(table))
    for fold in range(FOLDS):
        held = problem.fold == fold
        if not held.any():
            continue
        terms = _applied(law, problem.solve(~held if not held.all() else held, way), table)
        rows = np.repeat(held, problem.lengths)
        told[rows] = seconds(terms, table)[rows]
    return told


def _loss(regions: dict[str, dict[str, float]]) -> float:
    kinds = [figures for kind, figures in regions.items() if kind != "all"]
    return float(np.mean([figures["median"] + abs(figures["total"]) for figures in kinds]))


class _Problem:
    def __init__(self, table: StepTable, law: WorkTerms, prior: ExpectedError) -> None:
        self.pieces: Cuts = cut(table)
        self.lengths = np.diff(np.append(self.pieces.starts, len(table)))
        parts = self.pieces.part
        if len(np.unique(parts)) == 1:  # eight stretches, every other held out
            parts = (np.arange(len(parts)) * 8 // len(parts)).astype(np.int32)
        self.fold = parts % FOLDS
        columns = [seconds(_only(law, names), table) for names in GROUPS.values()]
        self._columns = np.column_stack((*columns, np.ones(len(table)), table.decodes))
        shares = _host_shares(law, table)
        hosted = replace(law, **{name: getattr(law, name) * share for name, share in shares.items()})
        self._host = seconds(_only(hosted, HOST), table)
        spread = [max(prior.decode, prior.prefill), prior.decode, prior.prefill, prior.mixed]
        self._scale = np.array([*spread, *ADDED.values()])
        self.mean = np.array([*([1.0] * len(GROUPS)), *([0.0] * len(ADDED))])

    def solve(self, use: Rows, way: str) -> Floats:
        """The factors, then what is added; steps that the host holds up say nothing of the GPU."""
        found = self.mean
        if way == TOGETHER:
            return found * self._level(found, use, MOST - 1)
        for _ in range(TURNS):
            held = self._host > self._columns @ found
            found = self._given(held, use)
        return found * self._level(found, use, MOST_LEVEL)

    def _given(self, held: Rows, use: Rows) -> Floats:
        real = self.pieces.seconds[use]
        rows = self.pieces.sums(np.where(held[:, None], 0.0, self._columns))[use] / real[:, None]
        wanted = 1 - self.pieces.sums(np.where(held, self._host, 0.0))[use] / real
        parts = len(np.unique(self.pieces.part[use]))
        weight = _balance(self.pieces.kind[use]) * INDEPENDENT * parts / len(rows)
        trust, found = np.ones(len(rows)), self.mean
        low = np.array([*([LEAST] * len(GROUPS)), *([0.0] * len(ADDED))]) / self._scale
        high = np.array([*([MOST] * len(GROUPS)), *([LONGEST] * len(ADDED))]) / self._scale
        for _ in range(ROUNDS):
            each = np.sqrt(weight * trust) / NOISE
            left = np.vstack((rows * self._scale * each[:, None], np.eye(len(self._scale))))
            right = np.concatenate((wanted * each, self.mean / self._scale))
            found = lsq_linear(left, right, (low, high)).x * self._scale
            off = np.abs(rows @ found - wanted)
            spread = max(1.4826 * float(np.median(off)), 1e-3)
            trust = np.minimum(1.0, HUBER * spread / np.maximum(off, 1e-12))
        return np.asarray(found, dtype=np.float64)

    def _level(self, found: Floats, use: Rows, most: float) -> float:
        real, kinds = self.pieces.seconds[use], self.pieces.kind[use]
        priced = self.pieces.sums(np.maximum(self._columns @ found, self._host))[use]
        return level(real, priced, kinds, 1 / (1 + most), 1 + most)


def _balance(kinds: np.ndarray[tuple[int], np.dtype[np.int8]]) -> Floats:
    weight = np.ones(len(kinds))
    for kind in np.unique(kinds):
        here = kinds == kind
        weight[here] = min(10.0, len(kinds) / (len(np.unique(kinds)) * here.sum()))
    return weight


def _only(law: WorkTerms, names: tuple[str, ...]) -> WorkTerms:
    prices = {field.name: 0.0 for field in fields(law) if isinstance(getattr(law, field.name), float)}
    return replace(law, **{**prices, **{name: getattr(law, name) for name in names}})


def _applied(law: WorkTerms, found: Floats, table: StepTable) -> WorkTerms:
    """The law with its factors; its host no slower than the steps that were seen."""
    changed = {
        name: getattr(law, name) * factor
        for names, factor in zip(GROUPS.values(), found, strict=False)
        for name in names
    }
    for place, name in enumerate(ADDED):
        changed[name] += float(found[len(GROUPS) + place])
    changed |= {name: getattr(law, name) * share for name, share in _host_shares(law, table).items()}
    rounded: dict[str, Any] = {name: float(f"{value:.6g}") for name, value in changed.items()}
    return replace(law, **rounded)


def _host_shares(law: WorkTerms, table: StepTable) -> dict[str, float]:
    """How much of the host's prior the steps leave room for: decodes alone, then with prompts."""
    host = replace(_only(law, HOST), least_tokens=0)
    said = seconds(host, table)
    shares = []
    for rows in (table.kind == DECODE, table.prefill > 0):
        room = table.seconds[rows] / np.maximum(said[rows], 1e-9)
        shares.append(min(1.0, float(np.quantile(room, LOWEST_HOST))) if rows.sum() >= FEWEST else 1.0)
    return {name: shares["prompts" in name or "ungraphed" in name] for name in HOST}


def _card(
    card: Card,
    terms: WorkTerms,
    host: HostTerms | None,
    name: str,
    source: str,
    figures: tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]],
    steps: int,
) -> Card:
    before, after = figures
    known = card.provenance
    residuals = {f"{kind} before": figures for kind, figures in before.items()}
    residuals |= {f"{kind} after": figures for kind, figures in after.items()}
    values = {field.name: getattr(terms, field.name) for field in fields(terms)}
    measured = {
        f"work.{name}": Number(value=value, origin="measured", source=f"rescaled by {source}")
        for name, value in values.items()
        if isinstance(value, float) and value
    }
    provenance = {
        "source": f"{source}; before: {known.source}",
        "measured": f"{steps} steps, which scale groups of a derived card's prices",
        "residuals": residuals,
        "numbers": known.numbers and known.numbers | measured,
    }
    changed = {
        "name": name,
        "description": f"Derived, then rescaled by {steps} steps: {card.model} on {card.gpu}.",
        "work": terms,
        "host": host,
        "expected_error": card.expected_error and _bars(card.expected_error, after, source),
        "provenance": known.model_copy(update=provenance),
    }  # a copy would keep the old cost object
    return Card(**{field: getattr(card, field) for field in Card.model_fields} | changed)


def _bars(prior: ExpectedError, after: dict[str, dict[str, float]], source: str) -> ExpectedError:
    """Twice the median error of steps not seen, where enough were; never wider than before."""

    def bar(kind: str, was: float) -> float:
        figures = after.get(kind)
        if figures is None or figures["pieces"] < FEWEST:
            return was
        return round(min(was, max(SURE, 2 * figures["median"])), 3)

    total = abs(after["all"]["total"])
    kinds = {kind: bar(kind, getattr(prior, kind)) for kind in KINDS[1:]}
    rates = round(min(prior.throughput, max(SURE, 2 * total, max(kinds.values()) / 2)), 3)
    return ExpectedError(**kinds, throughput=rates, kv=prior.kv, source=f"held-out steps of {source}")
