"""`plan flags`: what to set in plain vLLM or SGLang, and the simulated check of that advice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from headgate.advisor.drafts import SIZES, DraftsPlan, DraftsRun
from headgate.advisor.flags import (
    NO_PLUG_IN,
    QUEUE_SINCE,
    Checked,
    FlagsPlan,
    loaded_with,
    model_of,
    sglang_words,
)
from headgate.report import document as doc
from headgate.report.plans.threshold import lengths
from headgate.sim.engine.engine import Engine

UNNAMED = "MODEL"  # where no name is known that vLLM can load
LINE = 76  # characters of a line to paste


def flags_page(plan: FlagsPlan, command: Sequence[str], more: Sequence[doc.Section] = ()) -> doc.Page:
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
    load = about.load.rate
    share = f"; your load is {100 * load / plan.rate:.0f} % of it" if load and load < plan.rate else ""
    verdict = f"Set {' '.join(words)}: saturated, {rate}{bar}{share}."
    named = f"{about.source}, {about.workload}"
    title = f"Flags for plain {plan.served_by.title}"
    return doc.plan_page(title, named, verdict, sections, about.notes, command)


def _command(plan: FlagsPlan, words: Sequence[str]) -> tuple[doc.Block, ...]:
    loaded = model_of(plan.card, plan.settings.card)
    engine = loaded_with(plan.card, plan.situation.lost.longest, plan.settings.engine)
    code = pasted([f"{plan.served_by.serve} {quote(loaded or UNNAMED)}", *engine, *words])
    return (code,) if loaded else (code, unnamed(plan.card.model))


def unnamed(model: str) -> str:
    return f"{UNNAMED} stands for {model}, which has no name here that vLLM could load: put yours."


def pasted(parts: Sequence[str]) -> doc.Code:
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part) > LINE:
            lines.append("   ")
        lines[-1] += f" {part}"
    return doc.Code(" \\\n".join(lines)[1:])


def sglang_said(made: Mapping[str, tuple[str, Mapping[str, Any]]], engine: Engine) -> list[str]:
    limits = engine.running, engine.batch_tokens
    words = {text: sglang_words(policy, own, *limits) for text, (policy, own) in made.items()}
    return [f"SGLang, {text}: {' '.join(flags) or NO_PLUG_IN}" for text, flags in words.items()]


def check_section(runs: Sequence[Checked], load: str, plan: FlagsPlan) -> doc.Section:
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
    return doc.Section("Simulated", (doc.Grid("", heads, tuple(rows), (said,)),))


# -- `plan speculation`: which k at this load, what each gains, and vLLM's schedule of k by batch size

CARE = (
    "Runs are finite. Acceptance is taken to be the same at every load, and the drafter's own prompts and KV "
    "are not simulated."
)
DENSE = (
    "A dense model reads its weights once whatever the batch: drafts are nearly free in small batches and "
    "cost their whole work in large ones, so gains fall as the batch grows."
)
EXPERTS = (
    "A mixture of experts reads more experts for more tokens: in small batches drafts need experts of their "
    "own, in large ones all are read anyway, so gains grow with the batch until the GPU's arithmetic is busy."
)


def drafts_page(plan: DraftsPlan, command: Sequence[str]) -> doc.Page:
    rows = [_row(plan, run) for run in plan.runs]
    heads: tuple[str, ...] = ("drafts\na step", "tokens\na step", "decodes\nat once", "TPOT\nms")
    heads += ("gap p99\nms", "TTFT\nms", "output\ntokens/s", "busy", "gain")
    if any(run.kept is not None for run in plan.runs):
        heads += ("promises\nkept",)
    sizes = []
    for k, values in plan.gains.items():
        loses = "never" if plan.loses_from[k] is None else f"{plan.loses_from[k]:,}"
        sizes.append(doc.row(k, *(doc.valued(f"{value:.2f}", value) for value in values), loses))
    by_size = doc.Grid("", ("drafts", *(f"batch\n{size}" for size in SIZES), "slower\nfrom"), tuple(sizes))
    words: tuple[doc.Block, ...] = ("No batch size gains by drafts: leave speculation off.",)
    if max(k for _, _, k in plan.ranges):
        words = (
            doc.Code(f"--speculative-config '{json.dumps(plan.config())}'"),
            "With data parallelism vLLM ignores the schedule. The drafter's own name (model) is to be added.",
        )
    sections = (
        doc.Section("At this load", (doc.Grid("", heads, tuple(rows)),)),
        doc.Section(
            f"Tokens a second by batch size, at {plan.context:,.0f} tokens of context",
            (by_size, EXPERTS if plan.card.work and plan.card.work.per_expert > 0 else DENSE),
        ),
        doc.Section("For vLLM", words),
    )
    about, said = f"card {plan.card.name}, {plan.workload}", answer(plan)
    return doc.plan_page("Speculation", about, said, sections, plan.notes, command, CARE, answer_first=True)


def answer(plan: DraftsPlan) -> str:
    best, none = plan.best, plan.runs[0]
    most = "at most " if plan.at_most else ""
    if not best.drafts:
        others = max(plan.runs[1:], key=lambda run: plan.gain(run))
        return (
            f"Leave speculation off at this load: the best of 1 to {plan.runs[-1].drafts} drafts gains {most}"
            f"{100 * (plan.gain(others) - 1):.0f} %."
        )
    return (
        f"Speculate with {doc.plural(best.drafts, 'draft')} a step: TPOT {1000 * best.tpot:.3g} instead of "
        f"{1000 * none.tpot:.3g} ms, {doc.number(best.output_rate)} instead of "
        f"{doc.number(none.output_rate)} output tokens/s, a gain of {most}"
        f"{100 * (plan.gain(best) - 1):.0f} %; gaps between deliveries are "
        f"{1000 * best.gap:.3g} instead of {1000 * none.gap:.3g} ms (p99)."
    )


def _row(plan: DraftsPlan, run: DraftsRun) -> doc.Row:
    tokens, batch = doc.valued(f"{run.tokens:.2f}", run.tokens), doc.valued(f"{run.batch:.1f}", run.batch)
    times = (1000 * value for value in (run.tpot, run.gap, run.first_token))
    gain, kept = plan.gain(run), () if run.kept is None else (f"{100 * run.kept:.1f} %",)
    shares = (f"{100 * run.busy:.0f} %", doc.valued(f"{gain:.2f}", gain))
    return doc.row(run.drafts, tokens, batch, *times, run.output_rate, *shares, *kept)
