"""`plan flags`: what to set in plain vLLM, and the simulated check of that advice."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.advisor.flags import QUEUE_SINCE, Checked, FlagsPlan
from headgate.report.document import Block, Cell, Code, Grid, Page, Section, row, share, valued
from headgate.report.numbers import number, sentence
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
            f"Known to vLLM from {QUEUE_SINCE} on. With an older one let the load balancer send at most "
            f"{plan.decoding + plan.waiting:,} requests at a time: {plan.decoding:,} decode, "
            f"{plan.waiting:,} are before their first token."
        )
    sections = (Section("", tuple(blocks)), Section("Command", (Code(_command(plan)),)), *more)
    rate = f"{number(plan.rate)} requests/s at {number(1000 * plan.per_token)} ms per token"
    bar = f", ±{100 * about.error:.0f} % (derived card)" if about.error else ""
    verdict, named = f"Predicted when saturated: {rate}{bar}.", f"{about.source}, {about.workload}"
    return plan_page("Flags for plain vLLM", named, verdict, sections, [*map(sentence, about.notes)], command)


def _command(plan: FlagsPlan) -> str:
    flags = [f"{flag.name} {flag.value}" for flag in plan.flags]
    tail = f" \\\n    {flags[2]}" if len(flags) > 2 else ""
    shared = f"--tensor-parallel-size {plan.tensor} " if plan.tensor > 1 else ""
    return f"vllm serve MODEL {shared}{flags[0]} {flags[1]}{tail}"


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
    if plan.queue is not None:
        said += " Without the queue limit: the simulator refuses no request."
    return Section("Simulated", (Grid("", heads, tuple(rows), (said,)),))
