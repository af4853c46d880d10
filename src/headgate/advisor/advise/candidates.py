"""What is worth trying: policies, each with the seats and token budgets that matter to it."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.advisor.capacity.slo import Level, promised_gap
from headgate.advisor.capacity.trials import Chosen, Contender
from headgate.advisor.flags import LARGE_GPU, safe_mixed_seats
from headgate.advisor.gap_budget import gap_budget
from headgate.advisor.set_up import SetUp
from headgate.advisor.situation import card_situation
from headgate.core.errors import InputError
from headgate.methods.bounds.capacity import Bound
from headgate.methods.make import make_policy, policy_parameters, split_name

PLAIN = "mixed"  # what vLLM does without a plug-in
POLICIES = (PLAIN, "keep", "slai", "eb+")
BY_BUDGET = (PLAIN, "sarathi", "sarathi-spf", "v0")  # the budget is all that bounds their steps
USUAL_SEATS = 256  # tried beside as many as memory is enough for
WITHOUT_GAP = (2048, 8192, 16384)  # budgets to try where no gap is promised
NEAR = (0.5, 1.0, 1.5)  # of the budget by formula
ASSUMED = 0.9  # of λ*: the rate that the formula for the budget is given


def candidates(policies: Sequence[str], start: SetUp, levels: Sequence[Level], bound: Bound) -> Chosen:
    """By name: every policy with seats and budgets, plain vLLM with its own defaults among them."""
    found: Chosen = {}
    tried = _seats(start)
    for text in policies:
        name, own = split_name(text)
        known = policy_parameters(name)
        values = {key: value for key, value in start.settings.set.items() if key in known} | own
        for seats in tried:
            for budget in _budgets(name, seats, start, levels, bound):
                engine = start.engine._replace(running=seats, batch_tokens=budget)
                make_policy(name, values, engine)  # mistakes show before the work
                found[label(text, seats, budget)] = Contender(name, values, (seats, budget))
    return found


def label(policy: str, seats: int, budget: int) -> str:
    """What it is called in tables."""
    return f"{policy}, {seats} seats, {budget} tokens"


def plain_default(start: SetUp) -> tuple[str, Contender]:
    """VLLM without a flag, on a GPU of this size; what the card was not meant for is cut."""
    seats, budget = min(LARGE_GPU[0], start.card.max_running), min(LARGE_GPU[1], start.card.max_batch_tokens)
    return label(PLAIN, seats, budget), Contender(PLAIN, {}, (seats, budget))


def formula_budget(seats: int, start: SetUp, gap: float, bound: Bound) -> int:
    """The budget by the card, for a load near what the engine bears."""
    lengths = start.traffic.lengths(start.engine)
    prompt, output = float(lengths.prompts.mean()), float(lengths.decodes.mean()) + 1
    most = start.card.max_batch_tokens
    return gap_budget(start.engine.cost, prompt, output, ASSUMED * bound.rate, gap, seats, most)


def most_seats(start: SetUp) -> int:
    """As `plan flags` has them: what KV memory is enough for, within --slots or the card's own limit."""
    rows = start.settings if start.traffic.recorded else start.settings.model_copy(update={"requests": None})
    about, _ = card_situation(rows)
    return min(safe_mixed_seats(about), about.slots)


def _seats(start: SetUp) -> list[int]:
    most = most_seats(start)
    return [most] if start.settings.slots else sorted({min(USUAL_SEATS, most), most})


def _budgets(name: str, seats: int, start: SetUp, levels: Sequence[Level], bound: Bound) -> list[int]:
    most = start.card.max_batch_tokens
    if start.settings.budget:
        if start.settings.budget < seats:
            raise InputError(
                f"--budget {start.settings.budget} is below {seats} seats; give --slots, or a larger budget"
            )
        return [start.settings.budget]
    gap = promised_gap(levels)
    if name not in BY_BUDGET:
        wanted: Sequence[float] = (LARGE_GPU[1],)
    elif gap is None:
        wanted = WITHOUT_GAP
    else:
        formula = formula_budget(seats, start, gap, bound)
        wanted = [*(share * formula for share in NEAR), LARGE_GPU[1]]
    return sorted({max(seats, min(most, int(budget) // 256 * 256)) for budget in wanted})
