"""`plan flags`: what to set in plain vLLM, and the simulated check of that advice."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.advisor.budget_search import BudgetsTried
from headgate.advisor.capacity.slo import Level
from headgate.advisor.flags import LARGE_GPU, LIMITED, QUEUE_SINCE, Checked, FlagsPlan
from headgate.advisor.graph_size import graph_flag
from headgate.report.document import Block, Cell, Code, Facts, Grid, Page, Section, row, share, valued
from headgate.report.numbers import interval, number, sentence
from headgate.report.plans.capacity import asked
from headgate.report.plans.threshold import lengths
from headgate.report.runs.origin import plan_page


def flags_page(plan: FlagsPlan, command: Sequence[str], more: Sequence[Section] = ()) -> Page:
    """Each flag with its reason, and the whole command; then the check, where there was one."""
    about = plan.situation
    rows = (row(f"{each.name} {each.value}", Cell(each.why, tone="prose")) for each in plan.flags)
    blocks: list[Block] = [f"{plan.model} on {plan.gpu}; {lengths(about)}"]
    blocks.append(Grid("", ("flag", "why"), tuple(rows)))
    if plan.waiting is not None:
        blocks.append(
            "With --max-num-queued-tokens vLLM answers 503 to requests that come while so many prompt tokens "
            f"wait: clients must retry or go elsewhere. Known to vLLM from {QUEUE_SINCE} on. With an older "
            "one let the load balancer send at most "
            f"{plan.decoding + plan.waiting:,} requests at a time: {plan.decoding:,} decode, "
            f"{plan.waiting:,} are before their first token."
        )
    sections = (Section("", tuple(blocks)), Section("Command", (Code(_command(plan)),)), *more)
    rate = f"{number(plan.rate)} requests/s at {number(1000 * plan.per_token)} ms per token"
    bar = f", ±{100 * about.error:.0f} % (derived card)" if about.error else ""
    flags = " ".join(f"{flag.name} {flag.value}" for flag in plan.flags)
    verdict, named = f"Set {flags}: saturated, {rate}{bar}.", f"{about.source}, {about.workload}"
    return plan_page("Flags for plain vLLM", named, verdict, sections, [*map(sentence, about.notes)], command)


def _command(plan: FlagsPlan) -> str:
    flags = [f"{flag.name} {flag.value}" for flag in plan.flags]
    tail = f" \\\n    {flags[2]}" if len(flags) > 2 else ""
    shared = f"--tensor-parallel-size {plan.tensor} " if plan.tensor > 1 else ""
    return f"vllm serve MODEL {shared}{flags[0]} {flags[1]}{tail}"


def promised_page(
    plan: FlagsPlan, tried: BudgetsTried, levels: Sequence[Level], command: Sequence[str]
) -> Page:
    """Seats and the budget for a promised gap, and the budgets that a search tried."""
    wanted = (plan.seats, tried.flag, graph_flag(tried.flag.value))
    flags = (row(f"{each.name} {each.value}", Cell(each.why, tone="prose")) for each in wanted)
    rates = []
    for budget, found in tried.found.items():
        word = "by the card" if budget == tried.flag.value else "vLLM's own" if budget == LARGE_GPU[1] else ""
        span = valued(interval(found.rate), found.rate.value)
        rates.append(row(budget, word, found.rate.value, span, found.limited_by or "nothing up to λ*"))
    heads = ("tokens\na step", "", "requests\nper s", "95 % interval", "gives way first")
    words = [f"{each.name} {each.value}" for each in wanted]
    line = f"vllm serve MODEL {' '.join(words[:2])} \\\n    {words[2]}"
    sections = (
        Section("", (Facts(tuple(asked(levels, ()).items())), Grid("", ("flag", "why"), tuple(flags)))),
        Section("Command", (Code(line),)),
        Section("Searched", (Grid("", heads, tuple(rates)),)),
    )
    named, notes = f"{plan.situation.source}, {plan.situation.workload}", [*map(sentence, tried.notes)]
    answer = _against_others(tried)
    return plan_page("Flags for plain vLLM", named, answer, sections, notes, command, answer_first=True)


def _against_others(tried: BudgetsTried) -> str:
    """What the budget by the card holds, and how the best of the search and vLLM's own stand to it."""
    mine = tried.found[tried.flag.value].rate.value
    said = f"--max-num-batched-tokens {tried.flag.value} holds {number(mine)} requests/s under the promise"
    if not mine:
        return f"{said}: it cannot be kept; ask for less."
    best, own = tried.found[tried.best].rate.value, tried.found.get(LARGE_GPU[1])
    if tried.best != tried.flag.value:
        said += f"; the search found {tried.best} to hold {100 * (best / mine - 1):.1f} % more"
    if own is not None and tried.flag.value != LARGE_GPU[1]:
        change = 100 * (own.rate.value / mine - 1)
        said += f"; vLLM's own {LARGE_GPU[1]} holds {abs(change):.1f} % {'less' if change < 0 else 'more'}"
    return f"{said}."


def check_section(runs: Sequence[Checked], load: str, plan: FlagsPlan) -> Section:
    """The simulated runs, one line each."""
    promised = any(run.metrics.goodput for run in runs)
    rows = []
    for run in runs:
        found = run.metrics
        times = (found.ttft.mean.value, found.ttft.p99, found.tpot.mean.value, found.tpot.p99)
        cells = [valued(f"{1000 * value:,.0f}", 1000 * value) for value in (*times, found.longest_gap)]
        kept = [share(found.goodput.share.value)] if found.goodput else []
        rows.append(row(run.label, run.seats, run.budget, found.request_rate.value, *cells, *kept))
    heads: tuple[str, ...] = ("setting", "seats", "budget", "requests\nper s", "TTFT\nmean", "TTFT\np99")
    heads += ("TPOT\nmean", "TPOT\np99", "gap", *(("kept",) if promised else ()))
    said = f"Mixed batching under {load}; times in ms, gap: the longest between two tokens"
    said += "; kept: requests that met both targets." if promised else "."
    if any(run.label == "vLLM's" for run in runs):
        said += " vLLM's: what `vllm serve` takes by itself on GPUs of 70 GiB or more."
    for run in runs:
        if run.label == LIMITED:
            counts = run.metrics.counts
            away = f"{counts.refused:,} of {counts.total:,} requests"
            said += f" {LIMITED}: with --max-num-queued-tokens, where vLLM answers 503 to {away}."
    return Section("Simulated", (Grid("", heads, tuple(rows), (said,)),))
