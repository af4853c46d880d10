"""`plan wait`: thresholds of WAIT and Nested WAIT, and the memory they need beside what there is."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from headgate.methods.wait.inventory import offered
from headgate.report import document as doc
from headgate_papers.wait.plan import Nested, WaitPlan
from headgate_papers.wait.segments import decays

WIDE = 78  # columns of a command
LIGHT = (
    "At this load every policy serves all that arrives, and mixed batching has the lower latency; WAIT pays "
    "near saturation, where evictions cost compute."
)
SATURATED = "max_pause=0 limits which requests enter and pauses none, which is usually better."


def wait_page(plan: WaitPlan, command: Sequence[str]) -> doc.Page:
    known = (_types(plan), _full(plan))
    sections = (
        doc.Section("", (_facts(plan),)),
        doc.Section("WAIT, where output lengths are known by type", known),
        doc.Section("Nested WAIT, where they are not known", tuple(_nested(plan))),
        doc.Section("To run it", (SATURATED if plan.mix.rate / plan.most >= 0.9 else LIGHT, _commands(plan))),
    )
    about = f"{plan.source}, {plan.workload}, {doc.number(plan.mix.rate)} requests/s"
    return doc.plan_page("WAIT", about, _verdict(plan), sections, plan.notes, command)


def _verdict(plan: WaitPlan) -> str:
    by_type = zip(plan.mix.names, plan.thresholds.sizes, strict=True)
    sizes = [f"{size:.3g}{f' ({name})' if name else ''}" for name, size in by_type]
    waits = f"a threshold of {sizes[0]}" if len(sizes) == 1 else f"thresholds of {', '.join(sizes)}"
    verdict = (
        f"At {100 * plan.mix.rate / plan.most:.0f} % of what the card can carry, WAIT with {waits} requests "
        f"holds at most {doc.number(plan.need)} of {plan.capacity:,} KV tokens, if outputs are as long as "
        "their type says"
    )
    if (total := _nested_need(plan)) is not None and plan.nested is not None:
        chance = f"with probability {1 - plan.nested.miss:g} over {doc.number(plan.wishes.horizon)} s"
        verdict += "; Nested WAIT, which needs no such forecast, holds at most "
        verdict += f"{doc.number(total)} {chance}"
    return f"{verdict}."


def _nested_need(plan: WaitPlan) -> float | None:
    total = None if plan.nested is None else plan.nested.bound.total
    return total if total is not None and isfinite(total) else None


def _facts(plan: WaitPlan) -> doc.Facts:
    fluid, rate = plan.fluid, plan.mix.rate
    active = f"{doc.number(sum(fluid.active))} active requests (N*)"
    paces = f"{doc.fine_time(plan.pace.shortest)} to {doc.fine_time(plan.pace.longest)}"
    rows = {
        "Rate": f"{doc.number(rate)} requests/s, load {rate / plan.most:.3f} of {doc.number(plan.most)}",
        "Work": f"{doc.number(offered(plan.mix.parts))} KV tokens touched per second (W)",
        "Iteration": f"{doc.fine_time(fluid.seconds)} in the fluid equilibrium (DT*)",
        "Equilibrium": f"{active}, {doc.number(fluid.kv)} KV tokens (M*) of {plan.capacity:,}",
        "Throughput": f"{doc.number(fluid.decode_rate)} decode tokens/s, all that arrives",
        "Feasible": f"{paces} per iteration; a longer one is a longer time per token",
    }
    return doc.Facts(rows)


def _types(plan: WaitPlan) -> doc.Grid:
    rows = []
    for name, part, size in zip(plan.mix.names, plan.mix.parts, plan.thresholds.sizes, strict=True):
        lengths = (part.rate, part.prompt, part.decodes, part.work, float(part.peak))
        rows.append(doc.row(name or "all", *map(float, lengths), doc.valued(f"{size:.4g}", size)))
    heads = ("type", "arrive\nper s", "prompt", "decodes", "KV work", "KV at its end\ntokens", "threshold")
    return doc.Grid("", heads, tuple(rows))


def _full(plan: WaitPlan) -> str:
    return (
        f"A full batch takes {doc.fine_time(plan.thresholds.seconds)} and {plan.thresholds.kv:,.0f} KV "
        f"tokens; with one request more of each type {plan.need:,.0f}, never exceeded where types keep their "
        f"lengths. Mean latency about {doc.fine_time(plan.latency)}."
    )


def _nested(plan: WaitPlan) -> list[doc.Block]:
    nested = plan.nested
    if nested is None:
        return [f"None: {plan.why_not_nested}."]
    found: list[doc.Block] = [_segments(nested), _bound(plan, nested)]
    if nested.active > nested.slots:
        found.append(
            f"Full segments hold {nested.active:,.0f} requests, there are {nested.slots} slots: cohorts that "
            "shrink little will wait for slots; give more --slots."
        )
    return found


def _segments(nested: Nested) -> doc.Grid:
    segments, sizes = nested.segments, nested.thresholds.sizes
    rates = ["-", *(f"{rate:.4g}" for rate in decays(segments, sizes))]
    stays = [*(f"{stay:.3f}" for stay in segments.stays), "-"]
    columns = zip(segments.begins, segments.ends, segments.reach, stays, sizes, rates, strict=True)
    rows = []
    for begin, end, reach, stay, size, theta in columns:
        cells = (doc.valued(text, inf) for text in (stay, f"{size:.4g}", theta))
        rows.append(doc.row(f"{begin + 1} to {end}", float(reach), *cells))
    heads = ("iterations", "reach it\nper s", "go on\nof these", "threshold", "theta")
    return doc.Grid("", heads, tuple(rows))


def _bound(plan: WaitPlan, nested: Nested) -> str:
    bound = nested.bound
    if bound.total == inf:
        return "No memory is enough: a threshold does not exceed what reaches it (10); give --slack above 0."
    terms = f"{bound.full:,.0f} in full segments, {bound.waiting:,.0f} and {bound.tail:,.0f} between them"
    chance = f"{doc.fine_time(plan.wishes.horizon)} with probability {1 - nested.miss:g}"
    enough = f"{bound.total:,.0f} KV tokens are enough for {chance} ({terms})"
    if nested.overflow >= 1:
        return f"{enough}; for the card's {plan.capacity:,} nothing is promised: the memory guard may evict."
    return f"{enough}; the card's {plan.capacity:,} with probability {1 - nested.overflow:.6g}."


def _commands(plan: WaitPlan) -> doc.Code:
    """A long word goes on at the start of the next line, as shells read it."""
    commands = []
    for name, words in plan.policies().items():
        lines = [f"  --policy {name}"]
        for word, value in words.items():
            line = f"      --set {word}={value}"
            lines.append("\\\n".join(line[begin : begin + WIDE] for begin in range(0, len(line), WIDE)))
        commands.append(" \\\n".join(lines))
    return doc.Code("\n".join(commands))
