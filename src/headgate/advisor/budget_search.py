"""The budget by formula, checked: plain mixed batching searched for its rate at budgets around it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headgate.advisor.advise.candidates import PLAIN, formula_budget
from headgate.advisor.capacity.found import Found, at_the_edge, put_together
from headgate.advisor.capacity.race import Race
from headgate.advisor.capacity.slo import Level, promised_gap
from headgate.advisor.capacity.trials import Case, Chosen, Contender, Progress
from headgate.advisor.flags import LARGE_GPU, Flag
from headgate.advisor.gap_budget import FILLED
from headgate.advisor.graph_size import graph_flag
from headgate.advisor.set_up import set_up, without_load
from headgate.advisor.settings import SearchSettings
from headgate.core.errors import InputError
from headgate.experiment.settings import Experiment
from headgate.stats.metrics import without_nan

REQUESTS = 3000  # of a run, unless told otherwise
AROUND = (0.5, 1.0, 1.5)  # of the budget by formula


@dataclass(frozen=True)
class BudgetsTried:
    """What plain vLLM holds under the promise at each budget; the formula's is one of them."""

    flag: Flag
    gap: float
    seats: int
    found: dict[int, Found]  # by budget
    notes: tuple[str, ...]

    @property
    def best(self) -> int:
        return max(self.found, key=lambda budget: self.found[budget].rate.value)

    def as_dict(self) -> dict[str, Any]:
        tried = {str(budget): asdict(found) for budget, found in self.found.items()}
        graphs = graph_flag(self.flag.value).value
        document = {
            "formula": self.flag.value,
            "gap": self.gap,
            "best": self.best,
            "graphs": graphs,
            "tried": tried,
        }
        plain = without_nan(document)
        assert isinstance(plain, dict)
        return plain


def search_budgets(
    settings: Experiment,
    levels: tuple[Level, ...],
    seats: int,
    options: SearchSettings,
    progress: Progress,
) -> BudgetsTried:
    """The formula's budget, half and one and a half of it, and vLLM's own, on the same requests."""
    gap = promised_gap(levels)
    if gap is None:
        raise InputError("--slo promises no gap; plan flags needs one for the budget, such as tbt=100ms@p99")
    named = settings.model_copy(update={"slots": seats, "budget": None})
    start = set_up(without_load(named), levels, options, REQUESTS)
    bound, _ = start.bounds()
    formula = max(seats, formula_budget(seats, start, gap, bound))
    wanted = {int(share * formula) // 256 * 256 for share in AROUND} | {formula, LARGE_GPU[1]}
    budgets = sorted({max(seats, min(budget, start.card.max_batch_tokens)) for budget in wanted})
    chosen: Chosen = {str(budget): Contender(PLAIN, {}, (seats, budget)) for budget in budgets}
    case = Case(start.engine, start.traffic, settings.watchdog, start.asynchronous)
    race = Race(case, bound.rate, options.precision, start.seeds, (), options.workers, progress)
    searches, answers, _ = race.run(chosen, {})
    if any(search.next() is not None for search in searches.values()):
        raise KeyboardInterrupt
    found = {budget: put_together(str(budget), searches, answers, bound.rate, levels) for budget in budgets}
    why = (
        f"beside the decodes of a full engine, so many tokens make a step of {100 * FILLED:.0f} % of the "
        f"{1000 * gap:g} ms promised between tokens, by the card."
    )
    notes = at_the_edge(list(found.values()))
    flag = Flag("--max-num-batched-tokens", formula, why)
    return BudgetsTried(flag, gap, seats, found, (*start.notes(fleet=False), *notes))
