"""Speculation on or off, and how many drafts: simulated at a load, by the step law for each batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headgate.core.errors import InputError, RunError
from headgate.cost.card import Card
from headgate.cost.laws.speculation import Acceptance, MixedAcceptance, crossover, gain, schedule
from headgate.cost.laws.terms import DraftTerms
from headgate.cost.laws.work import WorkCost
from headgate.experiment.build import make_engine, speculation_notes
from headgate.experiment.fleet import mean_lengths
from headgate.experiment.run import Prepared, arrivals_said, carry_out
from headgate.experiment.settings import Experiment
from headgate.methods.make import split_name
from headgate.sim.engine.engine import drafting_of, speculate_settings
from headgate.stats.measured import Measured
from headgate.stats.metrics import Metrics, without_nan

SIZES = (1, 4, 16, 64, 256, 512)  # batches whose gain is shown
WORTH = 1.02  # a gain below it is none: runs are finite, and draws are drawn


class DraftsRun(NamedTuple):
    drafts: int
    tokens: float  # that a decode step delivers by the law of acceptance
    batch: float  # decodes in a mean step that has any
    tpot: float  # mean, seconds
    gap: float  # between deliveries, p99
    first_token: float  # mean
    output_rate: float  # tokens a second
    busy: float  # share of the time
    kept: float | None  # share of requests whose promises were kept


@dataclass(frozen=True)
class DraftsPlan:
    card: Card
    workload: str
    arrivals: str
    closed: bool  # clients send as fast as they are served
    policy: str
    drafting: DraftTerms
    context: float  # KV tokens of a decode, on average
    runs: tuple[DraftsRun, ...]
    gains: dict[int, list[float]]  # by k, at each of `SIZES`
    loses_from: dict[int, int | None]  # by k: the smallest batch that it makes slower
    ranges: list[tuple[int, int, int]]
    notes: tuple[str, ...]

    @property
    def best(self) -> DraftsRun:
        """Promises first, to a percent, then the gain; none where drafts gain less than 2 %."""
        none = self.runs[0]
        found = max(self.runs, key=lambda run: (round(run.kept or 0.0, 2), self.gain(run), -run.drafts))
        keeps = round(found.kept or 0.0, 2) > round(none.kept or 0.0, 2)
        return found if keeps or self.gain(found) >= WORTH else none

    def gain(self, run: DraftsRun) -> float:
        """Over no drafts: tokens a second in a closed loop, time per token where the load is given."""
        none = self.runs[0]
        if self.closed:
            return run.output_rate / none.output_rate
        return none.tpot / run.tpot if run.tpot > 0 else 1.0

    @property
    def at_most(self) -> bool:
        return self.card.speculation is None or self.card.expected_error is not None

    def config(self) -> dict[str, Any]:
        most = max(k for _, _, k in self.ranges)
        words: dict[str, Any] = {"method": self.drafting.method, "num_speculative_tokens": most}
        if len(self.ranges) > 1:
            words["num_speculative_tokens_per_batch_size"] = [list(one) for one in self.ranges]
        return words

    def as_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "card": self.card.name,
            "workload": self.workload,
            "arrivals": self.arrivals,
            "policy": self.policy,
            "best": self.best.drafts,
            "at_most": self.at_most,
            "context": self.context,
            "runs": [{**run._asdict(), "gain": self.gain(run)} for run in self.runs],
            "gains": {
                str(k): dict(zip(map(str, SIZES), each, strict=True)) for k, each in self.gains.items()
            },
            "loses_from": {str(k): size for k, size in self.loses_from.items()},
            "speculative_config": self.config() if max(k for _, _, k in self.ranges) else None,
            "notes": self.notes,
        }
        return dict(without_nan(document))


def plan_drafts(settings: Experiment) -> DraftsPlan:
    if settings.speculate is None:
        raise InputError("plan speculation needs --speculate DRAFTS:accept=SHARE, the most drafts to try")
    asked = speculate_settings(settings.speculate)
    if not asked.drafts:
        raise InputError("--speculate 0 leaves nothing to plan; give the most drafts to try, such as 5")
    if settings.engines is not None:
        raise InputError(
            "plan speculation is about one engine; drop --engines and give it its share of the load"
        )
    prepared = Prepared(settings)
    card, engine = prepared.card, make_engine(settings.model_copy(update={"speculate": None}), prepared.card)
    speculation, cost = prepared.engine.speculation, engine.cost
    assert speculation is not None
    assert isinstance(cost, WorkCost)
    workload = prepared.workload
    outputs = np.minimum(workload.output, workload.limit).astype(np.float64)
    whole = np.bincount(workload.kind, outputs, minlength=len(workload.kinds))
    parts: dict[Acceptance, float] = {}
    for kind, share in zip(workload.kinds, (whole / whole.sum()).tolist(), strict=True):
        law = speculation.of(kind.name)
        parts[law] = parts.get(law, 0.0) + share
    accept = MixedAcceptance(tuple((share, law) for law, share in parts.items() if share))
    _, rest = (*settings.speculate.split(":", 1), "")[:2]
    runs = tuple(_run(settings, k, rest, accept) for k in range(asked.drafts + 1))
    _, context = mean_lengths(workload)
    drafting, ks = drafting_of(card, asked), range(1, asked.drafts + 1)
    return DraftsPlan(
        card=card,
        workload=workload.name or "requests as given",
        arrivals=arrivals_said(settings),
        closed=not np.ptp(workload.arrival),
        policy=settings.policy,
        drafting=drafting,
        context=context,
        runs=runs,
        gains={k: [gain(cost, drafting, accept, size, context, k).gain for size in SIZES] for k in ks},
        loses_from={k: crossover(cost, drafting, accept, context, k) for k in ks},
        ranges=schedule(cost, drafting, accept, context, asked.drafts, engine.running),
        notes=tuple(speculation_notes(prepared.engine, card, settings)),
    )


def _run(settings: Experiment, drafts: int, rest: str, accept: MixedAcceptance) -> DraftsRun:
    text = f"{drafts}:{rest}" if rest else str(drafts)
    prepared = Prepared(settings.model_copy(update={"speculate": text}))
    name, values = split_name(settings.policy)
    run = carry_out(prepared, name, {**settings.set, **values})
    if run.meta["outcome"] == "interrupted":
        raise KeyboardInterrupt
    if run.meta["outcome"] != "finished":
        raise RunError(f"{drafts} drafts: {run.meta['outcome']}")
    found: Metrics = Measured(run).metrics
    steps = run.steps["decodes"] > 0
    number = run.steps["count"][steps]
    return DraftsRun(
        drafts=drafts,
        tokens=accept.tokens(drafts),
        batch=float((run.steps["decodes"][steps] * number).sum() / max(number.sum(), 1)),
        tpot=found.tpot.mean.value,
        gap=found.itl.p99,
        first_token=found.ttft.mean.value,
        output_rate=found.output_rate.value,
        busy=found.engine.utilisation,
        kept=found.goodput.share.value if found.goodput else None,
    )
