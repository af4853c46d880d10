"""WAIT's plan as text for a terminal of 80 columns."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from headgate.advisor.wait.plan import Nested, WaitPlan
from headgate.methods.wait.iteration import offered
from headgate.methods.wait.nested import walks
from headgate.report.terminal.plan import columns, timed
from headgate.report.terminal.tables import number

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDE = 78  # columns of a command


def wait_text(plan: WaitPlan) -> RenderableType:
    """Facts, both tables of thresholds, the memory, and the policies to copy."""
    from rich.console import Group
    from rich.text import Text

    title = Text.assemble(("WAIT", "bold"), f": {plan.source}, {plan.workload}")
    parts: list[RenderableType] = [title, Text(), _facts(plan), Text()]
    parts += [Text("WAIT, where output lengths are known by type", style="bold"), _types(plan)]
    parts += [Text(_memory(plan)), Text(_whole(plan))]
    parts += [Text(f"{name}: {_list(sizes)}") for name, sizes in plan.rules.items()]
    parts += [Text(), Text("Nested WAIT, where nobody knows them", style="bold")]
    if plan.nested is None:
        parts.append(Text(f"None: {plan.why_not_nested}."))
    else:
        parts += [_segments(plan.nested), Text(_bound(plan, plan.nested)), Text(_tried(plan.nested))]
        if plan.nested.active > plan.nested.slots:
            parts.append(Text(_crowded(plan.nested)))
    parts += [Text(), Text(_advice(plan))]
    for name, words in plan.policies().items():
        settings = "".join(f" \\\n{_folded(f'      --set {word}={value}')}" for word, value in words.items())
        parts.append(Text(f"  --policy {name}{settings}", style="bold"))
    return Group(*parts)


def _facts(plan: WaitPlan) -> Table:
    fluid, rate = plan.fluid, plan.mix.rate
    table = columns(2)
    table.add_row("Rate", f"{number(rate)} requests/s, load {rate / plan.most:.3f} of {number(plan.most)}")
    table.add_row("Work", f"{number(offered(plan.mix.parts))} KV tokens touched per second (W)")
    table.add_row("Iteration", f"{timed(fluid.seconds)} in the fluid equilibrium (DT*)")
    active = f"{number(sum(fluid.active))} active requests (N*)"
    table.add_row("Equilibrium", f"{active}, {number(fluid.kv)} KV tokens (M*) of {plan.capacity:,}")
    table.add_row("Throughput", f"{number(fluid.decode_rate)} decode tokens/s, all that arrives")
    paces = f"{timed(plan.pace.shortest)} to {timed(plan.pace.longest)}"
    table.add_row("Feasible", f"{paces} per iteration; a longer one is a longer time per token")
    for note in plan.notes:
        table.add_row("Note", note)
    return table


def _types(plan: WaitPlan) -> Table:
    table = columns(6, header=("type", "per s", "prompt", "decodes", "KV work", "threshold"))
    rows = zip(plan.mix.names, plan.mix.parts, plan.thresholds.sizes, strict=True)
    for name, part, size in rows:
        lengths = (number(part.rate), number(part.prompt), number(part.decodes), number(part.work))
        table.add_row(name or "all", *lengths, f"{size:.4g}")
    return table


def _memory(plan: WaitPlan) -> str:
    return (
        f"A full batch takes {timed(plan.thresholds.seconds)} and {plan.thresholds.kv:,.0f} KV tokens; "
        f"with one request more of each type {plan.need:,.0f}, never exceeded where types keep their "
        f"lengths. Mean latency about {timed(plan.latency)}."
    )


def _whole(plan: WaitPlan) -> str:
    if plan.whole is None:
        return f"Whole thresholds: none ({plan.why_not})."
    return (
        f"Whole thresholds: {_list(plan.whole.sizes)}, {plan.whole.kv:,.0f} KV tokens, "
        f"{timed(plan.whole.seconds)} per full batch."
    )


def _segments(nested: Nested) -> Table:
    names = ("iterations", "per s", "go on", "threshold", "whole", "theta")
    table = columns(6, header=names)
    segments, sizes = nested.segments, nested.thresholds.sizes
    decays = ["-", *(f"{walk.decay:.4g}" for walk in walks(segments, sizes))]
    stays = [*(f"{stay:.3f}" for stay in segments.stays), "-"]
    whole = ["-"] * len(sizes) if nested.whole is None else [f"{size:g}" for size in nested.whole.sizes]
    rows = zip(segments.begins, segments.ends, segments.reach, stays, sizes, whole, decays, strict=True)
    for begin, end, reach, stay, size, n, theta in rows:
        table.add_row(f"{begin + 1} to {end}", number(reach), stay, f"{size:.4g}", n, theta)
    return table


def _bound(plan: WaitPlan, nested: Nested) -> str:
    bound = nested.bound
    if bound.total == inf:
        return "No memory is enough: a threshold does not exceed what reaches it (10); give --slack above 0."
    terms = f"{bound.full:,.0f} in full segments, {bound.waiting:,.0f} and {bound.tail:,.0f} between them"
    hours = timed(plan.wishes.horizon)
    enough = (
        f"{bound.total:,.0f} KV tokens are enough for {hours} with probability {1 - nested.miss:g} ({terms})"
    )
    if nested.overflow >= 1:
        return f"{enough}; for the card's {plan.capacity:,} nothing is promised: the memory guard may evict."
    return f"{enough}; the card's {plan.capacity:,} with probability {1 - nested.overflow:.6g}."


def _crowded(nested: Nested) -> str:
    return (
        f"Full segments hold {nested.active:,.0f} requests, there are {nested.slots} seats: cohorts that "
        "shrink little will wait for seats; give more --slots."
    )


def _tried(nested: Nested) -> str:
    found: dict[int, float] = {}
    for choice in nested.tried:
        if choice.bound is not None:
            count = len(choice.segments.ends)
            found[count] = min(found.get(count, inf), choice.bound.total)
    if len(found) < 2:
        some = sum(choice.bound is not None for choice in nested.tried)
        return f"Ways to cut that keep up: {some} of {len(nested.tried)} tried."
    listed = ", ".join(f"{count}: {number(total)}" for count, total in sorted(found.items()))
    return f"Memory by number of segments: {listed}."


def _advice(plan: WaitPlan) -> str:
    load = plan.mix.rate / plan.most
    if load < 0.9:
        return (
            "At this load every policy serves all that arrives, and mixed batching has the lower latency; "
            "WAIT pays near saturation, where evictions cost compute. To run it:"
        )
    return "To run it (max_pause=0 paces who enters and pauses nobody, which is usually better):"


def _folded(line: str) -> str:
    """A long word goes on at the start of the next line, as shells read it."""
    pieces = [line[begin : begin + WIDE] for begin in range(0, len(line), WIDE)]
    return "\\\n".join(pieces)


def _list(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values) + ")"
