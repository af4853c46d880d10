"""Flags of plain vLLM for a promise: those that `advise` tries, and the best of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headgate.advisor.advice import (
    PLAIN,
    REQUESTS,
    Advised,
    formula_budget,
    most_slots,
    plain_default,
    try_flags,
)
from headgate.advisor.capacity.plan import Declined
from headgate.advisor.capacity.search import Progress
from headgate.advisor.capacity.traffic import Level, promised_gap
from headgate.advisor.flags import FILLED, Flag, graph_flag, with_graphs
from headgate.advisor.set_up import offered_rate, set_up, without_load
from headgate.advisor.settings import SearchSettings
from headgate.core.errors import InputError
from headgate.experiment.build import ALL_FIT, Unservable
from headgate.experiment.settings import Experiment
from headgate.stats.metrics import without_nan


@dataclass(frozen=True)
class FlagsTried:
    """What plain vLLM holds under the promise with each of the flags that came into the final."""

    formula: int  # the budget by the card, at as many slots as the best has
    gap: float
    final: tuple[Advised, ...]
    default: str  # vLLM's own flags
    slots: Flag
    budget: Flag
    graphs: Flag
    notes: tuple[str, ...]
    declined: Declined | None = None
    lost: Unservable = ALL_FIT

    @property
    def best(self) -> Advised:
        return max(self.final, key=lambda each: each.found.rate.value)

    @property
    def own(self) -> Advised:
        """VLLM without a flag."""
        return next(each for each in self.final if each.name == self.default)

    @property
    def flags(self) -> tuple[Flag, ...]:
        return self.slots, self.budget, self.graphs

    def as_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "formula": self.formula,
            "gap": self.gap,
            "best": None if self.declined else self.best.name,
            "default": self.default,
            "graphs": self.graphs.value,
            "tried": [asdict(each) for each in self.final],
        }
        declined = {"declined": self.declined._asdict()} if self.declined else {}
        return dict(without_nan(document | declined))


def search_flags(
    settings: Experiment, levels: tuple[Level, ...], options: SearchSettings, progress: Progress
) -> FlagsTried:
    """As `advise` does for plain vLLM alone, so that both answer the same."""
    gap = promised_gap(levels)
    if gap is None:
        raise InputError("--slo promises no gap; plan flags needs one for the budget, such as tbt=100ms@p99")
    settings = with_graphs(settings, levels)
    start = set_up(without_load(settings), levels, options, REQUESTS)
    bound, _ = start.bounds()
    load = offered_rate(settings, start.traffic)
    tried = try_flags(start, (PLAIN,), bound, load, progress, None)
    final, searched = tried.final, tried.searched
    best = max(final, key=lambda each: each.found.rate.value)
    formula, most = formula_budget(best.slots, start, gap, bound), most_slots(start)
    return FlagsTried(
        formula=formula,
        gap=gap,
        final=tuple(final),
        default=plain_default(start)[0],
        slots=Flag("--max-num-seqs", best.slots, _why_slots(best.slots, most)),
        budget=Flag("--max-num-batched-tokens", best.budget, _why_budget(best.budget, formula, gap)),
        graphs=graph_flag(best.budget, settings.graph),
        notes=tuple(tried.notes),
        declined=searched.declined(best.found, load),
        lost=start.traffic.lost,
    )


def _why_slots(slots: int, most: int) -> str:
    enough = f"KV memory, --slots or the card are enough for {most:,} such requests 99 % of the time"
    return f"{enough}." if slots == most else f"{enough}; fewer held more in the search."


def _why_budget(budget: int, formula: int, gap: float) -> str:
    why = (
        f"beside the decodes of a full engine, {formula:,} tokens make a step of {100 * FILLED:.0f} % of the "
        f"{1000 * gap:g} ms promised between tokens, by the card"
    )
    return f"{why}." if budget == formula else f"{why}; {budget:,} held more in the search."
