"""`plan capacity`: the rate each policy sustains under service levels, or the fewest engines for a load."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isnan, nan

import numpy as np

from headgate.advisor.capacity.beside import BesidePlan, PolicyBeside
from headgate.advisor.capacity.plan import CapacityPlan, PolicyRate, apart
from headgate.advisor.capacity.traffic import Level
from headgate.advisor.fewest_engines import EnginesPlan, FleetFound, Size
from headgate.advisor.set_up import OtherTimes
from headgate.cost.card import Card
from headgate.report import document as doc
from headgate.report.charts import COLOURS, Axis, Bar, Bars, Chart, Mark, Series
from headgate.stats.comparison import EDGES

ENOUGH = (
    "A fleet is enough if it keeps every level with every seed. The row below it is one engine fewer, if "
    "that was tried; smaller fleets are not rechecked. In time: the percentage of requests (TBT: of gaps "
    "between tokens) within the limit. Slots: the share that decodes take. Of λ*: the load."
)
CLOSE = "How close each comes to λ*, the rate no policy exceeds; the thin line is the interval over seeds."
BESIDE = (
    "Tokens: prompts and outputs, from a fifth of the run to its last arrival. The bound counts no promise. "
    "No token: promised requests that never got one. Evictions: of the class without a promise, mean of a "
    "run."
)
FASTER = 1.5  # a trace that runs so many times as fast has sharper bursts than any that came
CARE = (
    "λ* is the rate no policy exceeds. Intervals are over seeds; runs are finite, so tails (p99) are "
    "optimistic."
)


def capacity_page(plan: CapacityPlan, command: Sequence[str]) -> doc.Page:
    found = sorted(plan.found, key=lambda each: -each.rate.value)
    bars = doc.Drawn(lambda: (rate_bars("sustained", found, plan.ideal.rate, CLOSE),))
    sections = (doc.Section("", (_facts(plan),)), doc.Section("Sustained rates", (_rates(found), bars)))
    about = f"card {plan.start.card.name}, {plan.start.workload}"
    return doc.plan_page("Capacity", about, _verdict(plan), sections, plan.notes, command, CARE)


def _verdict(plan: CapacityPlan) -> str:
    best = max(plan.found, key=lambda each: each.rate.value)
    if plan.declined:
        return f"No answer: {plan.declined}."
    if plan.interrupted and not best.rate.value:
        return "Interrupted before any rate was found that is sustained."
    share = f"{100 * best.share:.0f} % of λ*{bar_of(plan.error)}"
    rate = f"{'at most ' if best.at_edge else ''}{doc.number(best.rate.value)} requests/s"
    if len(plan.found) == 1:
        return f"{best.policy} sustains {rate}, {share}."
    others = [each for each in plan.found if each is not best]
    near = [each.policy for each in others if each.rate.value >= (1 - plan.error) * best.rate.value]
    if plan.error and near:
        return (
            f"Cannot tell which policy sustains most: {best.policy} with {rate}, {share}, and "
            f"{', '.join(near)} are within the error of a card that was not measured."
        )
    alike = [each.policy for each in others if not apart(each, best)]
    said = f"{best.policy} sustains most: {rate}, {share}"
    return f"{said}; no significant difference from {', '.join(alike)}." if alike else f"{said}."


def none_keeps(tried: Sequence[str]) -> str:
    *others, last = dict.fromkeys(tried)
    return f"None of {', '.join(others)} and {last} keeps" if others else f"{last} does not keep"


def bar_of(error: float) -> str:
    return f" (±{100 * error:.0f} %, derived card)" if error else ""


def apart_said(other: OtherTimes | None, holds: str, unit: str = "requests/s") -> str:
    if other is None or not other.apart:
        return ""
    faster = f" ({other.faster:.3g} times as fast)" if other.faster > FASTER else ""
    drawn = "with Poisson arrivals" + (", which share no prefix" if other.shared else "")
    laws = (f"with arrivals as recorded{faster}", drawn)
    here, there = laws if not other.recorded else laws[::-1]
    again = "with" if other.recorded else "without"
    return (
        f"Arrival times decide: {other.name} {holds} {other.answer:.4g} {unit} {here} and "
        f"{other.other:.4g} {there}; ask again {again} --as-recorded."
    )


def asked(levels: Sequence[Level], classes: Sequence[tuple[str, float]]) -> dict[str, str]:
    facts = {"Levels": "; ".join(str(level) for level in levels if level.statistic)}
    if any(level.statistic.startswith("p") for level in levels):
        facts["Levels"] += "; the rest may take any time"
    known = [str(level) for level in levels if not level.statistic]
    if known:
        facts["Promised"] = "; ".join(known) + " (told to policies, not checked)"
    if classes:
        total = sum(share for _, share in classes)
        facts["Classes"] = ", ".join(f"{name} {100 * share / total:g} %" for name, share in classes)
    return facts


def _facts(plan: CapacityPlan) -> doc.Facts:
    engine, limited = plan.start.engine, plan.limited.rate
    bound = f"above λ* = {doc.number(plan.ideal.rate)} requests/s"
    if limited < 0.999 * plan.ideal.rate:
        bound += f"; {doc.number(limited)} in steps of at most {engine.batch_tokens:,} tokens"
    facts = asked(plan.traffic.levels, plan.traffic.classes)
    facts["Engine"] = f"{engine.running} slots, {engine.batch_tokens:,} tokens a step"
    facts["No policy"] = bound
    return doc.Facts(facts | (rest(plan.best) if plan.best else {}))


def rest(found: PolicyRate) -> dict[str, str]:
    """What the percentiles leave out, with the seed in which it was worst."""
    said = []
    for name, times in found.tails.items():
        statistic, _, metric = name.partition(" <= ")[0].partition(" ")
        p99, most = map(doc.fine_time, times)
        said.append(f"{metric}{'' if statistic == 'p99' else f' p99 {p99},'} worst {most}")
    return {"The rest": f"{'; '.join(said)} (in the runs of {found.policy})"} if said else {}


def _rates(found: Sequence[PolicyRate]) -> doc.Grid:
    rows = []
    for each in found:
        share = doc.valued(f"{100 * each.share:.0f} %", 100 * each.share)
        reason = each.limited_by or "nothing up to λ*"
        name = f"{each.policy} (dropped)" if each.dropped else each.policy
        unknown = each.dropped and not each.rate.value  # it was not looked for further down
        rate = doc.valued(f"< {doc.number(each.rate.high or 0)}", 0.0) if unknown else each.rate.value
        rows.append(doc.row(name, rate, doc.span(each.rate), share, reason, each.runs))
    heads = ("policy", "requests\nper s", "95 % interval", "of λ*", "limited by", "runs")
    return doc.Grid("", heads, tuple(rows), minor=("runs",))


def rate_bars(done: str, found: Sequence[PolicyRate], most: float, look: str) -> doc.Figure:
    bars = [
        Bar(each.policy, f"c{n % COLOURS}", each.rate.value, each.rate.low, each.rate.high)
        for n, each in enumerate(found)
    ]
    mark = Mark(f"λ* = {doc.number(most)}", most)
    title = f"What each policy {'sustains' if done == 'sustained' else done}"
    return Bars(done, "requests/s", bars, mark).figure(title, look)


def beside_page(plan: BesidePlan, command: Sequence[str]) -> doc.Page:
    found = sorted(plan.found, key=lambda each: (bool(each.missed), -each.tokens.value))
    sections = (
        doc.Section("", (doc.Facts(_beside_facts(plan)),)),
        doc.Section(f"What is left to {plan.name}", (_left(found),)),
    )
    rate = f"{doc.number(plan.rate)} requests/s with a promise"
    about = f"card {plan.start.card.name}, {plan.start.workload}, {rate}"
    return doc.plan_page("Batch", about, left_said(plan), sections, plan.notes, command, BESIDE)


def _beside_facts(plan: BesidePlan) -> dict[str, str]:
    facts = asked(plan.traffic.levels, plan.traffic.classes)
    engine = plan.start.engine
    each = "each with " if plan.engines > 1 else ""
    facts["Engines"] = f"{plan.engines}, {each}{engine.running} slots, {engine.batch_tokens:,} tokens a step"
    rate, most, tokens = map(doc.number, (plan.rate, plan.promised_bound, plan.bound))
    facts["Load"] = f"{rate} requests/s with a promise, {most} at most"
    facts["Beside"] = f"{plan.clients:,} clients of {plan.name}, each sends when its last request returns"
    facts["No policy"] = f"gives {plan.name} more than {tokens} tokens/s (all others served, late or not)"
    facts["Runs"] = f"{plan.requests:,} requests with a promise, {doc.plural(len(plan.start.seeds), 'seed')}"
    return facts


def left_said(plan: BesidePlan) -> str:
    where = "one engine" if plan.engines == 1 else f"{plan.engines} engines"
    if not plan.bound:
        return f"Nothing is left to {plan.name} on {where}: the requests with a promise alone are too many."
    best = plan.best
    if best is None:
        closest = max(plan.found, key=lambda each: each.kept if not isnan(each.kept) else -1.0)
        missed = f"{closest.policy} misses {closest.missed} with {doc.percent(closest.kept)}"
        none = none_keeps([each.policy for each in plan.found])
        return (
            f"{none} these levels beside {plan.clients:,} clients of {plan.name} on {where}: {missed} of the "
            "promises kept."
        )
    of = f"{plan.name} ({plan.clients:,} clients){bar_of(plan.error)}"
    return (
        f"{doc.number(best.tokens.value)} tokens/s of {of} fit beside {doc.number(plan.rate)} requests/s on "
        f"{where} with {best.policy}, {100 * best.share:.0f} % of what any policy can; "
        f"{doc.percent(best.kept)} of the promises are kept."
    )


def _left(found: Sequence[PolicyBeside]) -> doc.Grid:
    rows = []
    for each in found:
        # Beyond it only where promised requests, which the bound serves all, were left for later
        known = each.share <= EDGES
        share = doc.valued(f"{100 * each.share:.0f} %", 100 * each.share) if known else doc.Cell("-")
        figures = (doc.span(each.tokens), share, doc.share(each.kept))
        missed = each.missed or "every level"
        tokens, none = each.tokens.value, each.unanswered
        rows.append(doc.row(each.policy, tokens, *figures, missed, none, each.evictions))
    heads: tuple[str, ...] = ("policy", "tokens\nper s", "95 % interval", "of the\nbound", "promises\nkept")
    heads += ("keeps, or misses", "no\ntoken", "evictions")
    return doc.Grid("", heads, tuple(rows), minor=("evictions",))


def engines_page(plan: EnginesPlan, command: Sequence[str]) -> doc.Page:
    checked = [level for level in plan.traffic.levels if level.statistic]
    every = [(found, size) for found in plan.found for size in found.sizes]
    nearest = []
    for found in plan.found:  # the answer and the largest fleet that is too few, or the largest tried
        most = found.engines or found.sizes[-1].engines
        wanted = (found.size(most), found.size(most - 1) if found.engines else None)
        nearest += [(found, size) for size in wanted if size]
    figures = doc.Drawn(lambda: (_in_time(plan, level) for level in checked))
    sections = (
        doc.Section("", (_fleet_facts(plan),)),
        doc.Section("Fewest engines", (_sizes(nearest, checked), figures)),
        doc.Section("Every number of engines tried", (_sizes(every, checked),), doc.PAGE_ONLY),
    )
    about = f"card {plan.start.card.name}, {plan.start.workload}, {doc.number(plan.rate)} requests/s"
    return doc.plan_page("Engines", about, _fewest(plan), sections, plan.notes, command, ENOUGH)


def _fewest(plan: EnginesPlan) -> str:
    enough = [each for each in plan.found if each.engines is not None]
    if not enough and plan.interrupted:
        return "Interrupted before any fleet was found to be enough."
    if not enough:
        most = plan.start.asks.options.most_engines
        return f"{most} engines are too few for these levels: ask for less, or raise --most-engines."
    best = min(each.engines for each in enough if each.engines is not None)
    answers = [each for each in enough if each.engines == best]
    names, load = " or ".join(each.name for each in answers), answers[0].crowded
    over = best - plan.least
    gap = f"{over} more than any fleet must have" if over else "as few as any fleet can have"
    if load:
        gap = f"but at {100 * load:.0f} % of λ*, where a backlog may grow unseen: plan {best + 1}"
    off = f"; {engines_range(best, plan.error)}" if plan.error else ""
    many = engines_said(best, plan.start.card)
    return f"{many} {'are' if best > 1 else 'is'} enough with {names}, {gap}{off}."


def engines_said(count: int, card: Card) -> str:
    each = int((card.provenance.settings or {}).get("tensor parallel", "1"))
    said = doc.plural(count, "engine")
    return f"{said} ({count * each:,} GPUs)" if each > 1 else said


def engines_range(engines: int, error: float) -> str:
    least, most = max(1, ceil(engines / (1 + error))), ceil(engines / (1 - error))
    return f"{least} to {most} with the error of ±{100 * error:.0f} % of a derived card"


def _fleet_facts(plan: EnginesPlan) -> doc.Facts:
    facts = asked(plan.traffic.levels, plan.traffic.classes)
    facts["Runs"] = f"{plan.traffic.requests:,} requests each, {doc.plural(len(plan.start.seeds), 'seed')}"
    one = f"{plan.start.engine.running} slots, {plan.start.engine.batch_tokens:,} tokens a step"
    facts["Engine"] = f"{one}; λ* = {doc.number(plan.bound.rate)} requests/s"
    facts["No fleet"] = f"of fewer than {plan.least} keeps up (load / λ* = {plan.rate / plan.bound.rate:.2f})"
    return doc.Facts(facts)


def _sizes(sizes: Sequence[tuple[FleetFound, Size]], checked: Sequence[Level]) -> doc.Grid:
    rows = []
    for found, size in sizes:
        enough = found.engines is not None and size.engines >= found.engines
        kept = doc.valued(f"{size.kept}/{size.seeds}", size.kept, "good" if enough else "")
        shares = (_share(size, level) for level in checked)
        engines = doc.valued(f"{size.engines:,}", size.engines, "words")
        used = map(doc.share, (size.slots.value, size.load))
        rows.append(doc.row(found.name, engines, kept, *shares, *used))
    heads = ("router, policy", "engines", "seeds\nkept", *map(_short, checked), "slots", "of λ*")
    return doc.Grid("", heads, tuple(rows), grouped=True)


def _short(level: Level) -> str:
    of = f" {level.kind}" if level.kind else ""
    wanted = f", want {level.statistic[1:]}" if level.statistic.startswith("p") else ""
    return f"{level.metric.upper()}{of} in time\n%{wanted}"


def _share(size: Size, level: Level) -> doc.Cell:
    share = size.shares[str(level)]
    if isnan(share.value):
        return doc.Cell("-")
    half = "" if share.low is None or share.high is None else f" ± {50 * (share.high - share.low):.1f}"
    return doc.valued(f"{100 * share.value:.1f}{half}", 100 * share.value)


def _in_time(plan: EnginesPlan, level: Level) -> doc.Figure:
    series = []
    for place, found in enumerate(plan.found):
        shares = [size.shares[str(level)].as_share() for size in found.sizes]
        ends = [[nan if end is None else 100 * end for end in (each.low, each.high)] for each in shares]
        low, high = np.array(ends, float).reshape(-1, 2).T
        engines = np.array([size.engines for size in found.sizes], float)
        values = np.array([100 * each.value for each in shares], float)
        series.append(Series(found.name, engines, values, place, "linked", low, high))
    wanted = level.statistic.removeprefix("p") if level.statistic.startswith("p") else ""
    marks = [Mark(f"wanted: {wanted} %", float(wanted), "y")] if wanted else []
    whose = "gaps" if level.metric == "tbt" else "requests"
    chart = Chart(Axis("fleet", "engines", whole=True), Axis("in time", f"% of {whose}"), series, marks)
    look = "The first point that lies above what is wanted, with its interval, is a fleet to trust."
    return chart.figure(f"{level}, by engines", look)
