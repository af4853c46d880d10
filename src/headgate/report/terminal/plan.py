"""Plans as text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from headgate.advisor.flags import QUEUE_SINCE, Checked, FlagsPlan
from headgate.advisor.situation import Situation
from headgate.advisor.threshold import WITHIN_ERROR, Predicted, ThresholdPlan
from headgate.methods.eb.thresholds import Threshold
from headgate.report.terminal.tables import number, time_unit

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

CAUTION = (
    f"Differences below about {100 * WITHIN_ERROR:.0f} % are within the error of these predictions on a "
    "measured card; on published cards and short or regular traces errors of 10 % were seen: check with "
    "headgate compare."
)


def threshold_text(plan: ThresholdPlan) -> RenderableType:
    """Facts, thresholds, both modes side by side, and the verdict in one sentence."""
    from rich.console import Group
    from rich.text import Text

    about = plan.situation
    parts: list[RenderableType] = [_title("Refill threshold", about), Text(), _facts(plan), Text()]
    parts += [_thresholds(plan), Text(), _modes(plan), Text()]
    parts += [Text(verdict(plan), style="bold"), Text(crossing(plan))]
    if plan.gap is not None:
        parts.append(Text(_gap(plan)))
    parts.append(Text(CAUTION, style="dim"))
    return Group(*parts)


def verdict(plan: ThresholdPlan) -> str:
    """Which mode to run at this load, in one sentence."""
    where, more = _where(plan), f"{100 * abs(plan.gain):.1f} %"
    chosen = plan.thresholds.chosen
    if plan.winner == "exclusive":
        return (
            f"{where} exclusive batches serve {more} more than mixed ones: refill {chosen.refill} of "
            f"{chosen.slots} seats at once (--policy eb --set refill={chosen.refill})."
        )
    if plan.winner == "mixed":
        return f"{where} mixed batches serve {more} more than exclusive ones: stay with --policy mixed."
    sign = "more" if plan.gain > 0 else "less"
    return (
        f"{where} the two cannot be told apart (exclusive serves {more} {sign}): stay with --policy mixed, "
        "vLLM's default."
    )


def _where(plan: ThresholdPlan) -> str:
    load = plan.situation.load
    if load.clients is not None:
        return f"At {load.clients:,} clients"
    if load.rate is not None:
        if load.rate > max(plan.mixed.rate, plan.exclusive.rate):
            return f"At {number(load.rate)} requests/s, more than either can serve,"
        return f"At {number(load.rate)} requests/s (about {plan.concurrent:,} at once)"
    return "With a queue that never empties"


def _title(what: str, about: Situation) -> RenderableType:
    from rich.text import Text

    return Text.assemble((what, "bold"), f": {about.source}, {about.workload}")


def _facts(plan: ThresholdPlan) -> Table:
    """Lengths, costs and memory."""
    about, costs, lengths, memory = plan.situation, plan.costs, plan.situation.lengths, plan.memory
    share = lengths.output / lengths.total
    table = columns(2)
    table.add_row("Lengths", _lengths(about))
    prefill = f"{timed(costs.prefill_fixed)} + {timed(costs.prefill_per_token)} per prompt token"
    decode = f"{timed(costs.decode_fixed)} + {timed(costs.decode_per_request)} per request"
    mixed = f"{timed(costs.mixed_fixed)} + {timed(costs.mixed_per_token(share))} per token"
    table.add_row("Prefill step", prefill)
    table.add_row("Decode step", f"{decode}, as a line near {plan.thresholds.chosen.slots:,}")
    table.add_row("Mixed step", f"{mixed} at a decode share of {share:.2f}")
    if memory.safe is None:
        table.add_row("Memory", "not given; pass --kv-tokens to bound the seats by it")
    else:
        safe = f"{about.kv_tokens:,.0f} KV tokens: safe for {memory.safe:,} seats of exclusive batches"
        table.add_row("Memory", f"{safe} (by equation (6) {memory.paper:,}); mixed fits {memory.mixed:,}")
    for note in plan.notes:
        table.add_row("Note", note)
    return table


def _lengths(about: Situation) -> str:
    lengths = about.lengths
    means = f"prompt {number(lengths.prompt)}, output {number(lengths.output + 1)} tokens"
    return f"{means}; a decode reads {number(lengths.context)}"


def _thresholds(plan: ThresholdPlan) -> Table:
    chosen = plan.thresholds
    table = columns(4, header=("refill when so many seats are idle", "share", "refill", "of seats"))
    use, other = ": use this", ""
    if chosen.chosen is not chosen.stationary:
        use, other = other, use
    rows: list[tuple[str, Threshold]] = [
        (f"best in a steady state, θ*{use}", chosen.stationary),
        (f"base share θ0, equation (3){other}", chosen.base),
        ("the paper's θ0 + Δθ, equations (3), (5)", chosen.paper),
    ]
    for name, each in rows:
        table.add_row(name, f"{each.share:.4f}", f"{each.refill:,}", f"{each.slots:,}")
    return table


def _modes(plan: ThresholdPlan) -> Table:
    """One line per figure, mixed and exclusive batches beside each other."""
    mixed, exclusive = plan.mixed, plan.exclusive
    table = columns(4, header=("predicted", "mixed", "exclusive", "difference"))
    rates = {"requests/s": "rate", "tokens/s, prompt and output": "tokens"}
    rates["requests/s by the paper's formulas"] = "paper_rate"
    for name, field in rates.items():
        table.add_row(name, *_pair(mixed, exclusive, field, scale=1.0))
    times = {"time per token, TPOT": "per_token", "longest gap in a full engine": "longest_gap"}
    if mixed.first_token is not None:
        times["time to first token, TTFT"] = "first_token"
    for name, field in times.items():
        scale, unit = time_unit(max(getattr(mixed, field), getattr(exclusive, field)))
        table.add_row(f"{name} ({unit})", *_pair(mixed, exclusive, field, scale))
    table.add_row("requests running at once", f"{mixed.running:,}", f"{exclusive.running:,}", "")
    return table


def _pair(mixed: Predicted, exclusive: Predicted, field: str, scale: float) -> tuple[str, str, str]:
    one, other = getattr(mixed, field), getattr(exclusive, field)
    change = 100 * (other / one - 1) if one > 0 else 0.0
    shown = f"{change:+,.0f} %" if abs(change) >= 99.95 else f"{change:+.1f} %"
    return number(one * scale), number(other * scale), shown


def crossing(plan: ThresholdPlan) -> str:
    """From which load on exclusive batches win, by us and by the paper."""
    found = plan.crossing
    if found.wins is None:
        said = f"Exclusive batches win at no load up to {found.searched:,} concurrent requests"
    elif found.wins[1] == found.searched:
        said = f"Exclusive batches win from {found.wins[0]:,} concurrent requests on"
    else:
        said = f"Exclusive batches win from {found.wins[0]:,} to {found.wins[1]:,} concurrent requests"
    if found.clearly and found.clearly != found.wins:
        said += f", by more than {100 * WITHIN_ERROR:.0f} % from {found.clearly[0]:,}"
    low, high = found.paper
    if not isfinite(low):
        return f"{said}; by the paper's formulas never."
    if low == 0:
        return f"{said}; by the paper's formulas always."
    bound = f"from {low:,.0f} on" if not isfinite(high) else f"below {high:,.0f}"
    return f"{said}; by the paper's formulas {bound}."


def _gap(plan: ThresholdPlan) -> str:
    """What a bound on gaps costs."""
    gap = plan.gap
    assert gap is not None
    if not gap.refill:
        return (
            f"No refill keeps gaps within {timed(gap.bound)}: one prompt and the step after it take "
            f"{timed(gap.gap)}. Cut prompts (eb's max_gap does) or run fewer at once."
        )
    if gap.change == 0:
        return f"That refill keeps gaps within {timed(gap.bound)}: {timed(gap.gap)} for mean prompts."
    cost = f"costs {-100 * gap.change:.1f} % of the rate" if gap.change < 0 else "costs nothing"
    return (
        f"Gaps within {timed(gap.bound)}: refill at most {gap.refill:,} at once ({timed(gap.gap)}), which "
        f"{cost}; or let eb cut refills into pieces (--set max_gap={gap.bound:g})."
    )


def flags_text(plan: FlagsPlan) -> RenderableType:
    """Each flag with its reason, and the whole command."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    about = plan.situation
    parts: list[RenderableType] = [_title("Flags for plain vLLM", about)]
    parts += [Text(f"{plan.model} on {plan.gpu}; {_lengths(about)}"), Text()]
    parts += [Text(f"note: {note}") for note in about.notes]
    for flag in plan.flags:
        parts.append(Text(f"{flag.name} {flag.value}", style="bold"))
        parts.append(Padding(Text(flag.why), (0, 0, 0, 4)))
    if plan.waiting is not None:
        most = plan.decoding + plan.waiting
        older = (
            f"Known to vLLM from {QUEUE_SINCE} on. With an older one let the load balancer send at most "
            f"{most:,} requests at a time: {plan.decoding:,} decode, {plan.waiting:,} are before their first "
            "token."
        )
        parts.append(Padding(Text(older), (0, 0, 0, 4)))
    rate = f"{number(plan.rate)} requests/s at {number(1000 * plan.per_token)} ms per token"
    parts += [Text(), Text(f"Predicted when saturated: {rate}."), Text(), Text(command(plan), style="bold")]
    return Group(*parts)


def command(plan: FlagsPlan) -> str:
    """The command line to copy."""
    flags = [f"{flag.name} {flag.value}" for flag in plan.flags]
    tail = f" \\\n    {flags[2]}" if len(flags) > 2 else ""
    return f"vllm serve MODEL {flags[0]} {flags[1]}{tail}"


def check_text(runs: Sequence[Checked], load: str, plan: FlagsPlan) -> RenderableType:
    """The simulated runs, one line each."""
    from rich.console import Group
    from rich.text import Text

    names = ("simulated", "seats", "budget", "req/s", "TTFT\nmean", "p99", "TPOT\nmean", "p99", "gap")
    promised = any(run.metrics.goodput for run in runs)
    table = columns(len(names) + promised, header=(*names, "kept") if promised else names)
    for run in runs:
        found = run.metrics
        times = (found.ttft.mean.value, found.ttft.p99, found.tpot.mean.value, found.tpot.p99)
        cells = [f"{1000 * value:,.0f}" for value in (*times, found.longest_gap)]
        if found.goodput:
            cells.append(f"{100 * found.goodput.share.value:.0f} %")
        table.add_row(run.label, f"{run.seats}", f"{run.budget}", number(found.request_rate.value), *cells)
    said = f"Mixed batching under {load}; times in ms, gap: the longest between two tokens"
    said += "; kept: requests that met both targets." if promised else "."
    if any(run.label == "vLLM's" for run in runs):
        said += " vLLM's: what `vllm serve` takes by itself on GPUs of 70 GiB or more."
    if plan.queue is not None:
        said += " Without the queue limit: the simulator turns nobody away."
    return Group(Text(), table, Text(said, style="dim"))


def columns(count: int, header: Sequence[str] = ()) -> Table:
    """Columns without lines: words on the left, then numbers; two columns are both words."""
    from rich import box
    from rich.table import Table

    lines = box.SIMPLE_HEAD if header else None
    table = Table(box=lines, show_header=bool(header), show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for index in range(count):
        words = index == 0 or count == 2
        name = header[index] if header else ""
        table.add_column(name, justify="left" if words else "right", no_wrap=count > 2 or index == 0)
    return table


def timed(seconds: float) -> str:
    """In the unit that suits it, down to nanoseconds."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.4g} {unit}"
    raise AssertionError
