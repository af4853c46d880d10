"""`headgate advise`: the answer, plain vLLM beside it, and the lines to paste."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from headgate.advisor.advice import Advice, Advised
from headgate.advisor.capacity.plan import Found, apart
from headgate.advisor.capacity.traffic import Level, promised_gap
from headgate.advisor.flags import FLAG, WHY, graph_flag, loaded_with, model_of
from headgate.cost.likeness import throughput_error
from headgate.report.document import (
    PAGE_ONLY,
    Code,
    Drawn,
    Facts,
    Figure,
    Grid,
    Page,
    Section,
    number,
    plan_page,
    plural,
    row,
    span,
    valued,
)
from headgate.report.plans.capacity import apart_said, asked, bar_of, engines_range, rate_bars
from headgate.report.plans.flags import UNNAMED, pasted, unnamed

SIMULATED = "All rates are simulated with such graphs, those of vLLM at its defaults too."
CARE = (
    "λ* is the rate no policy exceeds. Flags were chosen on short runs of one seed; rates and intervals are "
    "from long runs, over seeds. Runs are finite, so tails (p99) are optimistic."
)


def advice_page(advice: Advice, model: str | None, command: Sequence[str]) -> Page:
    """The answer first; then what else was tried, what to paste, and why."""
    rows = [advice.best, advice.plain, advice.default]
    card = advice.start.card
    loaded = model or model_of(card, advice.start.settings.card) or UNNAMED
    stands_for = (f"{unnamed(card.model)} --model puts it there.",) if loaded == UNNAMED else ()
    lines = (
        Section("With headgate", (serve_line(advice, advice.best, loaded),)),
        Section("Plain vLLM at its best flags", (plain_line(advice, advice.plain, loaded), *stands_for)),
    )
    sections = (
        Section("", (_facts(advice),)),
        Section("Beside plain vLLM", (_beside(advice, rows), Drawn(lambda: (_bars(advice),)))),
        *([] if advice.declined else lines),
        Section("Every policy at its best flags", (_finals(advice),)),
        Section("Flags tried on short runs", (_shorts(advice.first_round),), PAGE_ONLY),
    )
    about = f"card {advice.start.card.name}, {advice.start.workload}"
    graphs = (f"{FLAG}: {WHY} {SIMULATED}",) if promised_gap(advice.levels) is not None else ()
    notes = (*advice.notes, *graphs)
    return plan_page("Advice", about, answer(advice), sections, notes, command, CARE, answer_first=True)


def answer(advice: Advice) -> str:
    """One sentence: policy, flags, engines, the load it holds, what gives way first."""
    best, rate = advice.best, advice.best.found.rate
    if not rate.value:
        levels = "; ".join(str(level) for level in advice.levels if level.statistic)
        return f"No policy keeps {levels} at any rate on one engine: ask for less, or for a faster card."
    if advice.declined:
        return f"No answer: {advice.declined}."
    flags = f"--max-num-seqs {best.seats} --max-num-batched-tokens {best.budget}"
    span = "" if rate.low is None else f" (95 % interval {number(rate.low)} to {number(rate.high or 0.0)})"
    plain = "plain vLLM, without a plug-in," if best.plain else ""
    error = throughput_error(advice.start.card)
    said = f"Run {plain or _named(best)} with {flags}: one engine holds {number(rate.value)} requests/s"
    said += f"{span}{bar_of(error)}"
    way = best.found.limited_by
    said += f", then {way} gives way first" if way else ", as many as any policy can"
    if error and not plain and advice.plain.found.rate.value >= (1 - error) * rate.value:
        said += ". Cannot tell it from plain vLLM at its best flags: the card cannot separate them"
    if advice.load is None:
        return f"{said}."
    needs = plural(best.engines, "engine") if best.engines else f"more than {plural(advice.most, 'engine')}"
    needs += f", {engines_range(best.engines, error)}" if error and best.engines else ""
    return f"{said}. Your load of {number(advice.load)} requests/s needs {needs}{_also_plain(advice)}."


def _also_plain(advice: Advice) -> str:
    """Whether vLLM without a plug-in bears the load with as few engines: then nothing need be changed. Where
    it does not and yet its rate is no lower for sure, the load is near what so many engines bear.
    """
    best = advice.best
    for other, flags in ((advice.default, "at its defaults"), (advice.plain, "at its best flags")):
        if best.engines and other.engines == best.engines and other.name != best.name:
            return f"; plain vLLM {flags} bears it with as many"
    near = best.engines and not best.plain and not apart(best.found, advice.plain.found)
    if not near:
        return ""
    needs = _engines(advice, advice.plain)
    return (
        f"; plain vLLM at its best flags needs {needs}, though its rate is not significantly lower: the load "
        "is near the limit"
    )


def other_said(advice: Advice) -> str:
    """Both answers where the arrival times decide, else ""."""
    said = apart_said(advice.other, "holds")
    if not said or advice.load is None:
        return said
    many = plural(advice.other_engines, "engine") if advice.other_engines else f"more than {advice.most}"
    return f"{said} Your load then needs {many}."


def _named(each: Advised) -> str:
    given = ",".join(f"{key}={value}" for key, value in each.settings.items())
    return f"{each.policy}:{given}" if given else each.policy


def _facts(advice: Advice) -> Facts:
    facts = asked(advice.levels, advice.start.traffic.classes)
    plain, default = advice.plain, advice.default
    if not advice.declined:
        facts["Plain vLLM"] = (
            f"at its own best flags {_against(advice, plain)}; at its defaults {_against(advice, default)}"
        )
    facts["No policy"] = f"above λ* = {number(advice.bound.rate)} requests/s on one engine"
    facts["Runs"] = f"{advice.requests:,} requests each, {plural(len(advice.start.seeds), 'seed')}"
    return Facts.of(facts)


def _against(advice: Advice, other: Advised) -> str:
    """How the best stands to another."""
    best, error = advice.best, throughput_error(advice.start.card)
    mine, theirs = best.found.rate, other.found.rate
    if best.name == other.name:
        return "is this answer"
    if not theirs.value:
        return "keeps the levels at no rate"
    less = 1 - theirs.value / mine.value
    said = f"{number(theirs.value)} requests/s, {100 * abs(less):.1f} % {'less' if less > 0 else 'more'}"
    if not less:
        return "the same"
    if abs(less) <= error:
        return f"{said} (within the card's error)"
    return said if apart(best.found, other.found) else f"{said} (not significant)"


def _beside(advice: Advice, rows: Sequence[Advised]) -> Grid:
    words = ("the answer", "plain, best flags", "plain, defaults")
    cells = [
        row(
            word,
            _named(each),
            each.seats,
            each.budget,
            each.found.rate.value,
            span(each.found.rate),
            _engines(advice, each),
            each.found.limited_by or "nothing up to λ*",
        )
        for word, each in zip(words, rows, strict=True)
    ]
    heads = (
        "",
        "policy",
        "seats",
        "tokens\na step",
        "requests\nper s",
        "95 % interval",
        "engines",
        "gives way first",
    )
    return Grid("", heads, tuple(cells))


def _engines(advice: Advice, each: Advised) -> str:
    if not each.counted:
        return "-"
    return f"{each.engines:,}" if each.engines else f"> {advice.most:,}"


def _finals(advice: Advice) -> Grid:
    rows = []
    for each in advice.final:
        rate, share = each.found.rate, valued(f"{100 * each.found.share:.0f} %", 100 * each.found.share)
        engines = _engines(advice, each)
        rows.append(row(_named(each), each.seats, each.budget, rate.value, span(rate), share, engines))
    heads = ("policy", "seats", "tokens\na step", "requests\nper s", "95 % interval", "of λ*", "engines")
    return Grid("", heads, tuple(rows))


def _shorts(found: Sequence[Found]) -> Grid:
    ranked = sorted(found, key=lambda each: -each.rate.value)
    rows = [row(each.policy, each.rate.value, each.limited_by or "nothing up to λ*") for each in ranked]
    return Grid("", ("policy, flags", "requests\nper s", "gives way first"), tuple(rows))


def _bars(advice: Advice) -> Figure:
    look = "What one engine holds under the promise; the thin line is the interval over seeds."
    return rate_bars("holds", [each.found for each in advice.final], advice.bound.rate, look)


def serve_line(advice: Advice, each: Advised, model: str) -> Code:
    """What to paste to run it; promises of classes need a settings file."""
    parts = [f"headgate serve {quote(model)}", f"--policy {quote(each.policy)}"]
    parts += [f"--set {quote(f'{key}={value}')}" for key, value in each.settings.items()]
    parts.append(f"--card {quote(advice.start.settings.card)}")
    parts += [
        f"{flag} {_time(limit)}"
        for flag, metrics in (("--ttft", ("ttft",)), ("--tbt", ("tbt", "tpot")))
        if (limit := _closest(advice.levels, metrics)) is not None
    ]
    return pasted([*parts, *_limits(advice, each)])


def plain_line(advice: Advice, each: Advised, model: str) -> Code:
    """The same without a plug-in."""
    return pasted([f"vllm serve {quote(model)}", *_limits(advice, each)])


def _limits(advice: Advice, each: Advised) -> list[str]:
    found = loaded_with(advice.start.card, advice.start.engine.longest)
    found += [f"--max-num-seqs {each.seats}", f"--max-num-batched-tokens {each.budget}"]
    if promised_gap(advice.levels) is not None:
        found.append(f"{FLAG} {graph_flag(each.budget, advice.start.settings.graph).value}")
    return found


def _closest(levels: Sequence[Level], metrics: Sequence[str]) -> float | None:
    return min((each.limit for each in levels if each.metric in metrics and not each.kind), default=None)


def _time(seconds: float) -> str:
    return f"{1000 * seconds:g}ms"
