"""`plan threshold`: when to refill, and which batches serve more at this load, mixed or exclusive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headgate.advisor.situation import Situation
from headgate.advisor.threshold import WITHIN_ERROR, ThresholdPlan
from headgate.report import document as doc
from headgate.report.charts import LOG, Axis, Chart, Mark, Series

POINTS = 90
SHARES = (0.002, 0.98)  # of the slots: what is drawn
REACH = 12  # phases up to so many times the optimum's
CAUTION = (
    f"Differences below about {100 * WITHIN_ERROR:.0f} % are within the error of these predictions on a "
    "measured card; on published cards and short or regular traces errors of 10 % were seen: check with "
    "headgate compare."
)


def threshold_page(plan: ThresholdPlan, command: Sequence[str]) -> doc.Page:
    sections = (
        doc.Section("", (_facts(plan),)),
        doc.Section("Thresholds", (_thresholds(plan), doc.Drawn(lambda: (_curve(plan),)))),
        doc.Section("Both modes at this load", (_modes(plan),)),
    )
    verdict = " ".join(filter(None, (choice(plan), crossing(plan), _gap(plan))))
    about = f"{plan.situation.source}, {plan.situation.workload}"
    return doc.plan_page("Refill threshold", about, verdict, sections, plan.notes, command, CAUTION)


def choice(plan: ThresholdPlan) -> str:
    where, more = _where(plan), f"{100 * abs(plan.gain):.1f} %"
    if plan.keeps_up:
        most = plan.saturated
        change = f"{100 * abs(most.gain):.1f} % {'more' if most.gain > 0 else 'less'}"
        return (
            f"{where} both modes serve every request: no throughput to gain, stay with --policy mixed. "
            f"Saturated, exclusive batches serve {change} than mixed ones ({doc.number(most.exclusive)} "
            f"against {doc.number(most.mixed)} requests/s)."
        )
    chosen = plan.thresholds.chosen
    if plan.winner == "exclusive":
        return (
            f"{where} exclusive batches serve {more} more than mixed ones: refill {chosen.refill} of "
            f"{chosen.slots} slots at once (--policy eb --set refill={chosen.refill})."
        )
    if plan.winner == "mixed":
        return f"{where} mixed batches serve {more} more than exclusive ones: stay with --policy mixed."
    if plan.situation.error > WITHIN_ERROR:
        change = f"{more} {'more' if plan.gain > 0 else 'less'}"
        return (
            f"{where} cannot tell: exclusive batches serve {change} by this card, which was not measured and "
            f"may be off by {100 * plan.situation.error:.0f} %: stay with --policy mixed, vLLM's default."
        )
    return (
        f"{where} the difference is within the error (exclusive serves {more} "
        f"{'more' if plan.gain > 0 else 'less'}): stay with --policy mixed, vLLM's default."
    )


def _where(plan: ThresholdPlan) -> str:
    load = plan.situation.load
    if load.clients is not None:
        return f"At {load.clients:,} clients"
    if load.rate is not None:
        if load.rate > max(plan.mixed.rate, plan.exclusive.rate):
            return f"At {doc.number(load.rate)} requests/s, more than either can serve,"
        return f"At {doc.number(load.rate)} requests/s (about {plan.concurrent:,} at once)"
    return "With a queue that never empties"


def crossing(plan: ThresholdPlan) -> str:
    found = plan.crossing
    if found.wins is None:
        said = f"Exclusive batches win at no load up to {found.searched:,} concurrent requests"
    elif found.wins[1] == found.searched:
        said = f"Exclusive batches win from {found.wins[0]:,} concurrent requests on"
    else:
        said = f"Exclusive batches win from {found.wins[0]:,} to {found.wins[1]:,} concurrent requests"
    if found.clearly and found.clearly != found.wins:
        said += f", by more than {100 * WITHIN_ERROR:.0f} % from {found.clearly[0]:,}"
    return f"{said}."


def _gap(plan: ThresholdPlan) -> str:
    gap = plan.gap
    if gap is None:
        return ""
    bound, own = doc.fine_time(gap.bound), doc.fine_time(gap.gap)
    if not gap.refill:
        return (
            f"No refill keeps gaps within {bound}: one prompt and the step after it take {own}. Cut prompts "
            "(eb's max_gap does) or run fewer at once."
        )
    if gap.change == 0:
        return f"That refill keeps gaps within {bound}: {own} for mean prompts."
    cost = f"costs {-100 * gap.change:.1f} % of the rate" if gap.change < 0 else "costs nothing"
    return (
        f"Gaps within {bound}: refill at most {gap.refill:,} at once ({own}), which {cost}; or let eb cut "
        f"refills into pieces (--set max_gap={gap.bound:g})."
    )


def lengths(about: Situation) -> str:
    found = about.lengths
    cached = f" ({doc.percent(found.cached / found.prompt)} cached)" if found.uncached else ""
    means = f"prompt {doc.number(found.prompt)}{cached}, output {doc.number(found.output + 1)} tokens"
    return f"{means}; a decode reads {doc.number(found.context)}"


def _facts(plan: ThresholdPlan) -> doc.Facts:
    about, costs, memory = plan.situation, plan.costs, plan.memory
    decodes = about.lengths.output / about.lengths.total

    def cost(fixed: float, each: float, what: str) -> str:
        return f"{doc.fine_time(fixed)} + {doc.fine_time(each)} per {what}"

    near = f", as a line near {plan.thresholds.chosen.slots:,}"
    mixed = cost(costs.mixed_fixed, costs.mixed_per_token(decodes), "token")
    kv = f"{about.kv_tokens:,} KV tokens: safe for {memory.safe:,} slots of exclusive batches; "
    kv += f"mixed fits {memory.mixed:,}"
    rows = {
        "Lengths": lengths(about),
        "Prefill step": cost(costs.prefill_fixed, costs.prefill_per_token, "prompt token"),
        "Decode step": cost(costs.decode_fixed, costs.decode_per_request, "request") + near,
        "Mixed step": f"{mixed} at a decode share of {decodes:.2f}",
        "Memory": kv,
    }
    return doc.Facts(rows)


def _thresholds(plan: ThresholdPlan) -> doc.Grid:
    found = plan.thresholds
    use = {found.chosen is found.stationary: ": use this"}
    rows = {
        f"best in a steady state, θ*{use.get(True, '')}": found.stationary,
        f"base share θ0, equation (3){use.get(False, '')}": found.base,
    }
    entries = []
    for name, each in rows.items():
        entries.append(doc.row(name, doc.valued(f"{each.share:.4f}", each.share), each.refill, each.slots))
    return doc.Grid("", ("refill when so many slots are idle", "share", "refill", "of slots"), tuple(entries))


def _modes(plan: ThresholdPlan) -> doc.Grid:
    fields = {
        "requests/s with so many at once": "rate",
        "tokens/s, prompt and output": "tokens",
        "time per token, TPOT": "per_token",
        "longest gap in a full engine": "longest_gap",
        "time to first token, TTFT": "first_token",
    }
    rows: list[doc.Row] = []
    for name, field in fields.items():
        one, other = getattr(plan.mixed, field), getattr(plan.exclusive, field)
        if one is None or other is None:
            continue
        scale, unit = (1.0, "") if "/s" in name else doc.time_unit(max(one, other))
        change = 100 * (other / one - 1) if one > 0 else 0.0
        named = f"{name} ({unit})" if unit else name
        rows.append(doc.row(named, one * scale, other * scale, doc.valued(f"{doc.signed(change)} %", change)))
    most = plan.saturated
    gained = doc.valued(f"{doc.signed(100 * most.gain)} %", 100 * most.gain)
    rows.append(doc.row("requests/s, saturated", most.mixed, most.exclusive, gained))
    rows.append(doc.row("requests running at once", plan.mixed.running, plan.exclusive.running, doc.Cell("")))
    return doc.Grid("", ("predicted", "mixed", "exclusive", "difference"), tuple(rows))


def _curve(plan: ThresholdPlan) -> doc.Figure:
    """The time a request costs beside what no threshold changes, over its least: (T + g) M(T)."""
    survival, overhead = plan.situation.survival, plan.costs.overhead
    best, base = plan.thresholds.stationary, plan.thresholds.base
    mean = max(survival.mean, 2.0)
    phases = np.unique(np.geomspace(1, REACH * mean, POINTS).astype(np.int64)).tolist()
    shares = np.array([1 / survival.renewals(phase) for phase in phases])
    costs = np.array([(phase + overhead) * survival.renewals(phase) for phase in phases])
    shown = (shares >= SHARES[0]) & (shares <= SHARES[1]) & (costs <= 3 * costs.min())
    extra = 100 * (costs / costs.min() - 1)
    marks = [Mark(f"θ* = {best.share:.3f}", best.share), Mark(f"θ0 = {base.share:.3f}", base.share)]
    across, up = Axis("slots refilled at once", "share", LOG), Axis("extra time per request", "%", low=0.0)
    chart = Chart(across, up, [Series("refill and decode phases", shares[shown], extra[shown])], marks)
    look = "Extra time per request due to the threshold. θ* is the optimum, θ0 the base share."
    teeth = "Teeth stand where many outputs have nearly the same length."
    return chart.figure("Threshold curve", look, teeth)
