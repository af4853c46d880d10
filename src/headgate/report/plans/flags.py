"""`plan flags`: what to set in plain vLLM or SGLang, and the simulated check of that advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from headgate.advisor.budget_search import FlagsTried
from headgate.advisor.capacity.plan import apart
from headgate.advisor.capacity.traffic import Level
from headgate.advisor.flags import (
    LIMITED,
    NO_PLUG_IN,
    QUEUE_SINCE,
    Checked,
    FlagsPlan,
    loaded_with,
    model_of,
    sglang_words,
)
from headgate.report import document as doc
from headgate.report.plans.capacity import asked
from headgate.report.plans.threshold import lengths
from headgate.sim.engine.engine import Engine

UNNAMED = "MODEL"  # where no name is known that vLLM can load
LINE = 76  # characters of a line to paste


def flags_page(plan: FlagsPlan, command: Sequence[str], more: Sequence[doc.Section] = ()) -> doc.Page:
    """Each flag with its reason, and the whole command; then the check, where there was one."""
    about = plan.situation
    rows = (doc.row(each.text, doc.Cell(each.why, tone="prose")) for each in plan.flags)
    blocks: list[doc.Block] = [f"{plan.card.model} on {plan.card.gpu}; {lengths(about)}"]
    blocks.append(doc.Grid("", ("flag", "why"), tuple(rows)))
    if plan.waiting is not None and plan.served_by.title == "vLLM":
        blocks.append(
            "With --max-num-queued-tokens vLLM answers 503 to requests that come while so many prompt tokens "
            f"wait: clients must retry or go elsewhere. Known to vLLM from {QUEUE_SINCE} on. With an older "
            "one let the load balancer send at most "
            f"{plan.decoding + plan.waiting:,} requests at a time: {plan.decoding:,} decode, "
            f"{plan.waiting:,} are before their first token."
        )
    words = [flag.text for flag in plan.flags]
    sections = (doc.Section("", tuple(blocks)), doc.Section("Command", _command(plan, words)), *more)
    rate = f"{doc.number(plan.rate)} requests/s at {doc.number(1000 * plan.per_token)} ms per token"
    bar = f", ±{100 * about.error:.0f} % (derived card)" if about.error else ""
    verdict, named = f"Set {' '.join(words)}: saturated, {rate}{bar}.", f"{about.source}, {about.workload}"
    return doc.plan_page(
        f"Flags for plain {plan.served_by.title}", named, verdict, sections, about.notes, command
    )


def _command(plan: FlagsPlan, words: Sequence[str]) -> tuple[doc.Block, ...]:
    loaded = model_of(plan.card, plan.settings.card)
    engine = loaded_with(plan.card, plan.situation.lost.longest, plan.settings.engine)
    code = pasted([f"{plan.served_by.serve} {quote(loaded or UNNAMED)}", *engine, *words])
    return (code,) if loaded else (code, unnamed(plan.card.model))


def unnamed(model: str) -> str:
    """What the placeholder in lines to paste stands for."""
    return f"{UNNAMED} stands for {model}, which has no name here that vLLM could load: put yours."


def pasted(parts: Sequence[str]) -> doc.Code:
    """One command, on as many lines as it takes; none of the parts is divided."""
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part) > LINE:
            lines.append("   ")
        lines[-1] += f" {part}"
    return doc.Code(" \\\n".join(lines)[1:])


def promised_page(
    plan: FlagsPlan, tried: FlagsTried, levels: Sequence[Level], command: Sequence[str]
) -> doc.Page:
    """Slots and budget for a promised gap, and the flags that a search tried."""
    flags = (doc.row(f"{each.name} {each.value}", doc.Cell(each.why, tone="prose")) for each in tried.flags)
    rates = []
    for each in sorted(tried.final, key=lambda each: -each.found.rate.value):
        word = "vLLM's own" if each is tried.own else "by the card" if each.budget == tried.formula else ""
        rate = each.found.rate
        way = each.found.limited_by or "nothing up to λ*"
        rates.append(doc.row(each.slots, each.budget, word, rate.value, doc.span(rate), way))
    heads = ("slots", "tokens\na step", "", "requests\nper s", "95 % interval", "gives way first")
    facts, searched = doc.Facts.of(asked(levels, ())), doc.Grid("", heads, tuple(rates))
    sections: tuple[doc.Section, ...] = (
        doc.Section("", (facts, doc.Grid("", ("flag", "why"), tuple(flags)))),
        doc.Section("Command", _command(plan, [f"{each.name} {each.value}" for each in tried.flags])),
        doc.Section("Searched", (searched,)),
    )
    if tried.declined:
        sections = (doc.Section("", (facts,)), doc.Section("Searched", (searched,)))
    named, answer = f"{plan.situation.source}, {plan.situation.workload}", _against_own(tried)
    return doc.plan_page(
        "Flags for plain vLLM", named, answer, sections, tried.notes, command, answer_first=True
    )


def _against_own(tried: FlagsTried) -> str:
    """What the best flags hold, and how vLLM's own stand to them."""
    best, own = tried.best, tried.own
    mine = best.found.rate.value
    if tried.declined:
        return f"No answer: {tried.declined}."
    if not mine:
        return "No flags keep the promise at any rate: ask for less."
    flags = f"--max-num-seqs {best.slots} --max-num-batched-tokens {best.budget}"
    said = f"{flags} holds {doc.number(mine)} requests/s under the promise"
    if own is best:
        return f"{said}: vLLM's own flags."
    change = 100 * (own.found.rate.value / mine - 1)
    told = "" if apart(best.found, own.found) else " (not significant)"
    return f"{said}; vLLM's own {own.slots} and {own.budget} hold {abs(change):.1f} % less{told}."


def sglang_said(made: Mapping[str, tuple[str, Mapping[str, Any]]], engine: Engine) -> list[str]:
    """SGLang's flags for each of the policies that were run, by what the user called them."""
    lines = []
    for text, (policy, parameters) in made.items():
        words = sglang_words(policy, parameters, engine.running, engine.batch_tokens)
        lines.append(f"SGLang, {text}: {' '.join(words) or NO_PLUG_IN}")
    return lines


def check_section(runs: Sequence[Checked], load: str, plan: FlagsPlan) -> doc.Section:
    """The simulated runs, one line each."""
    promised = any(run.metrics.goodput for run in runs)
    rows = []
    for run in runs:
        found = run.metrics
        times = (found.ttft.mean.value, found.ttft.p99, found.tpot.mean.value, found.tpot.p99)
        cells = [doc.valued(f"{1000 * value:,.0f}", 1000 * value) for value in (*times, found.longest_gap)]
        kept = [doc.share(found.goodput.share.value)] if found.goodput else []
        rows.append(doc.row(run.label, run.slots, run.budget, found.request_rate.value, *cells, *kept))
    heads: tuple[str, ...] = ("setting", "slots", "budget", "requests\nper s", "TTFT\nmean", "TTFT\np99")
    heads += ("TPOT\nmean", "TPOT\np99", "gap", *(("kept",) if promised else ()))
    sglang = plan.served_by.title == "SGLang"
    said = f"{'SGLang' if sglang else 'Mixed batching'} under {load}; "
    said += "times in ms, gap: the longest between two tokens"
    said += "; kept: requests that met both targets." if promised else "."
    if any(run.label == "vLLM's" for run in runs):
        said += " vLLM's: what `vllm serve` takes by itself on GPUs of 70 GiB or more."
    if sglang and len(runs) > 1:
        mine, own = (run.metrics for run in runs[:2])
        gain = 100 * (mine.request_rate.value / own.request_rate.value - 1)
        said += f" These flags serve {abs(gain):.1f} % {'more' if gain > 0 else 'less'} than SGLang without "
        said += f"a flag, the longest gap is {1000 * mine.longest_gap:,.0f} instead of "
        said += f"{1000 * own.longest_gap:,.0f} ms; requests name no max_tokens."
    for run in runs:
        if run.label == LIMITED:
            counts = run.metrics.counts
            away = f"{counts.refused:,} of {counts.total:,} requests"
            said += f" {LIMITED}: with --max-num-queued-tokens, where vLLM answers 503 to {away}."
    return doc.Section("Simulated", (doc.Grid("", heads, tuple(rows), (said,)),))
