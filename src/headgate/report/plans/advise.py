"""`headgate advise`: the answer, the plain engine beside it, and the lines to paste."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from shlex import quote

from headgate.advisor.advice import Advice, Advised
from headgate.advisor.capacity.beside import BesidePlan
from headgate.advisor.capacity.plan import apart
from headgate.advisor.capacity.traffic import promise, promised_gap
from headgate.advisor.capacity.trials import Contender
from headgate.advisor.fewest_engines import least_engines
from headgate.advisor.flags import FLAG, WHY, graph_flags, graphs_said, loaded_with, model_of, sglang_words
from headgate.core.request import Slo
from headgate.cost.laws.work import WorkCost
from headgate.experiment.run import DEFAULT_ROUTER
from headgate.report import document as doc
from headgate.report.plans import capacity
from headgate.report.plans.flags import UNNAMED, pasted, unnamed
from headgate.settings_base import BETWEEN, promised

OTHER_DRAFTS = (
    "All rates are simulated with the drafts that --speculate names. headgate plan speculation says whether "
    "fewer, more or none serve better at your load, and prints vLLM's schedule of them by batch size."
)
SIMULATED = "All rates, those of vLLM at its defaults too, are simulated so, with the card's KV memory."
TOO_SHORT = ", λ*: the runs are too short to say what gives way first"
HELD = "What one engine holds under the promise; the thin line is the interval over seeds."
CLASSES = (
    'This is headgate.toml. A request names its class, "vllm_xargs": {"headgate_class": "NAME"}, or headgate '
    "route gives it one by its key."
)
OTHER_ROUTERS = "headgate plan capacity --find engines --router NAME, repeated, compares others"
PLAIN_ROWS = "plain: without headgate, at its best flags; defaults: the same without a flag"
COUNTED = "engines: counted for the best flags of each policy and for the defaults"
CARE = (
    "λ* is the rate no policy exceeds. Flags were chosen on short runs of one seed; rates and intervals are "
    "from long runs, over seeds. Runs are finite, so tails (p99) are optimistic."
)


def advice_page(advice: Advice, model: str | None, command: Sequence[str]) -> doc.Page:
    finals = [each.found for each in advice.final]
    bars = doc.Drawn(lambda: (capacity.rate_bars("holds", finals, advice.bound.rate, HELD),))
    card = advice.start.card
    loaded = model or model_of(card, advice.start.settings.card) or UNNAMED
    engine = advice.served_by
    stands_for = (f"{unnamed(card.model)} --model puts it there.",) if loaded == UNNAMED else ()
    first, lines = to_run(advice), list[doc.Section]()
    own = {"its defaults": advice.default} if is_enough(advice) else {}
    if first.name != advice.plain.name or not own:
        own["its best flags"] = advice.plain
    for which, each in own.items():
        line = pasted([f"{engine.serve} {quote(loaded)}", *_limits(advice, each)])
        lines.append(doc.Section(f"Plain {engine.title} at {which}", (line, *stands_for)))
    if engine.title == "vLLM" or not advice.is_plain(advice.best):
        watches = advice.is_plain(advice.best)
        title = "The same with headgate's metrics: it only watches" if watches else "With headgate"
        ours = doc.Section(title, serve_lines(advice, first if watches else advice.best, loaded))
        lines.insert(len(lines) - (not watches), ours)
    if first.fleet and (first.engines or 0) > 1:
        before = _route_line(first, first.engines or 0, first.fleet.router)
        lines.append(doc.Section("Before the engines", before))
    ranked = sorted(advice.first_round, key=lambda each: -each.rate.value)
    short = [doc.row(each.policy, each.rate.value, each.limited_by or "nothing up to λ*") for each in ranked]
    heads = ("policy, flags", "requests\nper s", "gives way first")
    sections = (
        doc.Section("", (_facts(advice),)),
        *([] if advice.declined else lines),
        doc.Section("Flags tried on long runs", (_finals(advice), bars)),
        doc.Section("Flags tried on short runs", (doc.Grid("", heads, tuple(short)),), doc.PAGE_ONLY),
    )
    about = f"card {card.name}, {advice.start.workload}"
    graphed = engine.title == "vLLM" and promised_gap(advice.levels) is not None
    graphs = (f"{FLAG}: {WHY} {SIMULATED}",) if graphed else ()
    told = (*advice.notes, *graphs_said(advice.start.settings, advice.start.engine, advice.levels))
    counted = [note for note in first.notes if note not in told]
    notes = (*advice.notes, *counted, *graphs, *([OTHER_DRAFTS] if advice.start.engine.speculation else []))
    return doc.plan_page("Advice", about, answer(advice), sections, notes, command, CARE, answer_first=True)


def answer(advice: Advice) -> str:
    best, rate, run = advice.best, advice.best.found.rate, to_run(advice)
    if advice.declined:
        return f"No answer: {advice.declined}."
    engine = advice.served_by
    flags = f"{engine.slots} {best.slots} {engine.budget} {best.budget}"
    if engine.title == "SGLang" and advice.is_plain(best):
        flags = " ".join(sglang_words(best.policy, best.settings, best.slots, best.budget))
    name = f"plain {engine.title}, without a plug-in," if advice.is_plain(best) else best.text
    error = advice.error
    is_default = is_enough(advice) and best.name == advice.default.name
    verdict = "" if is_default else f"run {name} with {flags}: "
    most = "at most " if best.found.at_edge or not best.found.limited_by else ""
    verdict += f"one engine holds {most}{doc.number(rate.value)} requests/s"
    if rate.low is not None:
        verdict += f" (95 % interval {doc.number(rate.low)} to {doc.number(rate.high or 0.0)})"
    way = best.found.limited_by
    verdict += capacity.bar_of(error) + (f", then {way} gives way first" if way else TOO_SHORT)
    if other := advice.untold:
        more = doc.number(other.found.rate.value)
        if other.engines and other.engines != best.engines:
            more += f" and need {doc.plural(other.engines, 'engine')}"
        verdict += f". {other.text} may hold {more}: the card cannot tell it from plain {engine.title}"
    if advice.load is None:
        return doc.sentence(verdict)
    load, many = doc.number(advice.load), best.engines or advice.most
    needs = ("" if best.engines else "more than ") + capacity.engines_said(many, advice.start.card)
    if run.fleet and run.fleet.router not in (DEFAULT_ROUTER, advice.start.settings.router):
        needs += f" behind router {run.fleet.router}"
    needs += f", {capacity.engines_range(best.engines, error)}" if error and best.engines else ""
    if run.engines and run.fleet and run.fleet.crowded:
        needs += f", at {100 * run.fleet.crowded:.0f} % of λ* with these flags: {run.engines + 1} are safer"
    if is_enough(advice):
        enough = f"Plain {engine.title} at its defaults is enough for your load of {load} requests/s: {needs}"
        return f"{enough}. {doc.sentence(verdict) if is_default else f'For more: {verdict}.'}"
    return doc.sentence(f"{verdict}. Your load of {load} requests/s needs {needs}{_also_plain(advice)}")


def is_enough(advice: Advice) -> bool:
    best, default = advice.best, advice.default
    return bool(best.engines) and default.engines == best.engines


def to_run(advice: Advice) -> Advised:
    return advice.default if is_enough(advice) else advice.best


def _also_plain(advice: Advice) -> str:
    best, plain = advice.best, advice.plain
    if not best.engines or advice.is_plain(best) or plain.engines != best.engines:
        return ""
    return f"; plain {advice.served_by.title} at its best flags bears it with as many"


def other_said(advice: Advice) -> str:
    said = capacity.apart_said(advice.other, "holds")
    if not said or advice.load is None or not advice.other_engines:
        return said
    then, mine = doc.plural(advice.other_engines, "engine"), advice.best.engines
    if advice.other_engines == mine:
        return f"{said} Your load needs {then} with either."
    larger = (
        f"plan for the larger number, {max(advice.other_engines, mine)}"
        if mine
        else f"plan for more than {advice.most}"
    )
    return f"{said} Your load then needs {then}: {larger}."


def _facts(advice: Advice) -> doc.Facts:
    facts = capacity.asked(advice.levels, advice.start.traffic.classes)
    if not advice.declined:
        plain, default = (_against(advice, other) for other in (advice.plain, advice.default))
        facts |= capacity.rest(advice.best.found)
        facts[f"Plain {advice.served_by.title}"] = f"at its own best flags {plain}; at its defaults {default}"
        others = (
            each for each in advice.final if not advice.is_plain(each) and each.text != advice.best.text
        )
        if other := max(others, key=lambda each: each.found.rate.value, default=None):
            facts["Next policy"] = f"{other.text}: {_against(advice, other)}"
    first = to_run(advice)
    if first.engines and first.engines > 1:
        behind = (f"{router}: {_many(advice, engines)}" for router, engines in first.routers.items())
        facts["Router"] = f"engines behind {', '.join(behind)}; {OTHER_ROUTERS}"
    for size in first.fleet.sizes if first.fleet else ():
        if size.engines in (first.engines, (first.engines or 0) - 1):
            kept = (f"{level} {100 * share.value:.1f} %" for level, share in size.shares.items())
            seeds = f"all levels with {size.kept} of {size.seeds} seeds"
            facts[f"In time on {size.engines}"] = f"{first.name}: {', '.join(kept)}; {seeds}"
    if advice.beside:
        facts["Background"] = background_said(advice.best.name, advice.beside)
    least = advice.load and least_engines(advice.load, advice.bound)
    needs = f"; your load needs at least {doc.plural(least, 'engine')}" if least else ""
    facts["No policy"] = f"above λ* = {doc.number(advice.bound.rate)} requests/s on one engine{needs}"
    facts["Runs"] = f"{advice.requests:,} requests each, {doc.plural(len(advice.start.seeds), 'seed')}"
    return doc.Facts(facts)


def _against(advice: Advice, other: Advised) -> str:
    best, error = advice.best, advice.error
    mine, theirs = best.found.rate, other.found.rate
    if best.name == other.name:
        return "is this answer"
    if not theirs.value:
        return "keeps the levels at no rate"
    less = 1 - theirs.value / mine.value
    said = f"{doc.number(theirs.value)} requests/s, {100 * abs(less):.1f} % {'less' if less > 0 else 'more'}"
    if not less:
        return "the same"
    if abs(less) <= error:
        return f"{said} (within the card's error)"
    return said if apart(best.found, other.found) else f"{said} (not significant)"


def background_said(answer: str, plan: BesidePlan) -> str:
    best, mine = plan.best, [each for each in plan.found if each.policy == answer]
    said = capacity.left_said(replace(plan, found=tuple(mine)))
    if not plan.bound or best is None or best in mine:
        return said
    tokens, kept = doc.number(best.tokens.value), doc.percent(best.kept)
    return f"{said} With {best.policy}: {tokens} tokens/s, {kept} of the promises are kept."


def _many(advice: Advice, engines: int | None) -> str:
    return f"{engines:,}" if engines else f"> {advice.most:,}"


def _finals(advice: Advice) -> doc.Grid:
    rows, named = [], {"answer": advice.best, "plain": advice.plain, "defaults": advice.default}
    named = {word: each for word, each in named.items() if word != "answer" or not advice.declined}
    for each in advice.final:
        rate, share = each.found.rate, doc.valued(f"{100 * each.found.share:.0f} %", 100 * each.found.share)
        engines = _many(advice, each.engines) if each.counted else "-"
        figures = (each.slots, each.budget, rate.value, doc.span(rate), engines)
        words = ", ".join(word for word, other in named.items() if each is other)
        rows.append(doc.row(each.text, *figures, words, share))
    heads: tuple[str, ...] = ("policy", "slots", "tokens\na step", "requests\nper s", "95 % interval")
    heads += ("engines", "which is", "of λ*")
    counted = () if advice.load is None or advice.declined else (COUNTED,)
    return doc.Grid("", heads, tuple(rows), (PLAIN_ROWS, *counted), minor=heads[-1:])


def serve_lines(advice: Advice, each: Advised, model: str) -> tuple[doc.Block, ...]:
    settings, traffic = advice.start.settings, advice.start.traffic
    policy = settings.engine if advice.is_plain(each) else each.policy
    mine = _times(promise([level for level in advice.levels if not level.kind], "", Slo()))
    parts = [f"headgate serve {quote(model)}", *(["--engine sglang"] if settings.engine == "sglang" else [])]
    if not (settings.classes or any(level.kind for level in advice.levels)):
        parts += [f"--policy {quote(policy)}"]
        parts += [f"--set {quote(f'{key}={value}')}" for key, value in each.settings.items()]
        parts += [f"--card {quote(settings.card)}", *(f"--{word} {time}" for word, time in mine.items())]
        return (pasted([*parts, *_limits(advice, each)]),)
    slos = {kind.name: kind.slo for kind in traffic.at_rate.at(1.0, settings.seed).kinds if kind.name}
    for own in settings.classes:
        slos.setdefault(own.name, promised(own, weight=own.weight, background=own.background))
    whole = Contender(policy, each.settings).text
    words = {"policy": whole, "card": settings.card, **mine}
    lines = [f"{word} = {json.dumps(value)}" for word, value in words.items()]
    for name, slo in slos.items():
        bare = name.isidentifier() and name.isascii()  # TOML takes no other letters there
        lines += ["", f"[classes.{name if bare else json.dumps(name, ensure_ascii=False)}]"]
        lines += [f"{word} = {json.dumps(time)}" for word, time in _times(slo).items()]
        lines += [f"weight = {slo.weight:g}"] if slo.weight is not None else []
        lines += ["background = true"] if slo.background else []
    line = pasted([*parts, "--config headgate.toml", *_limits(advice, each)])
    return line, doc.Code("\n".join(lines)), CLASSES


def _times(slo: Slo) -> dict[str, str]:
    between = next(word for word, kind in BETWEEN.items() if kind == slo.between_kind)
    times = {"ttft": slo.first_token, between: slo.between_tokens}
    return {word: f"{1000 * limit:g}ms" for word, limit in times.items() if limit is not None}


def _route_line(each: Advised, engines: int, router: str) -> tuple[doc.Code, str]:
    hosts = [f"--engine http://HOST{place}:8000" for place in (1, 2)]
    line = ["headgate route", *hosts, f"--router {router}", f"--slots {each.slots}"]
    return pasted(line), f"HOST1, HOST2, ...: where the {engines} engines are; repeat --engine."


def _limits(advice: Advice, each: Advised) -> list[str]:
    engine = advice.served_by
    flags = loaded_with(advice.start.card, advice.start.engine.longest, advice.start.settings.engine)
    if engine.title == "SGLang":
        words = sglang_words(each.policy, each.settings, each.slots, each.budget)
        return flags + (words or [f"{engine.slots} {each.slots}", f"{engine.budget} {each.budget}"])
    flags += [f"{engine.slots} {each.slots}", f"{engine.budget} {each.budget}"]
    if speculation := advice.start.engine.speculation:
        cost = advice.start.engine.cost
        assert isinstance(cost, WorkCost)
        assert cost.drafting is not None
        drafts = {"method": cost.drafting.method, "num_speculative_tokens": speculation.drafts}
        flags.append(f"--speculative-config {quote(json.dumps(drafts))}")
    if promised_gap(advice.levels) is not None:
        graphs, named = graph_flags(each.budget, advice.start.settings.graph), " ".join(flags)
        flags += [f"{flag} {value}" for flag, value in graphs.items() if flag not in named]
    return flags
