"""`plan speculation`: which k at this load, what each gains, and vLLM's schedule of k by batch size."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headgate.advisor.drafts import SIZES, DraftsPlan, DraftsRun
from headgate.report import document as doc

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
    """The answer, every k at the load, gains by batch size, and what to give vLLM."""
    rows = [_row(plan, run) for run in plan.runs]
    heads: tuple[str, ...] = (
        "drafts\na step",
        "tokens\na step",
        "decodes\nat once",
        "TPOT\nms",
        "gap p99\nms",
        "TTFT\nms",
    )
    heads += ("output\ntokens/s", "busy", "gain")
    if any(run.kept is not None for run in plan.runs):
        heads += ("promises\nkept",)
    sizes = [
        doc.row(k, *(doc.valued(f"{value:.2f}", value) for value in values), _loses(plan, k))
        for k, values in plan.gains.items()
    ]
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
            (by_size, EXPERTS if plan.experts else DENSE),
        ),
        doc.Section("For vLLM", words),
    )
    about = f"card {plan.card.name}, {plan.workload}"
    return doc.plan_page(
        "Speculation", about, answer(plan), sections, plan.notes, command, CARE, answer_first=True
    )


def answer(plan: DraftsPlan) -> str:
    """One sentence: on or off, which k, and by how much."""
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
    cells: list[doc.Cell | str | float] = [
        run.drafts,
        doc.valued(f"{run.tokens:.2f}", run.tokens),
        doc.valued(f"{run.batch:.1f}", run.batch),
    ]
    cells += [1000 * value for value in (run.tpot, run.gap, run.first_token)]
    gain = plan.gain(run)
    cells += [run.output_rate, f"{100 * run.busy:.0f} %", doc.valued(f"{gain:.2f}", gain)]
    if run.kept is not None:
        cells.append(f"{100 * run.kept:.1f} %")
    return doc.row(*cells)


def _loses(plan: DraftsPlan, k: int) -> str:
    size = plan.loses_from[k]
    return "never" if size is None else f"{size:,}"
